"""Lanes and links that serve by priority: worked examples, and the compiled twin."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from apportion.columns import Ints, offsets
from apportion.simulate import priority_schedule
from apportion.simulate.priority_schedule import (
    PriorityNetwork,
    PrioritySchedule,
    schedule_by_priority,
    schedule_by_priority_compiled,
)


def network(
    items: list[dict[str, int | list[int] | list[tuple[int, int]]]],
    size: int = 0,
    credit: int = 0,
) -> PriorityNetwork:
    """Items by lane (or hops: link, occupancy), rank, duration, after, release and latency."""

    def column(name: str, default: int) -> Ints:
        return np.array([item.get(name, default) for item in items], np.int64)

    after = [(before, k) for k, item in enumerate(items) for before in item.get("after", [])]
    first = np.array(sorted(after), np.int64).reshape(-1, 2)
    hops = [item.get("hops", []) for item in items]
    flat = np.array([hop for each in hops for hop in each], np.int64).reshape(-1, 2)
    return PriorityNetwork(
        4, 4, column("lane", -1), column("rank", 0), column("duration", 1), column("release", 0),
        column("latency", 0), np.bincount(first[:, 1], minlength=len(items)),
        offsets(np.bincount(first[:, 0], minlength=len(items))), first[:, 1],
        offsets(np.array([len(each) for each in hops])), flat[:, 0], flat[:, 1],
        np.full(len(flat), size), np.full(len(flat), credit), column("express", 0) > 0,
    )  # fmt: skip


def times(net: PriorityNetwork) -> list[tuple[int, int]]:
    start, end, _ = schedule_by_priority(net)
    return list(zip(start.tolist(), end.tolist(), strict=True))


def test_a_lane_takes_the_least_rank_and_is_not_interrupted() -> None:
    net = network(
        [
            {"lane": 0, "rank": 5, "duration": 10},
            {"lane": 0, "rank": 3, "duration": 4, "release": 2},
            {"lane": 0, "rank": 4, "duration": 6, "release": 1},
            {"lane": 1, "rank": 9, "duration": 7, "after": [1]},
        ]
    )
    assert times(net) == [(0, 10), (10, 14), (14, 20), (14, 21)]


def test_an_urgent_message_gets_the_link_at_the_next_slice() -> None:
    items = [
        {"hops": [(0, 100)], "rank": 9, "latency": 5},
        {"hops": [(0, 30)], "rank": 1, "release": 25},
    ]
    assert times(network(items)) == [(0, 105), (100, 130)]  # whole messages
    assert times(network(items, size=10)) == [(0, 135), (30, 60)]
    assert times(network(items, size=10, credit=15)) == [(0, 135), (40, 70)]
    assert times(network(items, size=10, credit=90)) == [(0, 105), (100, 130)]
    express = [items[0], {**items[1], "express": 1}]
    assert times(network(express, size=10, credit=90)) == [(0, 135), (30, 60)]
    late = [items[0], {**items[1], "rank": 10}]
    assert times(network(late, size=10)) == [(0, 105), (100, 130)]


def test_what_was_interrupted_goes_on_by_priority() -> None:
    net = network(
        [
            {"hops": [(0, 50)], "rank": 5},
            {"hops": [(0, 50)], "rank": 7, "release": 3},
            {"hops": [(0, 20)], "rank": 1, "release": 12},
            {"hops": [(0, 20)], "rank": 6, "release": 30},
        ],
        size=10,
    )
    assert times(net) == [(0, 70), (90, 140), (20, 40), (70, 90)]


def test_a_message_ends_when_all_its_links_are_done() -> None:
    net = network(
        [
            {"hops": [(0, 10), (1, 40)], "latency": 3},
            {"hops": [(0, 10)], "rank": 1},
            {"lane": 0, "duration": 5, "after": [0, 1]},
            {"after": [1], "latency": 2},
        ]
    )
    assert times(net) == [(0, 43), (10, 20), (43, 48), (20, 22)]


def random_network(rng: Random, count: int) -> PriorityNetwork:
    items: list[dict[str, int | list[int] | list[tuple[int, int]]]] = []
    for k in range(count):
        item: dict[str, int | list[int] | list[tuple[int, int]]] = {"rank": rng.randrange(6)}
        item["after"] = sorted(rng.sample(range(k), min(k, rng.randrange(3))))
        item["release"] = rng.choice([0, 0, rng.randrange(200)])
        if rng.random() < 0.5:
            item |= {"lane": rng.randrange(4), "duration": rng.randrange(1, 30)}
        else:
            links = rng.sample(range(4), rng.randrange(4))
            item["hops"] = [(link, rng.randrange(1, 60)) for link in links]
            item |= {"latency": rng.randrange(5), "express": rng.randrange(2)}
        items.append(item)
    return network(items, rng.choice([0, 7, 10]), rng.choice([0, 5, 25]))


def check(net: PriorityNetwork) -> None:
    """What holds of every schedule."""
    start, end, use = schedule_by_priority(net)
    for item in range(len(net.lane)):
        for later in net.next[net.next_start[item] : net.next_start[item + 1]]:
            assert start[later] >= end[item]
    assert (start >= net.release).all()
    for lane in range(net.lanes):
        mine = np.flatnonzero(net.lane == lane)
        mine = mine[np.argsort(start[mine])]
        assert (end[mine] - start[mine] == net.duration[mine]).all()
        assert (start[mine][1:] >= end[mine][:-1]).all()
    owner = np.repeat(np.arange(len(net.lane)), np.diff(net.hop_start))
    for link in range(net.links):
        mine = np.flatnonzero(net.hop_link == link)
        there = np.flatnonzero(use.link == link)
        there = there[np.argsort(use.start[there])]
        assert (use.start[there][1:] >= use.end[there][:-1]).all()  # one at a time
        served = np.bincount(use.item[there], (use.end - use.start)[there], len(net.lane))
        assert (served[owner[mine]] == net.hop_occupancy[mine]).all()
        assert (use.start[there] >= start[use.item[there]]).all()
        assert (use.end[there] <= end[use.item[there]]).all()


@pytest.mark.parametrize("seed", range(60))
def test_the_compiled_twin_is_equal(seed: int) -> None:
    net = random_network(Random(seed), 5 + seed)
    check(net)
    assert_equal(schedule_by_priority_compiled(net), schedule_by_priority(net))


def assert_equal(found: PrioritySchedule, meant: PrioritySchedule) -> None:
    for one, other in zip((*found[:2], *found.use), (*meant[:2], *meant.use), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_compiled_by_numba_it_is_equal() -> None:
    for seed in range(40):
        net = random_network(Random(seed), 40)
        run = priority_schedule._run
        kept, run.native = run.native, run.dispatcher
        try:
            found = schedule_by_priority_compiled(net)
        finally:
            run.native = kept
        assert_equal(found, schedule_by_priority(net))
