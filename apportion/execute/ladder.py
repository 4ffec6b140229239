"""The ladder of modes: how each segment of a rank runs, and what it falls back to.

Part of the room execute. A device's RankSteps and a mode come in, a SegmentFunction for each
segment goes out, with notes on those that do not run as asked.

    none       the interpreter, task by task: what all others are compared with
    generated  straight-line Python with fused updates in place (generate.py)
    graph      generated code under CUDA graphs
    inductor   compiled by inductor, on CUDA devices under CUDA graphs
    auto       the fastest that works on the device: inductor on CUDA, generated elsewhere

Every compiled segment is compared with the interpreter in the first step it runs (under a CUDA
graph, in the first two), on the same inputs. The interpreter writes over nothing, so it goes first
and costs no copies, only the room for its results, which stay if the segment fails or differs. Such
a segment runs one mode lower from then on (generated, then interpreted), and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from apportion.execute.cuda_graph import graphed
from apportion.execute.device_memory import free_bytes
from apportion.execute.executable import Executable
from apportion.execute.fused_update import FusedUpdate, fused_updates
from apportion.execute.generate import SegmentGenerator, SegmentSource
from apportion.execute.host_traffic import HostTraffic
from apportion.execute.inductor import inductor, kernel_by_kernel
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import HostStep, RankStep, Segment, slots_made, slots_read
from apportion.execute.recorded_step import CudaGraphPool, StepRecorder
from apportion.execute.segment_function import CannotCompile, SegmentFunction, interpreted
from apportion.machine import AUTO, GENERATED, GRAPH, INDUCTOR, INTERPRETER

COMPARED_AT_ONCE = 1 << 21  # elements, so that comparing takes little memory
COMPARING = 1 << 28  # bytes that comparing and kernels' own room may take
BELOW = {GENERATED: INTERPRETER, GRAPH: GENERATED, INDUCTOR: GENERATED}

# How far a compiled segment may be from the interpreter, relative to the largest element.
Tolerance = dict[torch.dtype, float]
ROUNDING: Tolerance = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
OTHER_ORDER: Tolerance = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}


def mode_of(mode: str, place: str) -> str:
    """The mode that is meant on torch's device `place`."""
    if mode == AUTO:
        return INDUCTOR if place.startswith("cuda") else GENERATED
    if mode == GRAPH and not place.startswith("cuda"):
        return GENERATED
    return mode


