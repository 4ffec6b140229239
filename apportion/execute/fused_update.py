"""Fused updates: many parameters' optimizer updates as one call of torch's fused kernels, in place.

Part of the room execute. An Executable comes in; out go which update tasks a fused kernel computes
(`fused_updates`), which state they overwrite (`overwritten_slots`), and the calls themselves.

A fused kernel rounds otherwise than an update's Body does. So whether a task is fused depends only
on what all replicas of its region share (recipe, dtypes), never on one device's memory; copies of a
parameter stay bit-equal. Whether the kernel writes over the old state is decided slot by slot:
where the old state is needed later, it works on a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from apportion.capture import torch_private
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import resolve
from apportion.execute.rank_steps import slots_read
from apportion.graph import UpdateRecipe
from apportion.lower import COMPUTE, FROM_HOST

UPDATE = "apportion.update"
FUSED = {
    "sgd": "aten._fused_sgd_.default",
    "adam": "aten._fused_adam_.default",
    "adamw": "aten._fused_adamw_.default",
}
FUSED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STATE_OF_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
HELD_BYTES = 1 << 26
"""Gradients that may be held back for one fused call, beside those that are there anyway."""


@dataclass(frozen=True, slots=True)
class FusedUpdate:
    """One update task that a fused kernel computes.

    ins   slots of the parameter, its gradient and its state, in the recipe's order
    outs  slots of the new parameter and the new state
    """

    task: int
    recipe: UpdateRecipe
    dtype: torch.dtype
    ins: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def batch(self) -> tuple[Any, ...]:
        """Equal for updates that one call computes."""
        return (self.recipe, self.dtype)

    @property
    def gradient(self) -> int:
        return self.ins[1]


def fused_updates(executable: Executable) -> dict[int, FusedUpdate]:
    """The update tasks that fused kernels compute, by task."""
    found = {}
    bodies, slots, tasks = executable.graph.bodies, executable.slots, executable.tasks
    updates = np.array([*(op.kind == UPDATE for op in executable.graph.ops), False])
    for task in np.flatnonzero((tasks.kind == COMPUTE) & updates[tasks.op]).tolist():
        work = executable.computes[task]
        if work.op.kind != UPDATE or work.op.body is None:
            continue
        recipe = bodies[work.op.body].recipe
        if recipe is None or not _known(recipe) or min(work.ins) < 0:
            continue
        if work.part.pads or any(scale != 1.0 for scale in work.part.scales):
            continue
        kind = slots[work.ins[0]].dtype
        if kind not in FUSED_DTYPES or len(work.ins) != 2 + len(recipe.state):
            continue
        names = ("", "", *recipe.state)
        shape = slots[work.ins[0]].shape
        wanted = [((), torch.float32) if name == "step" else (shape, kind) for name in names]
        if [(slots[s].shape, slots[s].dtype) for s in work.ins] == wanted:
            found[task] = FusedUpdate(task, recipe, kind, work.ins, work.outs)
    return found


def _known(recipe: UpdateRecipe) -> bool:
    """Whether the recipe is one that the fused kernels have."""
    if recipe.kind == "sgd":
        return recipe.state in ((), ("momentum_buffer",)) and "amsgrad" not in recipe.flags
    largest = "amsgrad" in recipe.flags
    names = tuple(n for n in STATE_OF_ADAM if largest or n != "max_exp_avg_sq")
    return recipe.kind in FUSED and recipe.state == names and "nesterov" not in recipe.flags


def overwritten_slots(
    executable: Executable, fused: Mapping[int, FusedUpdate] | None = None
) -> dict[int, int]:
    """New state slot -> the state slot in whose memory a fused update writes it; `fused` if the
    updates are known.

    That is where the old state is there when the step begins, neither it nor a view of it is read
    after the update, and it is what the new state is carried to; or where it has come from the host
    for the update, and nobody reads it afterwards.
    """
    tasks = executable.tasks
    carried: dict[int, list[int]] = {}
    for end, begin in executable.carry:
        carried.setdefault(end, []).append(begin)
    found = {}
    known = fused_updates(executable) if fused is None else fused
    for task, update in known.items():
        before = (update.ins[0], *update.ins[2:])
        for old, new in zip(before, update.outs, strict=True):
            own = tasks.slot_base[old] < 0 and update.ins.count(old) == 1
            own = own and tasks.slot_last[old] == task
            first = int(tasks.slot_first[old])
            here = first >= 0 and executable.kind[first] == FROM_HOST
            if own and (here or (first == -1 and carried.get(new) == [old])):
                found[new] = old
    return found


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Updates of a segment that are done together, when the task `after` is done. What they read
    lives until then; what `after` frees is freed before."""

    after: int
    updates: tuple[FusedUpdate, ...]


def update_batches(
    executable: Executable, segment: Sequence[int], fused: Mapping[int, FusedUpdate]
) -> dict[int, UpdateBatch]:
    """The fused updates of a segment, given by its tasks, in batches, each by the task after which
    it is done.

    Updates are held back until a task reads what one of them makes, or is the last to use what one
    of them reads, until the gradients that are held exceed HELD_BYTES, or until the segment ends.
    """
    found: dict[int, UpdateBatch] = {}
    waiting: list[FusedUpdate] = []
    outs: set[int] = set()
    ins: set[int] = set()
    held, before = 0, -1

    def close(after: int) -> None:
        nonlocal held
        if waiting:
            found[after] = UpdateBatch(after, tuple(waiting))
        waiting.clear()
        outs.clear()
        ins.clear()
        held = 0

    for task in segment:
        ends = task not in fused and not ins.isdisjoint(executable.frees[task])
        if ends or not outs.isdisjoint(slots_read(executable, task)):
            close(before)
        if task in fused:
            waiting.append(fused[task])
            outs |= set(fused[task].outs)
            ins |= set(fused[task].ins)
            meant = executable.slots[fused[task].gradient]
            held += meant.dtype.itemsize * math.prod(meant.shape)
            if held > HELD_BYTES:
                close(task)
        before = task
    close(before)
    return found


def in_place_updates(executable: Executable) -> set[int]:
    """The update tasks that overwrite all of their state."""
    fused = fused_updates(executable)
    written = overwritten_slots(executable, fused)
    return {task for task, update in fused.items() if all(slot in written for slot in update.outs)}


def fused_kernel(recipe: UpdateRecipe) -> Any:
    """The function that computes updates of a recipe."""
    return _native(FUSED[recipe.kind])


def count_kernel() -> Any:
    """The function that adds a number to each of several tensors, in place."""
    return _native("aten._foreach_add_.Scalar")


def _native(kind: str) -> Any:
    """torch's own function that calls an operator, which takes less time; else the operator."""
    operator = resolve(kind)
    return (*torch_private.native_functions(operator), operator)[0]


def fused_settings(recipe: UpdateRecipe) -> dict[str, Any]:
    """The keywords of a fused call: ("get", group, key) expressions of settings, or constants."""
    group, flags = recipe.group, recipe.flags
    named: dict[str, Any] = {key: ("get", group, key) for key in ("lr", "weight_decay")}
    if recipe.kind == "sgd":
        named |= {key: ("get", group, key) for key in ("momentum", "dampening")}
        return named | {
            "nesterov": "nesterov" in flags,
            "maximize": "maximize" in flags,
            "is_first_step": False,
        }
    return named | {
        "beta1": ("get", group, "betas", 0),
        "beta2": ("get", group, "betas", 1),
        "eps": ("get", group, "eps"),
        "amsgrad": "amsgrad" in flags,
        "maximize": "maximize" in flags,
    }
