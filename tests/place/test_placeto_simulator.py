"""Placeto's simulator: examples worked by hand, and an event-driven reading of its rules."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import schedule_as_compiled
from soak import cases

from apportion.columns import offsets
from apportion.place.imports.captured import placeto_links
from apportion.place.objectives.placeto_simulator import (
    OpGroups,
    SimulatedPlacement,
    queue_network,
    simulate_placement,
)
from apportion.place.objectives.step_time import simulate_step
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementProblem,
)
from apportion.simulate.schedule import schedule

US = 1000  # nanoseconds


def groups(costs_us: list[float], nbytes: list[int], edges: list[tuple[int, int]]) -> OpGroups:
    return OpGroups(
        np.array(costs_us) * 1e-6,
        np.array(nbytes, np.int64),
        np.array(edges, np.int64).reshape(-1, 2),
    )


def starts_us(outcome: SimulatedPlacement) -> list[float]:
    return [time / US for time in outcome.start_ns.tolist()]


def test_a_device_rests_between_groups() -> None:
    out = simulate_placement(groups([10, 20, 30], [0, 0, 0], []), [0, 0, 0], 1)
    assert starts_us(out) == [0, 15.7, 41.4]
    assert out.step_seconds == pytest.approx(77.1e-6)  # with the rest after the last


def test_a_group_without_cost_needs_no_rest() -> None:
    out = simulate_placement(
        groups([0, 0, 10, 0], [0] * 4, [(0, 1), (1, 2), (2, 3)]), [0, 1, 0, 1], 2
    )
    # Even an output of no bytes goes over the link, which is busy until 25 after the first.
    assert starts_us(out) == [0, 0, 0, 25]
    assert out.step_seconds == pytest.approx(50e-6)


def test_an_output_takes_its_bytes_by_7600_a_microsecond() -> None:
    out = simulate_placement(groups([10, 5], [76_000, 0], [(0, 1)]), [0, 1], 2)
    assert starts_us(out) == [0, 20]
    assert out.step_seconds == pytest.approx(45e-6)  # the link is free again at 10 + 10 + 25


def test_one_message_serves_all_devices_and_the_link_rests_after_it() -> None:
    made = groups([10, 10, 1, 1, 1], [7_600, 7_600, 0, 0, 0], [(0, 2), (0, 3), (0, 4), (1, 4)])
    out = simulate_placement(made, [0, 0, 1, 2, 1], 3)
    # Group 0 ends at 10 and is elsewhere at 11; the link is busy until 36. Group 1 ends at 25.7 and
    # is elsewhere at 37.
    assert starts_us(out) == [0, 15.7, 11, 11, 37]


def test_neighbours_on_the_device_do_not_wait_for_the_rest() -> None:
    made = groups([10, 1, 1], [0, 0, 0], [(0, 1), (0, 2)])
    assert starts_us(simulate_placement(made, [0, 0, 0], 1)) == [0, 15.7, 22.4]


def test_memory_is_charged_where_an_output_is_made() -> None:
    made = groups([10, 10, 10], [100, 30, 7], [(0, 1), (0, 2), (1, 2)])
    assert simulate_placement(made, [0, 0, 0], 1).peak_bytes == (137,)
    assert simulate_placement(made, [0, 1, 1], 2).peak_bytes == (100, 37)


def test_memory_is_given_back_a_microsecond_before_the_last_reader_ends() -> None:
    # Group 1 reads on device 1 from 11 to 23, so what it reads is gone from device 0 at 22. Group 3
    # starts there at 15.7 + the cost of group 2 + 5.7.
    for filling, peak in ((0.4, 7_650), (1.2, 7_600)):
        made = groups([10, 12, filling, 1], [7_600, 0, 0, 50], [(0, 1)])
        out = simulate_placement(made, [0, 1, 0, 0], 2)
        assert out.start_ns[3] / US == pytest.approx(21.4 + filling)
        assert out.peak_bytes == (peak, 0)


def test_what_does_not_fit_is_told() -> None:
    one = groups([1], [1], [])
    with pytest.raises(ValueError, match="one of 2 devices"):
        simulate_placement(one, [2], 2)
    with pytest.raises(ValueError, match="one of 2 devices"):
        simulate_placement(one, [0, 1], 2)
    with pytest.raises(ValueError, match="lead to later groups"):
        groups([1, 1], [1, 1], [(1, 0)])


@settings(max_examples=cases(200))
@given(seed=st.integers(0, 10**6), devices=st.integers(1, 4), count=st.integers(1, 30))
def test_the_engine_follows_the_rules(seed: int, devices: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    edges = [(a, b) for b in range(count) for a in range(b) if rng.random() < min(1.0, 2.5 / count)]
    costs = rng.choice([0, 0, 1, 2, 5.7, 13, 40], count)
    made = groups(costs.tolist(), (rng.integers(0, 20, count) * 7_600).tolist(), edges)
    place = rng.integers(0, devices, count)
    out = simulate_placement(made, place.tolist(), devices)
    start, peaks, last = events(made, place.tolist(), devices)
    assert out.start_ns.tolist() == start
    assert out.peak_bytes == tuple(peaks)
    assert out.step_seconds == last / 1e9
    _, net = queue_network(made, place, devices)
    for one, other in zip(schedule(net), schedule_as_compiled(net), strict=True):
        assert np.array_equal(one, other)
    step = simulate_step(problem_of(made, devices), place)
    assert step.ticks == last
    assert step.start.tolist() == start
    assert step.end.tolist() == out.end_ns.tolist()
    assert step.peak_bytes.tolist() == peaks


def problem_of(made: OpGroups, devices: int) -> PlacementProblem:
    """The groups as a PlacementProblem under Placeto's rules."""
    count = len(made.seconds)
    edges = made.edges[np.argsort(made.edges[:, 0], kind="stable")]
    every, one = np.arange(count), np.ones((1, devices))
    columns = PlacementColumns(
        unit=every,
        duration=np.rint(made.seconds[:, None] * 1e9 * one).astype(np.int64),
        backward=np.zeros(count, np.int64),
        resident=np.zeros(count, np.int64),
        source=every,
        nbytes=made.nbytes,
        send=made.nbytes.astype(float),
        output_start=np.arange(count + 1),
        reader_start=offsets(np.bincount(edges[:, 0], minlength=count)),
        reader=np.ascontiguousarray(edges[:, 1]),
        allowed=np.ones((count, devices), bool),
    )
    names, of = ("",) * count, tuple(PlacementDevice("", "") for _ in range(devices))
    return PlacementProblem("", names, names, columns, placeto_links(devices), of)


