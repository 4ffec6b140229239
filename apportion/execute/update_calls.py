"""Update tasks done together by fused kernels, outside of any graph.

Part of the room execute. A Segment of update tasks comes in, a SegmentFunction goes out. Which
updates a fused kernel computes and which state it overwrites, fused_update.py says; the rest run
their bodies. Where the Context has learning rates as tensors, kernels read those, so that a
recorded CUDA graph follows a schedule; the kernels read them in float32, so parameters in float64
take the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.execute.executable import Executable
from apportion.execute.fused_update import (
    FUSED,
    FusedUpdate,
    fused_settings,
    fused_updates,
    overwritten_slots,
)
from apportion.execute.kernels.base import Context, resolve
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment
from apportion.graph import UpdateRecipe

GRADIENT = 1  # which input of an update


@dataclass(frozen=True)
class FusedCall:
    """One call of a fused kernel.

    columns  slots of parameters, gradients, and each state, in the order of the recipe
    made     the slots that each column becomes; () for gradients
    kept     slots that the kernel must not overwrite
    """

    recipe: UpdateRecipe
    dtype: torch.dtype
    columns: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    kept: frozenset[int]

    def __call__(self, rank: Rank, context: Context) -> None:
        tensors = rank.tensors
        columns = [
            [tensors[s].clone() if s in self.kept else tensors[s] for s in slots]
            for slots in self.columns
        ]
        named = dict(zip(("", "grad", *self.recipe.state), columns, strict=True))
        parameters, gradients = columns[0], _laid_out(columns[GRADIENT], columns[0])
        settings = self._settings(context)
        kernel = resolve(FUSED[self.recipe.kind].replace("default", _form(settings)))
        if self.recipe.kind == "sgd":
            kernel(parameters, gradients, named.get("momentum_buffer", []), **settings)
        else:
            torch._foreach_add_(named["step"], 1)
            largest = named.get("max_exp_avg_sq", [])
            moments = named["exp_avg"], named["exp_avg_sq"], largest, named["step"]
            kernel(parameters, gradients, *moments, **settings)
        for slots, column in zip(self.made, columns, strict=True):
            tensors.update(zip(slots, column, strict=False))

    def dry(self, rank: Rank) -> None:
        """What it leaves on tensors without data."""
        for slots, made in zip(self.columns, self.made, strict=True):
            for old, new in zip(slots, made, strict=False):
                kept = rank.tensors[old]
                rank.tensors[new] = kept.clone() if old in self.kept else kept

    def _settings(self, context: Context) -> dict[str, Any]:
        found = {
            key: context.setting(value) if isinstance(value, tuple) else value
            for key, value in fused_settings(self.recipe).items()
            if key != "lr"
        }
        if context.rates is not None and self.dtype != torch.float64:
            return found | {"lr": context.rates(self.recipe.group)}
        return found | {"lr": context.setting(("get", self.recipe.group, "lr"))}


def _laid_out(tensors: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors with the strides of others: kernels read all of them in the order of memory."""
    return [
        t if t.stride() == other.stride() else torch.empty_like(other).copy_(t)
        for t, other in zip(tensors, like, strict=True)
    ]


def _form(settings: dict[str, Any]) -> str:
    return "tensor_lr" if isinstance(settings["lr"], torch.Tensor) else "default"


@dataclass(frozen=True)
class UpdateCalls:
    """Updates, as few calls as possible."""

    fused: tuple[FusedCall, ...]
    bodies: tuple[int, ...]
    frees: tuple[int, ...]

    def __call__(self, rank: Rank, context: Context) -> None:
        for call in self.fused:
            call(rank, context)
        self._rest(rank, context)

    def dry(self, rank: Rank, context: Context) -> None:
        """What it leaves on tensors without data."""
        for call in self.fused:
            call.dry(rank)
        self._rest(rank, context)

    def _rest(self, rank: Rank, context: Context) -> None:
        for task in self.bodies:
            rank.make(task, context)
        for slot in self.frees:
            rank.tensors.pop(slot, None)


def update_calls(executable: Executable, own: Segment) -> UpdateCalls:
    """The function of a segment of updates. It may not have updates that read each other's
    results."""
    known = executable.artefacts.setdefault("fused updates", {})
    if not known:
        known["updates"] = fused_updates(executable)
        known["overwritten"] = frozenset(overwritten_slots(executable, known["updates"]).values())
    batches: dict[Any, list[FusedUpdate]] = {}
    for task in own.tasks:
        if task in known["updates"]:
            update = known["updates"][task]
            batches.setdefault(update.batch, []).append(update)
    calls = tuple(_call(updates, known["overwritten"]) for updates in batches.values())
    bodies = tuple(task for task in own.tasks if task not in known["updates"])
    gone = [slot for task in own.tasks for slot in executable.frees[task]]
    return UpdateCalls(calls, bodies, tuple(gone))


def _call(updates: Sequence[FusedUpdate], overwritten: frozenset[int]) -> FusedCall:
    columns = tuple(zip(*(update.ins for update in updates), strict=True))
    parameters, *states = zip(*(update.outs for update in updates), strict=True)
    kept = {
        slot
        for number, column in enumerate(columns)
        if number != GRADIENT
        for slot in column
        if slot not in overwritten
    }
    return FusedCall(
        updates[0].recipe, updates[0].dtype, columns, (parameters, (), *states), frozenset(kept)
    )
