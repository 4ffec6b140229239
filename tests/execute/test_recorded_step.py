"""A step that uses the host, recorded and replayed on a device whose queues run as late as they
may: it trains as it does task by task, whatever lies where, and does not if nobody waits."""

from __future__ import annotations

import gc
from random import Random

import pytest
import torch
from lazy_device import ArenaPool, LazyStreams
from soak import cases
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.program import Program, setting_of, state_tensor
from apportion.execute.executable import Executable
from apportion.execute.host_traffic import HostTraffic
from apportion.execute.inductor import kernel_by_kernel
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank, run_together
from apportion.execute.rank_steps import HostStep, Segment, rank_steps
from apportion.execute.recorded_step import StepRecorder
from apportion.graph import FORWARD
from apportion.lower.runnable import runnable
from apportion.memory.host_state import DEVICE, HOST, HostState, parameters_on_host
from apportion.memory.offload import Offload
from apportion.memory.planned_graph import MemoryPlan, before_host, planned_graph
from apportion.memory.reorder import updates_early
from apportion.run.one_process import undivided
from apportion.split.space import Space

STEPS, WIDTH = 5, 7


def net(layers: int = 4) -> Program:
    torch.manual_seed(0)
    rows = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(layers)]
    model = nn.ModuleList(rows).double()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch
        for layer in model:  # type: ignore[attr-defined]
            x = x + torch.tanh(layer(x))
        return (x**2).mean()

    batch = torch.randn(5, WIDTH, dtype=torch.float64)
    return capture(step, model, torch.optim.AdamW(model.parameters(), lr=0.01), batch)


def drawn_plan(program: Program, rng: Random) -> MemoryPlan:
    """Some parameters on the host, some activations offloaded, copies anywhere."""
    graph = program.graph
    forward = [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]
    ops = tuple(op for op in forward if rng.random() < 0.3)
    order = updates_early(graph) if rng.random() < 0.7 else ()
    plan = MemoryPlan(order, ops)
    made = before_host(graph, plan).graph
    count = len(made.ops)
    states = [
        HostState(
            value, rng.choice((HOST, DEVICE)),
            tuple((op, rng.randrange(op + 1)) for op in made.consumers[value]),
            *(rng.randrange(count) for _ in range(3)),
        )
        for value in parameters_on_host(made) if rng.random() < 0.7
    ]  # fmt: skip
    plan = MemoryPlan(order, ops, tuple(states))
    made = planned_graph(graph, plan).graph
    count = len(made.ops)
    there = [
        value
        for op in made.ops
        if op.phase == FORWARD and op.kind.startswith("aten.") and rng.random() < 0.2
        for value in op.outputs
    ]
    away = tuple(Offload(v, *(rng.randrange(count) for _ in range(3))) for v in there)
    return MemoryPlan(order, ops, tuple(states), away)


def trained(program: Program, plan: MemoryPlan, rng: Random | None, broken: bool = False) -> Rank:
    """The rank after some steps: task by task, or recorded on a lazy device."""
    made = planned_graph(program.graph, plan)
    space, strategy = Space(made.graph), undivided(made.graph)
    executable = Executable(space, strategy, runnable(space, strategy, 1))
    rank = Rank(executable, 0)
    rank.load(lambda value: state_tensor(program, value))
    streams = LazyStreams(rng or Random(0), broken)
    traffic = HostTraffic(rank, streams)
    steps = rank_steps(executable, 0)
    inner = {
        step: kernel_by_kernel(executable, step, "cpu")
        for step in steps
        if isinstance(step, Segment)
    }
    recorder = StepRecorder(rank, steps, inner, traffic, ArenaPool(streams))
    (region,) = rank.inputs
    fed = program.batch.clone()
    for number in range(STEPS):
        rank.tensors[region.slot] = fed
        batch = program.batch * (number + 1)
        context = Context(0, number, lambda e: setting_of(program, e), made.graph.bodies)
        if rng is None:
            fed.copy_(batch)
            run_together([rank], context)
            continue
        streams.put(0, lambda batch=batch: fed.copy_(batch))
        if recorder.begin(context):
            recorder.run(context)
        else:
            streams.finish()
            for step in steps:
                if isinstance(step, HostStep):
                    for task in step.tasks:
                        rank.run(task, context)
                elif isinstance(step, Segment):
                    recorder.eager(step)(rank, context)
            rank.finish()
    if rng is not None:
        assert recorder.notes == [] and recorder.actions
        traffic.finish()
    return rank


def distance(program: Program, plan: MemoryPlan, rng: Random, broken: bool = False) -> float:
    plain, lazy = trained(program, plan, None).state(), trained(program, plan, rng, broken).state()
    assert plain.keys() == lazy.keys()
    return max(float((tensor - lazy[slot][1]).abs().max()) for slot, (_, tensor) in plain.items())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(12, 4)))
def test_a_recorded_step_trains_the_same(seed: int) -> None:
    program, rng = net(), Random(seed)
    plan = drawn_plan(program, rng)
    assert plan.host_state
    assert distance(program, plan, rng) < 1e-13  # updates are fused


@pytest.mark.slow
def test_python_looks_for_garbage_once_when_a_step_has_been_recorded() -> None:
    program, rng, seen = net(), Random(0), list[int]()

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.disable()
    gc.callbacks.append(noted)
    try:
        trained(program, drawn_plan(program, rng), rng)
    finally:
        gc.callbacks.remove(noted)
        gc.enable()
    assert seen == [2]


@pytest.mark.slow
def test_without_waiting_it_does_not() -> None:
    """The lazy device finds out what does not wait."""
    program = net()
    wrong = 0
    for seed in range(8):
        rng = Random(seed)
        try:
            far = distance(program, drawn_plan(program, rng), rng, broken=True)
            wrong += not far < 1e-9  # also if it is not a number
        except AssertionError:
            wrong += 1
    assert wrong >= 6


@pytest.mark.slow
def test_other_settings_are_recorded_anew() -> None:
    program, rng = net(), Random(3)
    plan = drawn_plan(program, rng)
    group = program.optimizers[0].param_groups[0]
    ends = []
    for lazy in (None, rng):
        group["weight_decay"] = 0.01
        ends.append(trained(program, plan, lazy).state())
        group["weight_decay"] = 0.5
        ends.append(trained(program, plan, lazy).state())
    slot = next(iter(ends[0]))
    assert not torch.equal(ends[0][slot][1], ends[1][slot][1])
    assert torch.allclose(ends[1][slot][1], ends[3][slot][1], rtol=0, atol=1e-13)
