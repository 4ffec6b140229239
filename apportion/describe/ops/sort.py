"""Operators along one dimension of which every result may depend on all elements there: orders,
scans, softmax, Fourier transforms. They are cut along the other dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe, unsplit
from apportion.describe.errors import Undescribed
from apportion.describe.interval import Affine
from apportion.describe.language import Access, Operand, Output, axis, f, opaque
from apportion.describe.ops.reduction import WHOLE, normal_dims, opaque_over


def along(x: Operand, dim: int, i: Sequence[Affine]) -> Access:
    """The whole slice of `x` along `dim` at the place `i`."""
    return x[tuple(WHOLE if d == dim else axis for d, axis in enumerate(i))]


def _scan(dim: int, *tensors: Operand) -> Any:
    """As many results along `dim` as there are, each a function of the slices there."""
    rank = tensors[0].ndim
    if not rank:
        return lambda: f("elementwise", *(x[()] for x in tensors))
    d = dim % rank
    return lambda *i: opaque(*(along(x, d, i) for x in tensors))[i[d]]


@describe(
    "aten._softmax",
    "aten._log_softmax",
    "aten._safe_softmax",
    "aten.cumsum",
    "aten.cumprod",
    "aten.logcumsumexp",
    "aten._logcumsumexp",
)
def opaque_along(x: Any, dim: Any) -> Any:
    return _scan(dim, x)


@describe("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(grad: Any, out: Any, dim: Any) -> Any:
    return _scan(dim, grad, out)


@describe("aten._masked_softmax")
def masked_softmax(x: Any, mask: Any, dim: Any, kind: Any) -> Any:
    d = x.ndim - 1 if dim is None else dim % x.ndim
    if mask.shape == x.shape and kind in (None, 2):
        return _scan(d, x, mask)
    if x.ndim != 4 or d != 3 or kind not in (0, 1):
        raise Undescribed("a mask that is broadcast")
    # One mask for all matrices of scores, or one per sample; the kernel wants these square.
    b, h, i, j = (axis(name) for name in "bhij")
    shared = mask[:, :] if kind == 0 else mask[b, :]
    return Output.of((b, h, i, j), opaque(x[b, h, :, :], shared)[i, j])


@describe("aten._masked_softmax_backward")
def masked_softmax_backward(grad: Any, out: Any, mask: Any, dim: Any) -> Any:
    if mask.shape != grad.shape:
        raise Undescribed("a mask that is broadcast")
    return _scan(-1 if dim is None else dim, grad, out, mask)


@describe("aten.cummax", "aten.cummin")
def scan_with_places(x: Any, dim: Any) -> Any:
    return (_scan(dim, x),) * 2


@describe("aten.sort.default")
def sort(x: Any, dim: Any = -1) -> Any:
    return (_scan(dim, x),) * 2


@describe("aten.sort.stable")
def stable_sort(x: Any, stable: Any, dim: Any = -1) -> Any:
    return (_scan(dim, x),) * 2


@describe("aten.topk")
def topk(x: Any, k: Any, dim: Any = -1) -> Any:
    return (_scan(dim, x),) * 2


@describe("aten.argsort.default")
def argsort(x: Any, dim: Any = -1) -> Any:
    return _scan(dim, x)


@describe("aten.argsort.stable")
def stable_argsort(x: Any, stable: Any, dim: Any = -1) -> Any:
    return _scan(dim, x)


# One result for each slice


@describe("aten.argmax", "aten.argmin")
def place(x: Any, dim: Any = None, keepdim: Any = False) -> Any:
    return opaque_over(x, normal_dims(dim, x.ndim), bool(keepdim))


@describe("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim", "aten.mode")
def value_and_place(x: Any, dim: Any = -1, keepdim: Any = False) -> Any:
    return (place(x, dim, keepdim),) * 2


@describe("aten.kthvalue")
def kthvalue(x: Any, k: Any, dim: Any = -1, keepdim: Any = False) -> Any:
    return (place(x, dim, keepdim),) * 2


@describe("aten.median.default", "aten.nanmedian.default")
def median(x: Any) -> Any:
    return opaque_over(x, tuple(range(x.ndim)), False)


# Fourier transforms


@describe("aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c")
def fourier(x: Any, dims: Any) -> Any:
    where = {d % x.ndim for d in dims}

    def output(*i: Affine) -> Any:
        source = x[tuple(WHOLE if d in where else a for d, a in enumerate(i))]
        return opaque(source)[tuple(a for d, a in enumerate(i) if d in where)]

    return output


# Labels and frames


def _samples(args: tuple[Any, ...], local: PartLocation, first: int) -> tuple[Any, ...]:
    """The lengths of a part's samples are those of the whole's, from where it begins."""
    low, high = local.ranges["n"]
    lengths = (tuple(given[low:high]) for given in args[first : first + 2])
    return (*args[:first], *lengths, *args[first + 2 :])


@describe("apportion.ctc_loss", local=lambda args, local: _samples(args, local, 2))
def ctc_loss(
    scores: Any, targets: Any, frames: Any, letters: Any, blank: Any, finite: Any, width: Any
) -> Any:
    n, t, s = axis("n"), axis("t"), axis("s")
    slices = opaque(scores[:, n, :], targets[n, :], width)
    return Output.of((n,), slices), Output.of((n, t, s), slices[t, s])


@describe("aten._ctc_loss_backward.default", local=lambda args, local: _samples(args, local, 3))
def ctc_loss_backward(
    grad: Any, scores: Any, targets: Any, frames: Any, letters: Any, loss: Any, alpha: Any
) -> Any:
    if targets.ndim != 2:
        raise Undescribed("targets in a row: where those of a sample begin depends on the others")
    n, t, c = axis("n"), axis("t"), axis("c")
    slices = (grad[n], scores[:, n, :], targets[n, :], loss[n], alpha[n, :, :])
    return Output.of((t, n, c), opaque(*slices)[t, c])


unsplit(
    "aten._ctc_loss.default",
    why="targets in a row: where those of a sample begin depends on the others",
)
unsplit(
    "aten.nonzero", "aten.unique_dim", "aten.unique_consecutive", "aten.unique_dim_consecutive",
    "aten._unique", "aten._unique2",
    why="the shape of the result depends on data",
)  # fmt: skip
unsplit(
    "aten.nonzero_static",
    why="where an element goes depends on how many nonzeros there are before it",
)
unsplit(
    "aten._ctc_loss.Tensor", "aten._ctc_loss_backward.Tensor",
    why="the width of the alignments depends on the longest target, which is data",
)  # fmt: skip
