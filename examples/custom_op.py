"""A custom operator, described in a few lines: a gated MLP whose gate is one fused kernel.

    out[n, d] = silu(gate[n, d]) * up[n, d] * scale[d]

The operator and its backward are registered with torch.library, as for any kernel of one's own.
What apportion needs beside is at the end: what each of them computes. All ways to cut them follow.

apportion run examples/custom_op.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import apportion as ap


@torch.library.custom_op("mylib::scaled_swiglu", mutates_args=())
def scaled_swiglu(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """A fused kernel would stand here."""
    return silu(gate) * up * scale


@torch.library.custom_op("mylib::scaled_swiglu_backward", mutates_args=())
def scaled_swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate, up and scale."""
    open_ = torch.sigmoid(gate)
    gated = gate * open_
    slope = open_ * (1 + gate * (1 - open_))
    return grad * up * scale * slope, grad * gated * scale, (grad * gated * up).sum(0)


@scaled_swiglu.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(gate)


@scaled_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up), torch.empty_like(scale)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return scaled_swiglu_backward(grad, *ctx.saved_tensors)


scaled_swiglu.register_autograd(_backward, setup_context=_keep)


@ap.describe("mylib::scaled_swiglu")
def swiglu(gate: Any, up: Any, scale: Any) -> Any:
    return lambda n, d: ap.f("swiglu", gate[n, d], up[n, d], scale[d])


@ap.describe("mylib::scaled_swiglu_backward")
def swiglu_backward(grad: Any, gate: Any, up: Any, scale: Any) -> Any:
    return (
        lambda n, d: ap.f("for gate", grad[n, d], gate[n, d], up[n, d], scale[d]),
        lambda n, d: ap.f("for up", grad[n, d], gate[n, d], scale[d]),
        lambda d: ap.Sum(lambda n: ap.f("for scale", grad[n, d], gate[n, d], up[n, d])),
    )


class GatedMlp(nn.Module):
    """Two projections, the fused gate, and a classifier."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, hidden))
        self.down = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(scaled_swiglu(self.gate(x), self.up(x), self.scale))


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def make() -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer, Any]:
    """(step, model, optimizer, batch)."""
    model = GatedMlp(width=24, hidden=64, classes=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return step, model, optimizer, (torch.randn(16, 24), torch.randint(12, (16,)))
