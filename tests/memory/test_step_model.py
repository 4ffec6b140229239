"""The model of a step with recomputed operators against lowering and simulating it."""

from __future__ import annotations

from random import Random

import pytest
from graphs import captured
from recompute_graphs import chain_graph, drawn_graph, forward_ops, modelled, simulated

from apportion.graph import Graph


def equal_on_random_sets(graph: Graph, cluster: str, count: int) -> None:
    model, run, rng = modelled(graph, cluster), simulated(graph, 0, cluster), Random(0)
    sets = [frozenset(forward_ops(graph))]
    for _ in range(count - 1):
        share = rng.random()
        sets.append(frozenset(op for op in forward_ops(graph) if rng.random() < share))
    for ops in sets:
        real, step = run(ops), model.of(ops)
        assert (step.peak, step.nanoseconds) == (real.over, round(real.seconds * 1e9)), sorted(ops)


@pytest.mark.parametrize("cluster", ["1xh100", "local:1"])
@pytest.mark.parametrize("seed", range(6))
def test_drawn_graphs(seed: int, cluster: str) -> None:
    equal_on_random_sets(drawn_graph(seed), cluster, 6)


def test_a_chain() -> None:
    equal_on_random_sets(chain_graph(8), "1xh100", 8)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "rnn:tiny", "transformer-moe:tiny"])
def test_models(spec: str) -> None:
    equal_on_random_sets(captured(spec)[0].graph, "1xh100", 4)


def test_what_is_over_the_limit_is_summed_over_operators() -> None:
    model = modelled(chain_graph(4))
    step = model.of(())
    assert model.of((), step.peak).excess == 0
    assert model.of((), step.peak - 1).excess >= 1
    assert model.of((), 0).excess > step.peak


def test_units_are_all_that_makes_something() -> None:
    model = modelled(chain_graph(4))
    units = [op for unit in model.units for op in unit]
    assert len(units) == len(set(units))
    assert set(units) <= set(forward_ops(model.graph))
    for op in set(forward_ops(model.graph)) - set(units):
        assert not any(model.columns.nbytes[v] for v in model.graph.ops[op].outputs)
