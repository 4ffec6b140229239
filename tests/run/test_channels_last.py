"""Convolutions are measured on operands in the order that torch's compiler gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apportion.capture.capture import capture
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import kernel
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.machine.cost_table import CostFile, KernelMeasurement, kind_of_signature
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run import channels_last
from apportion.run.channels_last import (
    channels_last_call,
    image_convolutions,
    measured_channels_last,
    turns_images,
)
from apportion.run.fused_line import FusedStep, fused_table
from apportion.simulate.simulate import simulate


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 80, 3, padding=1)
        self.second = torch.nn.Conv2d(80, 96, 3, stride=2)
        self.third = torch.nn.Conv2d(96, 96, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(self.first(x).relu()).relu())
        return out


def step(model: Images, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = Images()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = capture(step, model, optimizer, torch.zeros(2, 3, 9, 9))
    return make_plan(program.graph, cluster("1xh200"), "single")


@pytest.fixture(scope="module")
def executable(plan: Plan) -> Executable:
    return Executable(plan.space, plan.strategy, plan.tasks)


def test_each_convolution_of_images_is_found_once(plan: Plan, executable: Executable) -> None:
    found = image_convolutions(executable, plan.storage)
    kinds = [kind_of_signature(text) for text in found]
    assert kinds.count("aten.convolution.default") == 3
    assert kinds.count("apportion.conv_backward_both") == 2
    assert kinds.count("apportion.conv_backward_weight") == 1, "the batch has no gradient"


def test_what_a_call_reads_and_makes(
    plan: Plan, executable: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Any]] = []

    def watched(kind: str) -> Any:
        def run(context: Any, args: Any) -> Any:
            seen.append(list(args))
            return kernel(kind)(context, args)

        return run

    monkeypatch.setattr(channels_last, "kernel", watched)
    for text, task in image_convolutions(executable, plan.storage).items():
        made = channels_last_call(executable, task, "cpu")()
        shapes = [executable.slots[slot].shape for slot in executable.computes[task].outs]
        assert [tuple(x.shape) for x in made] == shapes
        order = [
            x.is_contiguous(memory_format=torch.channels_last)
            for x in seen[-1]
            if isinstance(x, torch.Tensor) and min(x.shape) > 1
        ]
        forward = kind_of_signature(text) == "aten.convolution.default"
        batch = "apportion.conv_backward_weight" in text
        assert all(order) if forward else order[:2] == [True, not batch], text
        assert not forward or seen[-1][2] is None, "the bias is another kernel's"


@pytest.mark.parametrize(
    ("weights", "turned"),
    [
        ([((64, 3, 7, 7), 1), ((256, 64, 1, 1), 1), ((64, 256, 1, 1), 1)], True),
        ([((64, 3, 7, 7), 1), ((64, 64, 3, 3), 1)], False),  # few channels everywhere
        ([((128, 64, 3, 3), 1), ((32, 128, 3, 3), 1)], False),  # far fewer than it reads
        ([((128, 64, 3, 3), 1), ((128, 2, 3, 3), 64)], False),  # groups of several channels
        ([((128, 64, 1, 1), 1), ((128, 1, 3, 3), 128)], True),
        ([], False),
    ],
)
def test_whether_images_are_turned(weights: Any, turned: bool) -> None:
    assert turns_images(weights) is turned


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        _Event.now += 0.25
        self.at = _Event.now

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at

    now = 0.0


def test_a_table_of_them(
    plan: Plan, executable: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 300)
    monkeypatch.setattr(channels_last, "sleep", lambda seconds: None)
    monkeypatch.setattr(channels_last, "FLUSHED", 8)
    real = channels_last.channels_last_call

    def slow(executable: Executable, task: int, place: str, turning: bool = False) -> Any:
        call = real(executable, task, place, turning)

        def run() -> Any:
            _Event.now += 2.0
            return call()

        return run

    monkeypatch.setattr(channels_last, "channels_last_call", slow)
    found = measured_channels_last(executable, plan.storage, "cpu")
    assert len(found) == 6
    for text, work in found.items():
        task = image_convolutions(executable, plan.storage)[text]
        assert work.seconds == pytest.approx(2e-3) and work.workspace == 700
        assert work.flops == executable.tasks.flops[task] and work.itemsize == 4


def test_compiled_steps_take_what_was_measured_in_their_order(
    plan: Plan, executable: Executable
) -> None:
    where, tasks = plan.cluster, plan.tasks
    generated = default_cost(where).tables["h200"]
    turned = {
        text: KernelMeasurement(
            2e-3, float(tasks.flops[task]), int(tasks.nbytes[task]), 4, 1000 + task
        )
        for text, task in image_convolutions(executable, plan.storage).items()
    }
    step = FusedStep(tasks, where, 0.03)
    table = fused_table(generated, [step], turned=turned)
    for text, work in turned.items():
        assert table.works[text].workspace == work.workspace
        assert 1e-3 < table.works[text].seconds < 5e-3, "not what generated code takes"
    cost = default_cost(where, "inductor", (CostFile("here", "2.11.0", (table,)),))
    assert simulate(tasks, where, cost).step_seconds == pytest.approx(0.03, rel=0.05)


def test_convolutions_of_another_order_say_nothing(plan: Plan, executable: Executable) -> None:
    where, kind = plan.cluster, "aten.convolution.default"
    before = default_cost(where).tables["h200"]
    here = {t for t in image_convolutions(executable, plan.storage) if t.startswith(kind)}
    turned = {text: KernelMeasurement(1e-3, 1e9, 10**6, 4) for text in here}
    table = fused_table(before, [FusedStep(plan.tasks, where, 0.01)], turned=turned)
    costs = default_cost(where, "inductor", (CostFile("here", "2.11.0", (table,)),))
    known = costs.tables["h200"].works
    there = {text for text in before.works if text.startswith(f"{kind}(")}
    assert there and here <= known.keys()
    stale = [t for t in there - here if known.get(t) == before.works[t]]
    assert not stale, "measured in generated code"
    assert any(t.startswith("aten.mm.") and known.get(t) == w for t, w in before.works.items())