@dataclass
class Ladder:
    """The functions of one device's segments, and what there is to say about them.

    fallen  (segment's number, how it runs instead, why)
    """

    device: int
    functions: dict[Segment, SegmentFunction] = field(default_factory=dict)
    general: list[str] = field(default_factory=list)
    fallen: list[tuple[int, str, str]] = field(default_factory=list)
    speakers: list[Any] = field(default_factory=list)  # functions that have notes of their own
    inner: dict[Segment, SegmentFunction] = field(default_factory=dict)  # what is to be recorded
    recorder: StepRecorder | None = None
    uncompared: int = 0

    def record(self, rank: Rank, steps: Sequence[RankStep], traffic: HostTraffic) -> None:
        """Lets a step that uses the host be recorded as a whole, if its segments are to be."""
        segments = {step for step in steps if isinstance(step, Segment)}
        if not self.inner or segments != self.inner.keys():
            return
        pool = CudaGraphPool(rank.place)
        self.recorder = StepRecorder(rank, steps, self.inner, traffic, pool)
        self.speakers.append(self.recorder)

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that does not run as asked."""
        why: dict[tuple[str, str], list[int]] = {}
        for number, how, reason in self.fallen:
            why.setdefault((how, reason), []).append(number)
        fallen = [
            f"{_segments(numbers)} of device {self.device} {'is' if len(numbers) == 1 else 'are'} "
            f"{how}: {reason}"
            for (how, reason), numbers in why.items()
        ]
        own = [note for speaker in self.speakers for note in speaker.notes]
        if self.uncompared:
            fallen.append(
                f"{self.uncompared} segments of device {self.device} are not compared with the "
                "interpreter: there is no room for the results of both"
            )
        return [*self.general, *fallen, *dict.fromkeys(own)]


def _segments(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"segment {shown}" if len(numbers) == 1 else f"segments {shown}"


def ladder(
    executable: Executable,
    device: int,
    place: str,
    steps: Sequence[RankStep],
    mode: str,
    timed: bool = False,
) -> Ladder:
    """How each segment of a device runs. `timed`: in steps that are recorded every task has a span,
    where the mode can."""
    segments = [step for step in steps if isinstance(step, Segment)]
    found = Ladder(device)
    wanted = mode_of(mode, place)
    found.functions = {segment: interpreted(segment) for segment in segments}
    if wanted == INTERPRETER or not segments:
        return found
    if wanted != mode and mode != AUTO:
        found.general.append(f"{mode} needs a CUDA device; on {place} segments run {wanted}")
    rungs = Rungs(executable, place, steps, found, timed)
    for number, segment in enumerate(segments):
        found.functions[segment] = rungs.begin(number, segment, wanted)
    return found


@dataclass
class Rungs:
    """Makes the functions of a device's segments: compiled as asked, and what they fall back to."""

    executable: Executable
    place: str
    steps: Sequence[RankStep]
    ladder: Ladder
    timed: bool

    @cached_property
    def generator(self) -> SegmentGenerator:
        return SegmentGenerator(self.executable, self.ladder.device, self.place, self.timed)

    @cached_property
    def sources(self) -> dict[Segment, SegmentSource]:
        found = self.generator.segments(self.steps)
        self.ladder.general += self.generator.notes
        return {source.segment: source for source in found}

    @cached_property
    def pool(self) -> Any:
        return torch.cuda.MemPool()

    def begin(self, number: int, segment: Segment, mode: str) -> SegmentFunction:
        """The function of a segment in a mode, compared in its first steps; the next one down if
        there is none."""
        try:
            function, checks, tolerance = self._made(segment, mode)
        except CannotCompile as error:
            return self.fall(number, segment, mode, str(error))
        return FirstSteps(self, number, segment, mode, function, checks, tolerance)

    def fall(self, number: int, segment: Segment, mode: str, why: str) -> SegmentFunction:
        """The function that a segment has instead."""
        lower = BELOW[mode]
        if self.ladder.inner.pop(segment, None) is not None and self.ladder.recorder is not None:
            self.ladder.recorder.abandoned = True
        self.ladder.fallen.append((number, lower if lower != INTERPRETER else "interpreted", why))
        return interpreted(segment) if lower == INTERPRETER else self.begin(number, segment, lower)

    def _made(self, segment: Segment, mode: str) -> tuple[SegmentFunction, int, Tolerance]:
        """The function of a segment, in how many steps it is compared, and how closely."""
        cuda = self.place.startswith("cuda")
        if mode == GENERATED:
            # A GPU's scatters add up in any order: even the interpreter is not equal to itself.
            exact = OTHER_ORDER if cuda else dict.fromkeys(ROUNDING, 0.0)
            return self.sources[segment].function(), 1, exact
        inner = inductor if mode == INDUCTOR else kernel_by_kernel
        function = inner(self.executable, segment, self.place)
        if hasattr(function, "notes"):
            self.ladder.speakers.append(function)
        if not cuda:
            return function, 1, OTHER_ORDER
        tolerance = other_order_on_cuda(_convolves(self.executable, segment))
        if self.records_whole:
            self.ladder.inner[segment] = function
            return self._with_tensors(segment), 1, tolerance
        whole = graphed(self.executable, segment, function, self.pool, self.place)
        self.ladder.speakers.append(whole)
        return whole, 2, tolerance  # once as it is, once recorded and replayed

    @cached_property
    def records_whole(self) -> bool:
        """Whether steps are recorded with all that lies between their segments: they use the host,
        and exchange nothing with other ranks."""
        return any(isinstance(step, HostStep) for step in self.steps) and all(
            isinstance(step, HostStep | Segment) for step in self.steps
        )

    def _with_tensors(self, segment: Segment) -> SegmentFunction:
        """The function of a segment in the first step: what the recorder will record, where there
        is one."""
        found = self.ladder

        def run(rank: Rank, context: Context) -> None:
            function = found.inner[segment]
            if found.recorder is not None:
                function = found.recorder.eager(segment)
            function(rank, context)

        return run

    @cached_property
    def fused(self) -> dict[int, FusedUpdate]:
        return fused_updates(self.executable)


def other_order_on_cuda(convolves: bool) -> Tolerance:
    """OTHER_ORDER where products or convolutions in float32 may be computed in TF32, which has
    little more digits than bfloat16: another layout means another algorithm. Through tens of
    convolutions and batch norms such a difference grows, and the first layer's gradient of a
    resnet50 is off by more than a tenth of its largest element: there only gross errors are seen
    here, and float64 tells the rest (tests/gpu)."""
    if convolves and torch.backends.cudnn.allow_tf32:
        return OTHER_ORDER | {torch.float32: 0.5}
    if torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32:
        return OTHER_ORDER | {torch.float32: OTHER_ORDER[torch.bfloat16]}
    return OTHER_ORDER


def _convolves(executable: Executable, segment: Segment) -> bool:
    """Whether a segment has a convolution."""
    calls = (executable.computes.get(task) for task in segment.tasks)
    return any("conv" in call.op.kind for call in calls if call is not None)


