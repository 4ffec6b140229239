"""Delta simulation equals full simulation bit for bit, whatever is changed and undone."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest
from plain_lower import lower as lower_plainly

from apportion import delta as deltas
from apportion import ops as ops
from apportion import zoo
from apportion.capture import capture
from apportion.cluster import cluster
from apportion.cost import default_cost
from apportion.delta import Delta
from apportion.lower import Lowering, lower
from apportion.search import SEARCHES, Problem
from apportion.search.random import _choice, draw
from apportion.simulate import simulate
from apportion.splits import Space
from apportion.strategy import Choice, Strategy
from apportion.tasks import ASSEMBLE, COLLECTIVE, COMPUTE, TaskGraph, verify


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


@pytest.mark.parametrize("machine", MACHINES)
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


@pytest.mark.parametrize(
    ("spec", "machine"),
    [("rnn:tiny", "2x2xa100"), ("gpt2:tiny", "4xh100"), ("wresnet:tiny", "p2.8xlarge:4")],
)
def test_real_graphs_from_data_parallelism(spec: str, machine: str) -> None:
    rng, space, them = Random(1), space_of(spec), cluster(machine)
    cost = default_cost(them)
    strategy = SEARCHES["data"](Problem(space, them, cost), budget=0.0, seed=0).strategy
    live = Delta(space, strategy, them, cost)
    for number in range(8):
        edit(live, rng)
        assert agrees(live), number
        live.undo() if number % 3 == 1 else live.keep()


@pytest.mark.parametrize("machine", ["2x2xk80", "p2.8xlarge"])
@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_looking_at_what_moves_and_at_everything_give_the_same(
    patience: float, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of few devices in many lanes come and go between others that wait for them."""
    monkeypatch.setattr(deltas, "PATIENCE", patience)
    rng = Random(5)
    live = live_of("mlp:tiny", machine, rng)
    whole = 0
    for _ in range(60):
        edit(live, rng)
        whole += live.whole is not None
        assert agrees(live)
        live.undo() if rng.random() < 0.5 else live.keep()
    assert (whole > 40) == (patience == 0.0)


def test_room_runs_out_and_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "ROOM", 1)
    monkeypatch.setattr(deltas, "SPARE", 40)
    rng = Random(2)
    live = live_of("mlp:tiny", "3xh100", rng)
    arrays = set()
    for _ in range(25):
        before = live.step_ns
        edit(live, rng)
        assert agrees(live)
        arrays.add(id(live.live.cells))
        if rng.random() < 0.5:
            live.undo()
            assert live.step_ns == before and agrees(live)
        else:
            live.keep()
    assert len(arrays) > 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "MEMORY", 1)
    monkeypatch.setattr(deltas, "SPARE", 100)
    rng = Random(6)
    live = live_of("mlp:tiny", "4xh100", rng)
    limit = len(live.flows) + len(live.blocks) + 100
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
    flows = Lowering(space, strategy, devices).lowered().flows
    reduced = {value for value, flow in enumerate(flows) if flow.laid_out}
    assert ours.bytes_moved <= lower_plainly(space, strategy, devices).bytes_moved
    expected = summary(lower_plainly(space, strategy, devices, reduced))
    for what, found in summary(ours).items():
        assert found == expected[what], what
    return ours


@pytest.mark.parametrize("seed", range(12))
def test_lowering_by_patterns_equals_lowering_op_by_op(seed: int) -> None:
    devices = 2 + seed % 4
    alike("mlp:tiny", draw(space_of("mlp:tiny"), devices, Random(seed)), devices)


@pytest.mark.parametrize("spec", ["gpt2:tiny", "rnn:tiny", "wresnet:tiny"])
def test_regular_plans_become_collectives(spec: str) -> None:
    them = cluster("4xh100")
    problem = Problem(space_of(spec), them, default_cost(them))
    strategy = SEARCHES["data"](problem, budget=0.0, seed=0).strategy
    tasks = alike(spec, strategy, 4)
    among = tasks.kind == COLLECTIVE
    assert among.any()
    assert {tasks.groups[g] for g in tasks.group[among].tolist()} == {(0, 1, 2, 3)}
