"""Which plan is kept after trials, and what can be tried at all; no process is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
from graphs import captured

import apportion as ap
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan, PlanTrial
from apportion.run import plan_here as planning
from apportion.run import pool, trial
from apportion.run.pool import SharedPool
from apportion.run.step_source import StepSource
from apportion.run.trial import TrialFailure, fastest_measured, keep_fastest, step_seconds, unfit
from apportion.show import plan_tables
from apportion.show.json_facts import plan_facts


def made(method: str = "data") -> Plan:
    return make_plan(captured("mlp:tiny")[0].graph, ap.cluster("local:2"), method)


@pytest.mark.slow
def test_the_really_fastest_is_kept() -> None:
    plans = [made("data"), made("fsdp"), made("single")]
    plan = keep_fastest(plans, [0.5, 0.25, 0.75])
    assert plan.strategy == plans[1].strategy and plan.method == "fsdp"
    expected = [p.predicted.step_seconds for p in plans]
    assert plan.measured == (
        PlanTrial("data", expected[0], 0.5, False),
        PlanTrial("fsdp", expected[1], 0.25, True),
        PlanTrial("single", expected[2], 0.75, False),
    )
    assert "of 3 plans that ran, that by fsdp was the fastest: 250 ms a step" in plan.notes[-1]
    assert plan.tasks is plans[1].tasks
    assert plan_facts(plan)["measured"][1] == {
        "method": "fsdp",
        "predicted_seconds": expected[1],
        "measured_seconds": 0.25,
        "chosen": True,
    }
    rows = list(plan_tables.trials(plan).columns[-1].cells)
    assert rows == ["", "kept", ""]


def test_what_fails_is_left_out_with_its_reason() -> None:
    plans = [made("data"), made("fsdp")]
    plan = keep_fastest(plans, [TrialFailure("rank 1 failed: no"), 0.25])
    assert plan.method == "fsdp" and [t.method for t in plan.measured] == ["fsdp"]
    assert "data was left out: rank 1 failed: no" in plan.notes
    plan = keep_fastest(plans, [TrialFailure("this"), TrialFailure("that")])
    assert plan.method == "data" and plan.measured == ()
    assert plan.notes[-1] == "nothing was measured: the best as predicted"


def test_a_step_is_never_shorter_than_a_rank_takes() -> None:
    """Though the other, with nothing to do, begins when the first is nearly done."""
    works, idles = [(0.0, 2.0)], [(1.75, 1.875)]
    assert step_seconds([works, idles]) == step_seconds([idles, works]) == 2.0
    assert step_seconds([[(0.0, 1.0)], [(0.5, 3.5)]]) == 3.5


def test_disturbed_steps_do_not_count() -> None:
    assert step_seconds([[(0.0, 4.0), (5.0, 6.0), (7.0, 16.0), (20.0, 22.0), (30.0, 33.0)]]) == 2.0


def test_a_plan_that_takes_too_much_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made()
    assert unfit(plan, 1e12) == ""
    assert "running it would need" in unfit(plan, 1.0)
    slow = replace(plan, predicted=replace(plan.predicted, step_seconds=100.0))
    assert unfit(slow, 1e12) == "one step would take about 100 s"
    monkeypatch.setattr(trial, "free_memory", lambda: 1.0)
    told: list[str] = []
    source = StepSource(plan.graph, "mlp:tiny")
    kept = fastest_measured([plan], source, told.append, SharedPool(2))
    assert told == ["running 1 plan for 7 steps each on 2 processes"]
    assert kept.measured == () and "data was left out: running it would need" in kept.notes[-2]


def test_an_interrupt_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        answers: ClassVar = [[[(0.0, 1.0)], [(0.0, 1.0)]]]
        closed = False

        def __init__(self, processes: int, timeout: float) -> None:
            pass

        def ask(self, request: Any, timeout: float) -> Any:
            if not self.answers:
                raise KeyboardInterrupt
            return self.answers.pop()

        def close(self) -> None:
            Interrupted.closed = True

    monkeypatch.setattr(pool, "ProcessPool", Interrupted)
    plans = [made("data"), made("fsdp")]
    source = StepSource(plans[0].graph, "mlp:tiny")
    with SharedPool(2) as processes:
        plan = fastest_measured(plans, source, lambda text: None, processes)
    assert plan.method == "data" and "fsdp was left out: interrupted" in plan.notes
    assert [t.measured_seconds for t in plan.measured] == [1.0] and Interrupted.closed


def test_plans_that_do_not_fit_are_not_run() -> None:
    plan = make_plan(
        captured("mlp:tiny")[0].graph, ap.cluster("local:2"), "data", budget=0.0, memory_limit=1
    )
    source = StepSource(plan.graph, "mlp:tiny")
    kept = fastest_measured([plan], source, lambda text: None, SharedPool(2))
    assert not kept.feasible and kept.notes[-1] == "nothing was measured: no plan fits"


@pytest.mark.parametrize(
    ("place", "measure", "sentence"),
    [
        ("8xh100", 2, "plans for 8xh100 cannot be measured: this machine has no such devices"),
        ("local:2", 0, "0 plans cannot be measured"),
        ("local:2", 2, "a Graph alone cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    place: str, measure: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("it began to search")

    monkeypatch.setattr(planning, "best_plans", never)
    with pytest.raises(ValueError, match=sentence):
        ap.plan(captured("mlp:tiny")[0].graph, ap.cluster(place), measure=measure)
