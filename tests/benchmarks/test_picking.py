"""The walk over finite options finds what exhaustive search proves to be best."""

from __future__ import annotations

from random import Random

import pytest
from graphs import captured
from proof.exhaustive import prove_optimum
from proof.picking import OptionWalk

from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.single import single
from apportion.search.problem import Problem
from apportion.search.walks.metropolis import Chain
from apportion.search.walks.units import Unit, layer_units
from apportion.simulate.simulate import simulate


@pytest.mark.slow
def test_the_walk_finds_the_proven_optimum_and_nothing_below() -> None:
    space, them = captured("mlp:tiny")[1], cluster("flexflow-p100:2")
    problem = Problem(space, them, default_cost(them))
    units = [Unit(u.name, u.ops, u.options[:6]) for u in layer_units(space, 2)]
    proof = prove_optimum(problem, units, budget=60.0)
    assert proof.proven
    walk = OptionWalk(problem, space, single(problem).strategy, units)
    walk.scatter(Random(0))
    chain = Chain(walk, Random(0))
    for _ in range(600):
        chain.step()
    options = [dict(zip(u.ops, o, strict=True)) for u in units for o in u.options]
    assert all(any(o.get(op) == c for o in options) for op, c in enumerate(walk.best.choices))
    line = simulate(lower(space, walk.best, 2), them, problem.cost)
    assert chain.best == line.step_seconds
    assert round(chain.best * 1e9) == proof.step_ns
