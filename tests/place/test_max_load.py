"""The load formula, and that the compiled columns and single moves agree with it."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_loads import build, drawn

from apportion.place.objectives.max_load import (
    ThroughputObjective,
    device_loads,
    is_contiguous,
    largest_load,
    load_columns,
    load_state,
    move_unit,
    order_edges,
    work_bound,
)


def node(acc: float, cost: float = 0.0, cls: object = None, backward: int = 0, size: int = 0):
    it = {"acc": acc, "cpu": 10 * acc, "size": size, "backward": backward, "cost": cost}
    return {**it, "cls": object() if cls is None else cls}


def test_a_transfer_is_paid_once_in_and_once_out():
    # one node is read by two nodes of one other accelerator, and by one of a host
    it = build("t", [node(1, cost=3), node(2), node(4), node(8)], [(0, 1), (0, 2), (0, 3)], 2, 1, 0)
    assert device_loads(it, np.array([0, 1, 1, 2])).sum(axis=1).tolist() == [4.0, 9.0, 80.0]


def test_forward_and_backward_have_a_maximum_each_if_asked():
    nodes = [node(5, cls=0), node(1, cls=1), node(7, cls=1, backward=1), node(2, cls=0, backward=1)]
    it = build("t", nodes, [(0, 1), (2, 3)], 2, 0, None)
    place = np.array([0, 1])
    assert ThroughputObjective(it).score(place) == 8.0
    assert ThroughputObjective(it, apart=True).score(place) == 12.0


def test_over_memory_is_worse_than_anything_that_fits():
    it = build("t", [node(1, size=3), node(1, size=3)], [(0, 1)], 2, 1, 4)
    judge = ThroughputObjective(it)
    worst = max(judge.score(np.array(p)) for p in ([0, 1], [0, 2], [2, 2]))
    assert judge.score(np.array([0, 0])) > worst
    assert not judge.evaluate(np.array([0, 0])).feasible
    assert judge.evaluate(np.array([0, 1])).memory.tolist() == [3, 3, 0]


def test_contiguous_means_that_devices_can_be_ordered():
    chain = build("t", [node(1) for _ in range(3)], [(0, 1), (1, 2)], 3, 0, None)
    assert is_contiguous(chain, np.array([2, 0, 1]))
    assert not is_contiguous(chain, np.array([0, 1, 0]))
    pair = build("t", [node(1) for _ in range(4)], [(0, 1), (2, 3)], 2, 0, None)
    assert is_contiguous(pair, np.array([0, 1, 0, 1]))
    assert not is_contiguous(pair, np.array([0, 1, 1, 0]))  # each reads from the other


def test_a_unit_without_forward_nodes_is_mirrored():
    nodes = [node(1, cls=0), node(1, cls=1), node(1, cls=2, backward=1), node(1, cls=0, backward=1)]
    it = build("t", nodes, [(0, 1), (2, 3)], 2, 0, None)
    assert order_edges(it).tolist() == [[0, 1], [0, 2]]


@pytest.mark.parametrize("apart", [False, True])
def test_columns_and_moves_agree_with_the_formula(apart):
    for seed in range(40):
        it = drawn(seed)
        it = it if seed % 3 else _without_transfer(seed)
        rng, c = np.random.default_rng(seed), load_columns(it, apart)
        k = len(it.devices)
        state = load_state(c, rng.integers(0, k, it.units))
        for _ in range(6):
            move_unit(c, state, int(rng.integers(it.units)), int(rng.integers(k)))
            loads = device_loads(it, state.place)
            assert np.allclose(state.loads.sum(axis=1) / it.tick, loads.sum(axis=1), rtol=1e-12)
            expected = loads.max(axis=0).sum() if apart else loads.sum(axis=1).max()
            assert largest_load(c, state) / it.tick == pytest.approx(expected, rel=1e-12)
            again = load_state(c, state.place)
            assert (again.reading == state.reading).all()
            assert (again.memory == state.memory).all()
            assert largest_load(c, state) >= work_bound(c) - 1e-6


def _without_transfer(seed):
    it = drawn(seed)
    return type(it)(
        it.name, it.node_names, it.node_kinds, it.columns, it.links, it.devices, it.tick, "ms"
    )