def events(made: OpGroups, place: list[int], devices: int) -> tuple[list[int], list[int], int]:
    """Starts, peaks, and the time of the last event: the rules, from one instant to the next."""
    cost = [round(s * 1e9) for s in made.seconds.tolist()]
    delay = [round(b / 7.6) for b in made.nbytes.tolist()]
    readers, inputs = defaultdict(list), [0] * len(cost)
    for a, b in made.edges.tolist():
        readers[a].append(b)
        inputs[b] += 1
    waiting = [(0, g, "run") for g in range(len(cost)) if not inputs[g]]
    arriving: list[tuple[int, int, str]] = []  # outputs on their way, and ends of groups
    free: dict[tuple[str, int], int] = defaultdict(int)
    start, last, now = [-1] * len(cost), 0, 0
    while waiting or arriving:
        arrived = sorted(event for event in arriving if event[0] <= now)
        arriving = [event for event in arriving if event[0] > now]
        for _, group, how in arrived:
            elsewhere = [r for r in readers[group] if place[r] != place[group]]
            here = [r for r in readers[group] if place[r] == place[group]]
            if how == "run" and elsewhere:
                waiting.append((now, group, "send"))
            for reader in here if how == "run" else elsewhere:
                inputs[reader] -= 1
                if not inputs[reader]:
                    waiting.append((now, reader, "run"))
        able = [w for w in waiting if free[w[2], place[w[1]]] <= now]
        if able:  # one, then look again: it may have taken no time
            _, group, how = first = min(able)
            waiting.remove(first)
            takes = cost[group] if how == "run" else delay[group]
            rest = (5_700 if takes else 0) if how == "run" else 25_000
            free[how, place[group]] = now + takes + rest
            last = max(last, now + takes + rest)
            arriving.append((now + takes, group, how))
            if how == "run":
                start[group] = now
        elif not any(event[0] <= now for event in arriving):
            times = [event[0] for event in arriving] + [free[w[2], place[w[1]]] for w in waiting]
            now = min((time for time in times if time > now), default=now)
    return start, peaks_by_scan(made, place, devices, start, cost), last


def peaks_by_scan(
    made: OpGroups, place: list[int], devices: int, start: list[int], cost: list[int]
) -> list[int]:
    """At the start of every group, all that is held then."""
    gone = list(start)
    for a, b in made.edges.tolist():
        gone[a] = max(gone[a], start[b] + cost[b] - US)
    return [
        max(
            (
                sum(
                    int(made.nbytes[g])
                    for g in range(len(cost))
                    if place[g] == device and start[g] <= time <= gone[g]
                )
                for time in start
            ),
            default=0,
        )
        for device in range(devices)
    ]
