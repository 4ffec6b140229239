"""auto and the memory limit: never worse than a baseline, anytime, and clear when nothing fits."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from graphs import captured
from method_rows import Searches, only, row

import apportion as ap
from apportion.lower.task_graph import TaskGraph
from apportion.machine.cost_model import ASSUMED, CostModel
from apportion.machine.cost_table import Condition, CostTable
from apportion.machine.topology import verify as verify_cluster
from apportion.plan import auto, candidates
from apportion.plan import devices_needed as enough
from apportion.plan import plan as plans
from apportion.plan.candidates import PlanningProgress
from apportion.plan.make_plan import compare_methods, make_plan
from apportion.plan.plan import Plan, PlanWarning
from apportion.search import METHODS, Problem, SearchResult, UnsuitableMethod, tried_by_auto
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.baselines.random_strategy import random as random_search
from apportion.search.problem import Progress
from apportion.split.strategy import Strategy
from apportion.work_clock import WORK_CLOCK

Search = Callable[..., SearchResult]


@pytest.fixture
def without_flexflow() -> Iterator[None]:
    """Which takes all the time that there is. The order of METHODS is the same afterwards."""
    with only(*(name for name in METHODS if name != "flexflow")):
        yield


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Searches]:
    """METHODS with data and fsdp alone, to be added to."""
    with only("data", "fsdp") as found:
        yield found


def interrupted(problem: Problem, **how: Any) -> NoReturn:
    raise KeyboardInterrupt


def peak(plan: Plan) -> int:
    return max(plan.predicted.peak_bytes)


def rows(spec: str, place: str, **how: Any) -> list[Plan]:
    """Plans by all that auto tries, but for what takes all the time that there is."""
    names = [name for name in tried_by_auto() if not METHODS[name].takes_starts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        return compare_methods(captured(spec)[0], ap.cluster(place), names, **how)


@pytest.mark.slow
@pytest.mark.usefixtures("without_flexflow")
@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("mlp:tiny", "local:2"),
        pytest.param("gpt2:tiny,layers=1", "6xh100", marks=pytest.mark.soak),
        ("lenet:tiny", "3xk80"),
        ("mlp:layers=2,width=256,batch=64", "2x2xa100"),
    ],
)
def test_auto_is_never_worse_than_any_method(
    spec: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enough, "QUICK_METHODS", ())
    graph, cluster = captured(spec)[0], ap.cluster(place)
    plans = rows(spec, place)
    least = min(map(peak, plans))
    for limit in (math.inf, least):
        auto = make_plan(graph, cluster, memory_limit=limit)
        seconds = [p.predicted.step_seconds for p in plans if peak(p) <= limit]
        assert auto.feasible and auto.predicted.step_seconds <= min(seconds)
    assert peak(make_plan(graph, cluster, memory_limit=least - 1)) <= least


@pytest.mark.slow
def test_without_a_budget_auto_is_the_best_baseline() -> None:
    spec, place = "mlp:tiny", ap.cluster("local:2")
    auto = make_plan(captured(spec)[0], place, budget=0.0)
    baselines = [plan for plan in rows(spec, "local:2") if METHODS[plan.method].baseline]
    best = min(baselines, key=lambda p: (p.predicted.step_seconds, p.predicted.bytes_moved))
    assert (auto.method, auto.predicted) == (best.method, best.predicted)
    assert "the budget ended before tofu" in auto.notes[-1]


@pytest.mark.slow
def test_the_last_method_improves_what_others_found_however_long_they_take(
    searches: Searches,
) -> None:
    """A share of the budget is kept for it, nobody pays for what is compiled, and what it leaves is
    for those that were late."""
    given: dict[str, float] = {}

    def lasting(seconds: float, compiles: float) -> Search:
        def search(problem: Problem, *, budget: float, **how: Any) -> SearchResult:
            given[f"{seconds}"] = budget
            WORK_CLOCK.stop()
            time.sleep(compiles)
            WORK_CLOCK.go_on()
            time.sleep(seconds)
            return data(problem)

        return search

    searches["tofu"] = lasting(0.5, compiles=1.0)
    searches["tofu-seconds"] = lasting(1.6, compiles=0.0)
    searches["exact"] = lasting(0.1, compiles=0.0)
    searches["flexflow"] = lasting(0.0, compiles=0.0)
    auto = make_plan(captured("mlp:tiny")[0], ap.cluster("1xh100"), budget=3.0)
    assert list(given) == ["0.5", "1.6", "0.0", "0.1"]
    assert given["0.5"] <= 2.0 and given["1.6"] <= 1.5
    assert 0.9 >= given["0.0"] > 0.2
    assert given["0.1"] < 0.9  # what the last one has left over
    assert auto.notes[-1].endswith("flexflow, exact")


def test_baselines_keep_to_the_budget_once_something_fits(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all of them together take longer; but where nothing fits yet, they are tried."""
    asked: list[str] = []

    def watched(problem: Problem, **how: Any) -> SearchResult:
        asked.append("owt")
        return random_search(problem, seed=1)

    searches["owt"] = watched
    monkeypatch.setattr(auto, "BASELINE_SECONDS", 0.0)
    graph, place = captured("mlp:tiny")[0], ap.cluster("2xh100")
    made = make_plan(graph, place, budget=0.0)
    assert asked == [] and made.notes[-1].endswith("; the budget ended before owt")
    assert not make_plan(graph, place, budget=0.0, memory_limit=1).feasible
    assert asked == ["owt"]


