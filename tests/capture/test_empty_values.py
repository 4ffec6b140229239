"""Tensors without elements: nobody computes or moves them, and the step is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_read_probes import assert_equals_eager, captured
from torch import nn


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    nothing = model(x[:0])
    parts = torch.cat([nothing, model(x), nothing])
    return parts.pow(2).mean() + (nothing * 2).relu().sum()


def cache(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept = torch.cat([torch.empty(0, 4), x])
    return model(kept).mean() + torch.zeros(0).sum() + torch.ones(0).prod()


def inner(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    product = torch.addmm(torch.ones(6, 6), x[:, :0], x[:, :0].t()) + x[:, :0] @ x[:, :0].t()
    written = model(x).index_put((torch.empty(0, dtype=torch.long),), torch.empty(0, 3))
    return product.mean() + written.scatter_add(0, torch.empty(0, 3).long(), x[:0, :3]).mean()


@pytest.mark.parametrize("loss", [rows, cache, inner])
def test_nothing_reads_a_tensor_without_elements(loss: Any) -> None:
    torch.manual_seed(1)
    program = captured(loss, linear(), torch.randn(6, 4))
    values = program.graph.values
    read = {v for op in program.graph.ops for v in op.inputs}
    assert not [values[v].name for v in read if 0 in (values[v].shape or ())]
    assert_equals_eager(program)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nothing = nn.Linear(4, 3), nn.Parameter(torch.empty(0))
        self.register_buffer("kept", torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(3)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) + self.nothing.sum() + self.kept.sum()


def test_state_and_batches_without_elements_and_batch_norm_that_is_fixed() -> None:
    torch.manual_seed(1)
    batch = (torch.randn(6, 4), torch.empty(0, 3))
    program = captured(lambda m, b: m(b[0]).pow(2).mean() + b[1].sum(), Holder(), batch)
    assert_equals_eager(program)
