"""Description -> legal Splits: what each part of an Op reads, leaves, and gets as arguments.

The main file of split/: the signature of a call and a cut go in, a Split (part.py) comes out.

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

All Splits of a call share its CallRegions (regions.py): which ranges of a part's box make up each
region. Parts of equal lengths share the rest, so that many parts cost little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import itemgetter

from apportion.describe import (
    Box,
    Description,
    Factors,
    IllegalCut,
    PartLocation,
    Quotient,
    Range,
    Undescribed,
    arguments_read,
    bad_description,
    bounds,
    evaluate_outputs,
    find_description,
    flatten,
    full,
    lengths,
    part_range,
    runs,
    shape_pattern,
    unflatten,
    volume,
)
from apportion.graph import Arg
from apportion.split.part import Pad, Part, Split
from apportion.split.partial import PartialOutput
from apportion.split.regions import (
    AccessRegion,
    AxisWindow,
    BoxRanges,
    CallRegions,
    CallSignature,
    Shape,
)
from apportion.split.restriction import (
    FormulaMatch,
    PartFrame,
    match_formulas,
)


def derive(call: CallSignature, parts: tuple[int, ...]) -> Split:
    """The Split of a call; raises Refused with the reason if the cut is not legal."""
    return call_splits(call).split(parts)


def call_splits(call: CallSignature) -> CallSplits:
    """The Splits of a call, shared by all calls that are equal."""
    return _call_splits(call, tuple(map(type, call.args)), find_description(call.kind))


@lru_cache(maxsize=2048)
def _call_splits(
    call: CallSignature, types: tuple[type, ...], description: Description | None
) -> CallSplits:
    return CallSplits(call, description)


_MOST = 100_000  # parts in the cache of calls that may come again; more empty it


class CallSplits:
    """The Splits of one call, each derived once.

    `remembered` counts the parts of all calls that the cache above holds, to keep it from growing.
    """

    remembered = 0

    def __init__(self, call: CallSignature, description: Description | None) -> None:
        self.call = call
        self.description = description
        self._regions: CallRegions | None = None
        self._known: dict[tuple[int, ...], Split | str] = {}

    def split(self, parts: tuple[int, ...]) -> Split:
        """The Split for these parts per axis; raises Refused if it is not legal."""
        found = self._known.get(parts)
        if found is None:
            try:
                found = self._derive(parts)
            except IllegalCut as refusal:
                found = str(refusal)
            self._known[parts] = found
            CallSplits.remembered += 1 if isinstance(found, str) else len(found.parts)
            if CallSplits.remembered > _MOST:
                CallSplits.remembered = 0
                _call_splits.cache_clear()
        if isinstance(found, str):
            raise IllegalCut(found)
        return found

    def _derive(self, parts: tuple[int, ...]) -> Split:
        call, description = self.call, self.description
        extents = [f for _, factors in call.axes for f in factors]
        if len(parts) != len(extents):
            raise IllegalCut(f"{call.kind} has {len(extents)} axes, the cut names {len(parts)}")
        if description is None or not call.axes:
            if math.prod(parts) != 1:
                raise IllegalCut(f"{call.kind} has no axes to cut")
            return _unsplit(call)
        for extent, number in zip(extents, parts, strict=True):
            if not 1 <= number <= max(extent, 1):
                raise IllegalCut(
                    f"{call.kind}: an axis of {extent} cannot be cut into {number} parts"
                )
        if self._regions is None:
            self._regions = CallRegions(call, description)
        try:
            return _SplitDerivation(self._regions, parts).split()
        except IllegalCut:
            if math.prod(parts) != 1:
                raise
            return _unsplit(call)  # a description that does not fit forbids cuts, not the call


def _unsplit(call: CallSignature) -> Split:
    inputs = tuple(full([f for dim in dims for f in dim]) for dims in call.inputs)
    outputs = tuple(full([f for dim in dims for f in dim]) for dims in call.outputs)
    count = len(outputs)
    flops = float(sum(volume(box) for box in outputs))
    part = Part(inputs, (), outputs, (0,) * count, call.args, (1.0,) * count, flops)
    return Split((part,), (None,) * count, (1,) * count)


# One Split


@dataclass(slots=True)
class _LocalCall:
    """The local call of parts of equal lengths: its shapes, which inputs are padded and, as soon as
    they are known and unless they depend on the part's place, its arguments and scales."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    padded: frozenset[tuple[int, int]]
    args: tuple[Arg, ...] | None = None
    scales: tuple[float, ...] | None = None
    flops: float | None = None


