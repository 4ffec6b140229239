"""Published methods for recomputation, and the programme against all sets."""

from __future__ import annotations

import pytest
from recompute_graphs import chain_graph, drawn_graph, forward_ops, modelled, walked

from apportion.graph import Graph
from apportion.memory.budget_knapsack import budget_knapsack
from apportion.memory.checkmate import checkmate
from apportion.memory.chen import chen_greedy, chen_root
from apportion.memory.choose_by_model import choose_by_model, lowest_peak
from apportion.memory.choose_recompute import RecomputeOutcome, full_recompute
from apportion.memory.exhaustive_recompute import exhaustive_recompute
from apportion.memory.forward_chain import forward_chain
from apportion.memory.recompute_costs import ForwardMemory
from apportion.memory.rotor import rotor


def seconds(graph: Graph, ops: frozenset[int]) -> float:
    columns = modelled(graph).columns
    return sum(int(columns.duration[op]) for op in ops) / 1e9


@pytest.mark.slow
@pytest.mark.parametrize("seed", (0, 1, 2, 5, 7, 9, 12, 13, 16, 24))
def test_the_programme_is_the_best_of_all_sets(seed: int) -> None:
    graph = drawn_graph(seed)
    model = modelled(graph)
    every = exhaustive_recompute(graph, walked(model))
    for limit in sorted({one.over for one in every.values()})[:4]:
        best = min(seconds(graph, ops) for ops, one in every.items() if one.over <= limit)
        found = checkmate(model, limit)
        assert found.ops is not None and found.optimal
        assert model.of(found.ops).peak <= limit
        assert seconds(graph, found.ops) == pytest.approx(best, rel=1e-3, abs=1e-9)
        assert found.bound <= best * 1.001 + 1e-9
    below = checkmate(model, int(0.99 * min(one.over for one in every.values())))
    assert below.ops is None and below.optimal


def test_a_chain_is_cut_between_its_layers() -> None:
    model = modelled(chain_graph(16))
    links = forward_chain(model.graph, model.costs)
    assert [op for link in links for op in link.ops] == forward_ops(model.graph)
    assert len(links) >= 32
    total = ForwardMemory(model.graph, model.costs).total
    assert sum(link.kept for link in links) == total


@pytest.mark.slow
def test_chen_needs_the_root() -> None:
    model = modelled(chain_graph(64))
    peak, run = model.of(()).peak, walked(model)
    for ops in (
        chen_root(model.graph, model.costs),
        chen_greedy(model.graph, model.costs, run),
    ):
        assert model.of(ops).peak < 0.45 * peak
        assert model.of(ops).nanoseconds < 1.4 * model.of(()).nanoseconds


@pytest.mark.slow
def test_rotor_fits_up_to_a_link() -> None:
    """It counts bytes by links, and copies are made when the first of a segment is needed."""
    model = modelled(chain_graph(32))
    peak = model.of(()).peak
    link = max(one.output for one in forward_chain(model.graph, model.costs))
    times = []
    for share in (1.02, 0.9, 0.75, 0.6):
        ops = rotor(model, int(share * peak))
        assert ops is not None
        assert model.of(ops).peak <= share * peak + link
        times.append(model.of(ops).nanoseconds)
    assert times == sorted(times) and times[0] < 1.01 * model.of(()).nanoseconds
    assert rotor(model, peak // 20) is None


def test_the_knapsack_keeps_no_more_than_it_may() -> None:
    model = modelled(chain_graph(16))
    memory = ForwardMemory(model.graph, model.costs)
    for share in (0.75, 0.5):
        ops = budget_knapsack(model.graph, model.costs, int(share * memory.total))
        assert ops is not None
        assert memory.total - memory.saved(ops) <= share * memory.total
    assert budget_knapsack(model.graph, model.costs, memory.total) is not None


@pytest.mark.slow
def test_the_planner_is_near_the_programme_and_no_worse_than_published_methods() -> None:
    graph = chain_graph(12)
    model = modelled(graph)
    peak, least = model.of(()).peak, lowest_peak(model).step.peak
    for share in (0.25, 0.75):
        limit = int(least + share * (peak - least))
        run = walked(model, limit)
        found = choose_by_model(model, run(frozenset()), run)
        assert found.outcome.over <= 0
        exact = checkmate(model, limit, 20.0)
        bound = run(frozenset()).seconds + exact.bound
        assert bound <= found.outcome.seconds * (1 + 1e-6)
        assert found.outcome.seconds <= 1.02 * bound or not exact.optimal
        for ops in (chen_greedy(graph, model.costs, run), rotor(model, limit)):
            if ops is not None and run(ops).over <= 0:
                assert found.outcome.seconds <= run(ops).seconds


@pytest.mark.slow
def test_where_the_model_is_wrong_everything_is_recomputed_at_last() -> None:
    graph = chain_graph(12)
    model = modelled(graph)
    everything = full_recompute(graph, model.costs)

    def run(ops: frozenset[int]) -> RecomputeOutcome:
        return RecomputeOutcome(-1 if ops == everything else 1, 1.0)

    found = choose_by_model(model, run(frozenset()), run)
    assert found.ops == everything and found.outcome.over < 0
