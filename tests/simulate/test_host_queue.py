"""Work of a host in the order of need: the specification, its compiled twin and a clock that ticks
agree; and copies that slow each other down take what their rates say."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from make_tasks import schedule_as_compiled

from apportion.simulate.contention import _share
from apportion.simulate.schedule import Network, schedule


def drawn(rng: Random, count: int = 14, hosts: int = 2) -> Network:
    """Work, and items of hosts by urgency, with random predecessors."""
    before = [
        sorted(rng.sample(range(k), min(k, rng.randrange(3)))) if k else [] for k in range(count)
    ]
    after: list[list[int]] = [[] for _ in range(count)]
    for item, earlier in enumerate(before):
        for other in earlier:
            after[other].append(item)
    urgent = [rng.random() < 0.6 for _ in range(count)]
    zeros = np.zeros(count, np.int64)
    return Network(
        links=hosts,
        duration=np.array([rng.randrange(1, 6) for _ in range(count)]),
        release=np.array([rng.randrange(8) for _ in range(count)]),
        hold=zeros,
        latency=zeros,
        pending=np.array([len(earlier) for earlier in before]),
        next_start=np.append(0, np.cumsum([len(later) for later in after])),
        next=np.array([item for later in after for item in later], np.int64),
        hop_start=np.append(0, np.cumsum(urgent)),
        hop_link=np.array([rng.randrange(hosts) for each in urgent if each], np.int64),
        hop_occupancy=np.array([rng.randrange(1, 6) for each in urgent if each], np.int64),
        urgency=np.array([rng.randrange(5) if each else -1 for each in urgent]),
    )


def ticking(net: Network) -> tuple[list[int], list[int]]:
    """By a clock: at every tick, each free host takes the most urgent item that is ready."""
    count = len(net.duration)
    start, end = [-1] * count, [-1] * count
    links = [net.hop_link[net.hop_start[k] : net.hop_start[k + 1]].tolist() for k in range(count)]
    took = [
        int(net.hop_occupancy[net.hop_start[k]]) if links[k] else int(net.duration[k])
        for k in range(count)
    ]
    before: list[list[int]] = [[] for _ in range(count)]
    for item in range(count):
        for later in net.next[net.next_start[item] : net.next_start[item + 1]].tolist():
            before[later].append(item)
    free = [0] * net.links
    now = 0
    while min(start) < 0:
        ready = [
            k
            for k in range(count)
            if start[k] < 0
            and now >= net.release[k]
            and all(0 <= end[other] <= now for other in before[k])
        ]
        begun = [k for k in ready if not links[k]]
        for link in range(net.links):
            mine = [k for k in ready if links[k] == [link]]
            if mine and free[link] <= now:
                begun.append(min(mine, key=lambda k: (net.urgency[k], k)))
        for k in begun:
            start[k], end[k] = now, now + took[k]
            for link in links[k]:
                free[link] = end[k]
        now += 1
    return start, end


@pytest.mark.parametrize("seed", range(60))
def test_the_most_urgent_comes_first(seed: int) -> None:
    net = drawn(Random(seed))
    slow, fast = schedule(net), schedule_as_compiled(net)
    assert [column.tolist() for column in slow] == [column.tolist() for column in fast]
    assert (slow[0].tolist(), slow[1].tolist()) == ticking(net)


def test_shares_of_time_beside_others() -> None:
    start, end = np.array([0, 10, 20, 5, 0]), np.array([10, 20, 30, 15, 40])
    assert _share((start, end), np.array([3]), np.array([0, 2])).tolist() == [0.5]
    assert _share((start, end), np.array([3]), np.array([0, 1, 2])).tolist() == [1.0]
    assert _share((start, end), np.array([4, 0]), np.array([2])).tolist() == [0.25, 0.0]
    assert _share((start, end), np.array([4]), np.zeros(0, np.int64)).tolist() == [0.0]
