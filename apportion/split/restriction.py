"""The restriction check: is a part's formula the whole's formula, moved to the part's origin?

The step of derive.py in split/ that decides whether a cut is legal. Knowing what a part reads does
not show that the same kernel on it computes the part. So the local call is described too, and
compared access by access. Axes of local extent 1 are written as 0 on both sides, since a dimension
of extent 1 broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

from apportion.describe import (
    Access,
    Affine,
    All,
    Apply,
    Box,
    Const,
    Expr,
    Factors,
    Gather,
    IllegalCut,
    Index,
    Opaque,
    Output,
    Position,
    Quotient,
    Reduce,
    flatten,
)
from apportion.split.partial import terms_of


@dataclass(frozen=True, slots=True)
class PartFrame:
    """The frame of reference of a part: where it lies along axes and inputs.

    factors, boxes  of each axis
    dims, regions   of each input: the atoms of its dimensions, and what the part reads
    """

    kind: str
    factors: dict[str, Factors]
    boxes: dict[str, Box]
    dims: tuple[tuple[Factors, ...], ...]
    regions: tuple[Box, ...]
    before: dict[tuple[int, int], int]
    """Elements of padding that the part gets before its region, by input and dimension."""

    def origin(self, name: str) -> int:
        """Where the part begins along an axis."""
        span = flatten(self.boxes[name], self.factors[name])
        if span is None:
            raise IllegalCut(f"{self.kind}: axis {name} is cut into ranges that are not contiguous")
        return span[0]

    def input_origin(self, tensor: int, dim: int) -> int:
        """Where the part's region of an input begins along a dimension."""
        place = sum([len(f) for f in self.dims[tensor][:dim]])
        factors = self.dims[tensor][dim]
        span = flatten(self.regions[tensor][place : place + len(factors)], factors)
        if span is None:
            raise IllegalCut(f"{self.kind}: a region of input {tensor} is not contiguous")
        return span[0] - self.before.get((tensor, dim), 0)


@dataclass(frozen=True, slots=True)
class OriginShift:
    """By how much a form must move from a part's origin to the origin of what it indexes.

    place    what it indexes: (input, dimension); None if the form is a value itself
    divisor  the unit of the place's origin
    """

    terms: tuple[tuple[str, int], ...]
    place: tuple[int, int] | None
    divisor: int
    distance: int

    def holds(self, frame: PartFrame) -> bool:
        """Whether the form moves by that distance in a given part."""
        begin = 0 if self.place is None else self.divisor * frame.input_origin(*self.place)
        return sum([c * frame.origin(n) for n, c in self.terms]) - begin == self.distance


@dataclass(frozen=True, slots=True)
class FormulaMatch:
    """A part's formula is the whole's wherever the shifts hold; `ratio` is what to multiply its
    result with."""

    ratio: float
    shifts: tuple[OriginShift, ...]

    def check(self, frame: PartFrame) -> float:
        """The ratio; raises Refused if some shift does not hold for the part."""
        for shift in self.shifts:
            if not shift.holds(frame):
                raise _not_the_part(frame.kind)
        return self.ratio


def _not_the_part(kind: str) -> IllegalCut:
    return IllegalCut(f"{kind}: the kernel on a part's inputs does not compute the part")


def match_formulas(
    whole: Output,
    part: Output,
    kind: str,
    factors: dict[str, Factors],
    dims: tuple[tuple[Factors, ...], ...],
    single: frozenset[str],
) -> FormulaMatch:
    """How a part's formula is the whole's; raises Refused if they differ otherwise. `single` are
    the axes along which the part is one element long."""
    ours, theirs = list(terms_of(whole.body)), list(terms_of(part.body))
    if len(ours) != len(theirs) or whole.dims != part.dims:
        raise IllegalCut(f"{kind}: a part computes something else than the whole")
    ratios = set()
    matcher = _FormulaMatcher(factors, dims, single)
    for (factor, term), (local_factor, local_term) in zip(ours, theirs, strict=True):
        if not matcher.same(term, local_term):
            raise _not_the_part(kind)
        if local_factor == 0 or factor == local_factor:
            ratios.add(1.0)
        else:
            ratios.add(factor / local_factor)
    if len(ratios) > 1:
        raise IllegalCut(f"{kind}: the terms of a part need different corrections")
    return FormulaMatch(ratios.pop(), tuple(dict.fromkeys(matcher.shifts)))


