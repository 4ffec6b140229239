"""Operators on different subsets of the devices, as walks place them: the same training."""

from __future__ import annotations

import pytest
from compare_runs import compare
from graphs import captured

from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.problem import Problem
from apportion.search.walks.flexflow import flexflow
from apportion.split.strategy import space_of

DEVICES = 4


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["lenet:batch=8", "rnnlm:tiny"])
def test_a_walk_s_plan_trains_the_same_model(spec: str) -> None:
    program, space = captured(spec)
    there = cluster("flexflow-p100:4")  # where it pays to use several
    found = flexflow(Problem(space, there, default_cost(there)), proposals=300, workers=1)
    subsets = {frozenset(choice.devices) for choice in found.strategy.choices}
    assert len(subsets) > 3 and min(map(len, subsets)) < DEVICES
    own = space_of(program.graph, found.strategy)
    distance = compare(program, own, found.strategy, DEVICES)
    assert distance.equal, distance
