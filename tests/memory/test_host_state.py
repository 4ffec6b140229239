"""Parameters on the host, updated there or on the device: the step is the same, whatever is chosen
and wherever copies stand, and the host has what is said to lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare_runs import REFERENCE, compare
from graphs import captured, problem
from torch import Tensor, nn

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.widen import widened
from apportion.describe.ops.host import FROM_HOST_KIND, ON_HOST_KIND, TO_HOST_KIND
from apportion.describe.ops.update import HOST_UPDATE_KIND
from apportion.execute import host_adam, host_blocks, host_sgd
from apportion.execute.executable import Executable
from apportion.graph import PARAMETER, Graph, from_json, to_json, verify
from apportion.lower.runnable import runnable
from apportion.memory.carry_strategy import carry_strategy
from apportion.memory.host_state import (
    CAST,
    DEVICE,
    HOST,
    HostState,
    host_state,
    parameters_on_host,
    readers_on_device,
    shadow_dtype,
)
from apportion.memory.planned_graph import MemoryPlan, before_host, planned_graph
from apportion.memory.reorder import reorder, updates_early
from apportion.memory.rewritten_graph import RewrittenGraph
from apportion.run.one_process import undivided
from apportion.run.planned_program import planned_bindings
from apportion.search import METHODS
from apportion.search.baselines.random_strategy import draw
from apportion.simulate.host_bytes import host_peaks
from apportion.split.space import Space
from apportion.split.strategy import Strategy, verify_strategy


class Net(nn.Module):
    """Dropout, batch norm, a weight that is used twice and one that is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.fixed = nn.Linear(6, 6)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.norm(self.first(x))), 0.5)
        y = torch.tanh(self.fixed(self.last(y)))
        found: Tensor = self.first(y)
        return found


def small(optimizer: str = "adamw") -> Program:
    torch.manual_seed(0)
    model = Net().double()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) ** 2).mean()
        return found

    batch = torch.randn(12, 6, dtype=torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    made: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.01)
    if optimizer == "sgd":
        made = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    return capture(step, model, made, batch)


def drawn_states(graph: Graph, share: float, rng: Random) -> list[HostState]:
    """Some parameters, which come, leave and are updated anywhere."""
    count, found = len(graph.ops), []
    for value in parameters_on_host(graph):
        if rng.random() >= share:
            continue
        update = rng.choice((HOST, DEVICE)) if value in graph.after else "fixed"
        readers = readers_on_device(graph, value, update)
        first = [reader for reader in readers if rng.random() < 0.5]
        fetches = tuple((reader, rng.randrange(reader + 1)) for reader in first)
        places = (rng.randrange(count + 1) for _ in range(3))
        found.append(HostState(value, update, fetches, *places))
    return found


def drawn_plan(graph: Graph, rng: Random, share: float = 0.6) -> MemoryPlan:
    """A random plan with updates that come early in half of the cases."""
    order = updates_early(graph) if rng.random() < 0.5 else ()
    forward = [op for op, meant in enumerate(graph.ops) if meant.phase == "forward"]
    ops = tuple(op for op in forward if rng.random() < 0.3)
    plan = MemoryPlan(order, ops)
    made = before_host(graph, plan)
    return replace(plan, host_state=tuple(drawn_states(made.graph, share, rng)))


def trains_the_same(
    program: Program, made: RewrittenGraph, strategy: Strategy, devices: int, seed: int = 0
) -> bool:
    bound = planned_bindings(program.bindings, made)
    again = replace(program, graph=made.graph, bindings=bound)
    REFERENCE.borrow(again, program, seed)
    space = Space(made.graph, strategy.digits, strategy.opening)
    verify_strategy(space, strategy, devices)
    found = compare(
        again, space, strategy, devices, seed=seed, corrupt=lambda task, message: message
    )
    return bool(found.equal)


# The Graph


