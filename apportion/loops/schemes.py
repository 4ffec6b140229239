"""Scheme: how the iterations of a loop are divided among processes so that its meaning is kept.

Part of the room loops. Dependences come in, the Schemes that they permit go out.

    1d         the iterations are cut along dim `space`, and the parts have nothing to do with each
               other: every vector is zero there
    2d         cut along `space` and `time`; parts that differ in both have nothing to do with each
               other: every vector is zero in one of them. Each process keeps its part of `space`
               and the parts of `time` rotate, so that all work at once. The order is another one
               than the program's.
    wavefront  cut along `space` and `time` after the indices were skewed: the time of an iteration
    p
               is p[time] + skew * p[space]. No vector is negative in space or time then, and part
               (s, t) runs after (s - 1, t) and (s, t - 1): the program's own order is kept.

The wavefront is the unimodular transformation of the loop: with rows (1, 0) and (skew, 1) its
determinant is 1, and the outer loop of Orion's paper, (skew + 1) * p[space] + p[time], is the sum
of both. What is cut into parts afterwards are parallelograms, so that a process computes many
iterations between two messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from apportion.loops.dependence import Dependence

ONE_D, TWO_D, WAVEFRONT = "1d", "2d", "wavefront"


@dataclass(frozen=True)
class Scheme:
    """See the head of this file; `time` is -1 for 1d, and `skew` 0 unless indices are skewed."""

    kind: str
    space: int
    time: int = -1
    skew: int = 0

    def __str__(self) -> str:
        if self.kind == ONE_D:
            return f"1D on k{self.space}"
        if self.kind == TWO_D:
            return f"2D, space k{self.space}, time k{self.time}"
        skewed = f"k{self.time}+{self.skew}*k{self.space}" if self.skew else f"k{self.time}"
        return f"{self.family}, space k{self.space}, time {skewed}"

    @property
    def family(self) -> str:
        """1D, 2D, wavefront or unimodular, as people call it."""
        names = {ONE_D: "1D", TWO_D: "2D"}
        return names.get(self.kind, "unimodular" if self.skew else "ordered 2D wavefront")


def permitted_schemes(vectors: Sequence[Dependence], dims: int, ordered: bool) -> list[Scheme]:
    """Every Scheme under which a loop over `dims` indices with these dependences keeps its meaning;
    wavefronts of a loop whose order is free only where nothing else is permitted."""
    found = [Scheme(ONE_D, dim) for dim in range(dims) if _is_zero(vectors, dim)]
    if not ordered:
        found += _two_d(vectors, dims)
    if ordered or not found:
        found += _wavefronts(vectors, dims)
    return found


def _is_zero(vectors: Sequence[Dependence], dim: int) -> bool:
    return all(vector.distance[dim].is_zero for vector in vectors)


def _two_d(vectors: Sequence[Dependence], dims: int) -> Iterator[Scheme]:
    for space, time in permutations(range(dims), 2):
        if all(v.distance[space].is_zero or v.distance[time].is_zero for v in vectors):
            yield Scheme(TWO_D, space, time)


def _wavefronts(vectors: Sequence[Dependence], dims: int) -> Iterator[Scheme]:
    for space, time in permutations(range(dims), 2):
        skew = _least_skew(vectors, space, time)
        if skew is not None:
            yield Scheme(WAVEFRONT, space, time, skew)


def _least_skew(vectors: Sequence[Dependence], space: int, time: int) -> int | None:
    """The least factor by which the time of every vector becomes 0 or more; None if there is none,
    or a vector may be negative in space."""
    skew = 0
    for vector in vectors:
        across, along = vector.distance[space].low, vector.distance[time].low
        if across is None or across < 0:
            return None
        if along is not None and along >= 0:
            continue
        if along is None or across == 0:
            return None
        skew = max(skew, -(along // across))
    return skew