class _ObservedLocation(PartLocation):
    """Where a part is, for a local rule. It notices whether the rule reads the part's position
    (`position_read`), or only lengths, which other parts of that size have too."""

    __slots__ = ("_box", "_output_regions", "_regions", "position_read")

    position_read: bool
    _regions: CallRegions
    _box: Box
    _output_regions: tuple[Box, ...]

    def __init__(
        self, regions: CallRegions, local: _LocalCall, box: Box, outputs: tuple[Box, ...]
    ) -> None:
        given = {
            "inputs": local.inputs,
            "outputs": local.outputs,
            "padded": local.padded,
            "extents": regions.formula.extents,
            "position_read": False,
            "_regions": regions,
            "_box": box,
            "_output_regions": outputs,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def positions(self) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]:
        object.__setattr__(self, "position_read", True)
        dims = self._regions.call.outputs
        return tuple([_positions(b, d) for b, d in zip(self._output_regions, dims, strict=True)])

    @property
    def ranges(self) -> Mapping[str, Range]:
        object.__setattr__(self, "position_read", True)
        regions = self._regions
        spans = (
            (name, flatten(self._box[first:end], regions.factors[name]))
            for name, (first, end) in regions.places.items()
        )
        return {name: span for name, span in spans if span is not None}


_Region = tuple[Box, tuple[Pad, ...]]
"""A region, and the pads of all dimensions whose padding is cut."""