def test_nothing_on_the_host_is_the_same_graph() -> None:
    graph = small().graph
    assert host_state(graph, ()).graph is graph


@pytest.mark.parametrize("update", [HOST, DEVICE])
def test_every_reader_reads_a_copy_and_state_ends_on_the_host(update: str) -> None:
    graph = small().graph
    trained = [v for v in parameters_on_host(graph) if v in graph.after]
    made = host_state(graph, [HostState(v, update, ()) for v in trained]).graph
    verify(made)
    assert from_json(to_json(made)).fingerprint == made.fingerprint != graph.fingerprint
    assert made.values[: len(graph.values)] == graph.values and made.state == graph.state
    reading = {FROM_HOST_KIND} | ({HOST_UPDATE_KIND} if update == HOST else set())
    ending = HOST_UPDATE_KIND if update == HOST else TO_HOST_KIND
    for value in trained:
        assert {made.ops[op].kind for op in made.consumers[value]} == reading
        maker = made.producer[made.after[value]]
        assert maker is not None and made.ops[maker[0]].kind == ending


def test_updates_come_as_soon_as_gradients_are_final() -> None:
    graph = small().graph
    order = updates_early(graph)
    assert order and updates_early(reorder(graph, order).graph) == ()
    made = reorder(graph, order).graph
    verify(made)
    for place, op in enumerate(made.ops):
        if op.phase == "update":
            makers = [m[0] for v in op.inputs if (m := made.producer[v]) is not None]
            between = made.ops[max(makers) + 1 : place]
            assert all(other.phase == "update" for other in between)


def test_an_order_that_cannot_run_is_refused() -> None:
    graph = small().graph
    with pytest.raises(ValueError, match="does not have each of the"):
        reorder(graph, (0, 0))
    with pytest.raises(ValueError, match="before one that it reads"):
        reorder(graph, tuple(reversed(range(len(graph.ops)))))


def test_what_cannot_lie_on_the_host_is_refused() -> None:
    graph = small().graph
    first = parameters_on_host(graph)[0]
    activation = graph.ops[0].outputs[0]
    for wrong, why in (
        (HostState(len(graph.values), HOST, ()), "there is no value"),
        (HostState(activation, HOST, ()), "is no parameter"),
        (HostState(first, "nowhere", ()), "is not updated at 'nowhere'"),
        (HostState(first, "fixed", ()), "cannot be updated so"),
    ):
        with pytest.raises(ValueError, match=why):
            host_state(graph, [wrong])
    with pytest.raises(ValueError, match="twice"):
        host_state(graph, [HostState(first, HOST, ())] * 2)


