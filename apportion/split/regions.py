"""CallRegions: how the regions of a part of a call follow from the part's box.

What derive.py in split/ finds once per call, before anything is cut. A part owns a box: one range
per atom of all axes of the call. Nearly every dimension of every tensor is some of these ranges in
a row, or a constant range, whatever is cut. A dimension that is read through a form of axes (a
window, a slice) is worked out part by part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from apportion.describe import (
    Affine,
    All,
    Apply,
    Box,
    Description,
    Factors,
    IllegalCut,
    Index,
    Opaque,
    Output,
    Quotient,
    Range,
    Reduce,
    accesses_of,
    arguments_read,
    depends_on_position,
    evaluate_formula,
    full,
    shape_pattern,
    unflatten,
)
from apportion.graph import Arg, Body
from apportion.split.partial import (
    PartialOutput,
    mentions,
    partial_output,
)
from apportion.split.restriction import identity

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """All that the splits of an Op depend on: Ops whose CallSignatures are equal have equal Splits.

    inputs, outputs  for each tensor the atoms of every dimension
    axes             names of axes, each with its atoms
    """

    kind: str
    args: tuple[Arg, ...]
    inputs: tuple[tuple[Factors, ...], ...]
    outputs: tuple[tuple[Factors, ...], ...]
    axes: tuple[tuple[str, Factors], ...]
    body: Body | None


def shape_of(dims: tuple[Factors, ...]) -> Shape:
    """Extents from atoms."""
    return tuple([math.prod(factors) for factors in dims])


@dataclass(frozen=True, slots=True)
class BoxRanges:
    """A dimension whose region is some of the ranges of the part's box. `uncut` names axes that
    must be whole, since the dimension is factored in another way."""

    picks: tuple[int, ...]
    uncut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AxisWindow:
    """A dimension of a tensor whose region follows from a form of axes, which may lie outside if
    there is a `fill`."""

    form: Affine | Quotient
    factors: Factors
    tensor: int
    dim: int
    fill: float | None = None


AccessRegion = BoxRanges | tuple[BoxRanges | AxisWindow, ...]
"""How the region of one access is found: all dimensions at once or, where there are windows, one by
one."""


def _access_region(dims: list[BoxRanges | AxisWindow]) -> AccessRegion:
    picked = [dim for dim in dims if isinstance(dim, BoxRanges)]
    if len(picked) < len(dims):
        return tuple(dims)
    uncut = tuple([name for dim in picked for name in dim.uncut])
    return BoxRanges(tuple([pick for dim in picked for pick in dim.picks]), uncut)


class CallRegions:
    """How the regions of a part follow from its box: a range per atom of all axes, then ranges that
    are the same for all parts.

    places     where the atoms of each axis stand in the box
    constants  the ranges that all parts share, each with its number
    reads      for every input the regions of its accesses
    writes     for every output its region
    windows    whether some region depends on a form of axes
    in_order   of a view: whether both regions are the same ranges of the same atoms
    anywhere   whether nothing depends on where a part lies
    plain      whether a part with the whole's formula is known to compute the part
    counted    for every output the axes over which its operations are counted, and how many at each
    """

    def __init__(self, call: CallSignature, description: Description) -> None:
        self.call = call
        self.description = description
        self.args = arguments_read(description, call.args)
        self.factors = dict(call.axes)
        self.extents = [f for _, factors in call.axes for f in factors]
        self.inputs, self.outputs = (
            [shape_of(dims) for dims in tensors] for tensors in (call.inputs, call.outputs)
        )
        self.formula = evaluate_formula(
            description, call.args, self.inputs, self.outputs, call.body
        )
        self.places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, factors in call.axes:
            self.places[name] = (end, end + len(factors))
            end += len(factors)
        self.constants: dict[Range, int] = {}
        self.reads = [self._reads(tensor) for tensor in range(len(call.inputs))]
        self.writes = [self._writes(position) for position in range(len(call.outputs))]
        readings = [*self.writes, *(one for several in self.reads for one in several)]
        self.windows = not all(isinstance(reading, BoxRanges) for reading in readings)
        self.in_order = description.reshape and self._same_order()
        self.anywhere = not depends_on_position(self.formula)
        self.plain = self.anywhere and not self.formula.sized and self._plain()
        self.pattern = [shape_pattern(shape) for shape in (*self.inputs, *self.outputs)]
        self.counted = [
            None if output is None else _counted_axes(output) for output in self.formula.outputs
        ]
        self._partials: dict[tuple[str, ...], list[PartialOutput | None] | str] = {}

    def partials(self, cut: dict[str, int]) -> list[PartialOutput | None]:
        """What the cut axes leave of each output; raises Refused."""
        active = tuple([name for name, number in cut.items() if number > 1])
        found = self._partials.get(active)
        if found is None:
            try:
                found = [
                    None if output is None else partial_output(output, cut, self.call.kind)
                    for output in self.formula.outputs
                ]
                if self.description.local is None:
                    self._check_mentioned(active)
            except IllegalCut as refusal:
                found = str(refusal)
            self._partials[active] = found
        if isinstance(found, str):
            raise IllegalCut(found)
        return found

    def _check_mentioned(self, active: tuple[str, ...]) -> None:
        # Nothing would tell the kernel that an output is shorter along an axis that nothing reads.
        for output in filter(None, self.formula.outputs):
            for name in (n for dim in output.dims for n in dim):
                if name in active and not mentions(output.body, name):
                    raise IllegalCut(f"{self.call.kind}: nothing is read along axis {name}")

    def _constant(self, box: Box) -> tuple[int, ...]:
        """Where ranges that all parts have stand in their boxes."""
        begin = len(self.extents)
        known = self.constants
        return tuple([begin + known.setdefault(span, len(known)) for span in box])

    def _whole_tensor(self, dims: tuple[Factors, ...]) -> BoxRanges:
        return BoxRanges(self._constant(full([f for factors in dims for f in factors])))

    def _reads(self, tensor: int) -> list[AccessRegion]:
        dims = self.call.inputs[tensor]
        found: dict[AccessRegion, None] = {}
        for access in self.formula.accesses:
            if access.tensor == tensor:
                reading = [
                    self._dim_region(index, factors, tensor, dim, access.fill)
                    for dim, (index, factors) in enumerate(zip(access.index, dims, strict=True))
                ]
                found[_access_region(reading)] = None
        return list(found) or [self._whole_tensor(dims)]

    def _writes(self, position: int) -> AccessRegion:
        dims = self.call.outputs[position]
        output = self.formula.outputs[position]
        if output is None:
            return self._whole_tensor(dims)
        found = []
        for dim, (names, factors) in enumerate(zip(output.dims, dims, strict=True)):
            index = tuple([Affine(((name, 1),)) for name in names])
            found.append(self._dim_region(index, factors, -1, dim))
        return _access_region(found)

    def _dim_region(
        self,
        index: tuple[Index, ...],
        factors: Factors,
        tensor: int,
        dim: int,
        fill: float | None = None,
    ) -> BoxRanges | AxisWindow:
        picks = self._product(index, factors)
        if picks is not None:
            return BoxRanges(picks)
        whole = self._constant(full(factors))
        if len(index) != 1:
            names = (n for item in index if isinstance(item, Affine) for n, _ in item.terms)
            return BoxRanges(whole, tuple(names))
        (item,) = index
        if isinstance(item, Quotient) and fill is not None:
            return AxisWindow(item, factors, tensor, dim, fill)
        if not isinstance(item, Affine) or (fill is not None and not item.terms):
            return BoxRanges(whole)
        if not item.terms and 0 <= item.constant < math.prod(factors):
            box = unflatten((item.constant, item.constant + 1), factors)
            if box is not None:
                return BoxRanges(self._constant(box))
        return AxisWindow(item, factors, tensor, dim, fill)

    def _product(self, index: tuple[Index, ...], factors: Factors) -> tuple[int, ...] | None:
        """The ranges of a dimension whose atoms are those of the axes in turn, or None."""
        found: list[int] = []
        rest = list(factors)
        for item in index:
            if isinstance(item, All):
                taken = _take_factors(rest, item.extent)
                if taken is None:
                    return None
                found += self._constant(full(taken))
            elif isinstance(item, Affine) and item.axis is not None:
                own = self.factors[item.axis]
                if tuple(rest[: len(own)]) != own:
                    return None
                del rest[: len(own)]
                found += range(*self.places[item.axis])
            else:
                return None
        return None if rest else tuple(found)

    def _same_order(self) -> bool:
        """Whether the regions before and after a view are the same ranges of the same atoms."""
        before, after = self.reads[0], self.writes[0]
        flat = [
            [f for dim in dims for f in dim] for dims in (self.call.inputs[0], self.call.outputs[0])
        ]
        if flat[0] != flat[1] or not isinstance(after, BoxRanges):
            return False
        return not after.uncut and before == [after]

    def _plain(self) -> bool:
        """Whether every index is an axis whose atoms the dimension has, or no axis at all: then a
        part that has the whole's formula computes the part."""
        for access in self.formula.accesses:
            for dims, index in zip(self.call.inputs[access.tensor], access.index, strict=True):
                for item in index:
                    if isinstance(item, Affine):
                        if item.axis is not None:
                            if not identity(self.factors[item.axis], dims):
                                return False
                        elif item.terms or item.constant or len(index) > 1:
                            return False
                    elif isinstance(item, Quotient):
                        return False
        return True


def _take_factors(rest: list[int], extent: int) -> list[int] | None:
    """Removes from the front of `rest` the factors whose product is `extent`."""
    size, count = 1, 0
    while size < extent and count < len(rest):
        size *= rest[count]
        count += 1
    if size != extent:
        return None
    taken = rest[:count]
    del rest[:count]
    return taken


def _counted_axes(output: Output) -> tuple[tuple[str, ...], int]:
    """The axes over which an output's operations are counted, and how many there are at each."""
    reduced = {name for reduction in _reductions(output.body) for name in reduction.axes}
    several = len({a.tensor for a in accesses_of(output.body)}) > 1
    names = {n for dim in output.dims for n in dim} | reduced
    return tuple(names), 2 if reduced and several else 1


def _reductions(expr: Any) -> list[Any]:
    if isinstance(expr, Reduce):
        return [expr, *_reductions(expr.body)]
    if isinstance(expr, Apply | Opaque):
        return [r for arg in expr.args for r in _reductions(arg)]
    return []
