"""Random numbers are the same on every device, so that a split dropout decides alike everywhere."""

from __future__ import annotations

import pytest
import torch

from apportion.capture.counter_random import uniform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gpu_draws_the_numbers_of_a_cpu(dtype: torch.dtype) -> None:
    indices = [torch.arange(n) for n in (64, 129, 257)]
    here = uniform((3, 5, 7), indices, dtype)
    there = uniform((3, 5, 7), [i.cuda() for i in indices], dtype)
    assert torch.equal(here, there.cpu())
