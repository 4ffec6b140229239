"""Operators that write at places given by data.

Their own kinds know where their part of the destination begins, and how long all of it is; what
goes elsewhere is dropped. So all of them are cut along the destination. Those that accumulate are
cut along what is written too: partial sums, the destination's own elements counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import Expr, Operand, Output, axes, axis, f, opaque, reduce
from apportion.describe.ops.embedding import from_row, moves_inputs, whole_of
from apportion.describe.ops.index import at_dim, from_places, indexed_dims, masked_dims

_EXTREMES = {"amax": "max", "amin": "min"}


@describe("apportion.scatter", local=from_row, flops=moves_inputs)
def scatter(
    x: Any, dim: Any, index: Any, source: Any, how: Any, own: Any, offset: Any, size: Any
) -> Any:
    from_tensor = isinstance(source, Operand)
    if 0 in index.shape:  # of any shape; nothing is written
        read = [whole_of(t) for t in (index, source) if isinstance(t, Operand)]
        return lambda *i: f("scatter", x[i], opaque(*read))
    if not x.ndim or index.ndim != x.ndim or (from_tensor and source.ndim != x.ndim):
        raise Undescribed("a scatter of scalars has nothing to cut")
    d, v, p = dim % x.ndim, axis("v"), axis("p")
    i = axes("i", x.ndim)
    # Beyond an index that is shorter than the destination nothing is written.
    short = [k for k in range(x.ndim) if k != d and index.shape[k] != x.shape[k]]
    there = [slice(None) if k in short else i[k] for k in range(x.ndim)]

    def written(place: Any) -> list[Expr]:
        tensors = [index, source] if from_tensor else [index]
        read = [t[at_dim(there, d, place)] for t in tensors]
        return [opaque(*read)[tuple(i[k] for k in short)]] if short else read

    place = (v + offset, size, None if from_tensor else source)
    out = at_dim(i, d, v)
    body = _accumulated(x[out], place, how, own, written, p)
    return Output.of(out, body)


def _accumulated(
    before: Any, place: Sequence[Any], how: str, own: bool, written: Any, p: Any
) -> Expr:
    """What becomes of an element; by a reduction over `p` where the parts of one combine."""
    if how == "sum" and own:
        total: Expr = before + reduce("sum", [p], f("at", *place, *written(p)))
        return total
    if how in _EXTREMES and own:
        return reduce(_EXTREMES[how], [p], f("at", *place, before, *written(p)))
    return f("scatter", *place, how, own, before, opaque(*written(slice(None))))


def _along(x: Any, dim: int, index: Any, source: Any) -> Any:
    """The axes of the destination, and a function from the place in the index to what is read."""
    if not x.ndim:
        raise Undescribed("a scalar has nothing to cut")
    d = dim % x.ndim
    i = axes("i", x.ndim)

    def written(place: Any) -> list[Expr]:
        read = [index[place] if index.ndim else index[()]]
        if isinstance(source, Operand) and source.ndim:
            read.append(source[at_dim(i, d, place if index.ndim else 0)])
        elif isinstance(source, Operand):
            read.append(source[()])
        return read

    return at_dim(i, d, axis("v")), written


@describe("apportion.index_add", local=from_row, flops=moves_inputs)
def index_add(x: Any, dim: Any, index: Any, source: Any, alpha: Any, offset: Any, size: Any) -> Any:
    out, written = _along(x, dim, index, source)
    place = (axis("v") + offset, size)
    p = axis("p")
    total = reduce("sum", [p] if index.ndim else [], f("at", *place, *written(p)))
    return Output.of(out, x[out] + (int(alpha) if isinstance(alpha, bool) else alpha) * total)


@describe("apportion.index_reduce", local=from_row, flops=moves_inputs)
def index_reduce(
    x: Any, dim: Any, index: Any, source: Any, how: Any, own: Any, offset: Any, size: Any
) -> Any:
    out, written = _along(x, dim, index, source)
    place = (axis("v") + offset, size)
    if not index.ndim:
        own = False
    return Output.of(out, _accumulated(x[out], place, how, own, written, axis("p")))


@describe("apportion.index_copy", "apportion.index_fill", local=from_row, flops=moves_inputs)
def index_copy(x: Any, dim: Any, index: Any, source: Any, offset: Any, size: Any) -> Any:
    out, written = _along(x, dim, index, source)
    place = (axis("v") + offset, size, None if isinstance(source, Operand) else source)
    return Output.of(out, f("copy", *place, x[out], opaque(*written(slice(None)))))


@describe("apportion.index_put", local=from_places, flops=moves_inputs)
def index_put(x: Any, indices: Any, values: Any, accumulate: Any, origins: Any, sizes: Any) -> Any:
    here = indexed_dims(x, indices)
    before = x[here.inside]
    if accumulate and here.used:
        added = f("at", *here.at(indices, origins, sizes), values.at(here.picked))
        total = reduce("sum", here.shared, added) if here.shared else f("one", added)
        return Output.of(here.inside, before + total, **here.names())
    # Of two values for one place the later one stays.
    places = [item for k in here.used for item in (here.inside[k] + origins[k], sizes[k])]
    free = {a.axis for k, a in enumerate(here.inside) if k not in here.used}
    read = [whole_of(indices[k]) for k in here.used]
    read.append(values[_aligned(values, here.picked, free)])
    return Output.of(here.inside, f("put", *places, accumulate, before, opaque(*read)))


def _aligned(tensor: Any, axes_: Sequence[Any], free: set[str | None]) -> tuple[Any, ...]:
    """Right-aligned broadcasting, whole along axes that are not free."""
    skip = len(axes_) - tensor.ndim
    return tuple(
        0 if n == 1 else axes_[skip + d] if axes_[skip + d].axis in free else slice(None)
        for d, n in enumerate(tensor.shape)
    )


@describe("apportion.put", local=from_places, flops=moves_inputs)
def put(x: Any, index: Any, source: Any, accumulate: Any, origins: Any, sizes: Any) -> Any:
    v, p = axes("v", x.ndim), axes("p", index.ndim)
    place = [a + o for a, o in zip(v, origins, strict=True)]
    if accumulate and index.shape == source.shape and p:
        added = reduce("sum", p, f("put", *place, sizes, index[p], source[p]))
        return Output.of(v, x[v] + added)
    read = opaque(whole_of(index), whole_of(source))
    return Output.of(v, f("put", *place, sizes, accumulate, x[v], read))


@describe("apportion.mask_put")
def mask_put(x: Any, indices: Any, values: Any, accumulate: Any, masks: Any) -> Any:
    used, rank = masked_dims(x, indices, masks)
    i = axes("i", x.ndim)
    free = [a for k, a in enumerate(i) if k not in used]
    start = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    places = [t for t in indices if t is not None]
    behind = len(free) - start
    one_value = values.ndim <= behind or values.shape[-behind - 1] == 1
    if len(places) == 1 and any(masks) and one_value:
        mask = places[0][tuple(i[k] for k in used)]
        picked = (*free[:start], 0, *free[start:])
        value = values[tuple(0 if n == 1 else a for a, n in zip(
            picked[len(picked) - values.ndim :], values.shape, strict=True))]  # fmt: skip
        return Output.of(i, f("put", accumulate, mask, x[i], value))
    shared = axes("b", rank)
    picked = (*free[:start], *shared, *free[start:])
    names = {a.axis for a in free}
    there = x[tuple(slice(None) if k in used else i[k] for k in range(x.ndim))]
    read = [whole_of(t) for t in places] + [values[_aligned(values, picked, names)]]
    written = opaque(there, *read)[tuple(i[k] for k in used)]
    return Output.of(i, f("put", accumulate, written))
