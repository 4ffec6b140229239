"""Batch norm in one call on a GPU, by the kernels that torch itself would choose there."""

from __future__ import annotations

import pytest
import torch

from apportion.execute.kernels.base import Context, kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CLOSE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("shape", [(8, 6, 14, 14), (4, 3, 2, 2), (16, 5)])
def test_one_call_is_what_eager_pytorch_computes(shape: tuple[int, ...], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=kind, requires_grad=True)
    wide = torch.float32 if kind == torch.bfloat16 else kind
    weight, bias, mean, variance = (
        torch.rand(shape[1], device="cuda", dtype=wide) for _ in range(4)
    )
    weight.requires_grad_(True)
    bias.requires_grad_(True)
    before = mean.clone(), variance.clone()
    out = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (x, bias, weight), grad)
    context = Context(0, 0, lambda expression: 1.0, device="cuda")
    given = [t.detach() for t in (x, weight, bias)]
    found = kernel("apportion.batch_norm_whole")(context, (*given, *before, 0.1, 1e-5))
    ours, ours_mean, inverse, *after = found
    backward = kernel("apportion.batch_norm_whole_backward")
    gradients = backward(context, (grad, given[0], ours_mean, inverse, given[1], 1e-5))
    pairs = (
        (ours, out),
        (after[0], mean),
        (after[1], variance),
        *zip(gradients, wanted, strict=True),
    )
    for made, true in pairs:
        torch.testing.assert_close(made, true.detach(), rtol=CLOSE[kind], atol=CLOSE[kind])
    assert all(torch.equal(b, n) is False for b, n in zip(before, after, strict=True))
    (for_bias, for_weight) = backward(context, (grad, given[0], ours_mean, inverse, None, 1e-5))
    # without a gradient of x torch takes another kernel, which rounds otherwise
    torch.testing.assert_close(for_bias, gradients[1], rtol=CLOSE[kind], atol=CLOSE[kind])
    torch.testing.assert_close(for_weight, gradients[2], rtol=CLOSE[kind], atol=CLOSE[kind])