# Equality


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_device(optimizer: str, seed: int) -> None:
    program, rng = small(optimizer), Random(seed)
    made = planned_graph(program.graph, drawn_plan(program.graph, rng))
    verify(made.graph)
    assert trains_the_same(program, made, undivided(made.graph), 1, seed)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_device_by_compiled_loops(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large parameters are updated; here small ones are."""
    monkeypatch.setattr(host_blocks, "SMALL", 8)
    loops, module = [], host_adam if optimizer == "adamw" else host_sgd

    def counted(loop: Any, *rest: Any) -> Any:
        loops.append(loop)
        return host_blocks.calls_on_slices(loop, *rest)

    monkeypatch.setattr(module, "calls_on_slices", counted)
    program = small(optimizer)
    for seed in range(3):
        made = planned_graph(program.graph, drawn_plan(program.graph, Random(seed)))
        assert trains_the_same(program, made, undivided(made.graph), 1, seed)
    assert loops


@pytest.mark.parametrize("devices,seed", [(2, 0), (3, 1), (4, 2)])
def test_random_strategies(devices: int, seed: int) -> None:
    program, rng = small(), Random(seed)
    space = Space(program.graph)
    made = planned_graph(program.graph, drawn_plan(program.graph, rng))
    strategy = carry_strategy(draw(space, devices, rng), space, made)
    assert trains_the_same(program, made, strategy, devices, seed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "fsdp", "zero2", "megatron"])
def test_models(method: str) -> None:
    spec, rng = "gpt2:tiny", Random(5)
    program, _ = captured(spec)
    made = planned_graph(program.graph, drawn_plan(program.graph, rng))
    space = Space(program.graph)
    strategy = METHODS[method](problem(2, spec)).strategy
    assert trains_the_same(program, made, carry_strategy(strategy, space, made), 2)


# Narrower dtypes


def mixed() -> Program:
    it = zoo.load("mlp:tiny,precision=bf16-mixed", 0)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def test_what_is_cast_travels_in_fewer_bytes_and_rounds_the_same() -> None:
    program = mixed()
    graph = program.graph
    weights = [v for v in parameters_on_host(graph) if shadow_dtype(graph, v) == "bfloat16"]
    assert weights
    states = [HostState(v, HOST, ()) for v in weights]
    made = host_state(graph, states)
    there = [made.graph.values[a] for a, _ in made.graph.state if a >= len(graph.values)]
    assert [v.dtype for v in there] == ["bfloat16"] * len(weights)
    for op in made.graph.ops:
        if op.kind in (FROM_HOST_KIND, TO_HOST_KIND, ON_HOST_KIND):
            assert {made.graph.values[v].dtype for v in op.inputs} == {"bfloat16"}
        if op.kind == CAST:
            assert set(weights).isdisjoint(op.inputs)
    wide = widened(made.graph)
    assert all(wide.values[v].dtype == "float64" for v, _ in wide.state if v >= len(graph.values))
    ends = [_trained(program, one) for one in (None, made)]
    for value in weights:
        assert torch.equal(ends[0][value], ends[1][value])


def _trained(program: Program, made: RewrittenGraph | None) -> dict[int, Tensor]:
    """The state after two steps, in the step's own precision."""
    from apportion.run.one_process import train_in_one_process

    if made is not None:
        bound = planned_bindings(program.bindings, made)
        program = replace(program, graph=made.graph, bindings=bound)
    run = train_in_one_process(program, None, 1, [program.batch] * 2, 0)
    values = run.tasks.slot_value
    return {int(values[slot]): torch.from_numpy(a) for slot, a in run.ranks[0].state}


# Memory


def test_new_state_takes_the_memory_of_the_old_and_the_host_has_all_of_it() -> None:
    program = small()
    graph = program.graph
    trained = [v for v in parameters_on_host(graph) if v in graph.after]
    states = [HostState(v, (HOST, DEVICE)[k % 2], ()) for k, v in enumerate(trained)]
    made = host_state(graph, states)
    strategy = undivided(made.graph)
    space = Space(made.graph)
    tasks = runnable(space, strategy, 1)
    executable = Executable(space, strategy, tasks)
    there = {int(tasks.slot_value[s]) for s in np.flatnonzero(tasks.slot_on_host)}
    for state in states:
        assert state.parameter in there and made.graph.after[state.parameter] in there
    ends = [end for end, _ in executable.carry if executable.on_host[end]]
    assert ends and all(end in executable.host_homes for end in ends)
    held = sum(_bytes_of(graph, states))
    assert held <= host_peaks(tasks)[0] <= 2 * held
    role = [made.graph.values[v].role for v in there]
    assert role.count(PARAMETER) >= len(states)


def _bytes_of(graph: Graph, states: Sequence[HostState]) -> list[int]:
    """Of a parameter and what comes and leaves with it."""
    found = []
    for each in states:
        maker = graph.producer[graph.after[each.parameter]]
        assert maker is not None
        op = graph.ops[maker[0]]
        shape = graph.values[each.parameter].shape
        whole = [v for v in (op.inputs[0], *op.inputs[2:]) if graph.values[v].shape == shape]
        found.append(sum(graph.values[v].nbytes for v in whole))
    return found
