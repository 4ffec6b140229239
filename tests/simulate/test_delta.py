"""Delta simulation equals full simulation bit for bit, whatever is changed and undone."""

from __future__ import annotations

import math
import sys
from functools import cache
from random import Random

import numpy as np
import pytest
from plain_lower import lower as lower_plainly
from rings import sampled

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import BUFFER, FORWARD, OPTIMIZER_STATE, PARAMETER, UPDATE
from apportion.lower.lower import Lowering, lower
from apportion.lower.task_graph import (
    TaskGraph,
    verify,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
)
from apportion.lower.termwise import termwise
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.memory.carry_strategy import carry_strategy
from apportion.memory.offload import Offload, offload
from apportion.search import METHODS, Problem
from apportion.search.baselines.random_strategy import _choice, draw
from apportion.simulate.delta import delta as deltas
from apportion.simulate.delta import new_blocks, schedule_state
from apportion.simulate.delta.delta import Delta
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Choice, Layout, Strategy, unsplit_choice


@cache
def space_of(spec: str) -> Space:
    it = zoo.load(spec, 0)
    return Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)


def live_of(spec: str, machine: str, rng: Random) -> Delta:
    space, them = space_of(spec), cluster(machine)
    return Delta(space, draw(space, len(them.devices), rng), them, default_cost(them))


def agrees(live: Delta) -> bool:
    """Whether all times are those of a simulation from the beginning."""
    tasks = lower(live.space, live.strategy, len(live.cluster.devices))
    line = simulate(tasks, live.cluster, live.cost)
    start, end = live.times()
    assert live.step_ns == int(line.end_ns.max())
    return np.array_equal(start, line.start_ns) and np.array_equal(end, line.end_ns)


def edit(live: Delta, rng: Random, many: int = 1) -> None:
    devices, space = len(live.cluster.devices), live.space
    chosen = rng.sample(range(len(space.graph.ops)), many)
    live.change({op: _choice(space, op, devices, rng) for op in chosen})


MACHINES = ["4xh100", "2x2xk80", "p2.8xlarge:4", "local:3", "3xh200", "mixed-a100-v100"]


@pytest.mark.slow
@pytest.mark.parametrize("machine", sampled(MACHINES, 3))
def test_random_edits_of_a_random_strategy(machine: str) -> None:
    rng = Random(MACHINES.index(machine))
    live = live_of("mlp:tiny", machine, rng)
    assert agrees(live)
    counts = set()
    for number in range(50):
        edit(live, rng, rng.choice((1, 1, 1, 2, 4)))
        assert agrees(live), number
        counts.add(len(live.times()[0]))
        if rng.random() < 0.5:
            live.keep()
        else:
            live.undo()
    assert agrees(live)
    assert len(counts) > 10, "edits did not add and remove tasks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "machine"),
    [
        ("rnn:tiny", "2x2xa100"),
        ("gpt2:tiny", "4xh100"),
        pytest.param("wresnet:tiny", "p2.8xlarge:4", marks=pytest.mark.slow),
    ],
)
def test_real_graphs_from_data_parallelism(spec: str, machine: str) -> None:
    rng, space, them = Random(1), space_of(spec), cluster(machine)
    cost = default_cost(them)
    strategy = METHODS["data"](Problem(space, them, cost), budget=0.0, seed=0).strategy
    live = Delta(space, strategy, them, cost)
    for number in range(8):
        edit(live, rng)
        assert agrees(live), number
        live.undo() if number % 3 == 1 else live.keep()


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["2x2xk80", "p2.8xlarge"])
def test_tasks_in_many_lanes_come_and_go(machine: str) -> None:
    """Tasks of few devices come and go between others that wait for them."""
    rng = Random(5)
    live = live_of("mlp:tiny", machine, rng)
    for _ in range(60):
        edit(live, rng)
        assert agrees(live)
        live.undo() if rng.random() < 0.5 else live.keep()


@pytest.mark.slow
def test_what_is_before_a_change_is_not_worked_out_again() -> None:
    live = live_of("gpt2:tiny", "4xh100", Random(8))
    phases = [op.phase for op in live.space.graph.ops]
    written = []
    for op in (0, phases.index(UPDATE) - 1):
        now = live.strategy.choices[op]
        live.change({op: Choice(now.parts, tuple((d + 1) % 4 for d in now.devices))})
        written.append(int(live.state.counters[schedule_state.WRITTEN]))
        live.undo()
    assert 0 < 4 * written[1] < written[0]


