"""A step that uses the host, recorded: its segments as CUDA graphs, between them copies and waits.

Part of the room execute. A Rank and its RankSteps come in with the functions of its segments. The
first step runs as it is, which warms everything up. The second is recorded: each segment becomes a
CUDA graph, which is replayed at once, and whatever happens between segments is done and noted with
the addresses that it has. From then on a step is this list of actions, and nothing is looked up,
allocated or launched one by one.

All memory that comes and goes within a step is taken from one pool, in the plan's order, by graphs
and by copies from the host alike, and given back in that order: so what is used at the same time
lies apart, and what is not may share. Nobody holds a tensor of it after the recording. The actions
are done in the order in which they were recorded, so that addresses stay right, and copies wait for
the compute queue as host_traffic.py has them wait.

State that a segment does not write over by itself is copied over the old one at the end. Settings
of the optimizer are fixed in graphs, but for learning rates; where one has another value, the step
is recorded again (cuda_graph.py does the same for steps without the host).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from apportion.execute.cuda_clock import shared_out
from apportion.execute.executable import KernelCall
from apportion.execute.host_traffic import CopyBatch, HostTraffic, runs_of_a_kind
from apportion.execute.kernels.base import Context
from apportion.execute.pinned_memory import nothing_unpinned
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import HostStep, RankStep, Segment
from apportion.execute.segment_function import SegmentFunction
from apportion.execute.segment_graph import first_line
from apportion.execute.step_words import StepRates, StepWords
from apportion.lower import FROM_HOST, HOST_WORK, TO_HOST

MOST_RECORDINGS = 8  # then settings change too often
Action = Callable[[Context], None]


class GraphPool(Protocol):
    """Memory that graphs and copies share, and recording."""

    def prepare(self) -> None:
        """Gives memory that nobody uses back to the device, before it is needed here."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the pool."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as another tensor, which it does not keep."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What replays the kernels that a function launches, which do not run now."""


class _Address:
    """The memory of a tensor by its address, as numba, CuPy and others exchange it."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip


class CudaGraphPool:
    """The pool of a GPU. Everything in it belongs to one stream, which runs nothing."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.pool: Any = torch.cuda.MemPool()
        self.stream: Any = torch.cuda.Stream(place)
        self.graphs: list[Any] = []

    def prepare(self) -> None:
        torch.cuda.synchronize(self.place)
        torch.cuda.empty_cache()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
            return torch.empty(shape, dtype=dtype, device=self.place)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        raw = torch.as_tensor(_Address(tensor, (last + 1) * tensor.itemsize), device=tensor.device)
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph: Any = torch.cuda.CUDAGraph()
        here = torch.cuda.device(self.place), torch.cuda.stream(self.stream)
        with here[0], here[1], warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # it has only views
            graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
            try:
                function()
            except BaseException as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise error
            graph.capture_end()
        self.graphs.append(graph)
        replay: Callable[[], None] = graph.replay
        return replay


