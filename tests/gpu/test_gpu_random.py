"""Random numbers are the same on every device, so that a split dropout decides alike everywhere."""

from __future__ import annotations

import pytest
import torch

from apportion.capture.counter_random import key_words, uniform
from apportion.execute.device_random import is_trusted, uniform_on_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gpu_draws_the_numbers_of_a_cpu(dtype: torch.dtype) -> None:
    indices = [torch.arange(n) for n in (64, 129, 257)]
    here = uniform((3, 5, 7), indices, dtype)
    there = uniform((3, 5, 7), [i.cuda() for i in indices], dtype)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64,), (64, 129), (8, 129, 257), (2, 3, 65, 33)])
def test_so_does_one_kernel(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    assert is_trusted("cuda:0")
    where = tuple(((n, 0, n),) for n in sizes)
    here = uniform((3, 5, 7), [torch.arange(n) for n in sizes], dtype)
    there = uniform_on_cuda(*key_words((3, 5, 7)), where, dtype, "cuda:0")
    assert there.is_contiguous() and torch.equal(here, there.cpu())
