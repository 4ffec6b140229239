"""The program over ideals against every contiguous placement, and on published inputs."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_loads import build, drawn

from apportion.place.loads.exhaustive_placement import exhaustive
from apportion.place.loads.ideals import all_ideals, dp_ideals
from apportion.place.loads.linear_ideals import dp_linear
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import ThroughputObjective, device_loads, is_contiguous


def test_ideals_of_a_diamond_are_six():
    edges = np.array([[0, 1], [0, 2], [1, 3], [2, 3]])
    it = all_ideals(4, edges)
    assert it.complete
    assert len(it.above_start) - 1 == 6
    assert not all_ideals(4, edges, most=5).complete


@pytest.mark.slow
def test_equals_exhaustive_search():
    equals_exhaustive_search(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_equals_exhaustive_search_on_hundreds(part):
    assert equals_exhaustive_search(range(50 * part, 50 * part + 50)) >= 35


def equals_exhaustive_search(seeds):
    """Checks problems; how many optima were proven."""
    proven = 0
    for seed in seeds:
        judge = ThroughputObjective(drawn(seed), contiguous=True)
        oracle = judge.evaluate(exhaustive(judge).placement)
        found = dp_ideals(judge, contiguous=True)
        it = judge.evaluate(found.placement)
        if not oracle.feasible:
            assert not it.feasible
            continue
        assert it.feasible, seed
        assert it.value >= oracle.value - 1e-9
        if found.figures.get("contiguous_optimum") is not None:
            proven += 1
            assert it.value == pytest.approx(oracle.value, abs=1e-9), seed
            assert found.lower_bound == it.value
        assert it.value == pytest.approx(device_loads(judge.problem, found.placement).sum(1).max())
        assert is_contiguous(judge.problem, found.placement)
    return proven


def test_without_contiguity_the_bound_holds_for_all_placements():
    for seed in range(15):
        judge = ThroughputObjective(drawn(seed))
        oracle = exhaustive(judge)
        bound = dp_ideals(judge).lower_bound
        assert bound is not None
        if oracle.lower_bound is not None:
            assert bound <= oracle.lower_bound + 1e-9


def test_linear_variant_is_contiguous_and_never_below():
    for seed in range(15):
        judge = ThroughputObjective(drawn(seed, limited=False), contiguous=True)
        linear, best = dp_linear(judge).placement, dp_ideals(judge).placement
        assert judge.evaluate(linear).feasible
        assert judge.score(linear) >= judge.score(best)


def test_refuses_other_objectives():
    with pytest.raises(ValueError, match="largest load"):
        dp_ideals(LatencyObjective(drawn(1)))
    with pytest.raises(ValueError, match="largest load"):
        dp_ideals(ThroughputObjective(drawn(1), apart=True))


@pytest.mark.slow
def test_many_ideals_fall_back_to_the_linear_variant():
    nodes = [
        {"acc": 1.0 + i % 3, "cpu": 9.0, "size": 0, "backward": 0, "cls": i, "cost": 0.5}
        for i in range(40)
    ]
    judge = ThroughputObjective(build("wide", nodes, [(0, i) for i in range(1, 40)], 3, 0, None))
    found = dp_ideals(judge, contiguous=True)
    assert "linear" in found.notes[0]
    assert judge.evaluate(found.placement).value >= found.lower_bound
