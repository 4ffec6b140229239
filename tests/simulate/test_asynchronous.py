"""What asynchronous devices need, as far as it shows without one: attention's kernels, the host
that issues, and the shipped table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.dry_run import DeviceMemoryFacts, device_memory_facts
from apportion.execute.kernels import (
    attention,
)
from apportion.execute.kernels.base import (
    Context,
    kernel,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import shipped
from apportion.plan.candidates import DefaultCosts
from apportion.plan.make_plan import make_plan
from apportion.simulate.durations import shares
from apportion.simulate.network import issued


@pytest.mark.parametrize("own", [4, 2])
@pytest.mark.parametrize(
    ("causal", "masked", "start"),
    [(False, False, ()), (True, False, ()), (False, True, ()), (True, False, (3, 0))],
)
def test_plain_attention_is_that_of_the_cpu_kernel(
    own: int, causal: bool, masked: bool, start: tuple[int, ...]
) -> None:
    """In float64 no fused kernel of CUDA applies."""
    torch.manual_seed(1)
    keys = 5 + 3 * bool(start)
    q, grad = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, own, keys, 6, dtype=torch.float64)
    mask = torch.randn(2, 1, 5, keys, dtype=torch.float64) if masked else None
    context = Context(0, 0, float)
    rest: tuple[Any, ...] = (causal, mask, None)
    true = kernel("apportion.sdpa")(context, (q, k, v, 0.0, *rest, *start))
    back = kernel("apportion.sdpa_backward")(context, (grad, q, k, v, *true, 0.0, *rest, *start))
    ours = attention._on_cuda(q, k, v, *rest, start)
    found = attention._backward_on_cuda(grad, q, k, v, *ours, *rest, start)
    for a, b in zip((*ours, *found), (*true, *back), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_context_without_data_says_whose_kernels_are_meant() -> None:
    assert Context(0, 0, float, device="cuda").cuda
    assert Context(0, 0, float, device="meta", like="cuda").cuda
    assert not Context(0, 0, float, device="meta").cuda
    assert not Context(0, 0, float).cuda


# The host


def test_a_host_issues_one_task_after_another() -> None:
    device, issue, duration = np.array([0, 1, 0, 0]), np.array([5, 7, 5, 0]), np.full(4, 100)
    assert issued(device, issue, duration, np.zeros(2, np.int64)).tolist() == [5, 7, 10, 0]


def test_a_host_waits_when_the_queue_of_its_device_is_full() -> None:
    """Tasks of 100 are issued in 10 each, at most 20 ahead: the third waits for the first to begin,
    the fourth for the second, which begins when the first ends."""
    issue, duration, device = np.full(5, 10), np.full(5, 100), np.zeros(5, np.int64)
    assert issued(device, issue, duration, np.array([0])).tolist() == [10, 20, 30, 40, 50]
    assert issued(device, issue, duration, np.array([20])).tolist() == [10, 20, 30, 110, 210]


@pytest.mark.parametrize("seed", range(20))
def test_issuing_equals_a_slow_walk(seed: int) -> None:
    draw = np.random.default_rng(seed)
    device = draw.integers(0, 3, 60)
    issue = draw.integers(0, 4, 60) * 10
    duration = draw.integers(1, 60, 60)
    ahead = np.array([0, 35, 90])
    expected = np.zeros(60, np.int64)
    for d in range(3):
        tasks = [t for t in np.flatnonzero(device == d).tolist() if issue[t]]
        begun: list[int] = []
        host = 0
        for place, task in enumerate(tasks):
            host += int(issue[task])
            done = np.cumsum(issue[tasks[: place + 1]])
            waits = [k for k in range(place) if ahead[d] and done[k] <= done[-1] - ahead[d]]
            host = max([host, *(begun[k] for k in waits)])
            free = begun[-1] + int(duration[tasks[place - 1]]) if begun else 0
            begun.append(max(host, free))
            expected[task] = host
    assert issued(device, issue, duration, ahead).tolist() == expected.tolist()


# The shipped table


def test_a_table_of_the_h200_is_shipped() -> None:
    of_mode = {t.condition.mode: t for t in shipped() if t.condition.kind == "h200"}
    assert of_mode.keys() == {"none", "generated", "inductor"}
    table, fused = of_mode["generated"], of_mode["inductor"].lines["fused"]
    assert len(table.works) > 1000
    assert 2e12 < 1 / fused.per_byte < 4.8e12  # below the published bandwidth
    assert table.issue[""] < of_mode["none"].issue[""]
    known = device_memory_facts(table)
    assert known.resident > 32 << 20  # cuBLAS
    assert known.usual("aten.convolution.default", 1 << 28) > 1 << 26
    assert known.usual("aten.relu.default", 1 << 28) == 0
    assert device_memory_facts(None) == DeviceMemoryFacts()
    product = table.fits["aten.mm.default/4"]
    assert 40e12 < 1 / product.per_flop < 67e12  # float32 without TF32, below the published rate


@pytest.mark.slow
def test_a_plan_for_an_h200_is_costed_by_its_table() -> None:
    spec = "gpt2:layers=4,width=256,heads=4,batch=4,seq=256,dropout=0"
    it = zoo.load(spec, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    where = cluster("1xh200")
    made = make_plan(program, where, "single")
    assert shares(made.tasks, made.cluster, made.cost)["measured"] > 0.99
    assert made.predicted.step_seconds == pytest.approx(5.44e-3, rel=0.25)  # as it was measured
    assert made.predicted.peak_bytes[0] == pytest.approx(915e6, rel=0.03)
    fast = make_plan(program, where, "single", costs=DefaultCosts(where, mode="inductor"))
    assert fast.predicted.step_seconds == pytest.approx(3.80e-3, rel=0.05)
