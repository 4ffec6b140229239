"""What a step trains on, and how much of it in a second."""

from __future__ import annotations

import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.throughput import throughput, trained_on
from apportion.show.plan_tables import verdict


@pytest.mark.parametrize(
    ("spec", "unit", "count"),
    [
        ("gpt2:tiny", "tokens", 30),
        ("gpt2:tiny,accumulate=2", "tokens", 30),
        ("lenet:tiny", "samples", 6),
        ("mlp:tiny", "samples", 7),
    ],
)
def test_steps_are_counted_in_tokens_or_samples(spec: str, unit: str, count: int) -> None:
    it = zoo.load(spec, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph
    assert trained_on(graph) == (unit, count)


def test_the_first_line_says_whether_it_fits_and_how_fast_it_is() -> None:
    it = zoo.load("gpt2:tiny", meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    plan = make_plan(program, cluster("2xh100"), "data")
    done, step = throughput(plan), plan.predicted.step_seconds
    assert done is not None
    assert (done.per_second, done.per_device) == (30 / step, 15 / step)
    assert verdict(plan).startswith("fits: 433.66 KB of 80.00 GB; ")
    assert verdict(plan).endswith(f" a step, {15 / step:,.0f} tokens/s/GPU, 0% MFU")
    tight = make_plan(program, cluster("2xh100"), "data", memory_limit=100_000)
    assert verdict(tight).startswith("does not fit: 433.66 KB of 100.00 KB; ")
    free = make_plan(program, cluster("local:2"), "data", memory_limit=float("inf"))
    assert verdict(free).startswith("without a limit: ")
    assert "tokens/s/process" in verdict(free)
