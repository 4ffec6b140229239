"""Kernels that misread inputs of unusual strides, copies, and views, which may need one.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import OWN, Context, Kernel, own, resolve


@own("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def _reshape(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    # A part may have other strides than the whole had, so that a view of it may need a copy.
    return (args[0].reshape(args[1]),)


@own("aten.clone.default")
def _clone(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    # A Graph does not say in which order of dimensions; the view that follows most of them would
    # copy once more what is not dense.
    return (args[0].clone(memory_format=torch.contiguous_format),)


@own("aten.isin.Tensor_Tensor")
def _isin(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    given, candidates, unique, invert = args
    given, candidates = given.contiguous(), candidates.contiguous()
    return (torch.isin(given, candidates, assume_unique=unique, invert=invert),)


def _on_dense(kind: str) -> Kernel:
    """Kernels that read some inputs as if they were contiguous, whatever their strides say."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        dense = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        result = resolve(kind)(*dense)
        return tuple(result) if isinstance(result, tuple) else (result,)

    return call


_READ_AS_DENSE = (
    "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default",
    "aten.native_group_norm.default",
    "aten.native_group_norm_backward.default",
    "aten._weight_norm_interface.default",
    "aten._weight_norm_interface_backward.default",
    "aten._linalg_det.default",  # the factors of a dense matrix are those of its transpose
    "aten._linalg_slogdet.default",
    "aten._pdist_forward.default",
    "aten._pdist_backward.default",
    "aten._softmax.default",
    "aten._softmax_backward_data.default",
    "aten._log_softmax.default",
    "aten._log_softmax_backward_data.default",
    "aten._safe_softmax.default",
    "aten.embedding_dense_backward.default",
    "aten.mse_loss.default",
)
OWN.update({kind: _on_dense(kind) for kind in _READ_AS_DENSE})
