"""The ladder of modes: how each segment of a rank runs, and what it falls back to.

Part of the room execute. A device's RankSteps and a mode come in, a SegmentFunction for each
segment goes out, with notes on those that do not run as asked.

    none       the interpreter, task by task: what all others are compared with
    generated  straight-line Python with fused updates in place (generate.py)
    graph      generated code under CUDA graphs
    inductor   compiled by inductor, on CUDA devices under CUDA graphs
    auto       the fastest that works on the device: inductor on CUDA, generated elsewhere

Every compiled segment is compared with the interpreter in the first step it runs, on the same
inputs. The interpreter writes over nothing, so it goes first and costs no copies, only the room for
its results. A segment that fails or differs runs interpreted from then on, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from apportion.execute.executable import Executable
from apportion.execute.generate import SegmentGenerator
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import RankStep, Segment
from apportion.execute.segment_function import CannotCompile, SegmentFunction, interpreted

NONE = "none"
GENERATED = "generated"
GRAPH = "graph"
INDUCTOR = "inductor"
AUTO = "auto"
MODES = (NONE, GENERATED, GRAPH, INDUCTOR, AUTO)

# How far a compiled segment may be from the interpreter, relative to the largest element.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
OTHER_ORDER = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def check_mode(mode: str) -> str:
    """The mode; raises ValueError if there is none of that name."""
    if mode not in MODES:
        raise ValueError(f"there is no way to compile {mode!r}; choose one of {', '.join(MODES)}")
    return mode


def mode_of(mode: str, place: str) -> str:
    """The mode that is meant on torch's device `place`."""
    if mode == AUTO:
        return INDUCTOR if place.startswith("cuda") else GENERATED
    if mode == GRAPH and not place.startswith("cuda"):
        return GENERATED
    return mode


@dataclass
class Ladder:
    """The functions of one device's segments, and what there is to say about them."""

    functions: dict[Segment, SegmentFunction]
    notes: list[str] = field(default_factory=list)


def ladder(
    executable: Executable,
    device: int,
    place: str,
    steps: Sequence[RankStep],
    mode: str,
    timed: bool = False,
) -> Ladder:
    """How each segment of a device runs. `timed`: spans are recorded task by task where the mode
    can."""
    segments = [step for step in steps if isinstance(step, Segment)]
    found = Ladder({})
    wanted = mode_of(mode, place)
    if wanted == NONE or not segments:
        found.functions = {segment: interpreted(segment) for segment in segments}
        return found
    if wanted != mode and mode != AUTO:
        found.notes.append(f"{mode} needs a CUDA device; on {place} segments run {wanted}")
    generator = SegmentGenerator(executable, device, place, timed)
    try:
        sources = generator.segments(steps)
    except CannotCompile as error:
        found.notes.append(f"the segments of device {device} are interpreted: {error}")
        found.functions = {segment: interpreted(segment) for segment in segments}
        return found
    found.notes += generator.notes
    for number, (segment, source) in enumerate(zip(segments, sources, strict=True)):
        check = FirstStep(executable, segment, f"segment {number} of device {device}", found)
        tolerance = dict.fromkeys(ROUNDING, 0.0) if place == "cpu" else ROUNDING
        rounded = generator.rounded(segment)
        found.functions[segment] = check.around(source.function(), tolerance, rounded)
    return found


@dataclass(frozen=True)
class FirstStep:
    """Compares a segment's function with the interpreter in its first step, then lets it alone."""

    executable: Executable
    segment: Segment
    name: str
    ladder: Ladder

    def around(
        self,
        function: SegmentFunction,
        tolerance: dict[torch.dtype, float],
        rounded: frozenset[int] = frozenset(),
    ) -> SegmentFunction:
        """The function, compared once. `rounded` are slots that fused updates round otherwise."""

        def first(rank: Rank, context: Context) -> None:
            oracle = self._interpret(rank, context)
            try:
                function(rank, context)
                why = self._difference(rank, oracle, tolerance, rounded, context)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler's code may raise anything
                why = f"it raised {type(error).__name__}: {(str(error) or ' ').splitlines()[0]}"
            if not why:
                self.ladder.functions[self.segment] = function
                return
            self._put_back(rank, oracle)
            self.ladder.notes.append(f"{self.name} is interpreted: {why}")
            self.ladder.functions[self.segment] = interpreted(self.segment)

        return first

    def _interpret(self, rank: Rank, context: Context) -> Rank:
        """The segment interpreted on the same tensors, which it does not change."""
        oracle = Rank(self.executable, rank.device, place=rank.place)
        oracle.tensors = {slot: rank.tensors[slot] for slot in self.segment.ins}
        oracle.received = {m: rank.received[m] for m in self.segment.messages}
        interpreted(self.segment)(oracle, context)
        return oracle

    def _difference(
        self,
        rank: Rank,
        oracle: Rank,
        tolerance: dict[torch.dtype, float],
        rounded: frozenset[int],
        context: Context,
    ) -> str:
        """Where the two differ by more than rounding may; "" if nowhere."""
        for slot in self.segment.outs:
            found, meant = rank.tensors[slot], oracle.tensors[slot]
            share = ROUNDING if slot in rounded else tolerance
            if not near(found, meant, share.get(meant.dtype, 0.0)):
                value = self.executable.graph.values[self.executable.slots[slot].value].name
                return f"its {value!r} is not the interpreter's"
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


def near(found: torch.Tensor, meant: torch.Tensor, share: float) -> bool:
    """Whether no element is off by more than that share of the largest one; NaN equals NaN."""
    if found.shape != meant.shape or found.dtype != meant.dtype:
        return False
    if not meant.numel() or torch.equal(found, meant):
        return True
    if not (meant.is_floating_point() or meant.is_complex()):
        return False
    wide = torch.promote_types(meant.dtype, torch.float32)
    a, b = found.to(wide), meant.to(wide)
    known = torch.isfinite(b)
    largest = float(b[known].abs().max()) if bool(known.any()) else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=share * largest, equal_nan=True)
