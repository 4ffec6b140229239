"""Prices of tasks in compiled code are those of a full simulation, bit for bit."""

import numpy as np
import pytest

from apportion.lower.exchange import TASKS, new_op_tasks, pair_columns
from apportion.lower.task_kinds import ASSEMBLE, COMPUTE
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost, price_table
from apportion.simulate.delta.new_blocks import bare_tasks
from apportion.simulate.delta.task_prices import empty_prices, price_tasks
from apportion.simulate.durations import nanoseconds

KINDS = ("aten.mm.default", "aten.relu.default", "aten.view.default", "no.such")


@pytest.mark.parametrize("name", ["3xh100", "flexflow-p100:4", "mixed-a100-v100", "local:4"])
def test_prices_are_those_of_the_cost_model(name: str) -> None:
    them = cluster(name)
    cost, devices, rng = default_cost(them), len(them.devices), np.random.default_rng(5)
    n = 400
    kind = rng.choice([COMPUTE, ASSEMBLE], n)
    device, op = rng.integers(devices, size=n), rng.integers(len(KINDS), size=n)
    nbytes = rng.integers(1 << 30, size=n) * (rng.random(n) < 0.8)
    flops, taken = rng.random(n) * 1e12 * (rng.random(n) < 0.8), rng.integers(9, size=n)
    itemsize, none = rng.choice([1, 2, 4, 8, 16, 32], n), np.full(n, -1)
    full = bare_tasks(
        devices, kind, device, none, nbytes, none, none, (), op=op, flops=flops,
        itemsize=itemsize, taken=taken, kinds=KINDS,
    )  # fmt: skip
    tasks = new_op_tasks(n, 0, devices, pair_columns(devices))
    tasks.used[TASKS] = n
    columns = {"kind": kind, "device": device, "operator": op, "nbytes": nbytes, "flops": flops}
    for column, given in {**columns, "itemsize": itemsize, "taken": taken}.items():
        getattr(tasks, column)[:n] = given
    issue = rng.integers(9, size=(devices, len(KINDS) + 1))
    prices = empty_prices(tasks)
    price_tasks(price_table(cost, them, KINDS), issue, tasks, prices)
    assert (prices.duration == nanoseconds(full, them, cost)).all()
    assert (prices.issue == issue[device, np.where(kind == COMPUTE, op, len(KINDS))]).all()
