"""coarsen: few units from many, and what is conserved."""

from __future__ import annotations

import time

import numpy as np
import pytest

from apportion.columns import Ints, offsets
from apportion.place.coarse.coarsen import coarsen
from apportion.place.objective import StepObjective
from apportion.place.objectives.step_time import simulate_step
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
    check_problem,
)

DEVICES = 3


def _links(k: int) -> PlacementLinks:
    routes = [[a * k + b] if a != b else [] for a in range(k) for b in range(k)]
    return PlacementLinks(
        in_order=0, once=0, live=1, device_hold=0, link_hold=0, links=k * k,
        hop_start=offsets(np.array([len(r) for r in routes])),
        hop_link=np.array([x for r in routes for x in r], np.int64),
        hop_pace=np.full(k * k - k, 2.0),
        lag=np.full((k, k), 1.0), drag=np.zeros((k, k)), grace=0,
    )  # fmt: skip


def _problem(
    units: Ints, backward: Ints, edges: list[tuple[int, int]], seed: int = 0,
    allowed: np.ndarray | None = None, limit: int | None = None,
) -> PlacementProblem:  # fmt: skip
    """One output for each node, read by those that `edges` lead to."""
    rng, n = np.random.default_rng(seed), len(units)
    readers: list[list[int]] = [[] for _ in range(n)]
    for a, b in sorted(set(edges)):
        readers[a].append(b)
    nbytes = rng.integers(1, 100, n)
    columns = PlacementColumns(
        unit=units, duration=rng.integers(1, 50, (n, DEVICES)), backward=backward,
        resident=rng.integers(0, 9, n), source=np.arange(n), nbytes=nbytes,
        send=nbytes.astype(float), output_start=np.arange(n + 1),
        reader_start=offsets(np.array([len(r) for r in readers])),
        reader=np.array([x for r in readers for x in r], np.int64),
        allowed=np.ones((int(units.max()) + 1, DEVICES), bool) if allowed is None else allowed,
    )  # fmt: skip
    names = tuple(f"n{k}" for k in range(n))
    devices = tuple(PlacementDevice(f"d{k}", "acc", limit) for k in range(DEVICES))
    return PlacementProblem("made", names, names, columns, _links(DEVICES), devices, tick=1.0)


def _training(forward: int, seed: int) -> PlacementProblem:
    """A random forward pass and its mirror; a unit is an operator and its backward operator."""
    rng = np.random.default_rng(seed)
    pairs = [(int(rng.integers(max(0, b - 4), b)), b) for b in range(1, forward) for _ in "ab"]
    last = 2 * forward - 1
    edges = pairs + [(last - b, last - a) for a, b in pairs]
    edges += [(k, last - k) for k in range(forward)]
    units = np.concatenate([np.arange(forward), np.arange(forward)[::-1]])
    backward = np.repeat(np.array([0, 1]), forward)
    return _problem(units, backward, edges, seed)


def _crossing(problem: PlacementProblem, placement: Ints) -> float:
    """What is sent, each output once to each device that wants it."""
    c, total = problem.columns, 0.0
    device = placement[c.unit]
    for output, source in enumerate(c.source):
        there = device[c.reader[c.reader_start[output] : c.reader_start[output + 1]]]
        total += c.send[output] * len(set(there.tolist()) - {int(device[source])})
    return total


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("target", [1, 2, 5, 17])
def test_a_coarse_placement_is_a_fine_one_with_the_same_loads(seed: int, target: int) -> None:
    fine = _training(40, seed)
    coarse, which = coarsen(fine, target)
    check_problem(coarse)
    assert coarse.units == target and set(which.tolist()) == set(range(target))
    assert len(coarse.columns.unit) <= len(fine.columns.unit)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        placement = rng.integers(0, DEVICES, target)
        few, all_ = (
            StepObjective(p).evaluate(x) for p, x in ((coarse, placement), (fine, placement[which]))
        )
        np.testing.assert_allclose(few.loads, all_.loads)
        assert _crossing(coarse, placement) == _crossing(fine, placement[which])
        assert few.value >= all_.loads.max()
    assert coarse.columns.resident.sum() == fine.columns.resident.sum()


def test_every_coarse_node_runs_after_what_it_reads() -> None:
    for seed in range(4):
        coarse, _ = coarsen(_training(60, seed), 7)
        done = simulate_step(coarse, np.arange(7) % DEVICES)
        c = coarse.columns
        heads = np.repeat(c.source, np.diff(c.reader_start))
        assert (heads < c.reader).all() and (np.diff(c.source) >= 0).all()
        assert (done.end[heads] <= done.start[c.reader]).all()
        assert len(set(coarse.node_names)) == len(coarse.node_names) == len(c.unit)