class StepRecorder:
    """Runs the steps of a rank by actions. `functions` are those of its segments, which read what
    changes from step to step from the Context that `fixed` gives them."""

    def __init__(
        self,
        rank: Rank,
        steps: Sequence[RankStep],
        functions: dict[Segment, SegmentFunction],
        traffic: HostTraffic,
        pool: GraphPool,
    ) -> None:
        self.rank, self.steps, self.functions = rank, steps, functions
        self.traffic, self.pool = traffic, pool
        self.words, self.rates = StepWords(rank.place), StepRates(rank.place)
        self.notes: list[str] = []
        self.actions: list[Action] | None = None
        self.settings: dict[Any, float] = {}
        self.begins: dict[int, torch.Tensor] = {}  # what every step begins with, by slot
        self.loss: torch.Tensor | None = None
        self.calls = self.recordings = 0
        self.abandoned = False

    def eager(self, segment: Segment) -> SegmentFunction:
        """The function of a segment in steps that are not recorded."""
        inner = self.functions[segment]

        def run(rank: Rank, context: Context) -> None:
            inner(rank, self.fixed(context))

        return run

    def fixed(self, context: Context) -> Context:
        """The Context in which what changes from step to step is a tensor."""
        return replace(context, words=self.words, rates=self.rates)

    def begin(self, context: Context) -> bool:
        """Begins a step; whether it is to be run by `run`."""
        self.words.fill(context.seed, context.step)
        self.rates.fill(context.setting)
        self.calls += 1
        self.traffic.streams.begin()
        return self.calls > 1 and not self.abandoned

    def run(self, context: Context) -> torch.Tensor | None:
        """One step; the loss, if it is here."""
        actions = self.actions
        if actions is None or any(context.setting(x) != v for x, v in self.settings.items()):
            self._record(context)
        else:
            for action in actions:
                action(context)
        self.traffic.end_step()
        self.rank.tensors = dict(self.begins)
        return None if self.loss is None else self.loss.detach().clone()

    # Recording

    def _record(self, context: Context) -> None:
        """Runs a step, and notes what it does; on failure it goes on without noting."""
        rank = self.rank
        self.actions, self.loss, self.recordings = None, None, self.recordings + 1
        self.begins = dict(rank.tensors)
        self.settings = {}
        if self.recordings > MOST_RECORDINGS:
            self._abandon("settings of the optimizer change at every step")
        else:
            self.words.settle()
            self.pool.prepare()
        actions: list[Action] = []
        with nothing_unpinned():
            for step in self.steps:
                if isinstance(step, HostStep):
                    for action in self._host_actions(step.tasks, context):
                        self._do(actions, action, context)
                else:
                    assert isinstance(step, Segment), "steps with exchanges are not recorded"
                    self._segment(actions, step, context)
            self._end(actions)
        self.actions = None if self.abandoned else actions
        gc.collect()  # else Python does that within some later step, for up to a second

    def _do(self, actions: list[Action], action: Action, context: Context) -> None:
        action(context)
        actions.append(action)

    def _segment(self, actions: list[Action], own: Segment, context: Context) -> None:
        for which in self.traffic.waited(own.ins):
            self._do(actions, partial(_awaited, self.traffic, *which), context)
        replay = None if self.abandoned else self._recorded(own, context)
        if replay is None:
            self.functions[own](self.rank, self.fixed(context))
            return
        self._do(actions, partial(_replayed, self.rank, own, replay), context)

    def _recorded(self, own: Segment, context: Context) -> Callable[[], None] | None:
        """What replays a segment; None if it cannot be recorded, and then nothing has changed. What
        the segment lets go is only known by its address meanwhile, so that its memory is free."""
        rank = self.rank
        touched = {*own.ins, *own.frees} & rank.tensors.keys()
        before = {slot: self.pool.alias(rank.tensors[slot]) for slot in touched}

        def setting(expression: Any) -> float:
            self.settings[expression] = context.setting(expression)
            return self.settings[expression]

        given = replace(self.fixed(context), setting=setting)
        try:
            return self.pool.record(lambda: self.functions[own](rank, given))
        except Exception as error:  # whatever a kernel or the driver may raise
            self._abandon(first_line(error))
            for slot in own.outs:
                rank.tensors.pop(slot, None)
            missing = before.keys() - rank.tensors.keys()
            rank.tensors |= {slot: before[slot].clone() for slot in missing}
            return None

    def _abandon(self, why: str) -> None:
        self.abandoned = True
        self.notes.append(f"steps are not recorded as CUDA graphs: {why}")

    def _host_actions(self, tasks: Sequence[int], context: Context) -> Iterator[Action]:
        """What the tasks of a HostStep do, at the addresses that they have."""
        rank, traffic = self.rank, self.traffic
        for kind, some in runs_of_a_kind(rank.executable, tasks):
            works = [rank.executable.computes[task] for task in some]
            if kind == HOST_WORK:
                for task, work in zip(some, works, strict=True):
                    ins = [rank.tensors[slot] for slot in work.ins]
                    outs = [rank.room(slot) for slot in work.outs]
                    rank.tensors.update(zip(work.outs, outs, strict=True))
                    yield partial(traffic.work, task, ins, outs)
            elif kind in (TO_HOST, FROM_HOST):
                for work in works:
                    rank.tensors[work.outs[0]] = self._target(kind, work)
                copies = traffic.copies(some, self.pool.alias)
                begin = traffic.arrive if kind == FROM_HOST else traffic.depart
                yield partial(_copied, begin, copies)
            else:
                yield partial(_gone, traffic, some)
                for work in works:
                    rank.tensors[work.outs[0]] = rank.tensors[work.ins[0]].detach()
            for task in some:
                rank.free(task)

    def _target(self, kind: int, work: KernelCall) -> torch.Tensor:
        """Where a copy goes."""
        rank, source = self.rank, self.rank.tensors[work.ins[0]]
        if kind == TO_HOST:
            return rank.room(work.outs[0])
        if self.abandoned:
            return torch.empty(source.shape, dtype=source.dtype, device=rank.place)
        return self.pool.empty(tuple(source.shape), source.dtype)

    def _end(self, actions: list[Action]) -> None:
        """Notes what the next step begins with, and puts new state where the old was."""
        rank, begins = self.rank, self.begins
        old, new = [], []
        for end, begin in rank.executable.carry:
            if rank.executable.slot_device[end] != rank.device:
                continue
            made = rank.tensors[end]
            if begin not in begins or begin in rank.rooms:
                begins[begin] = made
            elif begins[begin] is not made and not _same(begins[begin], made):
                old.append(begins[begin])
                new.append(made)
        losses = (s for s in rank.executable.loss_slots if s in rank.tensors)
        self.loss = next((rank.tensors[slot] for slot in losses), None)
        if old and not self.abandoned:
            replay = self.pool.record(lambda: torch._foreach_copy_(old, new))
            actions.append(lambda context: replay())
            replay()
        elif old:
            torch._foreach_copy_(old, new)
        fed = {region.slot for region in rank.inputs}
        self.begins = {slot: tensor for slot, tensor in begins.items() if slot not in fed}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _awaited(traffic: HostTraffic, first: int, group: int, context: Context) -> None:
    traffic.await_arrival(first, group)


def _copied(begin: Callable[[CopyBatch], None], copies: CopyBatch, context: Context) -> None:
    begin(copies)


def _gone(traffic: HostTraffic, tasks: tuple[int, ...], context: Context) -> None:
    traffic.gone(tasks)


def _replayed(rank: Rank, own: Segment, replay: Callable[[], None], context: Context) -> None:
    if not rank.records:
        replay()
        return
    began = rank.clock()
    replay()
    rank.spans += shared_out(own.tasks, began, rank.clock())
