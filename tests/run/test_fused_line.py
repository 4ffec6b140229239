"""The cost of fused kernels is found again in steps that take what a line says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.machine.cost_table import CostFile
from apportion.plan.make_plan import make_plan
from apportion.run.fused_line import FAMILIES, FusedStep, _row, fused_table, kernel_family
from apportion.simulate.simulate import simulate

SPECS = (
    *("mlp:width=512,batch=512", "gpt2:layers=1,batch=8,seq=512,vocab=8192,dropout=0"),
    *("resnet50:tiny", "vgg16:batch=8", "bert:tiny", "rnn:tiny", "gpt2:layers=1,batch=2,seq=128"),
)
TRUE = np.array([1e-4, 0.97, 0.5, 0.8, 1.0, 1.0, 2.5e-6, 1 / 3.2e12])


@pytest.fixture(scope="module")
def steps() -> list[FusedStep]:
    where = cluster("1xh200")
    table = default_cost(where).tables["h200"]
    found = []
    for number, spec in enumerate(SPECS):
        it = zoo.load(spec, 0, meta=True)
        program = capture(it.step, it.model, it.optimizer, it.batch)
        step = FusedStep(make_plan(program.graph, where, "single").tasks, where, 0.0)
        off = 1 + 0.03 * (-1) ** number
        found.append(replace(step, seconds=float(np.array(_row(table, step)) @ TRUE) * off))
    return found


def test_families() -> None:
    assert [kernel_family(kind) for kind in (
        "aten.mm.default", "aten.mm.default~odd", "apportion.conv_backward_input",
        "apportion.sdpa", "apportion.update",
    )] == list(FAMILIES)  # fmt: skip


@pytest.mark.slow
def test_steps_are_met_and_others_are_near(steps: list[FusedStep]) -> None:
    where = cluster("1xh200")
    generated = default_cost(where).tables["h200"]
    table = fused_table(generated, steps[:-1])
    assert table.condition.mode == "inductor" and table.lines["fused"].points == len(SPECS) - 1
    cost = default_cost(where, "inductor", (CostFile("here", "2.11.0", (table,)),))
    ratios = [simulate(s.tasks, where, cost).step_seconds / s.seconds for s in steps]
    assert ratios[:-1] == pytest.approx([1.0] * (len(SPECS) - 1), abs=0.05)
    assert ratios[-1] == pytest.approx(1.0, abs=0.15), "a step that was not among them"
