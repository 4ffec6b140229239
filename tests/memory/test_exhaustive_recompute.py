"""The planner against all sets of forward operators, at every limit that makes a difference."""

from __future__ import annotations

import pytest
from recompute_graphs import chain_graph, drawn_graph, modelled, simulated, walked
from soak import cases, kept

from apportion.graph import Graph
from apportion.memory.choose_by_model import choose_by_model
from apportion.memory.exhaustive_recompute import best_within, exhaustive_recompute
from apportion.memory.refine_recompute import refine_recompute

LARGE = (6, 10, 19, 35)  # more than 13 forward operators


def limits(peaks: set[int], count: int = 8) -> list[int]:
    """Some of the peaks, from the least to the most, and one below all."""
    rising = sorted(peaks)
    step = max(len(rising) // count, 1)
    return [rising[0] - 1, *rising[::step]]


def equals_the_best_of_all(graph: Graph, lowered: bool) -> None:
    model = modelled(graph)
    every = exhaustive_recompute(graph, simulated(graph) if lowered else walked(model))
    for limit in limits({one.over for one in every.values()}):
        run = simulated(graph, limit) if lowered else walked(model, limit)
        found = choose_by_model(model, run(frozenset()), run)
        best = best_within(every, limit)
        if best.over <= limit:
            assert found.outcome.over <= 0
            assert found.outcome.seconds == best.seconds, limit
        else:
            assert found.outcome.over == best.over - limit


@pytest.mark.slow
@pytest.mark.parametrize("seed", kept((32, 16), 32))
def test_lowered_and_simulated(seed: int) -> None:
    equals_the_best_of_all(drawn_graph(seed), lowered=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(cases(42, 12)) if seed not in LARGE])
def test_drawn_graphs(seed: int) -> None:
    equals_the_best_of_all(drawn_graph(seed), lowered=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(cases(24, 8)) if seed not in LARGE])
def test_refining_finds_the_best_of_few(seed: int) -> None:
    """What is done for large Graphs, on small ones."""
    graph = drawn_graph(seed)
    model = modelled(graph)
    every = exhaustive_recompute(graph, walked(model))
    for limit in limits({one.over for one in every.values()}, 3)[1:]:
        found = refine_recompute(model, limit, [frozenset()])
        assert not found.step.excess
        assert found.step.nanoseconds / 1e9 == best_within(every, limit).seconds, limit


@pytest.mark.slow
def test_a_chain_of_three_layers() -> None:
    equals_the_best_of_all(chain_graph(3), lowered=False)


def test_too_many_sets_are_refused() -> None:
    graph = chain_graph(8)
    with pytest.raises(ValueError, match="too many to simulate"):
        exhaustive_recompute(graph, simulated(graph))