@pytest.mark.slow
def test_an_interrupt_leaves_the_best_so_far(searches: Searches) -> None:
    graph, place = captured("gpt2:tiny")[0], ap.cluster("local:2")
    searches["tofu"] = interrupted
    auto = make_plan(graph, place)
    assert auto.method == "data" and "interrupted: this is the best so far" in auto.notes
    with pytest.warns(PlanWarning, match="interrupted; methods not tried: tofu, fsdp"):
        plans = compare_methods(graph, place, ["data", "tofu", "fsdp"])
    assert [plan.method for plan in plans] == ["data"]
    with pytest.raises(KeyboardInterrupt):
        make_plan(graph, place, "tofu")
    with pytest.raises(KeyboardInterrupt):
        compare_methods(graph, place, ["tofu", "data"])
    searches["data"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        make_plan(graph, place)


def test_an_interrupted_auto_ends_a_comparison(searches: Searches) -> None:
    searches["tofu"] = interrupted
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    with pytest.warns(PlanWarning, match="interrupted; methods not tried: fsdp"):
        (only,) = compare_methods(graph, place, ["auto", "fsdp"])
    assert only.method == "auto" and "interrupted: this is the best so far" in only.notes


def test_methods_that_are_not_for_the_step_are_passed_over(searches: Searches) -> None:
    def never(problem: Problem, **how: Any) -> NoReturn:
        raise UnsuitableMethod("not for this")

    searches["tofu"] = never
    auto = make_plan(captured("mlp:tiny")[0], ap.cluster("local:2"))
    assert auto.notes[-1] == f"auto took {auto.method} of data, fsdp"


def test_equal_strategies_are_scored_once(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    real = candidates.scored

    def counted(request: Any, method: str, *found: Any) -> Any:
        scored.append(method)
        return real(request, method, *found)

    monkeypatch.setattr(candidates, "scored", counted)
    searches["tofu"] = data
    make_plan(captured("mlp:tiny")[0], ap.cluster("local:2"))
    assert scored == ["data", "fsdp"]


def test_what_was_worked_out_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by changes that it does not depend on; others drop it."""

    def never(*given: Any) -> None:
        raise AssertionError("it was worked out again")

    made = make_plan(captured("mlp:tiny")[0], ap.cluster("local:2"), "data")
    for name in ("runnable", "simulate"):
        monkeypatch.setattr(plans, name, never)
    named = plans.with_trials(plans.with_model(made, "mlp:tiny"), (), ("a note",))
    assert named.model == "mlp:tiny" and named.timeline is made.timeline
    assert named.tasks is made.tasks and named.space is made.space
    assert made.timeline.step_seconds == made.predicted.step_seconds
    with pytest.raises(AssertionError, match="worked out again"):
        replace(made, cost=replace(made.cost, efficiency=0.5)).simulate()


# The memory limit


def proxied(calls: list[tuple[int, ...]], margin: int) -> Search:
    """A search that sees memory by a proxy which is too low by about `margin` bytes."""

    def search(problem: Problem, *, budget: float, seed: int) -> SearchResult:
        limit = problem.memory_limit
        assert limit is not None
        calls.append(limit)
        low = make_plan(problem.space.source, problem.cluster, "data", memory_limit=math.inf)
        return data(problem) if peak(low) - margin <= max(limit) else fsdp(problem)

    return search


@pytest.mark.slow
def test_a_search_over_the_limit_is_asked_again_with_a_lower_one(
    searches: Searches,
) -> None:
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    high, low = (peak(make_plan(graph, place, method)) for method in ("data", "fsdp"))
    limit, calls = (high + low) // 2, []
    searches["proxied"] = proxied(calls, high - limit)
    plan = make_plan(graph, place, "proxied", memory_limit=limit)
    assert plan.feasible and peak(plan) == low and plan.method == "proxied"
    assert calls[0] == (limit, limit) and len(calls) == 2
    over = [p - limit for p in make_plan(graph, place, "data").predicted.peak_bytes]
    assert calls[1] == tuple(limit - max(n, 0) for n in over)
    calls.clear()
    late = make_plan(graph, place, "proxied", memory_limit=limit, budget=0.0)
    assert not late.feasible and len(calls) == 1


@pytest.mark.slow
def test_a_search_that_does_not_mind_the_limit_is_scored_once(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    calls: list[tuple[int, ...]] = []

    def deaf(problem: Problem, **how: Any) -> SearchResult:
        calls.append(problem.memory_limit or ())
        return data(problem)

    searches["deaf"] = deaf
    limit = peak(make_plan(graph, place, "data")) - 1
    monkeypatch.setattr(enough, "QUICK_METHODS", ())
    assert not make_plan(graph, place, "deaf", memory_limit=limit).feasible
    assert len(calls) == 2


@pytest.mark.slow
def test_rounds_end(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    drawn: list[int] = []

    def restless(problem: Problem, **how: Any) -> SearchResult:
        drawn.append(len(drawn))
        return random_search(problem, seed=len(drawn))

    searches["restless"] = restless
    limit = peak(make_plan(graph, place, "fsdp")) * 9 // 10
    monkeypatch.setattr(enough, "QUICK_METHODS", ())
    plan = make_plan(graph, place, "restless", memory_limit=limit)
    assert plan.feasible or 1 <= len(drawn) <= candidates.ROUNDS


def test_without_a_limit_everything_fits(tmp_path: Any) -> None:
    seen: list[Any] = []

    def watch(problem: Problem, **how: Any) -> SearchResult:
        seen.append(problem.memory_limit)
        return data(problem)

    place = ap.cluster("local:2")
    small = replace(place, devices=tuple(replace(d, memory_bytes=1) for d in place.devices))
    graph = captured("mlp:tiny")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "data", row("data", watch))
        plan = make_plan(graph, small, "data", memory_limit=math.inf)
    assert seen == [None] and plan.feasible and plan.memory_limit is None
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == plan
    plan.report(tmp_path / "p.html")
    assert not make_plan(graph, small, "data", budget=0.0).feasible


# Nothing fits


@pytest.mark.slow
def test_the_number_of_devices_that_would_do_is_planned(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned there it fits, with one device less it does not. Activations are most of what the
    model needs: what weights are exchanged in shrinks with more devices only from a MiB on."""
    graph = captured("mlp:layers=2,width=64,batch=840")[0]

    def planned(count: int, limit: float = math.inf) -> Plan:
        return make_plan(graph, ap.cluster(f"local:{count}"), "fsdp", 0.0, limit)

    limit = peak(planned(7))
    plan = make_plan(graph, ap.cluster("local:2"), memory_limit=limit, budget=600.0)
    assert not plan.feasible
    found = re.fullmatch(
        r"(\d+) such devices of .* would do \(by fsdp\), (\d+) would not", plan.notes[-1]
    )
    assert found, plan.notes
    most, least = int(found[1]), int(found[2])
    assert 2 < most <= 8 and least == most - 1
    assert planned(most, limit).feasible and not planned(least, limit).feasible


def test_what_is_over_is_told() -> None:
    graph = captured("mlp:tiny")[0]
    limit = peak(make_plan(graph, ap.cluster("2xh100"), "fsdp")) - 512
    plan = make_plan(graph, ap.cluster("2xh100"), "fsdp", memory_limit=limit, budget=0.0)
    told = plan.notes[-2]
    assert told.startswith("the plan by fsdp does not fit: it needs ")
    assert re.search(r"on device [01] \(node/gpu[01]\), 512 B over its limit of", told)
    most = max(range(2), key=plan.predicted.peak_bytes.__getitem__)
    kinds = plan.timeline.peak_categories[most]
    assert all(kind in told for kind in sorted(kinds, key=lambda k: -kinds[k])[:3])
    assert plan.notes[-1].endswith("was not found out within the budget")


def test_a_method_that_does_not_fit_where_another_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enough, "QUICK_METHODS", ("fsdp",))
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:3")
    limit = peak(make_plan(graph, place, "fsdp"))
    plan = make_plan(graph, place, "data", memory_limit=limit)
    assert not plan.feasible
    assert plan.notes[-1] == "on these devices there is a plan that fits, by fsdp"


def test_no_number_of_devices_holds_more_than_they_have() -> None:
    place = ap.cluster("local:2")
    plan = make_plan(captured("mlp:tiny")[0], place, budget=0.0, memory_limit=1)
    assert plan.notes[-1].startswith("not even 1,024 such devices of 1 B would do: the state alone")


def test_of_devices_that_differ_no_number_is_told() -> None:
    place = ap.cluster("mixed-a100-v100")
    plan = make_plan(captured("mlp:tiny")[0], place, "data", memory_limit=1)
    assert plan.notes[-1] == "how many devices would do cannot be told, because they are not equal"


def test_a_comparison_in_which_nothing_fits_says_so_once() -> None:
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    plans = compare_methods(graph, place, ["data", "fsdp"], memory_limit=1)
    assert plans[0].notes == () and plans[1].notes[0].startswith(
        "no plan fits: the nearest, by fsdp"
    )


@pytest.mark.parametrize("answer", [3, 7, 8, 9, 64, 700, 1024, None])
@pytest.mark.parametrize("low", [2, 6])
def test_the_smallest_number_is_found_by_few_trials(answer: int | None, low: int) -> None:
    asked: list[int] = []

    def trial(count: int, budget: float) -> str:
        asked.append(count)
        return "it" if answer is not None and count >= answer else ""

    if answer is not None and answer <= low:
        return
    found = enough._smallest(trial, 1e9, 2, low)
    assert found.high == answer and found.low == (answer - 1 if answer else 1024)
    assert len(asked) <= 20 and len(set(asked)) == len(asked)


def test_repeated_devices_are_a_cluster() -> None:
    for name in ("1xh100", "p2.8xlarge", "local:2", "2x8xa100"):
        place = ap.cluster(name)
        more = enough.repeated(place, 12)
        verify_cluster(more)
        assert len(more.devices) == 12
        assert {replace(d, name="") for d in more.devices} == {replace(place.devices[0], name="")}


# Progress


def test_progress_is_told(searches: Searches) -> None:
    def talks(problem: Problem, **how: Any) -> SearchResult:
        problem.report_progress(Progress("level 1 of 2", best=3.0, bound=2.0))
        return data(problem)

    searches["tofu"] = talks
    told: list[PlanningProgress] = []
    plan = make_plan(captured("mlp:tiny")[0], ap.cluster("local:2"), progress=told.append)
    assert [s.method for s in told if s.progress is None and s.step_seconds is None] == [
        *("data", "fsdp", "tofu")
    ]
    (said,) = [s.progress for s in told if s.progress is not None]
    assert said.what == "level 1 of 2" and said.gap == 0.5
    steps = [s.step_seconds for s in told if s.step_seconds is not None and s.fits]
    assert min(steps) == plan.predicted.step_seconds


# Costs that are measured meanwhile


class Measuring:
    """Prices by which everything becomes slower, by another factor each, as more is measured."""

    seconds = 0.0

    def __init__(self) -> None:
        self.models = [replace(ASSUMED, efficiency=1 / (k + 1)) for k in range(9)]
        self.asked = 0

    def known(self) -> CostModel:
        return self.models[self.asked]

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        self.asked += 1
        return self.known()


@pytest.mark.parametrize("counted", [True, False])
def test_measuring_takes_nothing_from_the_budget(
    counted: bool, searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which nothing but measuring takes time."""
    now = 0.0

    class Slow(Measuring):
        def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
            nonlocal now
            now += 1000.0
            self.seconds += 1000.0 if counted else 0.0
            return super().cost(strategy, tasks)

    budgets: list[float] = []

    def watch(problem: Problem, *, budget: float, seed: int) -> SearchResult:
        budgets.append(budget)
        return fsdp(problem)

    searches["tofu"] = watch
    monkeypatch.setattr(candidates, "work_seconds", lambda: now)
    make_plan(captured("mlp:tiny")[0], ap.cluster("local:2"), budget=600.0, costs=Slow())
    assert budgets == ([600.0] if counted else [])


def test_all_candidates_are_judged_by_the_last_costs(searches: Searches) -> None:
    graph, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    prices = Measuring()
    auto = make_plan(graph, place, costs=prices)
    assert prices.asked == 2 and auto.cost is prices.models[2]
    assert auto.timeline.step_seconds == auto.predicted.step_seconds
    prices = Measuring()
    plans = compare_methods(graph, place, ["data", "fsdp"], costs=prices)
    assert all(plan.cost is prices.models[2] for plan in plans)
    assert all(plan.predicted == plan.simulate().predicted for plan in plans)
    assert auto.predicted.step_seconds == min(plan.predicted.step_seconds for plan in plans)


class Known:
    """Costs of a machine where everything has been measured before: a new CostModel each time, but
    of the same table."""

    seconds = 0.0

    def __init__(self) -> None:
        self.tables = {"cpu": CostTable(Condition("cpu", 1, 2))}

    def known(self) -> CostModel:
        return replace(ASSUMED, name="calibrated", tables=dict(self.tables))

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return self.known()


def test_candidates_with_measured_costs_are_simulated_once(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = candidates.simulate

    def counted(*given: Any) -> Any:
        calls.append("simulate")
        return real(*given)

    for module in (candidates, auto, plans):
        monkeypatch.setattr(module, "simulate", counted)
    program, place = captured("mlp:tiny")[0], ap.cluster("local:2")
    made = make_plan(program, place, costs=Known())
    assert made.cost.name == "calibrated" and len(calls) == 2  # data and fsdp
    compare_methods(program, place, ["data", "fsdp"], costs=Known())
    assert len(calls) == 4
