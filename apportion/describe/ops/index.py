"""Operators that read at places given by data: gathering, searching, masks.

The own kinds know where their part of the tensor that is read begins, and how long all of it is
(capture/decompose/index.py). An element that lies elsewhere is 0, so that a cut of the dimension
that is picked from leaves partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apportion.describe.descriptions import PartLocation, describe, unsplit
from apportion.describe.errors import Undescribed
from apportion.describe.interval import Affine
from apportion.describe.language import Expr, Operand, Output, axes, axis, f, opaque, reduce
from apportion.describe.ops.embedding import from_row, moves_output, whole_of


def from_places(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    """The last two arguments are where each axis `v0`, `v1`, ... begins and how long it is."""
    origins = tuple(o + local.first(f"v{k}") for k, o in enumerate(args[-2]))
    return (*args[:-2], origins, args[-1])


def at_dim(items: Sequence[Any], d: int, item: Any) -> tuple[Any, ...]:
    """`items` with another one at place `d`."""
    return (*items[:d], item, *items[d + 1 :])


# One dimension


@describe("aten.gather")
def gather(x: Any, dim: Any, index: Any) -> Any:
    d = dim % x.ndim if x.ndim else 0

    def output(*i: Any) -> Any:
        return x[tuple(index[i] if k == d else axis for k, axis in enumerate(i))]

    return output


@describe("apportion.gather", local=from_row, flops=moves_output)
def gather_part(x: Any, dim: Any, index: Any, offset: Any, size: Any) -> Any:
    i, v = axes("i", index.ndim), axis("v")
    if not x.ndim:
        return Output.of(i, f("gather", index[i], x[()]))
    if index.ndim not in (0, x.ndim):
        raise Undescribed("an index that picks nothing has any shape")
    # An index may be shorter than what it picks from, along the other dimensions.
    here = x[at_dim(i, dim % x.ndim, v)]
    return Output.of(i, reduce("sum", [v], f("at", v + offset, size, index[i], here)))


@describe("apportion.index_select", local=from_row, flops=moves_output)
def index_select(x: Any, dim: Any, index: Any, offset: Any, size: Any) -> Any:
    i, v = axes("i", x.ndim), axis("v")
    if not x.ndim:
        return Output.of((), f("select", whole_of(index), x[()]))
    d = dim % x.ndim
    place = index[i[d]] if index.ndim else index[()]
    picked = f("at", v + offset, size, place, x[at_dim(i, d, v)])
    return Output.of(i, reduce("sum", [v], picked))


# Several dimensions


@dataclass(frozen=True, slots=True)
class IndexedDims:
    """What `x[indices]` reads: an index expression for every dimension of x that has one.

    picked   axes of the result
    inside   axes of x: `v<k>` where dimension k has an index, `i<k>` where it has none
    shared   axes that the indices have in common, broadcast
    extents  of the shared axes
    """

    picked: tuple[Affine, ...]
    inside: tuple[Affine, ...]
    shared: tuple[Affine, ...]
    extents: tuple[int, ...]
    used: tuple[int, ...]

    def at(self, indices: Any, origins: Any, sizes: Any) -> list[Any]:
        """Where x is read, and the data that must be just that."""
        places: list[Any] = []
        for k in self.used:
            places += [self.inside[k] + origins[k], sizes[k], indices[k].at(self.shared)]
        return places

    def reduced(self) -> list[Affine]:
        return [self.inside[k] for k in self.used]

    def names(self) -> dict[str, int]:
        return {f"b{k}": extent for k, extent in enumerate(self.extents)}


def indexed_dims(x: Operand, indices: Sequence[Any]) -> IndexedDims:
    """By torch's rule: neighbouring indices leave their dimensions where they were, others move
    them to the front."""
    used = tuple(k for k, index in enumerate(indices) if index is not None)
    inside = tuple(axis(f"v{k}" if k in used else f"i{k}") for k in range(x.ndim))
    rank = max((indices[k].ndim for k in used), default=0)
    extents = tuple(
        max((indices[k].shape[d - rank] for k in used if indices[k].ndim >= rank - d), key=_longer)
        for d in range(rank)
    )
    shared = axes("b", rank)
    free = [inside[k] for k in range(x.ndim) if k not in used]
    start = used[0] if used and used == tuple(range(used[0], used[-1] + 1)) else 0
    return IndexedDims((*free[:start], *shared, *free[start:]), inside, shared, extents, used)


def _longer(extent: int) -> tuple[bool, int]:
    return extent != 1, extent  # an extent of 0 wins over 1, which broadcasts


@describe("apportion.index", local=from_places, flops=moves_output)
def index(x: Any, indices: Any, origins: Any, sizes: Any) -> Any:
    here = indexed_dims(x, indices)
    element: Expr = x[here.inside]
    if here.used:
        element = f("at", *here.at(indices, origins, sizes), element)
        element = reduce("sum", here.reduced(), element)
    return Output.of(here.picked, element, **here.names())


@describe("apportion.take", local=from_places, flops=moves_output)
def take(x: Any, index: Any, origins: Any, sizes: Any) -> Any:
    i, v = axes("i", index.ndim), axes("v", x.ndim)
    place = [a + o for a, o in zip(v, origins, strict=True)]
    element = f("take", *place, sizes, index[i], x[v])
    return Output.of(i, reduce("sum", v, element) if v else element)


# Masks: their number of true elements is data


def masked_dims(x: Any, indices: Any, masks: Any) -> tuple[list[int], int]:
    """The dimensions of x that have an index, and how many dimensions the indices leave."""
    used: list[int] = []
    rank, dim = 0, 0
    for item, is_mask in zip(indices, masks, strict=True):
        width = item.ndim if is_mask else 1
        if is_mask and not width:
            raise Undescribed("a mask without dimensions adds one")
        if item is not None:
            used += range(dim, dim + width)
            rank = max(rank, 1 if is_mask else item.ndim)
        dim += width
    return used, rank


@describe("apportion.mask_index")
def mask_index(x: Any, indices: Any, masks: Any) -> Any:
    used, rank = masked_dims(x, indices, masks)
    free = [axis(f"i{k}") for k in range(x.ndim) if k not in used]
    shared = axes("b", rank)
    start = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    whole = [slice(None) if k in used else axis(f"i{k}") for k in range(x.ndim)]
    places = [whole_of(t) for t in indices if t is not None]
    picked = opaque(x[tuple(whole)], *places)[shared]
    return Output.of((*free[:start], *shared, *free[start:]), picked)


# Searching


@describe("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    line: Any, x: Any, narrow: Any, right: Any, side: Any, sorter: Any, *, out: Any
) -> Any:
    i, k = axes("i", len(out[0])), axis("k")
    value = x[i] if isinstance(x, Operand) else x
    rows = i[:-1] if line.ndim > 1 else ()
    after = bool(right) or side == "right"
    if sorter is not None:
        rows_whole = (*rows, slice(None))
        return Output.of(i, f("search", after, opaque(line[rows_whole], sorter[rows_whole]), value))
    # How many elements are smaller: those of all parts, together.
    return Output.of(i, reduce("sum", [k], f("smaller", after, line[(*rows, k)], value)))


@describe("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(x: Any, line: Any, narrow: Any, right: Any, *, out: Any) -> Any:
    return searchsorted(line, x, narrow, right, None, None, out=out)


# What a mask leaves


@describe("aten.masked_select")
def masked_select(x: Any, mask: Any, *, out: Any) -> Any:
    rank = max(x.ndim, mask.ndim)
    lead: list[Affine] = []
    for k in range(x.ndim):  # along leading dimensions that the mask does not know, one selection
        d = k + mask.ndim - x.ndim
        if x.ndim < rank or (d >= 0 and mask.shape[d] != 1):
            break
        lead.append(axis(f"i{k}"))
    if not any(n > 1 for n in x.shape[: len(lead)]):
        raise Undescribed("the shape of the result depends on data")
    here = x[(*lead, *[slice(None)] * (x.ndim - len(lead)))]
    return Output.of([(*lead, axis("s"))], opaque(here, whole_of(mask))[axis("s")])


@describe("aten.masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    if 0 not in source.shape:
        raise Undescribed("where an element goes depends on how many true elements come before it")
    # With nothing to take from, no element of the mask may be true.
    return lambda *i: f("masked", x.at(i), mask.at(i), whole_of(source))


unsplit(
    "aten.masked_scatter_backward",
    why="where an element goes depends on how many true elements come before it",
)
