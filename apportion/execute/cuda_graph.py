"""Segments under CUDA graphs: the kernels of a segment are recorded once and replayed as one.

Part of the room execute. A SegmentFunction and its Segment come in, a SegmentFunction goes out that
calls it once as it is, which warms it up, then once while a CUDA graph records its kernels, and
from then on replays the graph. For one rank a segment is a whole step; for several it is what lies
between two exchanges.

A graph reads and writes fixed addresses, and so whatever changes from step to step is a tensor:

    slots     the tensors that are there when the graph is recorded stay; another tensor in the
              same slot (a batch) is copied into them. State that the segment does not overwrite by
              itself is copied over the old one at the end of the graph
    messages  the same
    words     of random numbers: StepWords
    settings  of the optimizer are fixed in the graph. Where one has another value than it had, the
              graph is recorded again; learning rates that fused kernels read are tensors
              (StepRates), so a schedule costs nothing

If recording fails, the segment runs as it did, and `notes` says why.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apportion.capture import torch_private
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment
from apportion.execute.segment_function import SegmentFunction
from apportion.execute.segment_graph import first_line
from apportion.execute.step_words import StepRates, StepWords

MOST_RECORDINGS = 16  # of one segment; then its settings change too often


@dataclass(frozen=True)
class RecordedGraph:
    """A CUDA graph and what it reads and writes.

    ins       slot -> the tensor that it reads
    outs      slot -> the tensor that it leaves
    messages  message -> the bytes that it reads
    settings  expression -> the value that is fixed in it
    gone      messages that are dropped
    """

    graph: torch.cuda.CUDAGraph
    ins: dict[int, torch.Tensor]
    outs: dict[int, torch.Tensor]
    messages: dict[int, torch.Tensor]
    settings: dict[Any, float]
    gone: tuple[int, ...]


@dataclass
class GraphedSegment:
    """A segment's function under a CUDA graph."""

    executable: Executable
    segment: Segment
    inner: SegmentFunction
    pool: torch.cuda.MemPool
    words: StepWords
    rates: StepRates
    notes: list[str] = field(default_factory=list)
    recorded: RecordedGraph | None = None
    calls: int = 0
    recordings: int = 0

    def __call__(self, rank: Rank, context: Context) -> None:
        self.words.fill(context.seed, context.step)
        self.rates.fill(context.setting)
        self.calls += 1
        if self.calls == 1 or self.recordings > MOST_RECORDINGS:
            self.inner(rank, self._fixed(context))
            return
        found = self.recorded
        if found is None or any(context.setting(x) != v for x, v in found.settings.items()):
            found = self.recorded = None  # its memory can be used by the next one
            found = self._record(rank, context)
        else:
            self._copy_in(found, rank)
        if found is not None:
            found.graph.replay()
            self._leave(found, rank)

    def _record(self, rank: Rank, context: Context) -> RecordedGraph | None:
        """Records the graph, or runs the segment and says why not."""
        self.recordings += 1
        if self.recordings > MOST_RECORDINGS:
            self.notes.append("no CUDA graph: settings of the optimizer change at every step")
        tensors, received = dict(rank.tensors), dict(rank.received)
        for message in self.segment.messages:
            rank.received[message] = received[message].to(rank.place)
        try:
            if self.recordings <= MOST_RECORDINGS:
                self.recorded = self._recording(rank, context)
        except Exception as error:  # whatever a kernel or the driver may raise
            self.recordings = MOST_RECORDINGS + 1
            self.notes.append(f"no CUDA graph: {first_line(error)}")
        if self.recorded is None:
            torch.cuda.synchronize()
            rank.tensors, rank.received = tensors, received
            self.inner(rank, self._fixed(context))
        return self.recorded

    def _fixed(self, context: Context) -> Context:
        return replace(context, words=self.words, rates=self.rates)

    def _recording(self, rank: Rank, context: Context) -> RecordedGraph:
        settings: dict[Any, float] = {}

        def setting(expression: Any) -> float:
            settings[expression] = context.setting(expression)
            return settings[expression]

        own = self.segment
        ins = {slot: rank.tensors[slot] for slot in own.ins}
        messages = {message: rank.received[message] for message in own.messages}
        fixed = replace(self._fixed(context), setting=setting)
        if self.recordings == 1:
            self.words.settle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the warm-up used is for the graph's own pool
        graph = torch.cuda.CUDAGraph()
        pool: Any = self.pool.id
        here = torch.cuda.device(rank.place)
        with here, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.inner(rank, fixed)
            outs = {slot: rank.tensors[slot] for slot in own.outs}
            self._carry_over(ins, outs)
        gone = tuple(message for message in own.messages if message not in rank.received)
        return RecordedGraph(graph, ins, outs, messages, settings, gone)

    def _carry_over(self, ins: dict[int, torch.Tensor], outs: dict[int, torch.Tensor]) -> None:
        """Writes new state over the old one, where nobody will read that any more."""
        dropped = set(self.segment.frees)
        views = Counter(torch_private.storage_id(out) for out in outs.values())
        new, old = [], []
        for made, begun in self.executable.carry:
            if made not in outs or begun not in dropped or begun not in ins:
                continue
            target = ins[begun]
            if outs[made] is target or views[torch_private.storage_id(target)]:
                continue  # it was overwritten already, or an output is a view of it
            new.append(outs[made])
            old.append(target)
            outs[made] = target
        if old:
            torch._foreach_copy_(old, new)

    def _copy_in(self, found: RecordedGraph, rank: Rank) -> None:
        tensors = rank.tensors
        other = [slot for slot, tensor in found.ins.items() if tensors[slot] is not tensor]
        if other:
            torch._foreach_copy_([found.ins[s] for s in other], [tensors[s] for s in other])
        for message, room in found.messages.items():
            if rank.received[message] is not room:
                room.copy_(rank.received[message], non_blocking=True)

    def _leave(self, found: RecordedGraph, rank: Rank) -> None:
        for slot in self.segment.frees:
            rank.tensors.pop(slot, None)
        rank.tensors.update(found.outs)
        for message in found.gone:
            rank.received.pop(message, None)


def graphed(
    executable: Executable,
    segment: Segment,
    inner: SegmentFunction,
    pool: torch.cuda.MemPool,
    place: str = "cuda",
) -> GraphedSegment:
    """A segment's function under a CUDA graph, with memory out of `pool`, which the graphs of a
    rank share: they are always replayed in the order in which they are recorded."""
    return GraphedSegment(executable, segment, inner, pool, StepWords(place), StepRates(place))
