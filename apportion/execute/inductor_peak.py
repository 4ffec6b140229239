"""The peak of memory of a step that inductor compiled, by a dry run of the compiled code.

Part of the room execute. An Executable and a device come in, bytes go out. A compiler allocates by
its own lights: more than the plan here, less there. So its code is asked: every piece is compiled
(segment_cut.py, inductor.py) and runs on tensors without data, its kernels left out, and the
storages that are alive are counted. Kernels of libraries take room of their own while they run;
`workspace` says how much each task's takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apportion.capture import torch_private
from apportion.execute.allocations import AllocationTracker
from apportion.execute.executable import Executable
from apportion.execute.inductor import CompiledPiece, InductorSegment, inductor
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import HostStep, Post, Segment, rank_steps
from apportion.execute.segment_function import CannotCompile
from apportion.execute.torch_compiler import without_kernels
from apportion.execute.update_calls import UpdateCalls

LIBRARY_KINDS = ("apportion.sdpa", "apportion.conv", "aten.convolution", "aten.mm", "aten.addmm")


def no_workspace(task: int) -> int:
    """For devices of which nothing was measured."""
    return 0


def inductor_peak(
    executable: Executable, device: int, place: str, workspace: Callable[[int], int] = no_workspace
) -> int:
    """The most bytes of tensors that a device holds in a step compiled for torch's device `place`;
    raises CannotCompile where it does not run so. `workspace`: bytes that a task's kernel takes
    while it runs, counted where a library's kernel stays itself."""
    peak = 0
    context = Context(0, 0, lambda _: 0.5, executable.graph.bodies, "meta", place)
    with AllocationTracker(None) as tracked:
        rank = Rank(executable, device, place="meta")
        for slot in executable.begin:
            if executable.slot_device[slot] == device:
                spec = executable.slots[slot]
                rank.tensors[slot] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        tracked.peak = sum(n for _, n in tracked.alive.values())
        for step in rank_steps(executable, device):
            if isinstance(step, Segment):
                segment = inductor(executable, step, place)
                assert isinstance(segment, InductorSegment)
                peak = max(peak, _dry_run(segment, rank, context, tracked, workspace))
            elif isinstance(step, Post):
                for number, _ in step.exchange.sends:
                    rank.free(executable.messages[number].task)
            elif isinstance(step, HostStep):
                raise CannotCompile("what lies on the host is not told apart here")
            else:
                for number, _ in step.exchange.receives:
                    nbytes = executable.messages[number].nbytes
                    rank.received[number] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return peak


def _dry_run(
    segment: InductorSegment,
    rank: Rank,
    context: Context,
    tracked: AllocationTracker,
    workspace: Callable[[int], int],
) -> int:
    """Runs a segment without data; returns the peak."""
    peak = number = 0
    drawn = len(segment.operators)
    rows = torch.empty(drawn, 2, dtype=torch.int32, device="meta") if drawn else None
    while number < len(segment.pieces):
        if number == len(segment.ready):
            with torch_private.without_modes():
                segment.prepare(rank)
            continue
        tasks = segment.pieces[number].segment.tasks
        tracked.peak = 0
        _dry_piece(segment.ready[number], rank, context, rows)
        kinds = {task: _kind(segment.executable, task) for task in tasks}
        more = [workspace(task) for task, kind in kinds.items() if kind.startswith(LIBRARY_KINDS)]
        peak = max(peak, tracked.peak + max(more, default=0))
        number += 1
    return peak


def _dry_piece(piece: Any, rank: Rank, context: Context, rows: torch.Tensor | None) -> None:
    if isinstance(piece, CompiledPiece):
        piece.run(without_kernels(piece.code), rank, rows)
    elif isinstance(piece, UpdateCalls):
        piece.dry(rank, context)
    else:
        piece(rank, context)


def _kind(executable: Executable, task: int) -> str:
    call = executable.computes.get(task)
    return "" if call is None else call.op.kind
