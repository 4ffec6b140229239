"""Products of groups of rows: what experts compute, cut along rows, groups and widths."""

from __future__ import annotations

import pytest
import torch
from graphs import CONTEXT, one
from torch import nn
from torch.nn import functional as F

from apportion.capture.capture import capture
from apportion.capture.grouped_product import GROUPED_MM, fake_grouped_mm, grouped_mm
from apportion.capture.lift_call import lift_call
from apportion.verify.run_split import check_op

ENDS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)  # one group is empty, rows 8 and 9 have none
STARTS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
SHAPES = {"grouped_mm": ((10, 4), (4, 4, 6)), "grouped_outer": ((4, 10), (10, 6))}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def R(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", SHAPES)
def test_every_cut_makes_the_whole(name: str) -> None:
    a, b = (R(*shape) for shape in SHAPES[name])
    it = one(f"apportion.{name}", a, b, STARTS, ENDS, 0)
    assert it.cuttable() == {"s", "g", "k", "n"}
    findings = check_op(it.space, 0, it.tensors, CONTEXT)
    assert len(findings) >= 4
    assert not [str(f) for f in findings if not f.right]


@pytest.mark.parametrize("name", SHAPES)
def test_torchs_operator_becomes_ours(name: str) -> None:
    a, b = (torch.randn(shape) for shape in SHAPES[name])
    found = lift_call(lambda *x: F.grouped_mm(*x[:2], offs=x[2]), (a, b, ENDS), {}).graph
    assert [op.kind for op in found.ops][-1] == f"apportion.{name}"


@pytest.mark.parametrize("shapes", [((12, 8), (4, 8, 16)), ((8, 12), (12, 16))])
def test_float64_is_what_torch_computes_in_float32(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (R(*shape) for shape in shapes)
    ends = torch.tensor([3, 3, 7, 12], dtype=torch.int32)
    true = GROUPED_MM(a.float(), b.float(), ends)
    torch.testing.assert_close(grouped_mm(a, b, ends).float(), true, rtol=1e-5, atol=1e-5)
    assert fake_grouped_mm(a, b, ends).shape == true.shape


def test_a_step_with_experts_is_captured() -> None:
    model = nn.ParameterDict({"experts": nn.Parameter(torch.randn(4, 8, 16))})

    def step(model: nn.ParameterDict, batch: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2, 4, 4, 12], dtype=torch.int32)
        return F.grouped_mm(batch, model["experts"], offs=ends).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = [op.kind for op in capture(step, model, optimizer, torch.randn(12, 8)).graph.ops]
    assert kinds.count("apportion.grouped_mm") == kinds.count("apportion.grouped_outer") == 1