@pytest.mark.slow
def test_a_host_is_not_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four hosts one may be any time ahead of its device."""
    ahead = lambda cluster, cost: np.array([20_000, 0, 30_000, 15_000])  # noqa: E731
    for module in (deltas, sys.modules["apportion.simulate.network"]):
        monkeypatch.setattr(module, "ahead_nanoseconds", ahead)
    rng = Random(1)
    live = live_of("mlp:tiny", "4xh100", rng)
    for number in range(30):
        edit(live, rng, rng.choice((1, 2, 4)))
        assert agrees(live), number
        live.undo() if rng.random() < 0.5 else live.keep()


def layout_of(live: Delta, value: int, rng: Random) -> Layout | None:
    """One atom cut at random over different devices, or no Layout."""
    factors, devices = live.space.factors(value), len(live.cluster.devices)
    if rng.random() < 0.3:
        return None
    parts = [1] * len(factors)
    if factors:
        atom = rng.randrange(len(factors))
        parts[atom] = rng.randint(1, min(devices, factors[atom]))
    return Layout(tuple(parts), tuple(rng.sample(range(devices), math.prod(parts))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "machine"),
    [("mlp:tiny", "4xh100"), pytest.param("rnn:tiny", "2x2xk80", marks=pytest.mark.slow)],
)
def test_layouts_change_and_come_back(spec: str, machine: str) -> None:
    rng = Random(7)
    live = live_of(spec, machine, rng)
    for number in range(25):
        before, step = live.strategy, live.step_ns
        values = rng.sample(range(len(live.flows)), rng.choice((1, 1, 3)))
        ops = rng.sample(range(len(live.space.graph.ops)), rng.choice((0, 1, 2)))
        devices = len(live.cluster.devices)
        choices = {op: _choice(live.space, op, devices, rng) for op in ops}
        live.change(choices, {value: layout_of(live, value, rng) for value in values})
        assert agrees(live), number
        if rng.random() < 0.5:
            live.undo()
            assert live.strategy == before and live.step_ns == step and agrees(live)
        else:
            live.keep()
    assert len(live.strategy.layouts) > 5


def test_an_illegal_layout_changes_nothing() -> None:
    live = live_of("mlp:tiny", "4xh100", Random(4))
    strategy, step = live.strategy, live.step_ns
    parts = (1,) * len(live.space.factors(0))
    with pytest.raises(ValueError, match="is on device 9, of which there are 4"):
        live.change({}, {0: Layout(parts, (9,))})
    with pytest.raises(ValueError, match="lays out value 1000"):
        live.change({}, {1000: None})
    assert live.strategy == strategy and live.step_ns == step and agrees(live)


# What is held


def held_plainly(live: Delta) -> list[int]:
    """Bytes of all slots that hold state, and of those that forward Ops make and others use."""
    tasks, graph = live.tasks(), live.space.graph
    end, base = len(graph.ops), tasks.slot_base.tolist()

    def early(task: int) -> bool:
        op = int(tasks.op[task])
        return op < end and graph.ops[op].phase == FORWARD

    def root(slot: int) -> int:
        while base[slot] >= 0:
            slot = base[slot]
        return slot

    late = set()
    for task in range(len(tasks)):
        if not early(task):
            read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
            late.update(root(slot) for slot in read.tolist() if slot >= 0)
    total = [0] * len(live.cluster.devices)
    for slot, device in enumerate(tasks.slot_device.tolist()):
        made, role = int(tasks.slot_first[slot]), graph.values[int(tasks.slot_value[slot])].role
        state = made < 0 and role in (PARAMETER, OPTIMIZER_STATE, BUFFER)
        if base[slot] < 0 and (state or (made >= 0 and early(made) and slot in late)):
            total[device] += int(tasks.slot_nbytes[slot])
    return total


def test_what_is_held_is_what_the_slots_say() -> None:
    rng = Random(3)
    live = live_of("mlp:tiny", "4xh100", rng)
    seen = set()
    for number in range(12):
        assert live.held.tolist() == held_plainly(live)
        edit(live, rng, 3)
        seen.add(tuple(live.held.tolist() if number % 3 else ()))
        live.undo() if number % 4 == 0 else live.keep()
    assert len(seen) > 3


@pytest.mark.slow
def test_views_are_held_once() -> None:
    """Where views are cut otherwise than what they are views of, it is a little less."""
    live = live_of("rnn:tiny", "2x2xk80", Random(3))
    ours, plain = np.array(live.held), np.array(held_plainly(live))
    assert (ours <= plain).all() and (ours > 0.97 * plain).all()


@pytest.mark.slow
def test_what_is_computed_term_by_term_follows_changes() -> None:
    rng, space, them = Random(2), space_of("rnn:tiny"), cluster("2x2xa100")
    cost = default_cost(them)
    strategy = METHODS["data"](Problem(space, them, cost), budget=0.0, seed=0).strategy
    live = Delta(space, strategy, them, cost)
    (summed,) = live.lowering.termwise
    made = [space.graph.producer[value] for value in space.graph.ops[summed].inputs]
    around = [summed, *(op for op, _ in filter(None, made))]
    seen = set()
    for _ in range(12):
        live.change(
            {op: unsplit_choice(space, op, rng.sample(range(4), 2)) for op in rng.sample(around, 1)}
        )
        found = termwise(space, live.strategy, live.lowering.splits)
        assert live.lowering.termwise == found and agrees(live)
        seen.add(len(found))
        live.undo()
        assert live.lowering.termwise == {summed: (0, 1, 2, 3)}
    assert seen == {0}
    where = {op: Choice(live.strategy.choices[op].parts, (3, 2, 1, 0)) for op in around}
    live.change(where)
    assert live.lowering.termwise == {summed: (3, 2, 1, 0)} and agrees(live)


@pytest.mark.slow
def test_room_runs_out_and_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "ROOM", 1)
    monkeypatch.setattr(deltas, "SPARE", 40)
    monkeypatch.setattr(new_blocks, "SPARE", 40)
    rng = Random(2)
    live = live_of("mlp:tiny", "3xh100", rng)
    arrays = set()
    for _ in range(25):
        before = live.step_ns
        edit(live, rng)
        assert agrees(live)
        arrays.add(id(live.state.cells))
        if rng.random() < 0.5:
            live.undo()
            assert live.step_ns == before and agrees(live)
        else:
            live.keep()
    assert len(arrays) > 1


@pytest.mark.slow
def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "MEMORY", 1)
    monkeypatch.setattr(deltas, "SPARE", 40)
    rng = Random(6)
    live = live_of("mlp:tiny", "4xh100", rng)
    limit = len(live.flows) + 40
    forgotten = 0
    for _ in range(40):
        before = live.lowering.remembered
        edit(live, rng)
        forgotten += live.lowering.remembered < before
        assert live.lowering.remembered < limit + 100 and agrees(live)
        live.undo() if rng.random() < 0.5 else live.keep()
    assert forgotten > 1


def test_undo_restores_every_time() -> None:
    rng = Random(3)
    live = live_of("mlp:tiny", "4xh100", rng)
    for _ in range(20):
        before = live.times()
        strategy, step = live.strategy, live.step_ns
        edit(live, rng, 3)
        live.undo()
        after = live.times()
        assert live.strategy == strategy and live.step_ns == step
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_a_limit_decides_as_the_step_time_does() -> None:
    rng, other = Random(9), Random(9)
    live, plain = (live_of("rnn:tiny", "2x2xk80", r) for r in (rng, other))
    bounded = 0
    for number in range(40):
        edit(plain, other, 2)
        devices, ops = len(live.cluster.devices), len(live.space.graph.ops)
        chosen = {op: _choice(live.space, op, devices, rng) for op in rng.sample(range(ops), 2)}
        limit = plain.step_ns + (number % 5 - 2) * plain.step_ns // 1000
        found = live.change(chosen, limit=limit)
        assert (found <= limit) == (plain.step_ns <= limit)
        assert limit < found <= plain.step_ns if live.bounded else found == plain.step_ns
        bounded += live.bounded
        if live.bounded or number % 2:
            live.undo()
            plain.undo()
        else:
            live.keep()
            plain.keep()
        assert live.step_ns == plain.step_ns and (number % 8 or agrees(live))
    assert 5 < bounded < 35


def test_an_illegal_choice_changes_nothing() -> None:
    live = live_of("mlp:tiny", "4xh100", Random(4))
    strategy, step = live.strategy, live.step_ns
    name = live.space.graph.ops[0].name
    wrong = Choice(strategy.choices[0].parts, (9,) * len(strategy.choices[0].devices))
    with pytest.raises(ValueError, match=f"operator '{name}' is on device 9"):
        live.change({0: wrong})
    assert live.strategy == strategy and live.step_ns == step and agrees(live)


# The lowering that both stand on, against one that does the same Op by Op, in plain Python


def summary(tasks: TaskGraph) -> dict[str, object]:
    """What two lowerings of one strategy must agree in, however they number slots and tasks."""
    made = tasks.kind == COMPUTE
    joined = tasks.kind == ASSEMBLE
    copies = zip(
        tasks.copy_term.tolist(), tasks.copy_nbytes.tolist(),
        tasks.slot_device[tasks.copy_source].tolist(),
        tasks.slot_device[tasks.copy_target].tolist(), tasks.op[tasks.copy_task].tolist(),
        [tasks.boxes[b] for b in tasks.copy_source_box.tolist()],
        [tasks.boxes[b] for b in tasks.copy_target_box.tolist()], strict=True,
    )  # fmt: skip
    slots = zip(
        tasks.slot_value.tolist(), tasks.slot_device.tolist(), tasks.slot_nbytes.tolist(),
        tasks.slot_category.tolist(), (tasks.slot_base >= 0).tolist(),
        (tasks.slot_first < 0).tolist(), (tasks.slot_last == len(tasks)).tolist(),
        [tasks.boxes[b] for b in tasks.slot_region.tolist()], strict=True,
    )  # fmt: skip
    work = zip(
        tasks.op[made].tolist(), tasks.part[made].tolist(), tasks.device[made].tolist(),
        tasks.nbytes[made].tolist(), tasks.flops[made].tolist(), strict=True,
    )  # fmt: skip
    assemblies = zip(
        tasks.op[joined].tolist(), tasks.device[joined].tolist(), tasks.nbytes[joined].tolist(),
        strict=True,
    )  # fmt: skip
    return {
        "bytes moved": tasks.bytes_moved, "copies": sorted(copies), "slots": sorted(slots),
        "parts": sorted(work), "assemblies": sorted(assemblies), "carried": len(tasks.carry),
    }  # fmt: skip


def alike(spec: str, strategy: Strategy, devices: int) -> TaskGraph:
    space = space_of(spec)
    ours = lower(space, strategy, devices)
    verify(ours)
    lowered = Lowering(space, strategy, devices).lowered()
    reduced = {value for value, flow in enumerate(lowered.flows) if lowered.store.laid_out[flow]}
    assert ours.bytes_moved <= lower_plainly(space, strategy, devices).bytes_moved
    expected = summary(lower_plainly(space, strategy, devices, reduced))
    for what, found in summary(ours).items():
        assert found == expected[what], what
    return ours


@pytest.mark.parametrize("seed", range(12))
def test_lowering_by_patterns_equals_lowering_op_by_op(seed: int) -> None:
    devices = 2 + seed % 4
    alike("mlp:tiny", draw(space_of("mlp:tiny"), devices, Random(seed)), devices)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "rnn:tiny", "wresnet:tiny"])
def test_regular_plans_become_collectives(spec: str) -> None:
    them = cluster("4xh100")
    problem = Problem(space_of(spec), them, default_cost(them))
    strategy = METHODS["data"](problem, budget=0.0, seed=0).strategy
    tasks = alike(spec, strategy, 4)
    among = tasks.kind == COLLECTIVE
    assert among.any()
    assert {tasks.groups[g] for g in tasks.group[among].tolist()} == {(0, 1, 2, 3)}


# Copies to the host


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["2xh100", "local:2"])
def test_a_step_that_offloads(machine: str) -> None:
    rng, space, them = Random(4), space_of("mlp:tiny"), cluster(machine)
    graph, count = space.source, len(space.source.ops)
    kept = [op.outputs[0] for op in graph.ops if op.phase == FORWARD and op.outputs]
    drawn = [Offload(v, rng.randrange(count), rng.randrange(count)) for v in kept]
    made = offload(graph, drawn)
    strategy = carry_strategy(draw(space, 2, rng), space, made)
    live = Delta(
        Space(made.graph, strategy.digits, strategy.opening), strategy, them, default_cost(them)
    )
    for number in range(8):
        before = live.step_ns
        edit(live, rng, 2)
        assert agrees(live), number
        if number % 3 == 1:
            live.undo()
            assert live.step_ns == before and agrees(live)
        else:
            live.keep()
