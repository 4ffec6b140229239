"""Choosing what to recompute: it fits, and is near the best of all sets of operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from random import Random

import pytest
import torch
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.graph import FORWARD, Graph
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.memory.checkpoint_segments import checkpoint_segments
from apportion.memory.choose_recompute import (
    RecomputeOutcome,
    choose_recompute,
    full_recompute,
)
from apportion.memory.recompute import recompute
from apportion.memory.recompute_costs import (
    ForwardMemory,
    RecomputeCosts,
    kept_values,
    recompute_costs,
)
from apportion.run.one_process import undivided
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import Timeline
from apportion.split.space import Space

Outcome = Callable[[frozenset[int]], RecomputeOutcome]


@cache
def chain_graph(layers: int, rows: int = 4096, width: int = 8) -> Graph:
    """A chain in which activations are far larger than parameters."""
    model = nn.Sequential()
    for _ in range(layers):
        model.append(nn.Linear(width, width))
        model.append(nn.Tanh())
    return graph_of(model, rows, width)


def graph_of(model: nn.Module, rows: int, width: int) -> Graph:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).sum()
        return found

    with torch.device("meta"):
        model = model.to_empty(device="meta")
        batch = torch.empty(rows, width)
    return capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch).graph


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


@cache
def block_graph() -> Graph:
    """A linear layer, and a block beside which its input passes."""
    return graph_of(nn.Sequential(nn.Linear(8, 8), Block(8)), 4096, 8)


@cache
def simulated(graph: Graph) -> tuple[Space, TaskGraph, Timeline]:
    space, here = Space(graph), cluster("1xh100")
    tasks = runnable(space, undivided(graph), 1)
    return space, tasks, simulate(tasks, here, default_cost(here))


def costs_of(graph: Graph) -> RecomputeCosts:
    space, tasks, line = simulated(graph)
    return recompute_costs(space, tasks, line, 0)


def outcome_of(graph: Graph, limit: int) -> Outcome:
    def run(ops: frozenset[int]) -> RecomputeOutcome:
        line = simulated(recompute(graph, ops).graph)[2]
        return RecomputeOutcome(line.peak_bytes[0] - limit, line.step_seconds)

    return run


def forward_ops(graph: Graph) -> list[int]:
    return [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]


@pytest.mark.parametrize("seed", range(20))
def test_what_few_operators_save_is_what_all_values_say(seed: int) -> None:
    graph = chain_graph(6)
    costs, rng = costs_of(graph), Random(seed)
    memory = ForwardMemory(graph, costs)
    some = frozenset(op for op in forward_ops(graph) if rng.random() < 0.6)
    left = sum(costs.nbytes[v] for v in kept_values(graph, costs, some))
    assert memory.saved(some) == memory.total - left


@pytest.mark.slow
def test_segments_are_the_forward_in_order() -> None:
    graph = chain_graph(12)
    costs = costs_of(graph)
    total = ForwardMemory(graph, costs).total
    for parts in (2, 4, 12):
        found = checkpoint_segments(graph, costs, total // parts)
        assert [op for segment in found for op in segment.ops] == forward_ops(graph)
        assert sum(segment.kept for segment in found) == total
        assert len(found) >= parts


@pytest.mark.slow
def test_the_best_segments_of_a_chain_need_the_root_of_its_length() -> None:
    """As Chen et al. have it: boundaries and one segment, each about the root."""
    peaks = {}
    for layers in (16, 64):
        graph = chain_graph(layers)
        run = outcome_of(graph, 0)
        peaks[layers] = run(full_recompute(graph, costs_of(graph))).over
        assert peaks[layers] < 0.6 * run(frozenset()).over
    assert peaks[64] < 3 * peaks[16]


@pytest.mark.slow
@pytest.mark.parametrize("graph", [chain_graph(4), block_graph()], ids=["chain", "block"])
def test_near_the_best_of_all_sets(graph: Graph) -> None:
    costs = costs_of(graph)
    real = [op for op in forward_ops(graph) if costs.nbytes[graph.ops[op].outputs[0]]]
    assert 6 <= len(real) <= 12
    sets = [frozenset(some) for n in range(len(real) + 1) for some in combinations(real, n)]
    every = [outcome_of(graph, 0)(some) for some in sets]
    least, most = min(found.over for found in every), every[0].over
    assert least < 0.95 * most
    for limit in (least, (least + most) // 2):
        best = min(found.seconds for found in every if found.over <= limit)
        run = outcome_of(graph, limit)
        found = choose_recompute(graph, costs, run(frozenset()), run)
        assert found.outcome.over <= 0
        assert found.outcome.seconds <= 1.02 * best


@pytest.mark.slow
def test_a_large_end_is_not_recomputed_in_vain() -> None:
    """The last segment is there whatever is recomputed; to recompute it frees nothing."""
    model = nn.Sequential()
    for _ in range(10):
        model.extend([nn.Linear(8, 8), nn.Tanh()])
    model.extend([nn.Linear(8, 64), nn.LogSoftmax(-1)])
    graph = graph_of(model, 1024, 8)
    full = full_recompute(graph, costs_of(graph))
    run = outcome_of(graph, outcome_of(graph, 0)(full).over)
    found = choose_recompute(graph, costs_of(graph), run(frozenset()), run)
    assert found.outcome.over <= 0 and found.outcome.seconds <= run(full).seconds
    ends = {op for op in found.ops if graph.ops[op].kind.startswith("aten._log_softmax")}
    assert not ends


@pytest.mark.slow
def test_nothing_is_recomputed_if_the_step_fits() -> None:
    graph = chain_graph(3)
    run = outcome_of(graph, 10**12)
    assert choose_recompute(graph, costs_of(graph), run(frozenset()), run).ops == frozenset()


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_is_found() -> None:
    graph = chain_graph(24)
    run = outcome_of(graph, 1)
    found = choose_recompute(graph, costs_of(graph), run(frozenset()), run)
    assert 0 < found.outcome.over < 0.6 * run(frozenset()).over
    assert found.simulated <= 12
