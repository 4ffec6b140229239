"""The event simulation against hand-made examples, bounds, and a slow reading of its rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import EXACT, Maker, ports, random_tasks

from apportion.cluster import Cluster, cluster
from apportion.cost import PUBLISHED
from apportion.simulate import Network, network, schedule, schedule_compiled, simulate
from apportion.tasks import TRANSFER, TaskGraph
from apportion.timeline import verify

CLUSTERS = {
    "ports": ports(3),
    "latency": ports(3, latency=3e-9),
    "bus": ports(3, bus=True),
    "on device": ports(3, bus=True, on_device=True),
    "h100": cluster("3xh100"),
    "nodes": cluster("3x1xk80"),
}
seeds = st.integers(0, 10**6)
some_cluster = st.sampled_from(sorted(CLUSTERS))


def spans(make: Maker, c: Cluster) -> list[tuple[int, int]]:
    line = simulate(make.done(), c, EXACT)
    return list(zip(line.start_ns.tolist(), line.end_ns.tolist(), strict=True))


def test_two_devices_and_a_message() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 5, after=[a])
    make.compute(0, flops=20, after=[a])  # overlaps with the message
    b = make.assemble(1, 3, after=[message])
    make.compute(1, flops=4, after=[b])
    assert spans(make, ports(2)) == [(0, 10), (10, 15), (10, 30), (15, 18), (18, 22)]


def test_a_lane_keeps_its_order_even_if_a_later_task_could_start() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    make.compute(1, flops=1, after=[a])
    make.compute(1, flops=1)  # could start at 0
    assert spans(make, ports(2)) == [(0, 10), (10, 11), (11, 12)]


def test_ports_are_held_by_one_message_at_a_time() -> None:
    make = Maker(3)
    make.transfer(0, 2, 10)
    make.transfer(1, 2, 10)  # into the same device
    make.transfer(1, 0, 10)  # does not wait behind the one above
    assert spans(make, ports(3)) == [(0, 10), (10, 20), (0, 10)]


def test_an_all_to_all_fills_the_ports() -> None:
    make = Maker(4)
    for a in range(4):
        for b in range(4):
            if a != b:
                make.transfer(a, b, 10)
    assert simulate(make.done(), ports(4), EXACT).step_seconds == 30e-9


def test_a_shared_bus_serialises_messages_between_different_devices() -> None:
    make = Maker(4)
    make.transfer(0, 1, 10)
    make.transfer(2, 3, 10)
    assert spans(make, ports(4)) == [(0, 10), (0, 10)]
    assert spans(make, ports(4, bus=True)) == [(0, 10), (10, 20)]


def test_first_come_first_served_then_by_index() -> None:
    make = Maker(4)
    slow, fast = make.compute(0, flops=9), make.compute(1, flops=5)
    first = make.transfer(2, 3, 8)  # holds the bus till 8
    late = make.transfer(0, 1, 2, after=[slow])
    early = make.transfer(1, 0, 2, after=[fast])
    twin = make.transfer(1, 2, 2, after=[fast])
    times = spans(make, ports(4, bus=True))
    assert times[first] == (0, 8)
    assert times[early] == (8, 10)
    assert times[twin] == (10, 12)  # ready at 5, before `late` at 9
    assert times[late] == (12, 14)


def test_communication_on_the_device_stops_both_sides() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    make.compute(1, flops=4)
    make.transfer(0, 1, 5, after=[a])
    make.compute(0, flops=20)
    make.compute(1, flops=4)
    assert spans(make, ports(2)) == [(0, 10), (0, 4), (10, 15), (10, 30), (4, 8)]
    line = simulate(make.done(), ports(2, on_device=True), EXACT)
    assert line.start_ns.tolist() == [0, 0, 10, 15, 15]
    assert line.busy == pytest.approx((35 / 35, (4 + 5 + 4) / 35))


def test_latency_and_bandwidth_of_a_route_add_up() -> None:
    make = Maker(2)
    make.transfer(0, 1, 100)
    assert spans(make, ports(2, bus=True, latency=7e-9)) == [(0, 121)]


def test_busy_fractions_and_bytes_moved() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 10, after=[a])
    make.compute(1, flops=20, after=[message])
    line = simulate(make.done(), ports(2), EXACT)
    assert line.step_seconds == 40e-9
    assert line.busy == (0.25, 0.5)
    assert line.bytes_moved == 10


def test_no_tasks_take_no_time() -> None:
    line = simulate(Maker(2).done(), ports(2), EXACT)
    assert (line.step_seconds, line.peak_bytes, line.busy) == (0.0, (0, 0), (0.0, 0.0))


def test_a_cluster_may_have_more_devices_than_the_tasks_use() -> None:
    make = Maker(2)
    make.transfer(0, 1, 10)
    assert spans(make, ports(5)) == [(0, 10)]


@settings(deadline=None, max_examples=150)
@given(seed=seeds, name=some_cluster)
def test_both_schedulers_follow_the_rules(seed: int, name: str) -> None:
    net = network(random_tasks(seed), CLUSTERS[name], EXACT)
    start, end = schedule(net)
    compiled_start, compiled_end = schedule_compiled(net)
    assert np.array_equal(start, compiled_start)
    assert np.array_equal(end, compiled_end)
    assert start.tolist() == slow_starts(net)


@settings(deadline=None, max_examples=100)
@given(seed=seeds, name=some_cluster)
def test_bounds(seed: int, name: str) -> None:
    tasks, c = random_tasks(seed), CLUSTERS[name]
    net, line = network(tasks, c, EXACT), simulate(tasks, c, EXACT)
    verify(line, tasks)
    step = int(line.end_ns.max())
    assert step >= critical_path(tasks, net.duration)
    assert step <= int(net.duration.sum())  # something is always running
    assert all(0 <= share <= 1 for share in line.busy)
    for link in range(net.links):
        crossing = [t for t in range(len(tasks)) if link in route_of(net, t)]
        assert_disjoint(line.start_ns[crossing], line.end_ns[crossing])
    for device in range(tasks.devices):
        lane = np.flatnonzero((tasks.device == device) & (tasks.kind != TRANSFER))
        assert (line.start_ns[lane][1:] >= line.end_ns[lane][:-1]).all()
        assert step >= int(net.duration[lane].sum())


def test_simulation_is_deterministic() -> None:
    tasks = random_tasks(7, count=400, devices=3)
    first = simulate(tasks, CLUSTERS["bus"], PUBLISHED)
    again = simulate(tasks, CLUSTERS["bus"], PUBLISHED)
    assert np.array_equal(first.start_ns, again.start_ns)
    assert first.peak_bytes == again.peak_bytes


def test_larger_graphs_agree_too() -> None:
    net = network(random_tasks(3, count=5000, devices=8), cluster("2x4xk80"), PUBLISHED)
    for one, other in zip(schedule(net), schedule_compiled(net), strict=True):
        assert np.array_equal(one, other)


def test_a_task_that_waits_for_itself_is_our_own_defect() -> None:
    make = Maker(1)
    make.compute(0, flops=1, after=[0])
    net = network(make.done(), ports(1), EXACT)
    for run in (schedule, schedule_compiled):
        with pytest.raises(AssertionError, match="never ran"):
            run(net)


def route_of(net: Network, task: int) -> list[int]:
    links: list[int] = net.route[net.route_start[task] : net.route_start[task + 1]].tolist()
    return links


def slow_starts(net: Network) -> list[int]:
    """The rules read literally: at every instant try all waiting transfers in order."""
    n, before = len(net.duration), predecessors(net)
    start, end = [-1] * n, [-1] * n
    free_at, now = [0] * net.links, 0
    while -1 in start:
        ready = [
            (max([end[b] for b in before[t]], default=0), t)
            for t in range(n)
            if start[t] < 0 and all(0 <= end[b] <= now for b in before[t])
        ]
        for _, task in sorted(ready):
            if all(free_at[link] <= now for link in route_of(net, task)):
                start[task], end[task] = now, now + int(net.duration[task])
                for link in route_of(net, task):
                    free_at[link] = end[task]
        now = min(time for time in end if time > now)
    return start


def predecessors(net: Network) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in net.duration]
    for task in range(len(net.duration)):
        for later in net.next[net.next_start[task] : net.next_start[task + 1]].tolist():
            before[later].append(task)
    return before


def critical_path(tasks: TaskGraph, duration: np.ndarray) -> int:
    end: list[int] = []
    for task in range(len(tasks)):
        deps = tasks.dep[tasks.dep_start[task] : tasks.dep_start[task + 1]].tolist()
        end.append(max([end[d] for d in deps], default=0) + int(duration[task]))
    return max(end)


def assert_disjoint(start: np.ndarray, end: np.ndarray) -> None:
    order = np.argsort(start)
    assert (start[order][1:] >= end[order][:-1]).all()
