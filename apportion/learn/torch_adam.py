"""torch_adam: what torch's Adam remembers, as tensors by name, to be kept and given back.

In: an optimizer and the network that it moves. Out: for every weight `.mean`, `.square` and
`.steps`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def kept_moments(adam: torch.optim.Adam, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the optimizer remembers, on the CPU."""
    moments = {}
    for name, parameter in network.named_parameters():
        if state := adam.state.get(parameter):
            moments[f"{name}.mean"] = state["exp_avg"].cpu()
            moments[f"{name}.square"] = state["exp_avg_sq"].cpu()
            moments[f"{name}.steps"] = state["step"].cpu().reshape(1)
    return moments


def give_moments(
    adam: torch.optim.Adam, network: torch.nn.Module, moments: Mapping[str, torch.Tensor]
) -> None:
    """Let an optimizer that has not begun remember this."""
    for name, parameter in network.named_parameters():
        if f"{name}.mean" in moments:
            adam.state[parameter] = {
                "step": torch.tensor(float(moments[f"{name}.steps"])),
                "exp_avg": moments[f"{name}.mean"].to(parameter.device, copy=True),
                "exp_avg_sq": moments[f"{name}.square"].to(parameter.device, copy=True),
            }