def test_forward_and_backward_of_a_group_stay_apart() -> None:
    coarse, _ = coarsen(_training(30, 1), 1)
    assert coarse.columns.backward.tolist() == [0, 1]
    assert coarse.columns.duration.sum() == _training(30, 1).columns.duration.sum()


def test_two_parts_of_a_group_around_another_are_two_nodes() -> None:
    # 0 -> 1 -> 2, and 0 and 2 move together: as one node they would wait for 1, and 1 for them.
    fine = _problem(np.array([0, 1, 0]), np.zeros(3, np.int64), [(0, 1), (1, 2)])
    from apportion.place.coarse.merge_nodes import merge_nodes

    same = merge_nodes(fine, np.array([0, 1]))
    assert same.columns.unit.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(same.columns.duration, fine.columns.duration)


def test_counters_without_neighbours_do_not_use_up_the_groups() -> None:
    # Eight layers in a row, each followed by a counter that nothing reads.
    units = np.arange(16)
    edges = [(k, k + 2) for k in range(0, 14, 2)]
    fine = _problem(units, np.zeros(16, np.int64), edges)
    fine.columns.duration[1::2] = 1
    fine.columns.resident[:] = 0
    fine.columns.nbytes[1::2] = 1
    coarse, which = coarsen(fine, 8)
    assert coarse.units == 8
    assert len(set(which[::2].tolist())) == 8  # every layer a group of its own
    np.testing.assert_array_equal(which[1::2], which[::2])


def test_units_that_share_no_device_are_not_joined() -> None:
    allowed = np.zeros((4, DEVICES), bool)
    allowed[:2, 0] = allowed[2:, 1] = True
    fine = _problem(np.arange(4), np.zeros(4, np.int64), [(0, 1), (1, 2), (2, 3)], allowed=allowed)
    coarse, which = coarsen(fine, 1)
    assert which.tolist() == [0, 0, 1, 1]
    assert coarse.columns.allowed.tolist() == [[True, False, False], [False, True, False]]


def test_what_stays_on_a_device_must_fit() -> None:
    fine = _problem(np.arange(4), np.zeros(4, np.int64), [(0, 1), (1, 2), (2, 3)], limit=10)
    fine.columns.resident[:] = 5
    coarse, _ = coarsen(fine, 1)
    assert coarse.units == 2
    assert np.bincount(coarse.columns.unit, coarse.columns.resident).tolist() == [10, 10]


def test_outputs_within_a_node_are_held_while_it_runs() -> None:
    fine = _problem(np.arange(4), np.zeros(4, np.int64), [(0, 1), (1, 2), (2, 3)])
    fine.columns.nbytes[:] = [8, 16, 4, 1]
    fine.columns.resident[:] = 0
    coarse, _ = coarsen(fine, 1)
    everything = np.zeros(1, np.int64)
    assert simulate_step(coarse, everything).peak_bytes.tolist() == [24, 0, 0]  # 8 and 16 at once
    assert simulate_step(fine, np.zeros(4, np.int64)).peak_bytes[0] >= 24


def test_graphs_with_a_cost_of_crossing_keep_their_nodes() -> None:
    from dataclasses import replace

    fine = replace(_training(20, 2), transfer=np.ones(40))
    coarse, which = coarsen(fine, 4)
    np.testing.assert_array_equal(coarse.columns.unit, which[fine.columns.unit])
    assert len(coarse.columns.unit) == 40


def test_the_experts_device_of_a_group_is_that_of_most_of_its_time() -> None:
    from dataclasses import replace

    fine = _problem(np.arange(3), np.zeros(3, np.int64), [(0, 1), (1, 2)])
    fine.columns.duration[:] = [[1] * 3, [1] * 3, [9] * 3]
    coarse, _ = coarsen(replace(fine, expert=np.array([0, 0, 2])), 1)
    assert coarse.expert is not None and coarse.expert.tolist() == [2]


def test_a_small_problem_is_left_alone_and_no_units_are_refused() -> None:
    fine = _training(5, 0)
    coarse, which = coarsen(fine, 5)
    assert coarse is fine and which.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="into 0 units"):
        coarsen(fine, 0)


@pytest.mark.slow
def test_fifty_thousand_units_take_seconds() -> None:
    fine = _training(50_000, 0)
    began = time.perf_counter()
    coarse, _ = coarsen(fine, 128)
    assert coarse.units == 128
    assert time.perf_counter() - began < 30
