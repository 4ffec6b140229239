"""Products, and sums of several.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import OWN, Context, Kernel, own, resolve


def _multiply(kind: str) -> Kernel:
    """Products: an operand in which neither of the last two dimensions is dense is copied by
    BLAS."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        return (resolve(kind)(*(_for_blas(a) for a in args[:3]), **_weights(args)),)

    return call


def _weights(args: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("beta", "alpha"), args[3:], strict=False))


def _for_blas(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or _blas_stride(x):
        return x
    return x.contiguous()


def _blas_stride(x: torch.Tensor) -> bool:
    rows, columns = x.shape[-2:]
    a, b = x.stride()[-2:]
    return (b == 1 and a >= max(1, columns)) or (a == 1 and b >= max(1, rows))


@own("apportion.mm_total")
def _mm_total(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    lefts, rights = args
    total = torch.mm(lefts[0], rights[0])
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return (total,)


@own("apportion.sum_total")
def _sum_total(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    tensors, dims = args
    total = tensors[0].sum(dims)
    for tensor in tensors[1:]:
        total += tensor.sum(dims)
    return (total,)


PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")
OWN.update({kind: _multiply(kind) for kind in PRODUCTS})
