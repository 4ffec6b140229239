"""Dependence vectors: how far apart two iterations can be that touch one element.

Part of the room loops. References come in, Dependences go out. For two references to an array, at
least one of which writes, the distance between the iterations that meet in an element is, in every
dim of the loop, a number or anything:

    both subscripts of a dim are Index(d, .)    the difference of their offsets, in dim d
    both are Fixed                              no meeting at all, unless they are equal
    anything else                               says nothing

Two different numbers for one dim of the loop: they never meet. What is left is made
lexicographically positive, from the earlier iteration to the later one. With (a, *) both (a, *) and
(-a, *) are meant, and the first component that is not zero decides which iteration is the earlier
one. So (*, 1) is

    (+, 1)  and  (+, -1)  and  (0, 1)

which is kept as so many vectors of ranges. (The released Orion makes it (>=0, 1), and loses one.)

In a loop whose order is free two writes that nobody reads may come in any order: such pairs are
left out, but it is told which arrays have them, since the last write must then be known by its
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

from apportion.loops.references import ArrayReference
from apportion.loops.subscripts import Fixed, Index

Distances = tuple[int | None, ...]
"""The distance in each dim of the loop; None is any."""


class DistanceRange(NamedTuple):
    """Whole numbers from `low` to `high`; None is without a limit."""

    low: int | None
    high: int | None

    @property
    def is_zero(self) -> bool:
        return self.low == 0 and self.high == 0

    def holds(self, number: int) -> bool:
        """Whether a number is one of them."""
        return (self.low is None or number >= self.low) and (
            self.high is None or number <= self.high
        )

    def __str__(self) -> str:
        if self.low == self.high and self.low is not None:
            return str(self.low)
        return "+" if self.low == 1 else "*"


ANY, POSITIVE = DistanceRange(None, None), DistanceRange(1, None)


@dataclass(frozen=True)
class Dependence:
    """Iterations that far apart may touch one element of an array, at two lines of the body."""

    distance: tuple[DistanceRange, ...]
    array: str
    lines: tuple[int, int]

    def holds(self, distance: Sequence[int]) -> bool:
        """Whether it covers a distance."""
        return all(r.holds(d) for r, d in zip(self.distance, distance, strict=True))

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.distance))})"


@dataclass(frozen=True)
class LoopDependences:
    """All dependences of a loop, and the arrays of which some writes are in no order."""

    vectors: tuple[Dependence, ...]
    racing: tuple[str, ...] = ()


def dependences(references: Sequence[ArrayReference], dims: int, ordered: bool) -> LoopDependences:
    """The Dependences of a loop over `dims` indices that makes these references."""
    found: dict[tuple[tuple[DistanceRange, ...], str], Dependence] = {}
    racing = []
    for array in dict.fromkeys(each.array for each in references):
        mine = [each for each in references if each.array == array]
        for first, second in combinations_with_replacement(mine, 2):
            if not (first.writes or second.writes):
                continue
            distance = meeting_distance(first, second, dims)
            if distance is None:
                continue
            vectors = list(lexicographically_positive(distance))
            if not ordered and not _one_reads(first, second):
                racing += [array] if vectors else []
                continue
            for vector in vectors:
                lines = (first.line, second.line)
                found.setdefault((vector, array), Dependence(vector, array, lines))
    return LoopDependences(tuple(found.values()), tuple(dict.fromkeys(racing)))


def _one_reads(first: ArrayReference, second: ArrayReference) -> bool:
    """Whether one of two references reads what the other one writes."""
    return (first.reads and second.writes) or (first.writes and second.reads)


def meeting_distance(first: ArrayReference, second: ArrayReference, dims: int) -> Distances | None:
    """How far the iteration of `second` is from that of `first` where they touch one element; None
    if they never do."""
    found: list[int | None] = [None] * dims
    for dim in range(max(len(first.subscripts), len(second.subscripts))):
        a, b = first.subscript(dim), second.subscript(dim)
        if isinstance(a, Fixed) and isinstance(b, Fixed) and a != b:
            return None
        if isinstance(a, Index) and isinstance(b, Index) and a.dim == b.dim:
            distance = a.offset - b.offset
            if found[a.dim] not in (None, distance):
                return None
            found[a.dim] = distance
    return tuple(found)


def lexicographically_positive(distance: Distances) -> Iterator[tuple[DistanceRange, ...]]:
    """The distances from the earlier to the later of two iterations, in ranges; nothing if they are
    always the same iteration."""
    zero = DistanceRange(0, 0)
    for place, number in enumerate(distance):
        if number == 0:
            continue
        before, after = (zero,) * place, distance[place + 1 :]
        if number is not None:
            sign = 1 if number > 0 else -1
            yield (*before, *_ranges((number, *after), sign))
            return
        yield (*before, POSITIVE, *_ranges(after, 1))
        if any(after):
            yield (*before, POSITIVE, *_ranges(after, -1))


def _ranges(distance: Distances, sign: int) -> tuple[DistanceRange, ...]:
    return tuple(
        ANY if each is None else DistanceRange(sign * each, sign * each) for each in distance
    )