class _SplitDerivation:
    """Derives one Split.

    cut       the parts of every axis
    partials  what the cut axes leave of each output
    reads     for every input functions from a part's box to the region that an access reads
    writes    for every output the function from a part's box to its region
    alike     whether all parts have equal lengths
    """

    def __init__(self, regions: CallRegions, parts: tuple[int, ...]) -> None:
        self.regions = regions
        self.kind = regions.call.kind
        self.parts = parts
        self.cut = {
            name: math.prod(parts[first:end]) for name, (first, end) in regions.places.items()
        }
        self.partials = regions.partials(self.cut)
        self.reads = [[self._reader(reading) for reading in several] for several in regions.reads]
        self.writes = [self._reader(reading) for reading in regions.writes]
        self.alike = not regions.windows and all(
            extent % number == 0 for extent, number in zip(regions.extents, parts, strict=True)
        )
        self.ones = (1.0,) * len(regions.call.outputs)
        self.local_calls: dict[object, _LocalCall] = {}
        self.checked: dict[object, tuple[float, ...]] = {}
        self.matches: dict[object, list[FormulaMatch]] = {}

    def split(self) -> Split:
        spans = [
            [part_range(extent, number, k) for k in range(number)]
            for extent, number in zip(self.regions.extents, self.parts, strict=True)
        ]
        constants = tuple(self.regions.constants)
        terms = [self._terms(root) for root in self.partials]
        found = tuple(
            [
                self._make_part((*box, *constants), number)
                for number, box in zip(zip(*terms, strict=True), product(*spans), strict=True)
            ]
        )
        reducers = tuple(root.reducer if root else None for root in self.partials)
        counts = tuple(math.prod(self.cut[a] for a in r.partial) if r else 1 for r in self.partials)
        return Split(found, reducers, counts)

    def _terms(self, root: PartialOutput | None) -> list[int]:
        """For every part which of an output's partial values it leaves."""
        found = [0]
        for name, (first, end) in self.regions.places.items():
            partial = root is not None and name in root.partial
            for number in self.parts[first:end]:
                if partial:
                    found = [term * number + k for term in found for k in range(number)]
                elif number > 1:
                    found = [term for term in found for _ in range(number)]
        return found

    def _make_part(self, box: Box, terms: tuple[int, ...]) -> Part:
        description = self.regions.description
        inputs, pads = self._input_regions(box)
        outputs = tuple([write(box)[0] for write in self.writes])
        local = self._local_call_of(box, inputs, pads)
        args = local.args
        if args is None:
            args = self._local_args(local, box, outputs)
        if description.reshape:
            scales = self.ones
            if not self.regions.in_order:
                self._check_order(inputs, outputs)
        elif local.scales is not None:
            scales = local.scales
        else:
            scales = self._scales(local, args, box, inputs, pads)
        if local.flops is None:
            local.flops = self._flops(box, local)
        zeros: tuple[int, ...] = ()
        if any(terms):
            pairs = zip(self.partials, terms, strict=True)
            zeros = tuple(sorted({t for root, term in pairs if root and term for t in root.once}))
        pads = tuple([pad for pad in pads if pad.before or pad.after]) if pads else ()
        return Part(inputs, zeros, outputs, terms, args, scales, local.flops, pads)

    # Regions

    def _input_regions(self, box: Box) -> tuple[tuple[Box, ...], tuple[Pad, ...]]:
        found: list[Box] = []
        pads: tuple[Pad, ...] = ()
        for tensor, readers in enumerate(self.reads):
            region, more = readers[0](box)
            if len(readers) > 1 and len({read(box) for read in readers}) > 1:
                raise IllegalCut(f"{self.kind}: accesses to input {tensor} need different regions")
            found.append(region)
            if more:
                pads += more
        return tuple(found), pads

    def _reader(self, reading: AccessRegion) -> Callable[[Box], _Region]:
        """How to find the region of an access in a part's box."""
        if isinstance(reading, BoxRanges):
            return self._ranges_reader(reading)
        steps = [
            self._window_reader(d) if isinstance(d, AxisWindow) else self._ranges_reader(d)
            for d in reading
        ]

        def read(box: Box) -> _Region:
            found = [step(box) for step in steps]
            region = tuple([span for part, _ in found for span in part])
            return region, tuple([pad for _, pads in found for pad in pads])

        return read

    def _ranges_reader(self, dim: BoxRanges) -> Callable[[Box], _Region]:
        picks = dim.picks
        if any(self.cut[name] > 1 for name in dim.uncut):
            return self._refuse
        if len(picks) > 1:
            several = itemgetter(*picks)
            return lambda box: (several(box), ())
        if picks:
            (one,) = picks
            return lambda box: ((box[one],), ())
        return lambda box: ((), ())

    def _refuse(self, box: Box) -> _Region:
        raise IllegalCut(f"{self.kind}: a view factors this dimension in another way")

    def _window_reader(self, window: AxisWindow) -> Callable[[Box], _Region]:
        names = [name for name, _ in window.form.terms]
        if window.fill is not None and all(self.cut[name] == 1 for name in names):
            whole = full(window.factors)  # the kernel pads by itself
            return lambda box: (whole, ())
        places = [slice(*self.regions.places[name]) for name in names]
        known: dict[tuple[Box, ...], _Region] = {}

        def look(box: Box) -> _Region:
            key = tuple([box[place] for place in places])
            found = known.get(key)
            if found is None:
                found = known[key] = self._window_region(window, box)
            return found

        return look

    def _window_region(self, window: AxisWindow, box: Box) -> _Region:
        """The range of a dimension that a part reads; with padding, the range inside of it."""
        form, extent = window.form, math.prod(window.factors)
        plain = form.form if isinstance(form, Quotient) else form
        low, high = bounds(plain, {name: self._axis_range(name, box) for name, _ in form.terms})
        if window.fill is None:
            if low < 0 or high > extent:
                raise IllegalCut(
                    f"{self.kind}: a part reads [{low}, {high}) of a dimension of {extent}"
                )
            return self._box((low, high), window.factors), ()
        low, high = form.whole(low, high) if isinstance(form, Quotient) else (low, high)
        first, end = max(low, 0), min(high, extent)
        if first >= end:
            raise IllegalCut(f"{self.kind}: a part reads nothing but padding")
        pad = Pad(window.tensor, window.dim, first - low, high - end, window.fill)
        return self._box((first, end), window.factors), (pad,)

    def _box(self, span: Range, factors: Factors) -> Box:
        box = unflatten(span, factors)
        if box is None:
            raise IllegalCut(f"{self.kind}: a part reads a range that is not a box of atoms")
        return box

    def _axis_range(self, name: str, box: Box) -> Range:
        span = flatten(box[slice(*self.regions.places[name])], self.regions.factors[name])
        if span is None:
            raise IllegalCut(f"{self.kind}: axis {name} is cut into ranges that are not contiguous")
        return span

    # The local call

    def _local_call_of(
        self, box: Box, inputs: tuple[Box, ...], pads: tuple[Pad, ...]
    ) -> _LocalCall:
        key: object = None
        if not self.alike:
            key = lengths(box)
            if self.regions.windows:
                grown = [(pad.input, pad.dim, pad.before + pad.after) for pad in pads]
                key = (key, tuple(map(lengths, inputs)), tuple(grown))
        found = self.local_calls.get(key)
        if found is None:
            found = self.local_calls[key] = self._local_call(box, inputs, pads)
        return found

    def _local_call(self, box: Box, inputs: tuple[Box, ...], pads: tuple[Pad, ...]) -> _LocalCall:
        call = self.regions.call
        shapes = [_local_shape(b, d) for b, d in zip(inputs, call.inputs, strict=True)]
        for pad in pads:
            shape = list(shapes[pad.input])
            shape[pad.dim] += pad.before + pad.after
            shapes[pad.input] = tuple(shape)
        outputs = [write(box)[0] for write in self.writes]
        made = tuple([_local_shape(b, d) for b, d in zip(outputs, call.outputs, strict=True)])
        return _LocalCall(tuple(shapes), made, frozenset([(pad.input, pad.dim) for pad in pads]))

    def _local_args(self, local: _LocalCall, box: Box, outputs: tuple[Box, ...]) -> tuple[Arg, ...]:
        rule = self.regions.description.local
        if rule is None:
            local.args = self.regions.call.args
            return local.args
        location = _ObservedLocation(self.regions, local, box, outputs)
        try:
            args = rule(self.regions.call.args, location)
        except IllegalCut:
            raise
        except Exception as error:
            raise bad_description(
                self.regions.description, f"its local rule fails: {error}"
            ) from error
        if not location.position_read:
            local.args = args
        return args

    def _check_order(self, inputs: tuple[Box, ...], outputs: tuple[Box, ...]) -> None:
        # A reshape of the part is the part of the reshape if its atoms are the same, in one order.
        call = self.regions.call
        before, after = (
            runs(box, tuple(f for dim in dims for f in dim))
            for box, dims in ((inputs[0], call.inputs[0]), (outputs[0], call.outputs[0]))
        )
        if before != after and max(self.parts) > 1:
            raise IllegalCut(f"{self.kind}: the atoms before and after are not the same")

    def _scales(
        self,
        local: _LocalCall,
        args: tuple[Arg, ...],
        box: Box,
        inputs: tuple[Box, ...],
        pads: tuple[Pad, ...],
    ) -> tuple[float, ...]:
        """The check of restriction. Parts of equal shape share it where nothing depends on
        origins."""
        if not self.regions.anywhere:
            return self._check_restriction(local, args, box, inputs, pads)
        key = (args, local.inputs, local.outputs)
        found = self.checked.get(key)
        if found is None:
            same = (
                self.regions.plain
                and arguments_read(self.regions.description, args) == self.regions.args
            )
            if (
                same
                and [*map(shape_pattern, (*local.inputs, *local.outputs))] == self.regions.pattern
            ):
                found = self.ones  # the whole's formula
            else:
                found = self._check_restriction(local, args, box, inputs, pads)
            self.checked[key] = found
        if local.args is not None:
            local.scales = found
        return found

    def _check_restriction(
        self,
        local: _LocalCall,
        args: tuple[Arg, ...],
        box: Box,
        inputs: tuple[Box, ...],
        pads: tuple[Pad, ...],
    ) -> tuple[float, ...]:
        regions = self.regions
        boxes = {name: box[first:end] for name, (first, end) in regions.places.items()}
        key = (args, local.inputs, local.outputs, tuple(map(volume, boxes.values())))
        found = self.matches.get(key)
        if found is None:
            single = frozenset([name for name, own in boxes.items() if volume(own) == 1])
            found = self.matches[key] = self._matches(local, args, single)
        if not any(one.shifts for one in found):
            return tuple([one.ratio for one in found])
        before = {(pad.input, pad.dim): pad.before for pad in pads}
        frame = PartFrame(self.kind, regions.factors, boxes, regions.call.inputs, inputs, before)
        return tuple([one.check(frame) for one in found])

    def _matches(
        self, local: _LocalCall, args: tuple[Arg, ...], single: frozenset[str]
    ) -> list[FormulaMatch]:
        """The formula of the local call, compared with the whole's."""
        regions, call = self.regions, self.regions.call
        try:
            pieces = evaluate_outputs(
                regions.description, args, local.inputs, local.outputs, call.body
            )
        except Undescribed as why:
            raise IllegalCut(f"{self.kind}: {why}") from None
        found = []
        for whole, piece in zip(regions.formula.outputs, pieces, strict=True):
            if whole is None or piece is None:
                if whole is not piece:
                    raise IllegalCut(f"{self.kind}: a part has other outputs than the whole")
                found.append(FormulaMatch(1.0, ()))
            else:
                found.append(
                    match_formulas(whole, piece, self.kind, regions.factors, call.inputs, single)
                )
        return found

    def _flops(self, box: Box, local: _LocalCall) -> float:
        description = self.regions.description
        if description.alias:
            return 0.0
        if description.flops is not None:
            return float(description.flops(local.inputs, local.outputs))
        total = 0.0
        for names, each in filter(None, self.regions.counted):
            places = [self.regions.places[name] for name in names]
            total += math.prod([volume(box[first:end]) for first, end in places]) * each
        return total


def _local_shape(box: Box, dims: tuple[Factors, ...]) -> Shape:
    shape, position = [], 0
    for factors in dims:
        shape.append(volume(box[position : position + len(factors)]))
        position += len(factors)
    return tuple(shape)


def _positions(box: Box, dims: tuple[Factors, ...]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    found, position = [], 0
    for factors in dims:
        ranges = box[position : position + len(factors)]
        found.append(tuple((f, low, high) for f, (low, high) in zip(factors, ranges, strict=True)))
        position += len(factors)
    return tuple(found)
