"""Gradients of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.kernels.base import Context, own


@own("apportion.conv_backward_input")
def _conv_backward_input(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, weight, size, stride, padding, dilation, groups = args
    return _conv_backward(grad, _shaped(grad, size), weight, stride, padding, dilation, groups, 0)


@own("apportion.conv_backward_weight")
def _conv_backward_weight(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, size, stride, padding, dilation, groups = args
    return _conv_backward(grad, x, _shaped(grad, size), stride, padding, dilation, groups, 1)


def _conv_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any,
    dilation: Any, groups: int, wanted: int,
) -> tuple[Any, ...]:  # fmt: skip
    none = [0] * (grad.dim() - 2)
    mask = [k == wanted for k in range(3)]
    backward = torch.ops.aten.convolution_backward.default
    found = backward(grad, x, weight, None, stride, padding, dilation, False, none, groups, mask)
    return (found[wanted],)


def _shaped(like: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A tensor that is asked for its shape only; one element of memory."""
    return like.new_empty(1).expand(tuple(size))
