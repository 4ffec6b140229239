"""Batch norm as one call where it is whole: against the pieces, and where the pieces must stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import compare
from graphs import captured, problem

from apportion import graph as g
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.execute.dry_run import measure_storage
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.lower.join_batch_norm import (
    BACKWARD,
    NORM,
    REDUCE,
    SQUARES,
    SUM,
    batch_norms,
    join_batch_norm,
)
from apportion.lower.join_calls import NOTHING
from apportion.lower.lower import lower
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import verify, with_storage
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.runner import Runner
from apportion.run.training import _HostPeak
from apportion.search.baselines.data import data
from apportion.search.baselines.single import single
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy, unsplit_choice

PIECES = {SUM, SQUARES, NORM, REDUCE, BACKWARD}
WHOLE = "apportion.batch_norm_whole"


def kernels(executable: Executable) -> list[str]:
    return [work.op.kind for work in executable.computes.values()]


def alone(spec: str) -> tuple[Program, Space, Strategy]:
    program, space = captured(spec)
    return program, space, single(problem(1, spec)).strategy


def cut(space: Space, axes: dict[str, str], parts: int) -> Strategy:
    """Ops of these kinds cut along an axis, the others on the first device."""
    choices = []
    for index, op in enumerate(space.graph.ops):
        names = [axis.name for axis in space.axes(index)]
        name = axes.get(op.kind)
        if name is None or name not in names or space.axes(index)[names.index(name)].extent < parts:
            choices.append(unsplit_choice(space, index, (0,)))
            continue
        sizes = tuple(parts if other == name else 1 for other in names)
        choices.append(Choice(sizes, tuple(range(parts))))
    return Strategy(tuple(choices))


def unsplit(space: Space, devices: int = 1) -> Strategy:
    """All Ops undivided, on each of the devices."""
    where = tuple(range(devices))
    return Strategy(tuple(unsplit_choice(space, k, where) for k in range(len(space.graph.ops))))


def small_model(track: bool = True, affine: bool = True) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4, track_running_stats=track, affine=affine),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 6 * 6, 6),
        torch.nn.BatchNorm1d(6),
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    return capture(lambda m, b: m(b).square().mean(), model, optimizer, batch)


def joined_and_not(program: Program) -> list[dict[int, Any]]:
    """The state after a step in one call per batch norm, and in pieces."""
    space = Space(program.graph)
    strategy = unsplit(space)
    found = []
    for joined in (True, False):
        tasks = runnable(space, strategy, 1, joined)
        runner = Runner(program, worker(Executable(space, strategy, tasks), 0))
        runner.local_step(program.batch)
        found.append(dict(runner.worker.rank.state().values()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["resnet50:tiny", "inception-v3:tiny", "wresnet:tiny"])
def test_whole_models_train_as_in_eager_pytorch(spec: str) -> None:
    program, space, strategy = alone(spec)
    tasks = runnable(space, strategy, 1)
    verify(tasks)
    called = kernels(Executable(space, strategy, tasks))
    assert not PIECES & set(called)
    assert called.count(WHOLE) == sum(op.kind == NORM for op in program.graph.ops)
    assert compare(program, space, strategy, 1).equal


@pytest.mark.slow
@pytest.mark.parametrize("track", [True, False])
def test_one_call_makes_what_the_pieces_make(track: bool) -> None:
    program = small_model(track)
    one, pieces = joined_and_not(program)
    assert one.keys() == pieces.keys()
    for value, tensor in one.items():
        torch.testing.assert_close(tensor, pieces[value], rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_a_batch_norm_without_weight_stays_in_pieces() -> None:
    assert len(list(batch_norms(small_model(affine=False).graph))) == 1


@pytest.mark.slow
def test_channels_on_two_devices_are_whole() -> None:
    program, space = captured("wresnet:tiny")
    axes = dict.fromkeys(PIECES, "c") | {"aten.mul.Scalar": "i0", "aten.add.Tensor": "i0"}
    strategy = cut(space, axes, 2)
    tasks = runnable(space, strategy, 2)
    verify(tasks)
    called = kernels(Executable(space, strategy, tasks))
    assert called.count(WHOLE) == 2 * sum(op.kind == NORM for op in program.graph.ops)
    assert compare(program, space, strategy, 2).equal


def test_a_batch_on_two_devices_stays_in_pieces() -> None:
    _, space = captured("wresnet:tiny")
    strategy = data(problem(2, "wresnet:tiny")).strategy
    tasks = lower(space, strategy, 2)
    assert join_batch_norm(space, strategy, tasks) is tasks


@pytest.mark.slow
def test_if_one_piece_is_cut_otherwise_all_stay() -> None:
    """The copies of one computation take one form."""
    program, space = captured("wresnet:tiny")
    strategy = cut(space, {BACKWARD: "i0"}, 2)
    called = kernels(Executable(space, strategy, runnable(space, strategy, 2)))
    assert WHOLE not in called
    assert compare(program, space, strategy, 2).equal


@pytest.mark.slow
def test_replicas_are_joined_and_bit_equal() -> None:
    program, space = captured("wresnet:tiny")
    strategy = unsplit(space, 2)
    assert WHOLE in kernels(Executable(space, strategy, runnable(space, strategy, 2)))
    assert compare(program, space, strategy, 2).equal


@pytest.mark.slow
def test_a_statistic_that_somebody_else_reads_is_made() -> None:
    graph = small_model().graph
    (first, second) = batch_norms(graph)
    total = graph.ops[first.total].outputs[0]
    made = g.Value("twice", g.ACTIVATION, graph.values[total].shape, "float64", 32)
    reader = g.Op("twice", "aten.mul.Scalar", (total,), (len(graph.values),), (g.Ref(0), 2))
    more = replace(graph, values=(*graph.values, made), ops=(*graph.ops, reader))
    assert [found.norm for found in batch_norms(more)] == [second.norm]


def test_a_result_that_is_read_too_early_keeps_the_pieces() -> None:
    """Some task before batch_norm_backward reads a sum."""
    program = small_model()
    space = Space(program.graph)
    strategy = unsplit(space)
    tasks = lower(space, strategy, 1)
    (first, _) = batch_norms(program.graph)
    assert first.reduce is not None and first.backward is not None
    at = {op: int(np.flatnonzero(tasks.op == op)[-1]) for op in first.all}
    reduce = at[first.reduce]
    early = tasks.in_slot.copy()
    early[tasks.in_start[reduce - 1]] = tasks.out_slot[tasks.out_start[reduce]]
    assert join_batch_norm(space, strategy, tasks).call[list(at.values())].min() >= 0
    moved = join_batch_norm(space, strategy, replace(tasks, in_slot=early))
    assert moved.call.max() >= 0  # the other one is joined
    assert moved.call[list(at.values())].max() < 0


@pytest.mark.slow
def test_memory_is_predicted_to_the_byte() -> None:
    torch.set_num_threads(1)
    program = small_model()
    space, machine = Space(program.graph), cluster("local:1")
    strategy = unsplit(space)
    tasks = runnable(space, strategy, 1)
    executable = Executable(space, strategy, tasks)
    exact = with_storage(tasks, measure_storage(executable, 1))
    verify(exact)
    with _HostPeak(True) as memory:
        runner = Runner(program, worker(executable, 0, mode="none"))
        memory.mark()
        runner.local_step(program.batch)
    assert simulate(exact, machine, default_cost(machine)).peak_bytes == (memory.peak_bytes,)


def test_tasks_wait_for_the_call_that_does_the_work() -> None:
    _, space, strategy = alone("wresnet:tiny")
    tasks = runnable(space, strategy, 1)
    nothing = {k for k, call in enumerate(tasks.calls) if call == NOTHING}
    idle = [task for task, call in enumerate(tasks.call.tolist()) if call in nothing]
    assert idle and not tasks.nbytes[idle].any() and not tasks.flops[idle].any()
    for task in range(len(tasks)):
        made = tasks.slot_first[tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]]
        waits = tasks.dep[tasks.dep_start[task] : tasks.dep_start[task + 1]]
        if tasks.call[task] < 0:
            assert set(made.tolist()) - {-1} <= set(waits.tolist())
