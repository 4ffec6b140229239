"""SGD on the host is torch's: by the compiled loop and by operators, in float32 and float64, with
gradients and shadows in bfloat16."""

from __future__ import annotations

import itertools

import pytest
import torch

from apportion.execute.allocations import allocated_peak, memory_profile
from apportion.execute.host_blocks import SLICE, SMALL
from apportion.execute.host_sgd import SgdSettings, sgd_parts, sgd_workspace

WAYS = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.1, False), (0.9, 0.0, True)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [False, True])
def test_it_is_torchs(dtype: torch.dtype, narrow: bool) -> None:
    torch.manual_seed(0)
    for count, way, maximize in itertools.product((100, SMALL + 77), WAYS, (False, True)):
        momentum, dampening, nesterov = way
        parameter = torch.randn(count, dtype=dtype)
        gradients = [torch.randn(count).to(torch.bfloat16 if narrow else dtype) for _ in range(3)]
        buffer = torch.zeros(count, dtype=dtype) if momentum else None
        shadow = torch.empty(count, dtype=torch.bfloat16) if narrow else None
        wanted = torch.nn.Parameter(parameter.clone())
        optimizer = torch.optim.SGD(
            [wanted], 0.1, momentum, dampening, 0.1, nesterov, maximize=maximize
        )
        if momentum:  # as a step begins with it here
            optimizer.state[wanted]["momentum_buffer"] = torch.zeros(count, dtype=dtype)
        for gradient in gradients:
            wanted.grad = gradient.to(dtype)
            optimizer.step()
            at = SgdSettings(0.1, momentum, dampening, 0.1, nesterov, maximize)
            for part in sgd_parts(parameter, gradient, buffer, shadow, at):
                part()
        near = 1e-13 if dtype == torch.float64 else 3e-6
        assert torch.allclose(parameter, wanted.detach(), rtol=near, atol=near)
        if buffer is not None:
            kept = optimizer.state[wanted]["momentum_buffer"]
            assert torch.allclose(buffer, kept, rtol=near, atol=near)
        if shadow is not None:
            assert torch.equal(shadow, parameter.float().to(torch.bfloat16))


@pytest.mark.slow
def test_all_slices_are_updated_once() -> None:
    count = SLICE + 9
    parameter, gradient = torch.zeros(count), torch.ones(count)
    parts = sgd_parts(
        parameter, gradient, None, None, SgdSettings(1.0, 0.0, 0.0, 0.0, False, False)
    )
    assert len(parts) == 2
    for part in parts:
        part()
    assert torch.equal(parameter, -gradient)


@pytest.mark.parametrize("count", [100, SMALL + 5])
@pytest.mark.parametrize("maximize", [False, True])
def test_workspace_is_what_it_takes(count: int, maximize: bool) -> None:
    parameter, buffer = (torch.ones(count) for _ in range(2))
    narrow = torch.ones(count, dtype=torch.bfloat16)
    at = SgdSettings(0.1, 0.9, 0.0, 0.1, True, maximize)
    parts = sgd_parts(parameter, narrow, buffer, None, at)
    parts[0]()  # libraries are loaded, and the loop compiled
    with memory_profile() as profile:
        parts[0]()
    held, most = allocated_peak(profile), sgd_workspace(count, torch.float32, None)
    assert held <= most
    assert held == 0 if count >= SMALL else 2 * held >= most