class _FormulaMatcher:
    """Compares expressions, and collects the shifts that must hold."""

    def __init__(
        self,
        factors: dict[str, Factors],
        dims: tuple[tuple[Factors, ...], ...],
        single: frozenset[str],
    ) -> None:
        self.factors = factors
        self.dims = dims
        self.single = single
        self.shifts: list[OriginShift] = []

    def same(self, a: Expr, b: Expr) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, Access) and isinstance(b, Access):
            if (a.tensor, a.fill) != (b.tensor, b.fill) or len(a.index) != len(b.index):
                return False
            for dim, (x, y) in enumerate(zip(a.index, b.index, strict=True)):
                if not self._same_index(x, y, (a.tensor, dim)):
                    return False
            return True
        if isinstance(a, Const) and isinstance(b, Const):
            return bool(a.value == b.value)
        if isinstance(a, Position) and isinstance(b, Position):
            return self._same_form(a.form, b.form, None)
        if isinstance(a, Apply) and isinstance(b, Apply):
            return a.name == b.name and self._all_same(a.args, b.args)
        if isinstance(a, Reduce) and isinstance(b, Reduce):
            return (a.reducer, a.axes) == (b.reducer, b.axes) and self.same(a.body, b.body)
        assert isinstance(a, Opaque) and isinstance(b, Opaque)
        return a.axes == b.axes and self._all_same(a.args, b.args)

    def _all_same(self, a: tuple[Expr, ...], b: tuple[Expr, ...]) -> bool:
        return len(a) == len(b) and all(map(self.same, a, b))

    def _same_index(
        self, a: tuple[Index, ...], b: tuple[Index, ...], place: tuple[int, int]
    ) -> bool:
        if len(a) != len(b):  # of a product, axes that are one element long here may be left out
            a, b = self._without_single_axes(a), self._without_single_axes(b)
        if len(a) != len(b):
            return False
        if len(a) == 1:
            x, y = a[0], b[0]
            if isinstance(x, Affine) and x.axis is None:
                return isinstance(y, Affine) and self._same_form(x, y, place)
            if isinstance(x, Quotient):
                return (
                    isinstance(y, Quotient)
                    and (x.divisor, x.rounded) == (y.divisor, y.rounded)
                    and self._same_form(x.form, y.form, place, x.divisor)
                )
        return all(map(self._same_item, a, b, repeat(place)))

    def _without_single_axes(self, index: tuple[Index, ...]) -> tuple[Index, ...]:
        """The items of an index that are not a single element's."""
        kept = (i for i in index if not isinstance(i, Affine) or self._plain(i) != Affine(()))
        return tuple(kept) or (Affine(()),)

    def _same_form(
        self, a: Affine, b: Affine, place: tuple[int, int] | None, divisor: int = 1
    ) -> bool:
        self.shifts.append(OriginShift(a.terms, place, divisor, b.constant - a.constant))
        return self._plain(a).terms == self._plain(b).terms

    def _same_item(self, a: Index, b: Index, place: tuple[int, int]) -> bool:
        if isinstance(a, Affine) and isinstance(b, Affine):
            axis = a.axis
            if axis is None or (a is not b and self._plain(a) != self._plain(b)):
                return False
            tensor, dim = place
            own = identity(self.factors[axis], self.dims[tensor][dim])
            return own or self._same_form(a, b, place)
        if isinstance(a, Gather) and isinstance(b, Gather):
            return self.same(a.source, b.source)
        if isinstance(a, All) and isinstance(b, All):
            return a.extent == b.extent
        return a == b

    def _plain(self, form: Affine) -> Affine:
        single = self.single
        if not single:
            return form
        kept = tuple([(n, c) for n, c in form.terms if n not in single])
        return form if len(kept) == len(form.terms) else Affine(kept, form.constant)


def identity(own: Factors, there: Factors) -> bool:
    """Whether an axis' atoms are among a dimension's: then the region is the axis' own box."""
    width = len(own)
    if own == there or not own:
        return True
    return any(there[k : k + width] == own for k in range(len(there) - width + 1))
