"""Convolutions of one tap, for which a dilation chooses the library and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from apportion.execute.kernels import conv
from apportion.execute.kernels.base import Context, kernel

CONTEXT = Context(0, 0, float)
PLAIN = ([1, 1], [0, 0], [1, 1])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("samples", "side"), [(2, 2), (2, 3), (4, 4), (8, 14)])
def test_a_convolution_and_its_gradients_are_those_of_double_precision(
    samples: int, side: int, groups: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(samples, 256, side, side)
    weight, bias = torch.randn(512, 256 // groups, 1, 1) / 16, torch.randn(512)
    assert conv._dilation(CONTEXT, x, weight.shape, [1, 1], [1, 1]) == [2, 2]
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = F.conv2d(*wide, groups=groups)
    grad = torch.randn(y.shape)
    wanted = torch.autograd.grad(y, wide[:2], grad.double())
    (out,) = kernel("aten.convolution.default")(
        CONTEXT, (x, weight, bias, *PLAIN, False, [0, 0], groups)
    )
    both = conv._conv_backward_both(CONTEXT, (grad, x, weight, *PLAIN, groups))
    (for_x,) = conv._conv_backward_input(CONTEXT, (grad, weight, tuple(x.shape), *PLAIN, groups))
    shape = tuple(weight.shape)
    (for_weight,) = conv._conv_backward_weight(CONTEXT, (grad, x, shape, *PLAIN, groups))
    found = (out, *both, for_x, for_weight)
    for mine, truth in zip(found, (y, *wanted, *wanted), strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("x", "weight", "stride"),
    [
        ((8, 64, 4, 4), (64, 64, 1, 1), 1),  # small weights
        ((8, 256, 1, 1), (512, 256, 1, 1), 1),  # one place
        ((2, 256, 4, 4), (512, 256, 1, 1), 1),  # few samples, many places
        ((8, 256, 4, 4), (512, 256, 1, 1), 2),  # torch takes oneDNN anyway
        ((8, 256, 4, 4), (512, 256, 3, 3), 1),  # a dilation would mean something
        ((8, 256, 4), (512, 256, 1), 1),
    ],
)
def test_others_stay_as_they_are(x: tuple[int, ...], weight: tuple[int, ...], stride: int) -> None:
    given = [1] * (len(x) - 2)
    strides = [stride] * (len(x) - 2)
    assert conv._dilation(CONTEXT, torch.empty(x), weight, strides, given) is given
    double = torch.empty((8, 256, 4, 4), dtype=torch.float64)
    assert conv._dilation(CONTEXT, double, (512, 256, 1, 1), [1, 1], given) is given
