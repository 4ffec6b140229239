"""Description -> legal Splits: what each part of an Op reads, leaves, and gets as arguments.

To cut an Op is to cut its axes. For a cut, given as the number of parts of every (atom of an) axis:

 1. **Regions.** Each part owns a box of axis ranges; the interval analysis gives the region of
    every input that the part reads. Two accesses that need different regions of one input refuse
    the cut. A cut read that may lie outside is clamped to the tensor, and the part is told how much
    is missing before and after; it calls its kernel on the padded region.
 2. **What is left.** An axis that indexes an output concatenates it. An axis reduced at the root
    leaves partial values, combined by the reducer; terms of the root that do not mention the axis
    count once, so their inputs are zeros on all parts but the first. An axis that an output does
    not mention leaves equal copies. Anything else is refused.
 3. **Restriction.** The same kernel on those regions must compute the part: the formula of the
    local call (local shapes, local arguments) must equal the global formula moved to the part's
    origin, access by access. Root factors that depend on extents (a mean's 1/n) may differ: their
    ratio is the part's scale.

Axes that index an opaque result are never cut. Views keep the row-major order of their atoms, which
stands for 3.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from apportion.formula import (
    Undescribed,
    accesses_of,
    bad,
    depends_on_position,
    evaluate_formula,
)
from apportion.graph import Arg, Body
from apportion.interval import (
    Affine,
    Box,
    Factors,
    bounds,
    flatten,
    full,
    lengths,
    part_range,
    runs,
    unflatten,
    volume,
)
from apportion.restrict import Frame, Refused, ratio
from apportion.root import Root, mentions, root_of
from apportion.tdl import (
    Access,
    All,
    Apply,
    Description,
    Index,
    Local,
    Opaque,
    Quotient,
    Reduce,
    lookup,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pad:
    """Elements equal to `value` that a part's `input` gets before and after along `dim`."""

    input: int
    dim: int
    before: int
    after: int
    value: float


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a split Op.

    inputs   region of each input
    zeros    inputs that are blocks of zeros in this part instead
    outputs  region of each output
    terms    for each output which of its partial values this is; 0 where it is not partial
    args     arguments of the local call
    scales   for each output the factor that its local result is multiplied with
    pads     what the kernel gets around the regions
    """

    inputs: tuple[Box, ...]
    zeros: tuple[int, ...]
    outputs: tuple[Box, ...]
    terms: tuple[int, ...]
    args: tuple[Arg, ...]
    scales: tuple[float, ...]
    flops: float
    pads: tuple[Pad, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """All parts, and per output its reducer (None: not partial) and number of partial values."""

    parts: tuple[Part, ...]
    reducers: tuple[str | None, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """All that the splits of an Op depend on: equal Calls have equal Splits."""

    kind: str
    args: tuple[Arg, ...]
    inputs: tuple[tuple[Factors, ...], ...]
    outputs: tuple[tuple[Factors, ...], ...]
    axes: tuple[tuple[str, Factors], ...]
    body: Body | None


def derive(call: Call, parts: tuple[int, ...]) -> Split:
    """The Split of a call; raises Refused with the reason if the cut is not legal."""
    count = sum(len(factors) for _, factors in call.axes)
    if len(parts) != count:
        raise Refused(f"{call.kind} has {count} axes, the cut names {len(parts)}")
    description = lookup(call.kind)
    if description is None or not call.axes:
        if math.prod(parts) != 1:
            raise Refused(f"{call.kind} has no axes to cut")
        return _whole(call)
    flat_extents = [f for _, factors in call.axes for f in factors]
    for extent, number in zip(flat_extents, parts, strict=True):
        if not 1 <= number <= max(extent, 1):
            raise Refused(f"{call.kind}: an axis of {extent} cannot be cut into {number} parts")
    try:
        return _Derivation(call, description, parts).split()
    except Refused:
        if math.prod(parts) != 1:
            raise
        return _whole(call)  # a description that does not fit the call forbids cuts, not the call


def _shape(dims: tuple[Factors, ...]) -> Shape:
    return tuple(math.prod(factors) for factors in dims)


def _whole(call: Call) -> Split:
    inputs = tuple(full([f for dim in dims for f in dim]) for dims in call.inputs)
    outputs = tuple(full([f for dim in dims for f in dim]) for dims in call.outputs)
    count = len(outputs)
    flops = float(sum(volume(box) for box in outputs))
    part = Part(inputs, (), outputs, (0,) * count, call.args, (1.0,) * count, flops)
    return Split((part,), (None,) * count, (1,) * count)


class _Derivation:
    """One call of `derive`: what the parts have in common."""

    def __init__(self, call: Call, description: Description, parts: tuple[int, ...]) -> None:
        self.call = call
        self.description = description
        self.parts = parts
        self.factors = dict(call.axes)
        inputs, outputs = [_shape(d) for d in call.inputs], [_shape(d) for d in call.outputs]
        self.formula = evaluate_formula(description, call.args, inputs, outputs, call.body)
        self.cut: dict[str, int] = {}
        numbers = iter(parts)
        for name, factors in call.axes:
            self.cut[name] = math.prod(next(numbers) for _ in factors)
        self.roots: list[Root | None] = [
            None if output is None else root_of(output, self.cut, call.kind)
            for output in self.formula.outputs
        ]
        if description.local is None:
            self._check_mentioned()
        self.anywhere = not depends_on_position(self.formula)
        self.checked: dict[tuple[object, ...], tuple[float, ...]] = {}

    def split(self) -> Split:
        grid = itertools.product(*(range(n) for n in self.parts))
        found = tuple(self._part(index) for index in grid)
        reducers = tuple(root.reducer if root else None for root in self.roots)
        terms = tuple(math.prod(self.cut[a] for a in r.partial) if r else 1 for r in self.roots)
        return Split(found, reducers, terms)

    def _check_mentioned(self) -> None:
        # Nothing would tell the kernel that an output is shorter along an axis that nothing reads.
        for output in filter(None, self.formula.outputs):
            for name in (n for dim in output.dims for n in dim):
                if self.cut[name] > 1 and not mentions(output.body, name):
                    raise Refused(f"{self.call.kind}: nothing is read along axis {name}")

    def _boxes(self, index: tuple[int, ...]) -> dict[str, Box]:
        numbers = zip(self.parts, index, strict=True)
        return {
            name: tuple(part_range(f, *next(numbers)) for f in factors)
            for name, factors in self.call.axes
        }

    def _part(self, index: tuple[int, ...]) -> Part:
        boxes = self._boxes(index)
        read = [self._input_region(tensor, boxes) for tensor in range(len(self.call.inputs))]
        inputs = tuple(region for region, _ in read)
        pads = tuple(pad for _, several in read for pad in several)
        outputs = tuple(
            self._output_region(position, boxes) for position in range(len(self.call.outputs))
        )
        local, args, shapes = self._local(inputs, outputs, pads, boxes)
        if self.description.reshape:
            self._check_order(inputs, outputs)
            scales: tuple[float, ...] = (1.0,) * len(outputs)
        else:
            before = {(pad.input, pad.dim): pad.before for pad in pads}
            frame = Frame(self.call.kind, self.factors, boxes, self.call.inputs, inputs, before)
            scales = self._scales(frame, local, args, shapes)
        terms = tuple(self._term(root, index) for root in self.roots)
        zeros = tuple(
            sorted(
                {t for r, term in zip(self.roots, terms, strict=True) if r and term for t in r.once}
            )
        )
        flops = self._flops(boxes, local)
        pads = tuple(pad for pad in pads if pad.before or pad.after)
        return Part(inputs, zeros, outputs, terms, args, scales, flops, pads)

    def _term(self, root: Root | None, index: tuple[int, ...]) -> int:
        if root is None:
            return 0
        term, position = 0, 0
        for name, factors in self.call.axes:
            for _ in factors:
                if name in root.partial:
                    term = term * self.parts[position] + index[position]
                position += 1
        return term

    def _input_region(self, tensor: int, boxes: dict[str, Box]) -> tuple[Box, tuple[Pad, ...]]:
        """The region of an input, and the pads of all dimensions whose padding is cut."""
        accesses = (a for a in self.formula.accesses if a.tensor == tensor)
        regions = {self._access_region(access, boxes) for access in accesses}
        if len(regions) > 1:
            raise Refused(f"{self.call.kind}: accesses to input {tensor} need different regions")
        dims = self.call.inputs[tensor]
        return regions.pop() if regions else (full([f for dim in dims for f in dim]), ())

    def _access_region(self, access: Access, boxes: dict[str, Box]) -> tuple[Box, tuple[Pad, ...]]:
        region: list[tuple[int, int]] = []
        pads: list[Pad] = []
        dims = self.call.inputs[access.tensor]
        for dim, (index, factors) in enumerate(zip(access.index, dims, strict=True)):
            form = None if access.fill is None else _form(index)
            if form is None or self._product_region(index, factors, boxes) is not None:
                region += self._dim_region(index, factors, boxes)
            elif all(self.cut[name] == 1 for name, _ in form.terms):
                region += full(factors)  # the kernel pads by itself
            else:
                assert access.fill is not None
                span, before, after = self._clamped(form, math.prod(factors), boxes)
                region += self._box(span, factors)
                pads.append(Pad(access.tensor, dim, before, after, access.fill))
        return tuple(region), tuple(pads)

    def _clamped(
        self, form: Affine | Quotient, extent: int, boxes: dict[str, Box]
    ) -> tuple[tuple[int, int], int, int]:
        """The range inside a dimension that is read, and how much is read before and after it."""
        plain = form.form if isinstance(form, Quotient) else form
        low, high = bounds(plain, {name: self._flat(name, boxes) for name, _ in form.terms})
        low, high = form.whole(low, high) if isinstance(form, Quotient) else (low, high)
        inside = max(low, 0), min(high, extent)
        if inside[0] >= inside[1]:
            raise Refused(f"{self.call.kind}: a part reads nothing but padding")
        return inside, inside[0] - low, high - inside[1]

    def _output_region(self, position: int, boxes: dict[str, Box]) -> Box:
        dims = self.call.outputs[position]
        output = self.formula.outputs[position]
        if output is None:
            return full([f for dim in dims for f in dim])
        found: list[tuple[int, int]] = []
        for names, factors in zip(output.dims, dims, strict=True):
            index = tuple(Affine(((name, 1),)) for name in names)
            found += self._dim_region(index, factors, boxes)
        return tuple(found)

    def _dim_region(self, index: tuple[Index, ...], factors: Factors, boxes: dict[str, Box]) -> Box:
        direct = self._product_region(index, factors, boxes)
        if direct is not None:
            return direct
        if len(index) != 1:
            return self._uncut(index, factors)
        (item,) = index
        if not isinstance(item, Affine):
            return full(factors)
        flat = {name: self._flat(name, boxes) for name, _ in item.terms}
        low, high = bounds(item, flat)
        extent = math.prod(factors)
        if low < 0 or high > extent:
            raise Refused(
                f"{self.call.kind}: a part reads [{low}, {high}) of a dimension of {extent}"
            )
        return self._box((low, high), factors)

    def _box(self, span: tuple[int, int], factors: Factors) -> Box:
        box = unflatten(span, factors)
        if box is None:
            raise Refused(f"{self.call.kind}: a part reads a range that is not a box of atoms")
        return box

    def _product_region(
        self, index: tuple[Index, ...], factors: Factors, boxes: dict[str, Box]
    ) -> Box | None:
        """The region if the dimension's atoms are those of the axes in turn, or None."""
        found: list[tuple[int, int]] = []
        rest = list(factors)
        for item in index:
            if isinstance(item, All):
                taken = _take(rest, item.extent)
                if taken is None:
                    return None
                found += full(taken)
            elif isinstance(item, Affine) and item.axis is not None:
                own = self.factors[item.axis]
                if tuple(rest[: len(own)]) != own:
                    return None
                del rest[: len(own)]
                found += boxes[item.axis]
            else:
                return None
        return None if rest else tuple(found)

    def _uncut(self, index: tuple[Index, ...], factors: Factors) -> Box:
        for item in index:
            if isinstance(item, Affine) and any(self.cut[name] > 1 for name, _ in item.terms):
                raise Refused(f"{self.call.kind}: a view factors this dimension in another way")
        return full(factors)

    def _flat(self, name: str, boxes: dict[str, Box]) -> tuple[int, int]:
        span = flatten(boxes[name], self.factors[name])
        if span is None:
            raise Refused(
                f"{self.call.kind}: axis {name} is cut into ranges that are not contiguous"
            )
        return span

    def _local(
        self,
        inputs: tuple[Box, ...],
        outputs: tuple[Box, ...],
        pads: tuple[Pad, ...],
        boxes: dict[str, Box],
    ) -> tuple[Local, tuple[Arg, ...], tuple[Shape, ...]]:
        shapes = [_local_shape(b, d) for b, d in zip(inputs, self.call.inputs, strict=True)]
        for pad in pads:
            shape = list(shapes[pad.input])
            shape[pad.dim] += pad.before + pad.after
            shapes[pad.input] = tuple(shape)
        made = tuple(_local_shape(b, d) for b, d in zip(outputs, self.call.outputs, strict=True))
        positions = tuple(_positions(b, d) for b, d in zip(outputs, self.call.outputs, strict=True))
        padded = frozenset((pad.input, pad.dim) for pad in pads)
        rule = self.description.local
        spans = {n: flatten(box, self.factors[n]) for n, box in boxes.items()} if rule else {}
        ranges = {name: span for name, span in spans.items() if span is not None}
        local = Local(tuple(shapes), made, positions, padded, ranges, self.formula.extents)
        try:
            return local, rule(self.call.args, local) if rule else self.call.args, made
        except Refused:
            raise
        except Exception as error:
            raise bad(self.description, f"its local rule fails: {error}") from error

    def _check_order(self, inputs: tuple[Box, ...], outputs: tuple[Box, ...]) -> None:
        # A reshape of the part is the part of the reshape if its atoms are the same, in one order.
        before, after = (
            runs(box, tuple(f for dim in dims for f in dim))
            for box, dims in ((inputs[0], self.call.inputs[0]), (outputs[0], self.call.outputs[0]))
        )
        if before != after and max(self.parts) > 1:
            raise Refused(f"{self.call.kind}: the atoms before and after are not the same")

    def _scales(
        self, frame: Frame, local: Local, args: tuple[Arg, ...], shapes: tuple[Shape, ...]
    ) -> tuple[float, ...]:
        """The check of restriction. Parts of equal shape share it where nothing depends on
        origins."""
        if not self.anywhere:
            return self._compared(frame, local, args, shapes)
        key = (args, local.inputs, shapes)
        if key not in self.checked:
            self.checked[key] = self._compared(frame, local, args, shapes)
        return self.checked[key]

    def _compared(
        self, frame: Frame, local: Local, args: tuple[Arg, ...], shapes: tuple[Shape, ...]
    ) -> tuple[float, ...]:
        try:
            known = {name: volume(box) for name, box in frame.boxes.items()}
            part = evaluate_formula(
                self.description, args, local.inputs, shapes, self.call.body, known
            )
        except Undescribed as why:
            raise Refused(f"{self.call.kind}: {why}") from None
        found = []
        for whole, piece in zip(self.formula.outputs, part.outputs, strict=True):
            if whole is None or piece is None:
                if whole is not piece:
                    raise Refused(f"{self.call.kind}: a part has other outputs than the whole")
                found.append(1.0)
            else:
                found.append(ratio(whole, piece, frame))
        return tuple(found)

    def _flops(self, boxes: dict[str, Box], local: Local) -> float:
        if self.description.alias:
            return 0.0
        if self.description.flops is not None:
            return float(self.description.flops(local.inputs, local.outputs))
        total = 0.0
        for output in self.formula.outputs:
            if output is not None:
                names = {n for dim in output.dims for n in dim}
                reduced = set().union(*(r.axes for r in _reductions(output.body)))
                size = math.prod(volume(boxes[n]) for n in names | reduced)
                several = len({a.tensor for a in accesses_of(output.body)}) > 1
                total += size * (2 if reduced and several else 1)
        return total


def _reductions(expr: Any) -> list[Any]:
    if isinstance(expr, Reduce):
        return [expr, *_reductions(expr.body)]
    if isinstance(expr, Apply | Opaque):
        return [r for arg in expr.args for r in _reductions(arg)]
    return []


def _form(index: tuple[Index, ...]) -> Affine | Quotient | None:
    """The affine form or quotient that an index is, if it is one."""
    (item, *rest) = index
    return item if not rest and isinstance(item, Affine | Quotient) else None


def _take(rest: list[int], extent: int) -> list[int] | None:
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


def _local_shape(box: Box, dims: tuple[Factors, ...]) -> Shape:
    shape, position = [], 0
    for factors in dims:
        shape.append(math.prod(lengths(box[position : position + len(factors)])))
        position += len(factors)
    return tuple(shape)


def _positions(box: Box, dims: tuple[Factors, ...]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    found, position = [], 0
    for factors in dims:
        ranges = box[position : position + len(factors)]
        found.append(tuple((f, low, high) for f, (low, high) in zip(factors, ranges, strict=True)))
        position += len(factors)
    return tuple(found)
