"""Lowering: what is moved, where state ends, when slots die."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from graphs import Maker, Tensor, captured, context_of, problem, start

from apportion.capture.program import batch_leaves
from apportion.describe import descriptions
from apportion.describe.descriptions import describe
from apportion.describe.language import Sum
from apportion.graph import INPUT, PARAMETER
from apportion.lower.lower import Lowering, bytes_moved, lower
from apportion.lower.task_columns import build_task_graph
from apportion.lower.task_graph import TaskGraph, verify
from apportion.lower.task_kinds import COLLECTIVE, COMPUTE, TRANSFER
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Choice, Layout, Strategy

ROWS, COLUMNS = 8, 6
S = ROWS * COLUMNS * 4
BY_ROWS, BY_COLUMNS = Layout((2, 1), (0, 1)), Layout((1, 2), (0, 1))


def relu(choice: Choice, layouts: dict[str, Layout]) -> TaskGraph:
    """One pointwise Op x -> y."""
    make = Maker()
    x = make.value(ROWS, COLUMNS)
    y = make.op("aten.relu.default", x, out=(ROWS, COLUMNS))
    places = {"x": x.index, "y": y.index}
    strategy = Strategy((choice,), {places[name]: layout for name, layout in layouts.items()})
    tasks = lower(make.space(), strategy, 2)
    verify(tasks)
    return tasks


# The two-worker table: a tensor of S bytes, stored split by rows


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice((2, 1), (0, 1)), 0),
        (Choice((1, 2), (0, 1)), S // 2),
        (Choice((1, 1), (0, 1)), S),
        (Choice((2, 1), (1, 0)), S),  # the same halves, but on the other devices
    ],
)
def test_bytes_to_fetch_an_input(choice: Choice, expected: int) -> None:
    assert relu(choice, {"x": BY_ROWS}).bytes_moved == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice((2, 1), (0, 1)), 0),
        (Choice((1, 2), (0, 1)), S // 2),
        (Choice((1, 1), (0, 1)), 0),  # both have made all of it
        (Choice((1, 1), (0,)), S // 2),
    ],
)
def test_bytes_to_store_an_output(choice: Choice, expected: int) -> None:
    assert relu(choice, {"y": BY_ROWS}).bytes_moved == expected


@pytest.mark.parametrize("width", [3, 5])
def test_bytes_of_a_halo(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))
    describe("test.window")(lambda a, w: lambda i, j: Sum(lambda k: a[i + k, j] * w[k]))
    extent = 16
    make = Maker()
    a, w = make.value(extent, COLUMNS), make.value(width)
    make.op("test.window.default", a, w, out=(extent - width + 1, COLUMNS))
    space = make.space()
    assert [axis.name for axis in space.axes(0)] == ["i", "j", "k"]
    strategy = Strategy((Choice((2, 1, 1), (0, 1)),), {a.index: BY_ROWS})
    tasks = lower(space, strategy, 2)
    size = extent * COLUMNS * 4
    assert tasks.bytes_moved == (width - 1) * size // extent
    per_worker = [int(n) for n in tasks.nbytes[tasks.kind == TRANSFER]]
    assert per_worker == [tasks.bytes_moved // 2] * 2


@pytest.mark.parametrize("layout", [BY_ROWS, BY_COLUMNS, Layout((1, 1), (0,))])
def test_bytes_of_partial_outputs(layout: Layout) -> None:
    make = Maker()
    a, b = make.value(ROWS, 10), make.value(10, COLUMNS)
    c = make.op("aten.mm.default", a, b, out=(ROWS, COLUMNS))
    strategy = Strategy((Choice((1, 1, 2), (0, 1)),), {c.index: layout})
    assert lower(make.space(), strategy, 2).bytes_moved == S


# Fetching


def two_consumers(first: Choice, second: Choice) -> TaskGraph:
    make = Maker()
    x = make.value(ROWS, COLUMNS)
    make.op("aten.relu.default", x, out=(ROWS, COLUMNS))
    make.op("aten.exp.default", x, out=(ROWS, COLUMNS))
    return lower(make.space(), Strategy((first, second), {x.index: BY_ROWS}), 2)


def test_what_was_fetched_serves_later_consumers_on_that_device() -> None:
    whole, half = Choice((1, 1), (0,)), Choice((2, 1), (0, 0))
    assert two_consumers(whole, whole).bytes_moved == S // 2
    assert two_consumers(whole, half).bytes_moved == S // 2
    assert two_consumers(half, whole).bytes_moved == S // 2
    assert two_consumers(whole, Choice((1, 1), (1,))).bytes_moved == S


def test_inputs_start_where_they_are_read_unless_a_layout_says_otherwise() -> None:
    assert relu(Choice((1, 2), (1, 0)), {}).bytes_moved == 0
    tasks = relu(Choice((1, 1), (0,)), {"x": Layout((1, 1), (1,))})
    assert tasks.bytes_moved == S


def test_all_boxes_between_two_devices_at_one_position_are_one_message() -> None:
    make = Maker()
    x, y = make.value(4, 6), make.value(4, 6)
    make.op("aten.add.Tensor", x, y, 1, out=(4, 6))
    strategy = Strategy(
        (Choice((2, 2), (0, 0, 0, 0)),), dict.fromkeys((0, 1), Layout((1, 1), (1,)))
    )
    tasks = lower(make.space(), strategy, 2)
    assert [int(n) for n in tasks.nbytes[tasks.kind == TRANSFER]] == [2 * 4 * 6 * 4]


def test_a_sum_over_many_devices_is_reduced_before_it_is_spread() -> None:
    """Fetching every term everywhere would move k (k - 1) S, reduce-scatter and all-gather 2 (k -
    1) S."""
    k = 4
    make = Maker()
    a, b = make.value(ROWS, 8), make.value(8, COLUMNS)
    c = make.op("aten.mm.default", a, b, out=(ROWS, COLUMNS))
    make.op("aten.relu.default", c, out=(ROWS, COLUMNS))
    everywhere = tuple(range(k))
    strategy = Strategy((Choice((1, 1, k), everywhere), Choice((1, 1), everywhere)))
    assert lower(make.space(), strategy, k).bytes_moved == 2 * (k - 1) * S


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_data_parallelism_moves_all_gradients_and_the_loss(devices: int) -> None:
    it = problem(devices)
    graph = it.space.graph
    tasks = lower(it.space, data(it).strategy, devices)
    gradients = sum(v.nbytes for v in graph.values if v.role == PARAMETER) // 2  # before and after
    loss = graph.values[graph.loss or 0].nbytes  # backward begins with ones like it, everywhere
    assert tasks.bytes_moved == 2 * (devices - 1) * (gradients + loss)


# State


def strategies(spec: str, devices: int, count: int) -> list[tuple[Space, Strategy]]:
    space = captured(spec)[1]
    return [(space, draw(space, devices, Random(seed))) for seed in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "count"), [("mlp:tiny", 20), ("gpt2:tiny", 3)])
def test_state_ends_where_it_began(spec: str, count: int) -> None:
    for space, strategy in strategies(spec, 3, count):
        tasks = lower(space, strategy, 3)
        verify(tasks)
        begins = {before for before, _ in space.graph.state}
        slots = [
            s
            for s in range(len(tasks.slot_device))
            if tasks.slot_first[s] == -1 and tasks.slot_value[s] in begins
        ]
        ends, starts = tasks.carry[:, 0], tasks.carry[:, 1]
        assert sorted(starts.tolist()) == slots
        assert (tasks.slot_device[ends] == tasks.slot_device[starts]).all()
        assert (tasks.slot_region[ends] == tasks.slot_region[starts]).all()
        after = dict(space.graph.state)
        assert tasks.slot_value[ends].tolist() == [after[v] for v in tasks.slot_value[starts]]
        assert (tasks.slot_last[ends] == len(tasks)).all()
        _assert_covered(space, tasks, slots)


def _assert_covered(space: Space, tasks: TaskGraph, slots: list[int]) -> None:
    """Every element of every state is somewhere."""
    filled: dict[int, Any] = {}
    for slot in slots:
        value = int(tasks.slot_value[slot])
        there = filled.setdefault(value, np.zeros(space.factors(value), bool))
        there[tuple(slice(*r) for r in tasks.boxes[tasks.slot_region[slot]])] = True
    assert filled.keys() == {before for before, _ in space.graph.state}
    assert all(there.all() for there in filled.values())


def update_graph() -> tuple[Maker, Tensor, Tensor]:
    make = Maker()
    p, x = make.value(ROWS, role=PARAMETER), make.value(ROWS)
    after = make.op("aten.add.Tensor", p, x, 1, out=(ROWS,))
    make.survives(p, after)
    return make, p, after


def test_state_begins_where_its_update_leaves_it() -> None:
    make, p, _ = update_graph()
    tasks = lower(make.space(), Strategy((Choice((2,), (1, 0)),)), 2)
    begun = [s for s in range(len(tasks.slot_device)) if tasks.slot_value[s] == p.index]
    assert [int(tasks.slot_device[s]) for s in begun[:2]] == [1, 0]
    assert tasks.bytes_moved == 0


def test_a_layout_of_state_is_restored_at_the_end() -> None:
    make, p, _ = update_graph()
    strategy = Strategy((Choice((1,), (0,)),), {p.index: Layout((2,), (0, 1))})
    tasks = lower(make.space(), strategy, 2)
    assert tasks.bytes_moved == 2 * ROWS // 2 * 4  # half is fetched and half is brought back
    last = tasks.task(int(tasks.op_start[-2]))
    assert (last.kind, last.op) == (TRANSFER, 1)


def test_frozen_state_survives_the_step() -> None:
    make = Maker()
    frozen, x = make.value(ROWS, role=PARAMETER), make.value(ROWS, role=INPUT)
    make.op("aten.mul.Tensor", frozen, x, out=(ROWS,))
    tasks = lower(make.space(), Strategy((Choice((2,), (0, 1)),)), 2)
    for slot in range(len(tasks.slot_device)):
        survives = tasks.slot_last[slot] == len(tasks)
        assert survives == (tasks.slot_value[slot] == frozen.index)


# Slots


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "count"), [("mlp:tiny", 8), ("gpt2:tiny", 2)])
def test_slots_die_after_their_last_use(spec: str, count: int) -> None:
    """Between the last task and the end of the step only what survives it is left."""
    program = captured(spec)[0]
    leaves = batch_leaves(program, program.batch)
    for space, strategy in strategies(spec, 3, count):
        tasks, ranks = start(program, space, strategy, 3)
        for rank in ranks:
            rank.feed(lambda value: leaves[value])
        messages = ranks[0].executable.messages
        for number, kind in enumerate(tasks.kind):
            if kind not in (TRANSFER, COLLECTIVE):
                ranks[tasks.device[number]].run(number, context_of(program, 0, 0))
                continue
            mine = [k for k, it in enumerate(messages) if it.task == number]
            for k in mine:
                message = ranks[messages[k].sender].pack(k).clone()
                ranks[messages[k].receiver].received[k] = message
            for k in mine:
                ranks[messages[k].sender].free(number)
        for rank in ranks:
            unread = {  # nobody reads it, so no task frees it
                s for s in range(len(tasks.slot_device)) if tasks.slot_first[s] == -1
                and tasks.slot_last[s] < 0
            }  # fmt: skip
            left = {
                s
                for s in range(len(tasks.slot_device))
                if tasks.slot_last[s] == len(tasks) and tasks.slot_device[s] == rank.device
            }
            assert rank.tensors.keys() - unread == left - unread
            assert rank.received == {}


def test_storage_lives_as_long_as_its_aliases() -> None:
    for space, strategy in strategies("mlp:tiny", 3, 5):
        tasks = lower(space, strategy, 3)
        (alias,) = np.nonzero(tasks.slot_base >= 0)
        base = tasks.slot_base[alias]
        assert len(alias) > 0
        assert (tasks.slot_last[base] >= tasks.slot_last[alias]).all()
        assert (tasks.slot_device[base] == tasks.slot_device[alias]).all()
        assert (tasks.slot_base[base] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "count"), [("mlp:tiny", 20), ("rnn:tiny", 5), ("gpt2:tiny", 3)])
def test_bytes_moved_are_known_before_there_are_tasks(spec: str, count: int) -> None:
    _, space = captured(spec)
    for seed in range(count):
        strategy = draw(space, 3, Random(seed))
        assert bytes_moved(space, strategy, 3) == lower(space, strategy, 3).bytes_moved


COMPARED = (
    "kind", "part", "device", "peer", "position", "nbytes", "flops", "dep_start", "dep",
    "slot_device", "slot_nbytes", "slot_base", "slot_first", "slot_last", "in_slot", "out_slot",
    "taken", "group", "pattern", "copy_source", "copy_target", "copy_message", "carry",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "forgets"), [("mlp:tiny", 0.0), ("rnn:tiny", 0.3)])
def test_what_is_remembered_is_what_would_be_made_anew(spec: str, forgets: float) -> None:
    """Choices and Layouts that come, go and come back, some of it forgotten meanwhile."""
    _, space = captured(spec)
    rng, devices = Random(0), 5
    drawn = [draw(space, devices, Random(seed)) for seed in range(3)]
    lowering = Lowering(space, drawn[0], devices)
    laid: set[int] = set()
    for _ in range(6):
        for op in range(len(space.graph.ops)):
            choice = rng.choice(drawn).choices[op]
            lowering.choices[op], lowering.splits[op] = choice, space.split(op, choice.parts)
        for value in range(len(space.graph.values)):
            layout = rng.choice(drawn).layouts.get(value)
            lowering.set_layout(value, layout)
            laid |= {value} if layout else set()
        every = range(len(space.graph.ops))
        lowering.terms.update(every, lowering.choices, lowering.splits)
        lowering.termwise = lowering.terms.settled()
        lowered = lowering.lowered()
        strategy = Strategy(tuple(lowering.choices), dict(lowering.layouts))
        tasks, anew = build_task_graph(lowered), lower(space, strategy, devices)
        for name in COMPARED:
            assert np.array_equal(getattr(tasks, name), getattr(anew, name)), name
        assert tasks.groups == anew.groups
        if rng.random() < forgets:
            lowering.drop_unused(lowered.flows)
    assert laid


def test_every_part_is_computed_once_where_its_choice_says() -> None:
    space, strategy = strategies("mlp:tiny", 3, 4)[3]
    tasks = lower(space, strategy, 3)
    made = {
        (int(o), int(p)): int(d)
        for o, p, d, kind in zip(tasks.op, tasks.part, tasks.device, tasks.kind, strict=True)
        if kind == COMPUTE
    }
    assert made == {
        (op, part): device
        for op, choice in enumerate(strategy.choices)
        for part, device in enumerate(choice.devices)
    }


def test_tasks_and_copies_lie_in_the_buckets_of_their_ops() -> None:
    space, strategy = strategies("mlp:tiny", 3, 2)[1]
    tasks = lower(space, strategy, 3)
    owners = np.repeat(np.arange(len(space.graph.ops) + 1), np.diff(tasks.op_start))
    assert (tasks.op == owners).all()
    edges = np.repeat(np.arange(len(tasks.edge_op)), np.diff(tasks.edge_start))
    assert (tasks.slot_value[tasks.copy_target] == tasks.edge_value[edges]).all()
    assert (tasks.op[tasks.copy_task] == tasks.edge_op[edges]).all()


def test_a_strategy_that_is_not_legal_is_not_lowered() -> None:
    with pytest.raises(ValueError, match="of which there are 2"):
        relu(Choice((1, 1), (2,)), {})


def test_an_empty_value_is_made_of_nothing() -> None:
    """No piece meets a region without elements, and yet its reader must have it."""
    make = Maker()
    x = make.value(0, COLUMNS)
    y = make.op("aten.relu.default", x, out=(0, COLUMNS))
    elsewhere = {x.index: Layout((1, 1), (0,)), y.index: Layout((1, 1), (0,))}
    tasks = lower(make.space(), Strategy((Choice((1, 1), (1,)),), elsewhere), 2)
    verify(tasks)
    assert tasks.bytes_moved == 0
