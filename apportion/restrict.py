"""The restriction check: is a part's formula the whole's formula, moved to the part's origin?

Knowing what a part reads does not show that the same kernel on it computes the part. So the local
call is described too, and compared access by access. Axes of local extent 1 are written as 0 on
both sides, since a dimension of extent 1 broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.interval import Affine, Box, Factors, flatten, volume
from apportion.root import Refused, terms_of
from apportion.tdl import (
    Access,
    All,
    Apply,
    Const,
    Expr,
    Gather,
    Index,
    Opaque,
    Output,
    Position,
    Quotient,
    Reduce,
)

__all__ = ["Frame", "Refused", "ratio"]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a part lies: factors and box of each axis, atoms and region of each input."""

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
            raise Refused(f"{self.kind}: axis {name} is cut into ranges that are not contiguous")
        return span[0]

    def single(self, name: str) -> bool:
        """Whether the part is one element long along an axis."""
        return volume(self.boxes[name]) == 1

    def input_origin(self, tensor: int, dim: int) -> int:
        """Where the part's region of an input begins along a dimension."""
        place = sum(len(f) for f in self.dims[tensor][:dim])
        factors = self.dims[tensor][dim]
        span = flatten(self.regions[tensor][place : place + len(factors)], factors)
        if span is None:
            raise Refused(f"{self.kind}: a region of input {tensor} is not contiguous")
        return span[0] - self.before.get((tensor, dim), 0)


def ratio(whole: Output, part: Output, frame: Frame) -> float:
    """What to multiply the local result with; raises Refused if the formulas differ otherwise."""
    ours, theirs = list(terms_of(whole.body)), list(terms_of(part.body))
    if len(ours) != len(theirs) or whole.dims != part.dims:
        raise Refused(f"{frame.kind}: a part computes something else than the whole")
    ratios = set()
    for (factor, term), (local_factor, local_term) in zip(ours, theirs, strict=True):
        if not _same(term, local_term, frame):
            raise Refused(f"{frame.kind}: the kernel on a part's inputs does not compute the part")
        if local_factor == 0 or factor == local_factor:
            ratios.add(1.0)
        else:
            ratios.add(factor / local_factor)
    if len(ratios) > 1:
        raise Refused(f"{frame.kind}: the terms of a part need different corrections")
    return ratios.pop()


def _same(a: Expr, b: Expr, frame: Frame) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Const) and isinstance(b, Const):
        return bool(a.value == b.value)
    if isinstance(a, Position) and isinstance(b, Position):
        shift = sum(c * frame.origin(n) for n, c in a.form.terms)
        return _plain(a.form + shift, frame) == _plain(b.form, frame)
    if isinstance(a, Apply) and isinstance(b, Apply):
        return a.name == b.name and _all_same(a.args, b.args, frame)
    if isinstance(a, Reduce) and isinstance(b, Reduce):
        return (a.reducer, a.axes) == (b.reducer, b.axes) and _same(a.body, b.body, frame)
    if isinstance(a, Opaque) and isinstance(b, Opaque):
        return a.axes == b.axes and _all_same(a.args, b.args, frame)
    assert isinstance(a, Access) and isinstance(b, Access)
    if (a.tensor, a.fill) != (b.tensor, b.fill) or len(a.index) != len(b.index):
        return False
    return all(
        _same_index(x, y, a.tensor, dim, frame)
        for dim, (x, y) in enumerate(zip(a.index, b.index, strict=True))
    )


def _all_same(a: tuple[Expr, ...], b: tuple[Expr, ...], frame: Frame) -> bool:
    return len(a) == len(b) and all(_same(x, y, frame) for x, y in zip(a, b, strict=True))


def _same_index(
    a: tuple[Index, ...], b: tuple[Index, ...], tensor: int, dim: int, frame: Frame
) -> bool:
    if len(a) != len(b):  # of a product, axes that are one element long here may be left out
        a, b = _longer(a, frame), _longer(b, frame)
    if len(a) != len(b):
        return False
    if len(a) == 1 and isinstance(a[0], Affine) and a[0].axis is None:
        return isinstance(b[0], Affine) and _same_form(a[0], b[0], tensor, dim, frame)
    if len(a) == 1 and isinstance(a[0], Quotient):
        x, y = a[0], b[0]
        return (
            isinstance(y, Quotient)
            and (x.divisor, x.rounded) == (y.divisor, y.rounded)
            and _same_form(x.form, y.form, tensor, dim, frame, x.divisor)
        )
    return all(_same_item(x, y, tensor, dim, frame) for x, y in zip(a, b, strict=True))


def _longer(index: tuple[Index, ...], frame: Frame) -> tuple[Index, ...]:
    """The items of an index that are not a single element's."""
    kept = (i for i in index if not isinstance(i, Affine) or _plain(i, frame) != Affine(()))
    return tuple(kept) or (Affine(()),)


def _same_form(a: Affine, b: Affine, tensor: int, dim: int, frame: Frame, divisor: int = 1) -> bool:
    begin = divisor * frame.input_origin(tensor, dim)
    shift = sum(c * frame.origin(n) for n, c in a.terms) - begin
    return _plain(a + shift, frame) == _plain(b, frame)


def _same_item(a: Index, b: Index, tensor: int, dim: int, frame: Frame) -> bool:
    if isinstance(a, Affine) and isinstance(b, Affine):
        if a.axis is not None and _plain(a, frame) == _plain(b, frame):
            return _identity(a.axis, tensor, dim, frame) or _same_form(a, b, tensor, dim, frame)
        return False
    if isinstance(a, Gather) and isinstance(b, Gather):
        return _same(a.source, b.source, frame)
    if isinstance(a, All) and isinstance(b, All):
        return a.extent == b.extent
    return a == b


def _identity(name: str, tensor: int, dim: int, frame: Frame) -> bool:
    """Whether the axis' atoms are among the dimension's: then the region is the axis' own box."""
    own, there = frame.factors[name], frame.dims[tensor][dim]
    width = len(own)
    return any(there[k : k + width] == own for k in range(len(there) - width + 1)) or not own


def _plain(form: Affine, frame: Frame) -> Affine:
    return Affine(tuple((n, c) for n, c in form.terms if not frame.single(n)), form.constant)
