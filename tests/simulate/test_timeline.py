"""Memory over time, and what causes its peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from random import Random
from typing import Any

import numpy as np
import pytest
from graphs import captured
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import EXACT, SURVIVES, Maker, ports, random_tasks, small
from soak import cases

from apportion.graph import Graph, Op, Value
from apportion.lower.message_buffers import message_buffers
from apportion.lower.task_graph import (
    CATEGORIES,
    COMMUNICATION,
    WORKSPACE,
    TaskGraph,
    verify,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COLLECTIVE,
    TRANSFER,
)
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.simulate.memory_curve import CUDA_GRANULE, MIB, Cause, handed_out, peaks
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import MEASURED, Timeline, timeline

PARAMETER, GRADIENT = CATEGORIES.index("parameter"), CATEGORIES.index("gradient")


def curve(line: Timeline, device: int) -> list[tuple[int, int]]:
    c = line.curves[device]
    return list(zip(c.time_ns.tolist(), c.nbytes.tolist(), strict=True))


def test_slots_live_from_their_maker_to_their_last_user() -> None:
    make = Maker(1)
    a = make.compute(0, flops=10)
    b = make.compute(0, flops=5, after=[a])
    make.compute(0, flops=1, after=[b])
    make.slot(0, 1000, -1, SURVIVES, PARAMETER)
    made = make.slot(0, 100, a, b)
    make.slot(0, 100, a, b, base=made)  # a view costs nothing
    make.slot(0, 30, b, b, GRADIENT)
    make.slot(0, 7, -1, -1, GRADIENT)  # there, and used by nobody
    line = simulate(make.done(), ports(1), EXACT)
    assert curve(line, 0) == [
        (0, 1000), (0, 1007), (0, 1000), (0, 1100), (10, 1130), (15, 1030), (15, 1000),
    ]  # fmt: skip
    assert line.peak_bytes == (1130,)
    held = {name: n for name, n in line.peak_categories[0].items() if n}
    assert held == {"parameter": 1000, "activation": 100, "gradient": 30}


def test_at_one_instant_the_order_of_tasks_decides() -> None:
    make = Maker(1)
    a = make.compute(0, flops=10)
    b = make.compute(0, flops=10, after=[a])
    make.slot(0, 100, a, a)
    make.slot(0, 60, b, b)  # made when the other has been freed
    assert simulate(make.done(), ports(1), EXACT).peak_bytes == (100,)


def test_results_and_workspace_are_there_before_anything_is_freed() -> None:
    make = Maker(1)
    a = make.compute(0, flops=10)
    b = make.compute(0, flops=10, after=[a])
    make.slot(0, 100, a, b)
    make.slot(0, 60, b, SURVIVES)
    tasks = replace(make.done(), workspace=np.array([0, 7]))
    line = simulate(tasks, ports(1), EXACT)
    assert curve(line, 0) == [(0, 100), (10, 160), (10, 167), (20, 160), (20, 60)]
    assert line.peak_categories[0]["workspace"] == 7


def test_messages_have_buffers_at_both_ends_for_the_whole_step() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 40, after=[a])
    taken = make.assemble(1, 5, after=[message])
    make.compute(1, flops=7, after=[taken])
    source, target = make.slot(0, 100, a, message), make.slot(1, 50, taken, SURVIVES)
    make.copy(source, target, message, taken)
    line = simulate(make.done(), ports(2), EXACT)
    assert curve(line, 0) == [(0, 100), (0, 140), (50, 40)]
    assert curve(line, 1) == [(0, 40), (50, 90)]
    assert line.peak_categories[0]["communication"] == 40
    assert line.peak_categories[1]["communication"] == 40


def test_memory_follows_the_order_of_tasks_and_not_their_times() -> None:
    make = Maker(3)
    first = make.transfer(0, 1, 50)
    second = make.transfer(0, 2, 5)  # the port is held till 50
    last = make.compute(0, flops=10)  # ends at 10, but a process runs it after the messages
    one, two = make.assemble(1, 1, after=[first]), make.assemble(2, 1, after=[second])
    base = make.slot(0, 8, -1, last)
    view = make.slot(0, 8, -1, last, base=base)
    view = make.slot(0, 8, -1, last, base=view)
    make.copy(make.slot(0, 50, -1, first), make.slot(1, 50, one, one), first, one)
    make.copy(view, make.slot(2, 5, two, two), second, two)
    line = simulate(make.done(), ports(3), EXACT)
    assert line.end_ns[last] == 10
    assert curve(line, 0) == [(0, 8), (0, 58), (0, 108), (0, 113), (50, 63), (50, 55)]


def exchange(together: bool) -> Timeline:
    """Device 0 gets 40 bytes, sends 30 and 20 from slots of its own, and takes what it got."""
    make = Maker(2)
    there = make.transfer(0, 1, 30)
    more = make.transfer(0, 1, 20)
    back = make.transfer(1, 0, 40)
    taken = make.assemble(0, 1, after=[back])
    kept = make.assemble(1, 1, after=[there, more])
    make.copy(make.slot(0, 30, -1, there), make.slot(1, 30, kept, kept), there, kept)
    make.copy(make.slot(0, 20, -1, more), make.slot(1, 20, kept, kept), more, kept)
    make.copy(make.slot(1, 40, -1, back), make.slot(0, 40, taken, taken), back, taken)
    tasks = make.done()
    if together:
        tasks = replace(tasks, position=np.array([0, 0, 0, 1, 2]))
    return simulate(tasks, ports(2), EXACT)


def test_messages_share_a_buffer_unless_they_are_under_way_at_once() -> None:
    line = exchange(together=False)
    assert line.peak_categories[0]["communication"] == 40 + 20
    line = exchange(together=True)
    assert line.peak_categories[0]["communication"] == 30 + 20 + 40
    assert [n for _, n in curve(line, 0)] == [30, 50, 80, 100, 140, 110, 90, 130, 90]
    assert line.peak_bytes == (140, 40 + 30 + 20 + 30 + 20)


@pytest.mark.slow
@settings(max_examples=cases(150))
@given(seed=st.integers(0, 10**6), granule=st.sampled_from([1, 16]))
def test_curves_equal_a_slow_walk(seed: int, granule: int) -> None:
    """After the allocations of every task, and after its frees, both hold the same bytes of every
    category."""
    tasks = (random_tasks, random_exchanges, random_collectives)[seed % 3](seed)
    verify(tasks)
    rng = np.random.default_rng(seed)
    end = np.cumsum(rng.integers(1, 9, len(tasks)))
    line = timeline(
        tasks, end - rng.integers(1, 5, len(tasks)), end, source=MEASURED,
        granule=np.full(tasks.devices, granule),
    )  # fmt: skip
    for device, held in enumerate(line.curves):
        bands, walked = held.bands(), walk(tasks, line, device, granule)
        assert (bands >= 0).all() and (np.diff(held.time_ns) >= 0).all()
        assert (bands.sum(axis=1) == held.nbytes).all() and held.change.all()
        assert sum(held.peak_categories) == sum(held.alive().values()) == held.peak_bytes
        assert held.peak_bytes == max((sum(row.bands) for row in walked), default=0)
        assert held.peak < 0 or (held.nbytes[: held.peak] < held.peak_bytes).all()
        for row in walked:
            last = row.changes - 1
            assert row.bands == (bands[last].tolist() if last >= 0 else [0] * len(CATEGORIES))
            assert row.time == (held.time_ns[last] if last >= 0 else 0)
        assert walked[-1].changes == len(held.nbytes)


@dataclass(frozen=True)
class Walked:
    """Bytes of each category held after so many changes, and when that is."""

    changes: int
    bands: list[int]
    time: int


def walk(tasks: TaskGraph, line: Timeline, device: int, granule: int) -> list[Walked]:
    """What one process does, read literally: its tasks in order, the messages of one position
    together; all that is made comes before all that is freed."""
    held: dict[tuple[str, int], tuple[int, int]] = {}  # bytes, category
    start, end, time, changes = line.start_ns, line.end_ns, 0, 0
    found: list[Walked] = []
    buffers = message_buffers(tasks)

    def settle() -> None:
        bands = [0] * len(CATEGORIES)
        for nbytes, category in held.values():
            bands[category] += nbytes
        found.append(Walked(changes, bands, time))

    def slots(column: Any, task: int) -> list[int]:
        mine = (column == task) & (tasks.slot_device == device) & (tasks.slot_base < 0)
        return np.flatnonzero(mine).tolist()

    def born(task: int) -> dict[tuple[str, int], tuple[int, int]]:
        sizes, kinds = tasks.slot_nbytes, tasks.slot_category
        made = {("slot", s): (int(sizes[s]), int(kinds[s])) for s in slots(tasks.slot_first, task)}
        if task == 0:
            sizes = buffers.nbytes[buffers.device == device].tolist()
            made |= {("buffer", k): (size, COMMUNICATION) for k, size in enumerate(sizes)}
        if task >= 0 and tasks.device[task] == device and len(tasks.workspace):
            made["workspace", task] = int(tasks.workspace[task]), WORKSPACE
        return {k: (-(-n // granule) * granule, kind) for k, (n, kind) in made.items() if n}

    held |= born(-1)
    changes += len(held)
    settle()
    for slot in slots(tasks.slot_last, -1):
        del held["slot", slot]
        changes += 1
    settle()
    for group in together(tasks):
        for task in group:
            made = born(task)
            if any(what != "buffer" for what, _ in made):
                time = max(time, int(start[task]))
            held |= made
            changes += len(made)
        settle()
        for task in group:
            gone = {("slot", s): group[-1] for s in slots(tasks.slot_last, task)}
            gone |= {("workspace", task): task}
            for key in gone.keys() & held.keys():
                time = max(time, int(end[gone[key]]))
                del held[key]
                changes += 1
        settle()
    return found


def together(tasks: TaskGraph) -> list[list[int]]:
    """Tasks in order, the messages of one position as one."""

    def place(task: int) -> tuple[int, int]:
        moving = tasks.kind[task] in (TRANSFER, COLLECTIVE)
        return int(tasks.position[task]), -1 if moving else task

    return [list(group) for _, group in groupby(range(len(tasks)), place)]


def random_collectives(seed: int, devices: int = 4) -> TaskGraph:
    """Rounds of computation and an exchange among some devices: each sends every other as much."""
    rng = Random(seed)
    make, position = Maker(devices), []
    for turn in range(5):
        members = sorted(rng.sample(range(devices), rng.randint(2, devices)))
        made = {d: make.compute(d, flops=rng.randint(1, 9)) for d in members}
        size, k = 2 * rng.randint(1, 10), len(members)
        joint = make.collective(members, k * (k - 1) * size, [*made.values()])
        source = {d: make.slot(d, (k - 1) * size, made[d], joint, rng.randrange(7)) for d in made}
        position += [2 * turn] * k + [2 * turn + 1]
        for d in members:
            for _ in range(halves := rng.randint(1, 2)):  # perhaps a second assembly takes a part
                taken = make.assemble(d, 3, [joint])
                target = make.slot(d, 5, taken, rng.choice([taken, SURVIVES]))
                for other in members:
                    if other != d:
                        make.copies.append((source[other], target, joint, taken, size // halves))
                position.append(2 * turn + 1)
    tasks = make.done()
    return replace(tasks, position=np.array(position))


def random_exchanges(seed: int, devices: int = 4) -> TaskGraph:
    """Rounds of some computation with workspace, an exchange of several messages, and their
    assemblies, perhaps of several messages each."""
    rng = Random(seed)
    make, position, workspace = Maker(devices), [], []
    for turn in range(6):
        before = len(make.tasks)
        made = [make.compute(d, flops=rng.randint(1, 9)) for d in range(devices)]
        slots = [make.slot(d, rng.randint(1, 50), made[d], made[d]) for d in range(devices)]
        pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
        messages = []
        for a, b in sorted(rng.sample(pairs, rng.randint(0, 6))):
            messages.append((make.transfer(a, b, rng.randint(1, 9), [made[a]]), a, b))
            make.slots[slots[a]] = (*make.slots[slots[a]][:5], messages[-1][0])
        for device in range(devices):
            mine = [(m, a) for m, a, b in messages if b == device]
            if mine:
                taker = make.assemble(device, 3, [m for m, _ in mine])
                target = make.slot(device, 5, taker, rng.choice([taker, SURVIVES]))
                for message, a in mine:
                    make.copy(slots[a], target, message, taker)
        position += [2 * turn + (kind == TRANSFER) for kind, *_ in make.tasks[before:]]
        workspace += [rng.choice([0, 0, 30]) * (k != TRANSFER) for k, *_ in make.tasks[before:]]
    tasks = make.done()
    return replace(
        tasks, position=np.maximum.accumulate(position), workspace=np.array(workspace, np.int64)
    )


def test_a_peak_names_its_causes() -> None:
    line_of = "model.py:7"
    ops = (
        Op("embed", "test.op", (0,), (1,), (), line=line_of), Op("head", "test.op", (1,), (2,), ()),
    )  # fmt: skip
    values = (
        Value("weight", "parameter", (10, 10), "float32", 400),
        Value("hidden", "activation", (50,), "float32", 200),
        Value("loss", "output", (), "float32", 4),
    )
    graph = Graph(values, ops)
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 100, after=[a])
    taken = make.assemble(1, 100, after=[message])
    b = make.compute(1, flops=10, after=[taken])
    make.slot(0, 400, -1, SURVIVES, PARAMETER)
    half, other = make.slot(0, 100, a, message), make.slot(0, 100, a, message)
    target = make.slot(1, 100, taken, b)
    make.copy(half, target, message, taken)
    tasks = replace(
        make.done(), op=np.array([0, 1, 1, 1]), workspace=np.array([0, 0, 0, 30]),
        slot_value=np.array([0, 1, 1, 1]),
    )  # fmt: skip
    assert other == 2
    first, second = peaks(simulate(tasks, ports(2), EXACT).curves, tasks, graph)
    assert (first.nbytes, first.time_ns, first.task, first.op) == (700, 0, message, "head")
    assert first.causes == (
        Cause("weight", "float32[10,10]", "parameter", 400),
        Cause("hidden", "float32[50]", "activation", 200, "embed", line_of),
        Cause("message to device 1", "", "communication", 100, "head"),
    )
    assert first.others == (0, 0) and first.categories["activation"] == 200
    assert (second.nbytes, second.task) == (230, b)
    assert {c.name for c in second.causes} == {"message from device 0", "hidden", "workspace"}
    (brief, _) = peaks(simulate(tasks, ports(2), EXACT).curves, tasks, graph, top=1)
    assert [c.name for c in brief.causes] == ["weight"] and brief.others == (2, 300)


def test_a_device_that_holds_nothing_has_no_peak() -> None:
    tasks = Maker(1).done()
    (found,) = peaks(simulate(tasks, ports(1), EXACT).curves, tasks, Graph((), ()))
    assert (found.nbytes, found.task, found.causes) == (0, -1, ())


def test_an_accelerator_hands_out_memory_in_granules() -> None:
    make = Maker(2)
    a = make.compute(0, flops=1)
    make.slot(0, 1, a, SURVIVES)
    make.slot(0, 513, a, a)
    make.slot(1, 1, -1, SURVIVES)
    tasks = replace(make.done(), workspace=np.array([512]))
    place = ports(2)
    kinds = (replace(place.devices[0], kind="h100"), place.devices[1])
    line = simulate(tasks, replace(place, devices=kinds), EXACT)
    assert [n for _, n in curve(line, 0)] == [512, 1536, 2048, 1536, 512]
    assert line.peak_bytes == (2048, 1)


@pytest.mark.parametrize(
    ("asked", "got"),
    [(1, 512), (MIB, MIB), (2 * MIB, 2 * MIB), (3 * MIB, 3.25 * MIB), (11 * MIB, 12 * MIB),
     (11.5 * MIB, 12 * MIB), (2.5 * MIB, 2.75 * MIB), (10.75 * MIB, 11 * MIB)],
)  # fmt: skip
def test_remainders_stay_with_large_blocks(asked: float, got: float) -> None:
    assert handed_out(np.array([int(asked)]), np.array([CUDA_GRANULE])).tolist() == [got]


@pytest.mark.slow
def test_roles_are_categories_of_their_own() -> None:
    """Of a training step with Adam: gradients, state and activations are told apart."""
    plan = make_plan(captured("gpt2:tiny")[0], cluster("local:2"), "data")
    tasks, graph = plan.tasks, plan.space.graph
    fetched = np.zeros(len(tasks.slot_value), bool)
    made = tasks.slot_first >= 0
    fetched[made] = tasks.kind[tasks.slot_first[made]] == ASSEMBLE
    for slot, value in enumerate(tasks.slot_value.tolist()):
        role, category = graph.values[value].role, CATEGORIES[tasks.slot_category[slot]]
        assert category == role or (fetched[slot] and category == "communication")
    for held in plan.timeline.curves:
        most = dict(zip(CATEGORIES, held.bands().max(axis=0).tolist(), strict=True))
        state = sum(
            int(n) for n, k, first in zip(
                tasks.slot_nbytes, tasks.slot_category, tasks.slot_first, strict=True
            ) if first < 0 and CATEGORIES[k] == "optimizer state"
        )  # fmt: skip
        assert most["gradient"] > 0 and most["activation"] > 0 and most["communication"] > 0
        assert most["optimizer state"] >= state // 2


def test_measured_times_give_the_same_type() -> None:
    tasks, line = small()
    measured = timeline(tasks, line.start_ns * 2, line.end_ns * 2, source=MEASURED)
    assert measured.step_seconds == 2 * line.step_seconds
    assert measured.peak_bytes == line.peak_bytes
    assert str(measured).startswith("measured: 4.6e-06 s a step, peak 1000 bytes")
