"""What fusion leaves of the traffic between kernels, and how replayed steps are priced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chain_plan import chain_plan

from apportion import zoo
from apportion.capture.capture import capture
from apportion.lower.task_graph import TaskGraph
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import FITTED, MEASURED, CostModel
from apportion.machine.cost_table import Condition, CostLine, CostTable, KernelMeasurement
from apportion.machine.fusible_kinds import fusible, reduces_rows
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.simulate.durations import issue_nanoseconds, nanoseconds, restricted, sources
from apportion.simulate.fusion import fused_groups, fused_traffic
from apportion.simulate.simulate import simulate

ROWS, WIDTH = 64, 32
WHOLE = ROWS * WIDTH * 4  # bytes of an activation


@pytest.fixture(scope="module")
def plan() -> Plan:
    return chain_plan(ROWS, WIDTH)


def of_kind(tasks: TaskGraph, kind: str) -> list[int]:
    return [k for k in range(len(tasks)) if tasks.works[tasks.work[k]].startswith(f"{kind}(")]


def test_a_chain_reads_and_writes_once(plan: Plan) -> None:
    tasks, traffic = plan.tasks, fused_traffic(plan.tasks)
    relu, mul, sigmoid = (
        of_kind(tasks, f"aten.{name}")[0]
        for name in ("relu.default", "mul.Tensor", "sigmoid.default")
    )
    assert traffic.kernels[[relu, mul, sigmoid]].tolist() == [1 / 3] * 3
    assert traffic.nbytes[mul] == 0, "what it reads and makes stays in the kernel"
    assert traffic.nbytes[sigmoid] == WHOLE, "the second product reads it"
    assert traffic.nbytes[relu] == 2 * WHOLE, "reads the first product; the way back reads its own"


def test_no_kernel_is_of_two_pieces(plan: Plan) -> None:
    tasks = plan.tasks
    relu, mul = of_kind(tasks, "aten.relu.default")[0], of_kind(tasks, "aten.mul.Tensor")[0]
    group = fused_groups(tasks).group
    assert group[relu] == group[mul]
    group = fused_groups(tasks, [range(mul), range(mul, len(tasks))]).group
    assert group[relu] != group[mul]


@pytest.mark.slow
def test_parts_of_a_loss_are_kernels_of_their_own() -> None:
    """All read one number, and targets, each its own part of them: nothing that kernels share."""
    it = zoo.load("gpt2:tiny,batch=4,seq=8,loss_parts=4", 0, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    tasks = make_plan(program.graph, cluster("1xh200"), "single").tasks
    parts = of_kind(tasks, "aten._log_softmax_backward_data.default")
    assert len(parts) == 4
    assert len(set(fused_groups(tasks).group[parts].tolist())) == 4


def test_products_and_updates_are_not_fused(plan: Plan) -> None:
    tasks, traffic = plan.tasks, fused_traffic(plan.tasks)
    for task in (*of_kind(tasks, "aten.mm.default"), *of_kind(tasks, "apportion.update")):
        assert not traffic.fused[task] and not traffic.nbytes[task]
    assert traffic.nbytes.sum() < tasks.nbytes[traffic.fused].sum()


def test_nothing_is_known_without_calls(plan: Plan) -> None:
    bare = replace(plan.tasks, work=np.zeros(0, np.int64))
    assert not fused_traffic(bare).fused.any()


def test_kinds_and_reductions() -> None:
    assert fusible("aten.add.Tensor") and fusible("apportion.batch_norm")
    assert not fusible("aten.mm.default") and not fusible("mine.turn.default")
    assert not fusible("apportion.update") and not fusible("aten.convolution.default")
    assert reduces_rows("aten.mean.dim(float32[4,8,32]) #0", 32.0)
    assert not reduces_rows("aten.sum.dim_IntList(float32[64,32]) #0", 64.0)
    assert not reduces_rows("aten.arange.default() #0", 1.0)


def model(mode: str, **given: object) -> CostModel:
    table = CostTable(Condition("h200", mode=mode), **given)  # type: ignore[arg-type]
    return CostModel("test", "", 1.0, {"h200": table}, mode)


def test_fused_tasks_take_their_share_of_a_kernel(plan: Plan) -> None:
    tasks, where = plan.tasks, plan.cluster
    line = {"fused": CostLine(0.0, 3e-6, 1e-9, 0.0, 2)}
    traffic = fused_traffic(tasks)
    mul = of_kind(tasks, "aten.mul.Tensor")[0]
    mine = f"fused:{tasks.works[tasks.work[mul]]}"
    cost = model("inductor", lines=line)
    taken = nanoseconds(tasks, where, cost)
    relu = of_kind(tasks, "aten.relu.default")[0]
    assert taken[mul] == 1000 and taken[relu] == 1000 + traffic.nbytes[relu]
    assert sources(tasks, where, cost)[mul] == FITTED
    known = model("inductor", lines=line, works={mine: KernelMeasurement(7e-6, 1.0, 1, 4)})
    assert nanoseconds(tasks, where, known)[mul] == 7000
    assert sources(tasks, where, known)[mul] == MEASURED
    assert mine in restricted(known, tasks).tables["h200"].works
    other = model("generated", lines=line, works={mine: KernelMeasurement(7e-6, 1.0, 1, 4)})
    assert nanoseconds(tasks, where, other)[mul] not in (1000, 7000)


def test_a_device_that_replays_is_told_once(plan: Plan) -> None:
    tasks, where = plan.tasks, plan.cluster
    issue = {"": 5e-6, "begin": 20e-6, "replay": 9e-6}
    told = issue_nanoseconds(tasks, where, model("graph", issue=issue))
    assert told[0] == 29_000 and not told[1:].any()
    each = issue_nanoseconds(tasks, where, model("generated", issue=issue))
    assert each[0] == 25_000 and (each[1:] == 5000).all()
    bare = replace(tasks, work=np.zeros(0, np.int64))
    assert not issue_nanoseconds(bare, where, model("graph", issue=issue)).any()


def test_replaying_takes_the_host_out_of_the_step(plan: Plan) -> None:
    issue = {"": 50e-6}
    slow = simulate(plan.tasks, plan.cluster, model("generated", issue=issue)).step_seconds
    fast = simulate(plan.tasks, plan.cluster, model("graph", issue=issue)).step_seconds
    assert slow > 50e-6 * len(plan.tasks) * 0.99 and fast < slow / 4
