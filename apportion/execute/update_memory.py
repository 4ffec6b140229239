"""What fused updates do to memory: new state lies where the old was, gradients wait for their call.

Part of the room execute. An Executable comes in, with what a dry run has found of its slots; an
UpdateMemory goes out. Compiled ranks do updates so (fused_update.py), the interpreter does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from apportion.columns import Bools, Ints
from apportion.execute.executable import Executable
from apportion.execute.fused_update import (
    FusedUpdate,
    UpdateBatch,
    fused_updates,
    overwritten_slots,
    update_batches,
)
from apportion.execute.rank_steps import task_runs


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """What differs from updates that run their bodies.

    tasks      those that a fused kernel computes: none needs room of its own
    shared     new state -> the old state that it overwrites
    kept       slots that are needed longer -> until which task
    workspace  task -> bytes of copies that a call needs after it
    """

    tasks: tuple[int, ...] = ()
    shared: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    workspace: dict[int, int] = field(default_factory=dict)


def update_memory(executable: Executable, root: Ints, dense: Bools) -> UpdateMemory:
    """What the fused updates of all devices do. `root` is for every slot the one whose storage it
    shares, itself if none; `dense` whether its tensor is dense."""
    fused = fused_updates(executable)
    found = UpdateMemory(tuple(fused))
    if not fused:
        return found
    last: dict[int, int] = {}
    for owner, used in zip(root.tolist(), executable.tasks.slot_last.tolist(), strict=True):
        last[owner] = max(last.get(owner, -1), used)
    written = overwritten_slots(executable, fused)
    for task, update in fused.items():
        for old, new in zip((update.ins[0], *update.ins[2:]), update.outs, strict=True):
            if written.get(new) == old and last[int(root[old])] <= task:
                found.shared[new] = old
    for device in sorted({executable.device[task] for task in fused}):
        for run in task_runs(executable, device):
            for batch in update_batches(executable, run, fused).values():
                _add(executable, batch, dense, found)
    return found


def _add(executable: Executable, batch: UpdateBatch, dense: Bools, found: UpdateMemory) -> None:
    """What one batch keeps, and what its calls copy."""
    frees: Sequence[Sequence[int]] = executable.frees
    for update in batch.updates:
        if update.task < batch.after:
            found.kept.update(dict.fromkeys(frees[update.task], batch.after))
    calls: dict[object, int] = {}
    for update in batch.updates:
        if not dense[update.gradient]:
            calls[update.batch] = calls.get(update.batch, 0) + _nbytes(executable, update)
    if calls:
        found.workspace[batch.after] = max(calls.values())


def _nbytes(executable: Executable, update: FusedUpdate) -> int:
    meant = executable.slots[update.gradient]
    return meant.dtype.itemsize * math.prod(meant.shape)
