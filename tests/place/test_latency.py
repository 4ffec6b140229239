"""The model of latency by a plain twin, its pieces, and its searches against every placement."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_loads import build, drawn

from apportion.place.loads.exhaustive_placement import exhaustive
from apportion.place.loads.latency_greedy import latency_greedy
from apportion.place.loads.latency_search import latency_search
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import HOST, ThroughputObjective, transfers


def node(acc: float, cost: float = 0.0, cls: object = None, backward: int = 0, size: int = 0):
    it = {"acc": acc, "cpu": 10 * acc, "size": size, "backward": backward, "cost": cost}
    return {**it, "cls": object() if cls is None else cls}


def plain_latency(problem, placement):
    """The model with one piece, or None if pieces wait for each other: rounds over all groups until
    nothing changes."""
    c = problem.columns
    device = np.asarray(placement)[c.unit]
    host = [problem.devices[d].kind == HOST for d in device]
    group = [("node", v) if host[v] else ("acc", int(device[v])) for v in range(len(device))]
    rows = list(transfers(problem))
    took, inputs = {}, {}
    for g in set(group):
        inside = [v for v in range(len(device)) if group[v] == g]
        time = sum(c.duration[v, device[v]] for v in inside)
        reads = {s for s, to, _ in rows if group[s] != g and any(group[r] == g for r in to)}
        if g[0] == "acc":
            for s, readers, price in rows:
                others = {group[r] for r in readers} - {group[s]}
                if g in others or (group[s] == g and others):
                    time += price[g[1]]
        took[g], inputs[g] = time, {group[s] for s in reads}
    end = {}
    while len(end) < len(took):
        ready = [g for g in took if g not in end and inputs[g] <= end.keys()]
        if not ready:
            return None
        for g in ready:
            end[g] = took[g] + max((end[s] for s in inputs[g]), default=0)
    return max(end.values()) / problem.tick


def test_a_piece_receives_runs_and_sends_without_a_break():
    it = build("t", [node(1, 2), node(3, 5), node(4)], [(0, 1), (1, 2)], 2, 1, None)
    judge = LatencyObjective(it)
    assert judge.score(np.array([0, 0, 0])) == 8.0
    assert judge.score(np.array([0, 1, 1])) == (1 + 2) + (2 + 7)
    assert judge.score(np.array([0, 2, 1])) == (1 + 2) + 30 + (5 + 4)
    assert judge.evaluate(np.array([0, 2, 1])).loads.tolist() == [3.0, 9.0, 30.0]


def test_equals_the_plain_model():
    for seed in range(50):
        it = drawn(seed)
        rng, judge = np.random.default_rng(seed), LatencyObjective(it, pieces=1)
        for _ in range(4):
            place = rng.integers(0, len(it.devices), it.units)
            expected, found = plain_latency(it, place), judge.evaluate(place)
            memory = np.bincount(place, judge.resident, len(it.devices))
            fits = bool((memory <= it.limit).all())
            assert found.feasible == (fits and expected is not None)
            if expected is not None:
                assert found.value == pytest.approx(expected, rel=1e-12)
            if found.feasible:
                assert judge.score(place) == found.value
                assert found.value >= judge.lower_bound() - 1e-9
            else:
                assert judge.score(place) * it.tick > judge.worst


def test_an_accelerator_may_have_a_piece_for_each_pass():
    nodes = [node(1, cls=0), node(2, cls=1), node(4, cls=1, backward=1), node(8, cls=0, backward=1)]
    it = build("t", nodes, [(0, 1), (1, 2), (2, 3)], 2, 0, None)
    place = np.array([0, 1])
    assert LatencyObjective(it).evaluate(place).feasible
    assert LatencyObjective(it).score(place) == 15.0
    once = LatencyObjective(it, pieces=1)
    assert not once.evaluate(place).feasible
    assert once.evaluate(place).value == 15.0  # in as many pieces as it needs


def test_devices_that_wait_for_each_other_do_not_fit():
    it = build("t", [node(1), node(2), node(3), node(4)], [(0, 1), (2, 3)], 2, 0, None)
    judge = LatencyObjective(it)
    found = judge.evaluate(np.array([0, 1, 1, 0]))
    assert not found.feasible
    assert found.value == 7.0  # by finer pieces: the last node starts after the third, at 3
    assert judge.evaluate(np.array([0, 1, 0, 1])).feasible


def test_greedy_fills_one_accelerator_after_the_other():
    it = build("t", [node(1, size=2) for _ in range(5)], [(i, i + 1) for i in range(4)], 2, 1, 4)
    assert latency_greedy(LatencyObjective(it)).placement.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.slow
def test_search_finds_the_optimum_of_small_problems():
    for seed in range(25):
        judge = LatencyObjective(drawn(seed, most=5))
        oracle = exhaustive(judge)
        if oracle.lower_bound is None:
            continue
        for budget in (0.3, 3.0, 20.0):  # of seconds, on machines that others use as well
            found = latency_search(judge, budget=budget)
            assert found.lower_bound <= oracle.lower_bound + 1e-9
            if judge.score(found.placement) == pytest.approx(oracle.lower_bound):
                break
        assert judge.score(found.placement) == pytest.approx(oracle.lower_bound), seed


def test_a_path_that_does_not_fit_is_cut():
    nodes = [node(1, cost=2, size=3), node(1, cost=1, size=3), node(1, size=3)]
    it = build("t", nodes, [(0, 1), (1, 2)], 2, 1, 6)
    assert LatencyObjective(it).lower_bound() == 3 + 2 * 1  # after the second node
    it = build("t", nodes, [(0, 1), (1, 2)], 2, 1, None)
    assert LatencyObjective(it).lower_bound() == 3


@pytest.mark.slow
def test_no_placement_is_below_the_bound():
    reached = 0
    for seed in range(300):
        for pieces in (1, 2):
            judge = LatencyObjective(drawn(seed, most=5), pieces)
            best = exhaustive(judge).lower_bound
            if best is not None:
                assert judge.lower_bound() <= best + 1e-9, seed
                reached += judge.lower_bound() >= best - 1e-9
    assert reached > 100


def test_refuses_throughput():
    for placer in (latency_greedy, latency_search):
        with pytest.raises(ValueError, match="latency"):
            placer(ThroughputObjective(drawn(0)))
