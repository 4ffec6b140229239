"""Gradients of convolutions whose taps reach further than their input is long."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what goes wrong there writes beyond its memory.
SCRIPT = """
import torch
import torch.nn.functional as F
from apportion.execute.kernels import conv
from apportion.execute.kernels.base import Context

torch.manual_seed(0)
torch.set_num_threads(1)
context = Context(0, 0, float)
cases = ((1, 1, 16, 33), (2, 2, 16, 31), (2, 1, 32, 63), (1, 1, 5, 9))
for channels, groups, places, taps in cases:
    padding, size = [taps // 2, 0], (channels, channels // groups, taps, 1)
    for _ in range(20):
        x = torch.randn(4, channels, places, 16)
        weight = torch.randn(size)
        wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
        y = F.conv2d(*wide, None, 1, padding, 1, groups)
        grad = torch.randn(y.shape)
        wanted = torch.autograd.grad(y, wide, grad.double())
        settings = ([1, 1], padding, [1, 1], groups)
        both = conv._conv_backward_both(context, (grad, x, weight, *settings))
        alone = conv._conv_backward_weight(context, (grad, x, size, *settings))
        for found, truth in zip((*both, *alone), (*wanted, wanted[1]), strict=True):
            torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-3)
        _ = [torch.zeros(n) for n in (1, 66, 512, 33, 1024)]
"""


@pytest.mark.slow
def test_nothing_is_written_beyond_the_gradient() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
