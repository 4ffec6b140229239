"""What a compiled step of images holds: places of maxima in a byte, gradients put off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.candidates import DefaultCosts
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan

BATCH, CHANNELS, SIDE, WIDE = 512, 128, 32, 4096


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.pool = torch.nn.MaxPool2d(2)
        self.second = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.last = torch.nn.Linear(CHANNELS * SIDE * SIDE // 4, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(self.pool(self.first(x).relu())).relu()
        found: torch.Tensor = self.last(out.flatten(1))
        return found


def step(model: Images, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    with torch.device("meta"):
        model, batch = Images(), torch.empty(BATCH, 3, SIDE, SIDE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = capture(step, model, optimizer, batch)
    where = cluster("1xh200")
    fused = DefaultCosts(where, mode="inductor")
    return make_plan(program.graph, where, "single"), make_plan(
        program.graph, where, "single", costs=fused
    )


@pytest.mark.slow
def test_places_of_maxima_take_a_byte_each(plans: tuple[Plan, Plan]) -> None:
    plain, fused = plans
    numbers = [v.name for v in plain.graph.values if v.dtype == "int64" and v.shape]
    kinds = [int(s) for s in plain.tasks.slot_value.tolist()]
    slots = [k for k, v in enumerate(kinds) if plain.graph.values[v].name in numbers]
    places = [k for k in slots if plain.tasks.slot_nbytes[k] == 8 * BATCH * CHANNELS * 256]
    assert places
    for slot in places:
        assert fused.tasks.slot_nbytes[slot] * 8 == plain.tasks.slot_nbytes[slot]


def test_the_gradient_of_the_largest_weight_comes_last(plans: tuple[Plan, Plan]) -> None:
    _, fused = plans
    weight = WIDE * CHANNELS * SIDE * SIDE // 4 * 4
    gradients = [
        slot
        for slot, value in enumerate(fused.tasks.slot_value.tolist())
        if fused.graph.values[value].name == "last.weight.grad"
    ]
    (slot,) = [s for s in gradients if fused.tasks.slot_nbytes[s] == weight]
    assert slot in dict(fused.storage.late)
    assert fused.tasks.slot_first[slot] > max(
        task
        for task, op in enumerate(fused.tasks.op.tolist())
        if fused.graph.ops[op].kind.startswith("apportion.conv_backward")
    ) - 5  # fmt: skip


def test_the_file_of_a_plan_keeps_it(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    for plan in plans:
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded.storage == plan.storage
        assert loaded.predicted.peak_bytes == plan.predicted.peak_bytes
    assert plans[1].storage.late and not plans[0].storage.late
