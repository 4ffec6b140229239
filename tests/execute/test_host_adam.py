"""Adam on the host is torch's: by the compiled loop and by operators, in float32 and float64, with
gradients and shadows in bfloat16, which round as torch does."""

from __future__ import annotations

import pytest
import torch

from apportion.execute.allocations import allocated_peak, memory_profile
from apportion.execute.host_adam import AdamSettings, adam_workspace, host_adam
from apportion.execute.host_blocks import NUMBER_BYTES, SMALL


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_it_is_torchs(dtype: torch.dtype, narrow: bool, kind: str) -> None:
    torch.manual_seed(0)
    for count in (100, SMALL + 77):
        parameter = torch.randn(count, dtype=dtype)
        gradients = [torch.randn(count).to(torch.bfloat16 if narrow else dtype) for _ in range(3)]
        first, second = (torch.zeros(count, dtype=dtype) for _ in range(2))
        shadow = torch.empty(count, dtype=torch.bfloat16)
        wanted = torch.nn.Parameter(parameter.clone())
        made = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        optimizer = made([wanted], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
        for step, gradient in enumerate(gradients, 1):
            wanted.grad = gradient.to(dtype)
            optimizer.step()
            settings = AdamSettings(
                0.1, 0.9, 0.95, 1e-8, 0.1, 1 - 0.9**step, (1 - 0.95**step) ** 0.5,
                kind == "adamw", False,
            )  # fmt: skip
            host_adam(parameter, gradient, first, second, shadow, settings)
        near = 1e-13 if dtype == torch.float64 else 3e-6
        assert torch.allclose(parameter, wanted.detach(), rtol=near, atol=near)
        assert torch.equal(shadow, parameter.float().to(torch.bfloat16))
        state = optimizer.state[wanted]
        assert torch.allclose(first, state["exp_avg"], rtol=near, atol=near)
        assert torch.allclose(second, state["exp_avg_sq"], rtol=near, atol=near)


@pytest.mark.slow
def test_what_is_no_number_stays_none_in_the_shadow() -> None:
    count = SMALL + 5
    parameter = torch.ones(count)
    parameter[3], parameter[4], parameter[5] = float("nan"), float("inf"), 3.4e38
    moments = [torch.zeros(count) for _ in range(2)]
    shadow = torch.empty(count, dtype=torch.bfloat16)
    settings = AdamSettings(0.0, 0.9, 0.95, 1e-8, 0.0, 0.5, 0.5, True, False)
    host_adam(parameter, torch.zeros(count), *moments, shadow, settings)
    wanted = parameter.to(torch.bfloat16)
    assert torch.equal(shadow.isnan(), wanted.isnan())
    assert torch.equal(shadow[~shadow.isnan()], wanted[~wanted.isnan()])


@pytest.mark.slow
@pytest.mark.parametrize("count", [SMALL - 1, SMALL])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_what_torch_allocates_is_known(
    count: int, gradient: torch.dtype, decoupled: bool, maximize: bool
) -> None:
    tensors = [torch.rand(count) for _ in range(4)]
    tensors[1] = tensors[1].to(gradient)
    settings = AdamSettings(1e-3, 0.9, 0.99, 1e-8, 0.01, 0.1, 0.1, decoupled, maximize)
    host_adam(*tensors, None, settings)  # compiled
    with memory_profile() as profile:
        host_adam(*tensors, None, settings)
    found = allocated_peak(profile)
    said = adam_workspace(count, torch.float32, gradient, None, decoupled, maximize)
    assert found <= said <= found + NUMBER_BYTES
