"""Reading and writing at places given by data, by parts that hold a range of what is indexed.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
A part gets where its range begins and how long the dimension is in all. What it reads from
elsewhere is 0, what it would write elsewhere is dropped. With the whole range it is torch's own
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import OWN, Context, Kernel, own, resolve

Tensor = torch.Tensor
_OUT_OF_RANGE = "an index is out of range"


def check_all(fine: Tensor, what: str) -> None:
    """Raises RuntimeError, on a GPU later, unless all are true; an operator, so that compilers see
    it."""
    torch._assert_async(fine.all(), what)


def _inside(index: Tensor, offset: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices into a range of `count` that begins at `offset`, and which of them lie there."""
    check_all((index >= 0) & (index < size), _OUT_OF_RANGE)
    local = index - offset
    return local, (local >= 0) & (local < count)


def _wrapped(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


def _dim(x: Tensor, dim: int) -> int:
    return dim % x.dim() if x.dim() else 0


def _is_whole(x: Tensor, d: int, size: int) -> bool:
    return x.dim() == 0 or x.shape[d] == size


# Embeddings


@own("apportion.embedding")
def _embedding(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    weight, indices, offset, size = args
    rows = resolve("aten.embedding.default")
    if weight.shape[0] == size:
        return (rows(weight, indices),)
    local, inside = _inside(indices, offset, weight.shape[0], size)
    found = rows(weight, local.clamp_(0, weight.shape[0] - 1))
    return (found.masked_fill_(~inside.unsqueeze(-1), 0),)


@own("apportion.embedding_backward")
def _embedding_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, indices, rows, padding, by_frequency, offset, size = args
    backward = resolve("aten.embedding_dense_backward.default")
    grad, indices = grad.contiguous(), indices.contiguous()
    if rows == size:
        return (backward(grad, indices, rows, padding, by_frequency),)
    local, inside = _inside(indices, offset, rows, size)
    # One more row stands for all that are elsewhere; the kernel passes over it as over the padding.
    local = local.masked_fill_(~inside | (indices == padding), rows)
    return (backward(grad, local, rows + 1, rows, by_frequency).narrow(0, 0, rows),)


@own("apportion.embedding_renorm")
def _embedding_renorm(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    weight, indices, most, norm, offset, size = args
    renorm = resolve("aten.embedding_renorm.default")
    weight = weight.contiguous()  # the kernel's rows of other strides are not its input's
    rows = weight.shape[0]
    if rows == size:
        return (renorm(weight, indices.contiguous(), most, norm),)
    # One more row stands for all that are elsewhere; it is 0, so that its norm is never too large.
    local, inside = _inside(indices, offset, rows, size)
    wide = torch.cat((weight, weight.new_zeros(1, *weight.shape[1:])))
    found = renorm(wide, local.masked_fill_(~inside, rows).contiguous(), most, norm)
    return (found.narrow(0, 0, rows).contiguous(),)


# Reading


def _reading(kind: str, mask_of: Callable[[Tensor, Tensor, int], Tensor]) -> Kernel:
    """Torch's `kind` of (x, dim, index) on a part; `mask_of` shapes a mask of the index."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        x, dim, index, offset, size = args
        d = _dim(x, dim)
        if _is_whole(x, d, size):
            return (resolve(kind)(x, dim, index),)
        local, inside = _inside(index, offset, x.shape[d], size)
        found = resolve(kind)(x, dim, local.clamp_(0, x.shape[d] - 1))
        return (found.masked_fill_(~mask_of(inside, found, d), 0),)

    return call


def _along(mask: Tensor, like: Tensor, d: int) -> Tensor:
    return mask.reshape(-1, *[1] * (like.dim() - 1 - d))


OWN["apportion.gather"] = _reading("aten.gather.default", lambda mask, like, d: mask)
OWN["apportion.index_select"] = _reading("aten.index_select.default", _along)


def _places(
    x: Tensor, indices: Sequence[Any], origins: Sequence[int], sizes: Sequence[int]
) -> tuple[list[Any], Tensor | None]:
    """Indices into a part, and which of them lie inside it, broadcast (None: all)."""
    found: list[Any] = []
    keep: Tensor | None = None
    for k, index in enumerate(indices):
        if index is None or x.shape[k] == sizes[k]:
            found.append(index)
            continue
        local, inside = _inside(_wrapped(index, sizes[k]), origins[k], x.shape[k], sizes[k])
        found.append(local.clamp_(0, x.shape[k] - 1))
        keep = inside if keep is None else keep & inside
    if keep is not None:
        shapes = [i.shape for i in indices if i is not None]
        keep = keep.expand(torch.broadcast_shapes(*shapes))
    return found, keep


def _behind(x: Tensor, indices: Sequence[Any]) -> int:
    """How many dimensions follow those of the indices in x[indices]."""
    used = [k for k, index in enumerate(indices) if index is not None]
    if used[-1] - used[0] + 1 == len(used):
        return x.dim() - 1 - used[-1]
    return x.dim() - len(used)


def _read(x: Tensor, indices: Sequence[Any], origins: Any, sizes: Any) -> Tensor:
    local, keep = _places(x, indices, origins, sizes)
    found: Tensor = resolve("aten.index.Tensor")(x, local)
    if keep is None:
        return found
    mask = keep.reshape(*keep.shape, *[1] * _behind(x, indices))
    return found.masked_fill_(~mask, 0)


@own("apportion.index")
def _index(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (_read(*args),)


@own("apportion.take")
def _take(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, index, origins, sizes = args
    if tuple(x.shape) == tuple(sizes):
        return (resolve("aten.take.default")(x, index),)
    return (_read(x, _unravelled(index, sizes), origins, sizes),)


def _unravelled(index: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The place in each dimension of a place in all elements."""
    total = torch.Size(sizes).numel()
    index = _wrapped(index, total)
    check_all((index >= 0) & (index < total), _OUT_OF_RANGE)
    places: list[Tensor] = []
    for size in reversed(sizes):
        places.insert(0, index % size)
        index = index // size
    return places


@own("apportion.mask_index")
def _mask_index(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, indices, _ = args
    return (resolve("aten.index.Tensor")(x, indices),)


# Writing


def _writing(write: Callable[..., Tensor]) -> Kernel:
    """An in-place method of (x, dim, index, ...) on a part, which gets one more row for what goes
    elsewhere."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        x, dim, index, *rest, offset, size = args
        d = _dim(x, dim)
        if _is_whole(x, d, size):
            return (write(x.clone(), d, index, *rest),)
        count = x.shape[d]
        local, inside = _inside(index, offset, count, size)
        wide = x.new_zeros([n + (k == d) for k, n in enumerate(x.shape)])
        wide.narrow(d, 0, count).copy_(x)
        write(wide, d, local.masked_fill_(~inside, count), *rest)
        return (wide.narrow(d, 0, count).contiguous(),)

    return call


def _scatter(x: Tensor, d: int, index: Tensor, source: Any, how: str, with_own: bool) -> Tensor:
    if not isinstance(source, Tensor):
        name = {"sum": "add", "prod": "multiply"}.get(how)
        return x.scatter_(d, index, source, reduce=name) if name else x.scatter_(d, index, source)
    if not how:
        return x.scatter_(d, index, source)
    if how == "sum" and with_own:
        return x.scatter_add_(d, index, source)
    return x.scatter_reduce_(d, index, source, how, include_self=with_own)


def _index_add(x: Tensor, d: int, index: Tensor, source: Tensor, alpha: Any) -> Tensor:
    return x.index_add_(d, index, source, alpha=alpha)


def _index_reduce(
    x: Tensor, d: int, index: Tensor, source: Tensor, how: str, with_own: bool
) -> Tensor:
    return x.index_reduce_(d, index, source, how, include_self=with_own)


OWN["apportion.scatter"] = _writing(_scatter)
OWN["apportion.index_add"] = _writing(_index_add)
OWN["apportion.index_reduce"] = _writing(_index_reduce)
OWN["apportion.index_copy"] = _writing(torch.Tensor.index_copy_)
OWN["apportion.index_fill"] = _writing(torch.Tensor.index_fill_)


def _write(
    x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool, origins: Any, sizes: Any
) -> Tensor:
    local, keep = _places(x, indices, origins, sizes)
    put = resolve("aten.index_put.default")
    if keep is None:
        found: Tensor = put(x, local, values, accumulate)
        return found
    # One more row, of a dimension that is cut, for what goes elsewhere.
    d = next(k for k, i in enumerate(indices) if i is not None and x.shape[k] != sizes[k])
    count = x.shape[d]
    wide = x.new_zeros([n + (k == d) for k, n in enumerate(x.shape)])
    wide.narrow(d, 0, count).copy_(x)
    local[d] = torch.where(keep, local[d], count)
    resolve("aten.index_put_.default")(wide, local, values, accumulate)
    return wide.narrow(d, 0, count).contiguous()


@own("apportion.index_put")
def _index_put(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (_write(*args),)


@own("apportion.put")
def _put(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, index, source, accumulate, origins, sizes = args
    if tuple(x.shape) == tuple(sizes):
        return (resolve("aten.put.default")(x, index, source, accumulate),)
    places = _unravelled(index, sizes)
    return (_write(x, places, source.reshape(index.shape), accumulate, origins, sizes),)


@own("apportion.mask_put")
def _mask_put(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, indices, values, accumulate, _ = args
    return (resolve("aten.index_put.default")(x, indices, values, accumulate),)
