"""Tensors put together: concatenation, stacking, padding."""

from __future__ import annotations

from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import Output, axes, axis, f, opaque


@describe("aten.cat")
def cat(tensors: Any, dim: Any) -> Any:
    tensors = [x for x in tensors if x.shape != (0,)] or tensors  # of any rank, by tradition
    first = tensors[0]
    d = dim % first.ndim
    i = list(axes("i", first.ndim))
    if len({x.shape for x in tensors}) == 1:
        p = axis("p")
        chosen = f("pick", p, *(x[tuple(i)] for x in tensors))
        dims = [(p, a) if k == d else a for k, a in enumerate(i)]
        return Output.of(dims, chosen, p=len(tensors))
    slices = [x[tuple(slice(None) if k == d else a for k, a in enumerate(i))] for x in tensors]
    return Output.of(i, opaque(*slices)[i[d]])


@describe("aten.stack")
def stack(tensors: Any, dim: Any) -> Any:
    d = dim % (tensors[0].ndim + 1)

    def output(*i: Any) -> Any:
        inner = (*i[:d], *i[d + 1 :])
        return f("pick", i[d], *(x[inner] for x in tensors))

    return output


@describe("aten._chunk_cat")
def chunk_cat(tensors: Any, dim: Any, chunks: Any) -> Any:
    """Chunks of each tensor, padded and flat, beside each other."""
    lead = dim % tensors[0].ndim

    def output(*i: Any) -> Any:
        slices = (x[(*i[:lead], *[slice(None)] * (x.ndim - lead))] for x in tensors)
        return opaque(*slices)[i[lead:]]

    return output


@describe("aten.block_diag")
def block_diag(tensors: Any) -> Any:
    if len(tensors) != 1 or tensors[0].ndim != 2:
        raise Undescribed("each row and column of the result is of one input only")
    return lambda i, j: tensors[0][i, j]


def _pad_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, widths, *rest = args
    dims = len(local.inputs[x.index])
    cut = [2 * (dims - 1 - dim) for tensor, dim in local.padded if tensor == x.index]
    own = tuple(0 if k - k % 2 in cut else width for k, width in enumerate(widths))
    return (x, own, *rest)


@describe("aten.constant_pad_nd", local=_pad_local)
def constant_pad_nd(x: Any, widths: Any, value: Any) -> Any:
    before = dict(zip(reversed(range(x.ndim)), widths[::2], strict=False))
    return lambda *i: x.padded(value)[tuple(a - before.get(d, 0) for d, a in enumerate(i))]
