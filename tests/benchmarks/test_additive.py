"""The walk of flexflow over summed seconds, whose optimum is known: never below, and there."""

from __future__ import annotations

from random import Random

import pytest
from graphs import captured
from proof.additive import LayerGridWalk, walk_summed_seconds
from soak import kept

from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.layers.summed_seconds import SummedSeconds
from apportion.search.problem import Problem
from apportion.search.tables.eliminate import eliminate


def costs(spec: str, on: str) -> SummedSeconds:
    them = cluster(on)
    return SummedSeconds(Problem(captured(spec)[1], them, default_cost(them)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    kept(["lenet", "mlp:tiny", "alexnet:tiny", "rnnlm:tiny", "gpt2:tiny"], "lenet", "mlp:tiny"),
)
@pytest.mark.parametrize("on", kept(["flexflow-p100:4", "flexflow-k80:4"], "flexflow-p100:4"))
def test_the_walk_reaches_the_optimum_and_nothing_below(spec: str, on: str) -> None:
    it = costs(spec, on)
    _, least = eliminate(it.energy)
    found = []
    for seed in range(5):
        rows, seconds = walk_summed_seconds(it, 20_000, seed)
        assert seconds == it.energy.value(rows)
        found.append(seconds)
    assert min(found) >= least * (1 - 1e-12)
    assert min(found) <= least * (1 + 1e-9)


def test_changes_are_counted_by_what_they_touch() -> None:
    it, rng = costs("lenet", "flexflow-p100:4"), Random(0)
    walk = LayerGridWalk(it, [0] * len(it.grids))
    for _ in range(500):
        before, rows = walk.cost, list(walk.rows)
        cost = walk.change(rng, 0.0)
        if cost is None:
            continue
        assert cost == pytest.approx(it.energy.value(walk.rows), rel=1e-12)
        if rng.random() < 0.5:
            walk.keep()
        else:
            walk.undo()
            assert (walk.cost, walk.rows) == (before, rows)
