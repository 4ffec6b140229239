"""Where the arrays of a loop are while it runs under a scheme.

Part of the room loops. References and a scheme come in; out goes, for each array, an ArrayUse:
resident if every reference subscripts one of its dims with the loop's index of space, rotating if
with that of time, and otherwise fetched: the rows that are going to be touched, where a slice of
the body can find them out and the array is not small, else boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from apportion.loops.array import DenseArray
from apportion.loops.array_layout import ArrayLayout
from apportion.loops.balanced_bounds import even_bounds
from apportion.loops.buffer import Buffer
from apportion.loops.elements import DealFacts, DealRequest, skewed_extent
from apportion.loops.kernel_arrays import KernelArray
from apportion.loops.loop_body import HelperSource
from apportion.loops.loop_plan import (
    ADDED,
    BOXED,
    KEYED,
    READ,
    RESIDENT,
    ROTATING,
    TABLED,
    UPDATED,
    WRITTEN,
    ArrayUse,
)
from apportion.loops.references import ArrayReference
from apportion.loops.schemes import ONE_D, Scheme
from apportion.loops.subscripts import Fixed, Index, Unknown, Whole
from apportion.loops.tile_boxes import TileBoxes, tile_boxes
from apportion.loops.tile_schedule import TileSchedule

SMALL_BYTES = 1 << 16  # an array up to this size is fetched whole: finding rows takes longer
CACHE_BYTES = 1 << 20  # of arrays that a core has at hand, and of a block of them
BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class UsedArray:
    """An array as a loop uses it: its name in the body, its references, its buffer if what is added
    to it is sent later, and the dims that number its rows if those can be found out beforehand."""

    name: str
    array: DenseArray
    references: tuple[ArrayReference, ...]
    buffer: Buffer | None = None
    keyed: tuple[int, ...] = ()

    @property
    def is_written(self) -> bool:
        return any(each.writes for each in self.references)

    @property
    def change(self) -> str:
        """What a loop does to a copy of it."""
        if not self.is_written:
            return READ
        if self.buffer is None:
            return WRITTEN
        return ADDED if self.buffer.apply is None else UPDATED


def row_dims(used: UsedArray) -> tuple[int, ...]:
    """The dims that number the rows of an array: those that are not taken whole, if that is the
    same for all references and something is to be gained; else none."""
    array, references = used.array, used.references
    if array.nbytes <= SMALL_BYTES:
        return ()
    patterns = {
        tuple(dim for dim in range(array.ndim) if not isinstance(each.subscript(dim), Whole))
        for each in references
    }
    unknown = any(
        isinstance(each.subscript(dim), Unknown) for each in references for dim in range(array.ndim)
    )
    return patterns.pop() if len(patterns) == 1 and unknown else ()


def block_length(used: Mapping[str, UsedArray], scheme: Scheme, processes: int) -> int:
    """How many indices of space an unordered loop takes together, so that what it touches of
    resident arrays stays in the cache; 0 if all of it does anyway."""
    by_index = bytes_by_index(used, scheme)
    whole = sum(
        each.array.nbytes for each in used.values() if placement_of(each, scheme)[0] == RESIDENT
    )
    return max(1, int(BLOCK_BYTES // by_index)) if whole / processes > CACHE_BYTES else 0


def bytes_by_index(used: Mapping[str, UsedArray], scheme: Scheme) -> float:
    """Bytes of resident arrays for each index of space."""
    found = 0.0
    for each in used.values():
        placement, dim = placement_of(each, scheme)
        if placement == RESIDENT:
            found += each.array.nbytes / each.array.shape[dim]
    return found


def array_use(
    used: UsedArray, scheme: Scheme, schedule: TileSchedule, facts: DealFacts
) -> ArrayUse:
    """Where an array is under a scheme."""
    placement, dim = placement_of(used, scheme)
    alone = schedule.processes == 1 and used.change != UPDATED
    if alone:
        placement, dim = RESIDENT, 0
    array = used.array
    order = storage_order(used.references, array.ndim)
    if placement in (KEYED, TABLED):
        return _keyed(used, schedule, order, placement)
    if placement == BOXED:
        return _boxed(used, scheme, schedule, facts, order)
    bounds = facts.space_bounds if placement == RESIDENT else facts.time_bounds
    owners = tuple(range(schedule.processes)) if placement == RESIDENT else schedule.homes
    layout = ArrayLayout(dim, _stretched(bounds, array.shape[dim]), owners, order)
    origins = () if alone else (dim,)
    kernel = KernelArray(used.name, array.shape, array.dtype.name, order, origins)
    return ArrayUse(array.number, placement, kernel, layout, used.change)


def placement_of(used: UsedArray, scheme: Scheme) -> tuple[str, int]:
    """Whether an array is resident, rotating or boxed, and along which dim."""
    choices = [(RESIDENT, scheme.space)]
    if scheme.kind != ONE_D and not scheme.skew:
        choices.append((ROTATING, scheme.time))
    if used.references and used.buffer is None:
        for placement, index in choices:
            for dim in range(used.array.ndim):
                if all(each.subscript(dim) == Index(index) for each in used.references):
                    return placement, dim
    if used.buffer is not None and used.buffer.settings is not None:
        return TABLED, -1
    return (KEYED if used.keyed else BOXED), -1


def storage_order(references: Sequence[ArrayReference], dims: int) -> tuple[int, ...]:
    """The order of dims in memory: those that are subscripted first, then those that are taken
    whole, so that what an iteration touches lies together."""
    whole = [
        dim
        for dim in range(dims)
        if references and all(isinstance(each.subscript(dim), Whole) for each in references)
    ]
    return (*(dim for dim in range(dims) if dim not in whole), *whole)


def _boxed(
    used: UsedArray,
    scheme: Scheme,
    schedule: TileSchedule,
    facts: DealFacts,
    order: tuple[int, ...],
) -> ArrayUse:
    array, change = used.array, used.change
    boxes = tile_boxes(used.references, array.shape, scheme)
    kernel = KernelArray(
        used.name, array.shape, array.dtype.name, order, _partial_dims(boxes),
        masked=change == WRITTEN,
    )  # fmt: skip
    layout = _home(used, scheme, schedule, facts, order)
    return ArrayUse(array.number, BOXED, kernel, layout, change, boxes, *_update(used))


def _partial_dims(boxes: TileBoxes) -> tuple[int, ...]:
    """The dims in which boxes need not begin at 0."""
    return tuple(
        dim
        for dim, classes in enumerate(boxes.touched)
        if all(isinstance(each, Index | Fixed) for each in classes)
    )


def _keyed(
    used: UsedArray, schedule: TileSchedule, order: tuple[int, ...], placement: str
) -> ArrayUse:
    """An array that is fetched by rows; one in a table whose rows are not known is fetched
    whole."""
    array = used.array
    rows = used.keyed or (0,)
    order = (*rows, *(each for each in order if each not in rows))
    owners = tuple(range(schedule.processes))
    layout = ArrayLayout(
        rows[0], even_bounds(array.shape[rows[0]], schedule.processes), owners, order
    )
    kernel = KernelArray(
        used.name, array.shape, array.dtype.name, order, keyed=used.keyed,
        masked=used.change == WRITTEN,
    )  # fmt: skip
    settings = used.buffer.settings if used.buffer is not None else None
    change = ADDED if placement == TABLED else used.change
    states, apply = _update(used)
    return ArrayUse(
        array.number, placement, kernel, layout, change, None, states, apply, settings=settings
    )


def _update(used: UsedArray) -> tuple[tuple[int, ...], HelperSource | None]:
    """The arrays and the function by which the owner of an element changes it."""
    if used.buffer is None or used.buffer.apply is None:
        return (), None
    return tuple(each.number for each in used.buffer.state), used.buffer.apply


def _home(
    used: UsedArray,
    scheme: Scheme,
    schedule: TileSchedule,
    facts: DealFacts,
    order: tuple[int, ...],
) -> ArrayLayout:
    """Where a boxed array lies: cut like space if a dim of it follows that, else along its longest
    dim."""
    shape, owners = used.array.shape, tuple(range(schedule.processes))
    for dim in range(len(shape)):
        classes = [each.subscript(dim) for each in used.references]
        if any(isinstance(each, Index) and each.dim == scheme.space for each in classes):
            return ArrayLayout(dim, _stretched(facts.space_bounds, shape[dim]), owners, order)
    dim = max(range(len(shape)), key=lambda each: shape[each])
    return ArrayLayout(dim, even_bounds(shape[dim], schedule.processes), owners, order)


def _stretched(bounds: Sequence[int], extent: int) -> tuple[int, ...]:
    """Bounds of the loop's dim as bounds of an array's, which may be longer or shorter."""
    return (*(min(each, extent) for each in bounds[:-1]), extent)


def even_facts(request: DealRequest) -> DealFacts:
    """What would be known of elements that are spread evenly: for choosing before any are dealt."""
    space, time = request.shape[request.scheme.space], skewed_extent(request)
    counts = ((1,) * request.time_parts,) * request.space_parts
    ranges = tuple((0, extent - 1) for extent in request.shape)
    return DealFacts(
        even_bounds(space, request.space_parts),
        even_bounds(time, request.time_parts),
        counts,
        ranges,
    )


def uses_by_name(
    arrays: Mapping[str, UsedArray], scheme: Scheme, schedule: TileSchedule, facts: DealFacts
) -> dict[str, ArrayUse]:
    """Where all arrays of a loop are. One that is read and updated by two names lies in one place,
    and changes under the reader."""
    found = {name: array_use(used, scheme, schedule, facts) for name, used in arrays.items()}
    first: dict[int, ArrayUse] = {}
    for name, use in found.items():
        other = first.setdefault(use.number, use)
        if other is not use:
            found[name] = _beside(use, other, arrays[name], scheme)
            mate = next(each for each, known in found.items() if known is other)
            found[mate] = replace(other, is_volatile=True)
    return found


def _beside(use: ArrayUse, other: ArrayUse, used: UsedArray, scheme: Scheme) -> ArrayUse:
    """A use of an array that lies as another use wants it: by rows if they lie like that, else in
    boxes."""
    if use.layout == other.layout and use.kernel.order == other.kernel.order:
        return use
    boxes = tile_boxes(used.references, used.array.shape, scheme)
    order = other.layout.order
    kernel = replace(use.kernel, order=order, keyed=(), origins=_partial_dims(boxes))
    return replace(use, placement=BOXED, layout=other.layout, kernel=kernel, boxes=boxes)
