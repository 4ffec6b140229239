"""The programs for HiGHS against every placement."""

from __future__ import annotations

import pytest
from made_up_loads import drawn

from apportion.place.loads.exhaustive_placement import exhaustive
from apportion.place.loads.milp import _program, milp_placement
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import ThroughputObjective


def solved(judge, contiguous=False):
    """What the program alone says, without the search before it."""
    made = _program(judge, contiguous, judge.problem.tick, False)
    values, bound = made.program.solve(made.target, 20.0)
    return None if values is None else made.where(values), bound


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free", "apart", "contiguous"])
def test_throughput_program_equals_exhaustive_search(kind):
    judged = 0
    for seed in range(40):
        it = drawn(seed, most=5)
        judge = ThroughputObjective(it, contiguous=kind == "contiguous", apart=kind == "apart")
        oracle = exhaustive(judge)
        if oracle.lower_bound is None:
            continue
        place, bound = solved(judge, kind == "contiguous")
        assert bound == pytest.approx(oracle.lower_bound, abs=1e-5), seed
        assert judge.evaluate(place).value == pytest.approx(oracle.lower_bound, abs=1e-5), seed
        assert judge.evaluate(place).feasible
        judged += 1
    assert judged > 25


@pytest.mark.slow
def test_latency_program_is_a_bound_that_is_reached():
    judged = 0
    for seed in range(40):
        judge = LatencyObjective(drawn(seed, most=4), pieces=1)
        oracle = exhaustive(judge)
        if oracle.lower_bound is None:
            continue
        place, bound = solved(judge)
        assert bound <= oracle.lower_bound + 1e-5, seed
        assert judge.lower_bound() <= oracle.lower_bound + 1e-9, seed
        if judge.evaluate(place).feasible:
            assert judge.evaluate(place).value == pytest.approx(oracle.lower_bound, abs=1e-5), seed
            judged += 1
    assert judged > 20


def test_a_program_of_each_kind():
    free, whole = ThroughputObjective(drawn(2)), ThroughputObjective(drawn(2), contiguous=True)
    for judge in (free, whole, LatencyObjective(drawn(2), pieces=1)):
        place, bound = solved(judge, judge is whole)
        assert bound == pytest.approx(exhaustive(judge).lower_bound, abs=1e-5)
        assert judge.evaluate(place).value == pytest.approx(bound, abs=1e-5)


@pytest.mark.slow
def test_result_is_never_below_its_bound():
    for seed in range(6):
        for judge in (ThroughputObjective(drawn(seed)), LatencyObjective(drawn(seed))):
            found = milp_placement(judge, budget=0.4)
            it = judge.evaluate(found.placement)
            if it.feasible and found.lower_bound is not None:
                assert found.lower_bound <= it.value