@dataclass
class FirstSteps:
    """Compares a segment's function with the interpreter in its first steps, then lets it alone."""

    rungs: Rungs
    number: int
    segment: Segment
    mode: str
    function: SegmentFunction
    checks: int
    tolerance: Tolerance

    def __call__(self, rank: Rank, context: Context) -> None:
        functions = self.rungs.ladder.functions
        if not self._has_room(rank):
            self._let_alone(rank, context)
            return
        try:
            oracle = self._interpret(rank, context)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._let_alone(rank, context)
            return
        try:
            self.function(rank, context)
            why = self._difference_if_room(rank, oracle, context)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler, or its code, may raise anything
            told = (str(error).splitlines() or [""])[0]
            why = told if isinstance(error, CannotCompile) else f"{type(error).__name__}: {told}"
        if why:
            self._put_back(rank, oracle)
            functions[self.segment] = self.rungs.fall(self.number, self.segment, self.mode, why)
            return
        self.checks -= 1
        if not self.checks:
            functions[self.segment] = self.function
            if rank.place.startswith("cuda"):
                oracle.tensors.clear()
                torch.cuda.empty_cache()  # the interpreter's room, which nobody needs any more

    def _has_room(self, rank: Rank) -> bool:
        """Whether the device has room for the results of both, whatever each of them frees
        meanwhile, and for comparing them."""
        if not rank.place.startswith("cuda"):
            return True
        slots = rank.executable.slots
        made = [
            math.prod(slots[s].shape) * slots[s].dtype.itemsize
            for task in self.segment.tasks
            for s in slots_made(rank.executable, task)
        ]
        return 2 * sum(made) + COMPARING < free_bytes(rank.place)

    def _let_alone(self, rank: Rank, context: Context) -> None:
        """Runs the segment without comparing it."""
        ladder = self.rungs.ladder
        ladder.uncompared += 1
        ladder.functions[self.segment] = self.function
        self.function(rank, context)

    def _interpret(self, rank: Rank, context: Context) -> Rank:
        """The segment interpreted on the same tensors, which it does not change."""
        oracle = Rank(rank.executable, rank.device, place=rank.place)
        oracle.tensors = {slot: rank.tensors[slot] for slot in self.segment.ins}
        oracle.received = {m: rank.received[m] for m in self.segment.messages}
        interpreted(self.segment)(oracle, context)
        return oracle

    def _difference_if_room(self, rank: Rank, oracle: Rank, context: Context) -> str:
        """As `_difference`; where there is no memory to compare with, nothing is said."""
        try:
            return self._difference(rank, oracle, context)
        except torch.OutOfMemoryError:
            self.rungs.ladder.uncompared += 1
            return ""

    def _difference(self, rank: Rank, oracle: Rank, context: Context) -> str:
        """Where the two differ by more than rounding may; "" if nowhere."""
        rates = rounded_slots(rank.executable, self.rungs.fused, self.segment)
        for slot in self.segment.outs:
            found, meant = rank.tensors[slot], oracle.tensors[slot]
            share, more = self.tolerance.get(meant.dtype, 0.0), 0.0
            if slot in rates:
                share = max(share, ROUNDING.get(meant.dtype, 0.0))
                if meant.is_floating_point():
                    more = 4 * torch.finfo(meant.dtype).tiny  # below that digits are lost
                if self.mode != GENERATED or rank.place.startswith("cuda"):
                    # Adam makes steps of this size out of rounding
                    more = 4 * abs(context.setting(("get", rates[slot], "lr")))
            if not near(found, meant, share, more):
                slots, values = rank.executable.slots, rank.executable.graph.values
                return f"its {values[slots[slot].value].name!r} is not the interpreter's"
        return ""

    def _put_back(self, rank: Rank, oracle: Rank) -> None:
        """Leaves what the interpreter made."""
        for slot in self.segment.frees:
            rank.tensors.pop(slot, None)
        for slot in self.segment.outs:
            rank.tensors[slot] = oracle.tensors[slot]
        for message in self.segment.messages:
            if message not in oracle.received:
                rank.received.pop(message, None)


def rounded_slots(
    executable: Executable, fused: dict[int, FusedUpdate], segment: Segment
) -> dict[int, int]:
    """Slots of a segment that fused updates round otherwise than the interpreter does, each with
    the group of parameters whose rate it depends on."""
    found: dict[int, int] = {}
    for task in segment.tasks:
        if task in fused:
            found |= dict.fromkeys(fused[task].outs, fused[task].recipe.group)
            continue
        groups = [found[s] for s in slots_read(executable, task) if s in found]
        if groups:
            found |= dict.fromkeys(slots_made(executable, task), groups[0])
    return found


def near(found: torch.Tensor, meant: torch.Tensor, share: float, more: float = 0.0) -> bool:
    """Whether no element is off by more than that share of the largest one, and `more`; NaN equals
    NaN."""
    if found.shape != meant.shape or found.dtype != meant.dtype:
        return False
    if not meant.numel():
        return True
    pieces = list(zip(_pieces(found), _pieces(meant), strict=True))
    if all(torch.equal(a, b) for a, b in pieces):
        return True
    if not (meant.is_floating_point() or meant.is_complex()):
        return False
    wide = torch.promote_types(meant.dtype, torch.float32)
    largest = max(_largest(b.to(wide)) for _, b in pieces)
    allowed = share * largest + more
    return all(
        torch.allclose(a.to(wide), b.to(wide), rtol=0.0, atol=allowed, equal_nan=True)
        for a, b in pieces
    )


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views that are a tensor together, cut across its longest dimension."""
    if tensor.numel() <= COMPARED_AT_ONCE:
        return (tensor,)
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    rows = max(1, COMPARED_AT_ONCE * tensor.shape[dim] // tensor.numel())
    return tuple(tensor.split(rows, dim))


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude among elements that are numbers and finite."""
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())
