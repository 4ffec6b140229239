"""The event simulation against hand-made examples, bounds, and a slow reading of its rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import EXACT, Maker, ports, random_tasks, schedule_as_compiled
from soak import cases

from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COMPUTE,
)
from apportion.machine.cluster import cluster
from apportion.machine.collective import (
    ALL_GATHER,
    ALL_TO_ALL,
    collective,
)
from apportion.machine.cost_model import PUBLISHED
from apportion.machine.topology import Cluster
from apportion.simulate.network import _precedence, network, occupied_lanes
from apportion.simulate.schedule import Network, link_spans, schedule
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import verify

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


def test_links_serve_one_message_at_a_time() -> None:
    make = Maker(4)
    make.transfer(0, 2, 10)
    make.transfer(1, 2, 10)  # leaves its sender at once and waits to enter
    make.transfer(1, 0, 10)  # behind the one above, at the port that both leave by
    make.transfer(3, 1, 10)
    assert spans(make, ports(4)) == [(0, 10), (10, 20), (10, 20), (0, 10)]


def test_every_link_has_its_own_bandwidth() -> None:
    make = Maker(3)
    make.transfer(0, 2, 10)
    make.transfer(0, 1, 10)  # leaves by the port that is free again at 2
    make.transfer(1, 2, 10)
    c = ports(3)
    fast = replace(
        c, links=tuple(replace(k, bandwidth=5e9) if "out" in k.name else k for k in c.links)
    )
    times = spans(make, fast)
    assert times == [(0, 10), (2, 10), (10, 20)]
    net = network(make.done(), fast, EXACT)
    used = link_spans(net, schedule_as_compiled(net))
    assert used.item.tolist() == [0, 0, 1, 1, 2, 2]
    assert used.link.tolist() == [0, 5, 0, 3, 2, 5]
    assert used.start.tolist() == [0, 0, 2, 0, 0, 10]
    assert used.end.tolist() == [2, 10, 4, 10, 2, 20]


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


def test_links_are_free_again_while_latency_passes() -> None:
    make = Maker(2)
    make.transfer(0, 1, 10)
    make.transfer(0, 1, 10)
    assert spans(make, ports(2, latency=100e-9)) == [(0, 210), (10, 220)]


def test_a_link_stays_busy_for_the_hold() -> None:
    make = Maker(2)
    make.transfer(0, 1, 10)
    make.transfer(0, 1, 10)
    net = network(make.done(), ports(2), EXACT)._replace(hold=np.array([5, 5]))
    for run in (schedule, schedule_as_compiled):
        start, end = run(net)
        assert (start.tolist(), end.tolist()) == ([0, 15], [10, 25])


def test_nothing_is_ready_before_its_release() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    make.transfer(0, 1, 10, after=[a])
    make.compute(0, flops=10)
    net = network(make.done(), ports(2), EXACT)._replace(release=np.array([3, 50, 4]))
    for run in (schedule, schedule_as_compiled):
        assert run(net)[0].tolist() == [3, 50, 13]


def test_an_asynchronous_device_waits_for_its_host() -> None:
    make = Maker(2)
    for flops in (1, 1, 100, 1, 1):
        make.compute(0, flops=flops)
    make.compute(1, flops=1)
    c = ports(2)
    slow = tuple(replace(d, launch_seconds=10e-9, asynchronous=True) for d in c.devices)
    times = spans(make, replace(c, devices=slow))
    # The host issues a kernel every 10 ns and is far ahead after the long one.
    assert [start for start, _ in times] == [10, 20, 30, 130, 131, 10]
    assert spans(make, c)[3:] == [(102, 103), (103, 104), (0, 1)]


def test_a_collective_occupies_all_ports_of_its_members() -> None:
    make = Maker(4)
    first = make.collective([0, 1, 2], 60)  # each sends 10 to each of two others
    make.transfer(3, 0, 4)
    make.transfer(3, 1, 4, after=[first])
    assert spans(make, ports(4)) == [(0, 20), (20, 24), (20, 24)]


@pytest.mark.parametrize("pattern", [ALL_TO_ALL, ALL_GATHER])
def test_a_collective_takes_what_the_cheapest_algorithm_takes(pattern: int) -> None:
    for nbytes in (56, 56 * 10**6):
        make = Maker(8)
        make.collective(range(8), nbytes, pattern=pattern)
        c = cluster("2x4xh100")
        (span,) = spans(make, c)
        alone = collective(pattern, tuple(range(8)), nbytes, c)
        assert span[1] == pytest.approx(alone.seconds * 1e9, abs=2)


def test_a_collective_on_the_devices_stops_all_members() -> None:
    make = Maker(4)
    make.collective([0, 2], 20)
    for device in range(4):
        make.compute(device, flops=1)
    times = spans(make, ports(4, on_device=True))
    (_, end), *others = times
    assert end >= 20
    assert others == [(end, end + 1), (0, 1), (end, end + 1), (0, 1)]


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


@settings(max_examples=cases(150))
@given(seed=seeds, name=some_cluster)
def test_both_schedulers_follow_the_rules(seed: int, name: str) -> None:
    tasks = random_tasks(seed, collectives=True)
    net = vary(network(tasks, CLUSTERS[name], EXACT), seed)
    start, end = schedule(net)
    compiled_start, compiled_end = schedule_as_compiled(net)
    assert np.array_equal(start, compiled_start)
    assert np.array_equal(end, compiled_end)
    slow_start, slow_end, slow_turns = slow_times(net)
    assert (start.tolist(), end.tolist()) == (slow_start, slow_end)
    assert link_spans(net, (start, end)).start.tolist() == slow_turns


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_devices_go_on_while_messages_are_on_their_links(seed: int) -> None:
    """Both schedulers, and the rules read literally."""
    tasks = random_tasks(seed, collectives=True)
    net, rng = network(tasks, CLUSTERS["on device"], EXACT), np.random.default_rng(seed)
    duration = rng.integers(1, 9, len(tasks))
    crosses = (np.diff(net.hop_start) > 0) & (rng.random(len(tasks)) < 0.8)
    lead = np.where(crosses, rng.integers(0, duration + 1), -1)
    lane = rng.integers(0, 2, len(net.next))
    net = vary(net._replace(duration=duration, lead=lead, next_lane=lane), seed)
    start, end = schedule(net)
    for one, other in zip((start, end), schedule_as_compiled(net), strict=True):
        assert np.array_equal(one, other)
    slow_start, slow_end, slow_turns = slow_times(net)
    assert (start.tolist(), end.tolist()) == (slow_start, slow_end)
    assert link_spans(net, (start, end)).start.tolist() == slow_turns


def test_a_wire_between_hosts_is_busy_while_devices_compute() -> None:
    """Two messages of 40 and 30 ns on the wire, the second posted behind the first; what is
    computed besides takes no longer for them."""
    make = Maker(2)
    first = make.transfer(0, 1, 40)
    second = make.transfer(0, 1, 30)
    beside = make.compute(1, flops=50)
    taken = make.assemble(1, 1, after=[first])
    make.assemble(1, 1, after=[second, taken])
    net = network(make.done(), ports(2, on_device=True), EXACT)
    assert schedule(net)[0][beside] == 70
    lanes = network(make.done(), ports(2, on_device=True), EXACT).next_lane
    assert not len(lanes)  # all of a message is waited for
    lane_start, lane = occupied_lanes(make.done(), True)
    _, _, next_, in_lane = _precedence(make.done().dep_start, make.done().dep, lane_start, lane)
    assert (next_ == net.next).all()
    net = net._replace(
        duration=np.array([5, 5, 50, 1, 1]), lead=np.array([2, 2, -1, -1, -1]), next_lane=in_lane
    )
    for run in (schedule, schedule_as_compiled):
        start, end = run(net)
        assert start.tolist() == [0, 5, 10, 60, 72]
        assert end.tolist() == [42, 72, 60, 61, 73]


@settings(max_examples=cases(100))
@given(seed=seeds, name=some_cluster)
def test_bounds(seed: int, name: str) -> None:
    tasks, c = random_tasks(seed, collectives=True), CLUSTERS[name]
    net, line = network(tasks, c, EXACT), simulate(tasks, c, EXACT)
    verify(line, tasks)
    step = int(line.end_ns.max())
    alone = durations_alone(net)
    assert step >= critical_path(tasks, alone)
    working = alone.copy()  # once all are released something is always running, or on some link
    hops = np.diff(net.hop_start)
    working[hops > 0] = net.latency[hops > 0]
    assert step <= int(working.sum() + net.hop_occupancy.sum() + net.release.max())
    assert all(0 <= share <= 1 for share in line.busy)
    used = link_spans(net, (line.start_ns, line.end_ns))
    for link in range(net.links):
        crossing = used.link == link
        assert_disjoint(used.start[crossing], used.end[crossing])
    for device in range(tasks.devices):
        works = (tasks.kind == COMPUTE) | (tasks.kind == ASSEMBLE)
        lane = np.flatnonzero((tasks.device == device) & works)
        assert (line.start_ns[lane][1:] >= line.end_ns[lane][:-1]).all()
        assert step >= int(net.duration[lane].sum())


def test_simulation_is_deterministic() -> None:
    tasks = random_tasks(7, count=400, devices=3)
    first = simulate(tasks, CLUSTERS["bus"], PUBLISHED)
    again = simulate(tasks, CLUSTERS["bus"], PUBLISHED)
    assert np.array_equal(first.start_ns, again.start_ns)
    assert first.peak_bytes == again.peak_bytes


@pytest.mark.slow
def test_larger_graphs_agree_too() -> None:
    tasks = random_tasks(3, count=5000, devices=8, collectives=True)
    net = network(tasks, cluster("2x4xk80"), PUBLISHED)
    for one, other in zip(schedule(net), schedule_as_compiled(net), strict=True):
        assert np.array_equal(one, other)


def test_a_task_that_waits_for_itself_is_our_own_defect() -> None:
    make = Maker(1)
    make.compute(0, flops=1, after=[0])
    net = network(make.done(), ports(1), EXACT)
    for run in (schedule, schedule_as_compiled):
        with pytest.raises(AssertionError, match="never ran"):
            run(net)


def vary(net: Network, seed: int) -> Network:
    """The same with some releases and holds."""
    rng = np.random.default_rng(seed)
    release, hold = (rng.choice([0, 0, 3, 30], len(net.duration)) for _ in range(2))
    return net._replace(release=release, hold=hold)


def hops_of(net: Network, item: int) -> range:
    return range(net.hop_start[item], net.hop_start[item + 1])


def slow_times(net: Network) -> tuple[list[int], list[int], list[int]]:
    """The rules read literally, from one instant to the next: what is ready enters the queues of
    its links, and every free link turns to the first in its queue. Also the turns of all hops."""
    n, before = len(net.duration), predecessors(net)
    latency, hold, release = net.latency.tolist(), net.hold.tolist(), net.release.tolist()
    link_of, occupancy = net.hop_link.tolist(), net.hop_occupancy.tolist()
    start, end = [-1] * n, [-1] * n
    turn = [-1] * len(link_of)
    free_at, now = [0] * net.links, 0
    queues: list[list[tuple[int, int, int]]] = [[] for _ in range(net.links)]
    unseen = set(range(n))
    lead = net.lead.tolist() or [-1] * n
    gone_on = [-1] * n  # when those in its lanes may begin
    later: list[int] = []  # moments at which something enters a queue
    while -1 in end or any(queues):
        arrived = {
            t for t in unseen
            if release[t] <= now
            and all(0 <= (gone_on if lane else end)[b] <= now for b, lane in before[t])
        }  # fmt: skip
        unseen -= arrived
        for item in arrived:
            if not hops_of(net, item):
                start[item], end[item] = now, now + int(net.duration[item])
                gone_on[item] = end[item]
            elif lead[item] >= 0:
                start[item], gone_on[item] = now, now + int(net.duration[item])
            for hop in hops_of(net, item):
                entry = now + max(lead[item], 0)
                queues[link_of[hop]].append((entry, item, hop))
                later.append(entry)
        for link, queue in enumerate(queues):
            if queue and free_at[link] <= now and min(queue)[0] <= now:
                first = min(queue)
                queue.remove(first)
                _, item, hop = first
                turn[hop] = now
                free_at[link] = now + occupancy[hop] + hold[item]
                if all(turn[h] >= 0 for h in hops_of(net, item)):
                    done = max(turn[h] + occupancy[h] for h in hops_of(net, item))
                    end[item] = done + latency[item]
                    if lead[item] >= 0:
                        end[item] = max(end[item], gone_on[item])
                    else:
                        start[item], gone_on[item] = now, end[item]
        moments = [*end, *gone_on, *later, *free_at, *release, 10**18]
        now = min(time for time in moments if time > now)
    return start, end, turn


def durations_alone(net: Network) -> np.ndarray:
    alone = net.duration.copy()
    for item in range(len(alone)):
        if hops_of(net, item):
            longest = max(int(net.hop_occupancy[hop]) for hop in hops_of(net, item))
            alone[item] = longest + net.latency[item]
    return alone


def predecessors(net: Network) -> list[list[tuple[int, bool]]]:
    """What each item waits for, and whether only for its duration, where it has hops besides."""
    before: list[list[tuple[int, bool]]] = [[] for _ in net.duration]
    for task in range(len(net.duration)):
        both = len(net.lead) > 0 and bool(net.lead[task] >= 0)
        for at in range(net.next_start[task], net.next_start[task + 1]):
            before[int(net.next[at])].append((task, both and bool(net.next_lane[at])))
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
