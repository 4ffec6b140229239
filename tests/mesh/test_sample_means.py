"""Programs whose ranks average are refused where that is not what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apportion as ap
from apportion.mesh.layout_of_plan import NotExpressible, layout_of_plan
from apportion.mesh.program_text import check_program, program_text
from apportion.plan.make_plan import make_plan


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) * 0.5 + 1.0


def own_mean(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean(dim=1).mean()


def total(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def root(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]).sqrt()


def centred(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.mse_loss(out - out.mean(dim=0, keepdim=True), batch[1])


def exported(step: Callable[..., Tensor], samples: int = 8, norm: bool = False) -> str:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    batch = (torch.randn(samples, 6), torch.randn(samples, 4))
    program = ap.capture(step, model, torch.optim.SGD(model.parameters(), 0.1), batch)
    plan = make_plan(program, ap.cluster("local:2"), "fsdp")
    layout = layout_of_plan(program.graph, plan)
    check_program(program, plan, layout)
    return program_text(program, plan, layout, "net.py:make")


@pytest.mark.parametrize("step", [mean, own_mean])
def test_means_over_samples_are_exported(step: Callable[..., Tensor]) -> None:
    text = exported(step)
    compile(text, "train.py", "exec")
    assert "SAMPLE_DIMS = {0: 0, 1: 0}" in text and "import apportion" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "samples", "norm", "says"),
    [
        (total, 8, False, "mse_loss.*not known to be a mean"),
        (root, 8, False, "sqrt.*not known to be a mean"),
        (centred, 8, False, "'mean.*mixes samples"),
        (mean, 7, False, "7 samples, which 2 ranks cannot share"),
        (mean, 8, True, "mixes samples|all samples"),
    ],
)
def test_what_is_no_mean_over_samples_is_refused_by_name(
    step: Callable[..., Tensor], samples: int, norm: bool, says: str
) -> None:
    with pytest.raises(NotExpressible, match=says) as error:
        exported(step, samples, norm)
    assert "operator '" in str(error.value)
