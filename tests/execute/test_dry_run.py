"""What kernels allocate: one step in this process against the allocator's own events."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from graphs import Maker, captured
from make_tasks import EXACT, SURVIVES, ports
from make_tasks import Maker as Tasks
from soak import cases, kept

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.collector import uncollected
from apportion.execute import dry_run as storage
from apportion.execute.allocations import AllocationTracker, allocated_peak, memory_profile
from apportion.execute.dry_run import _DryRun, measure_storage
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.run_part import run_part
from apportion.execute.transport import worker
from apportion.graph import Dtype, Op
from apportion.lower.lower import lower
from apportion.lower.task_graph import (
    Storage,
    TaskGraph,
    verify,
    with_storage,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.runner import Runner
from apportion.run.training import _HostPeak
from apportion.search.baselines.random_strategy import draw
from apportion.search.baselines.single import single
from apportion.search.problem import Problem
from apportion.simulate.simulate import simulate
from apportion.split.part import Part
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy, unsplit_choice

MODELS = ["mlp:tiny", "gpt2:tiny", "rnn:tiny", "wresnet:tiny"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def program_of(spec: str, double: bool) -> tuple[Program, Space]:
    if double:
        return captured(spec)
    it = zoo.load(spec, seed=0)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    return program, Space(program.graph)


def run(program: Program, executable: Executable) -> int:
    """Peak bytes of a step of the only device, state included, by the allocator."""
    with _HostPeak(True) as allocations:
        runner = Runner(program, worker(executable, 0))
        runner.local_step(program.batch)  # in which segments are compared with the interpreter
        allocations.mark()
        runner.local_step(program.batch)
    assert allocations.peak_bytes is not None
    return allocations.peak_bytes


def predicted(tasks: TaskGraph) -> int:
    machine = cluster("local:1")
    (peak,) = simulate(tasks, machine, default_cost(machine)).peak_bytes
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("double", kept([False, True], False))
@pytest.mark.parametrize("spec", MODELS)
def test_the_peak_of_one_device_is_predicted_to_the_byte(spec: str, double: bool) -> None:
    program, space = program_of(spec, double)
    machine = cluster("local:1")
    strategy = single(Problem(space, machine, default_cost(machine))).strategy
    tasks = lower(space, strategy, 1)
    executable = Executable(space, strategy, tasks)
    exact = with_storage(tasks, measure_storage(executable, 1))
    verify(exact)
    assert run(program, executable) == predicted(exact)
    if spec not in ("gpt2:tiny", "rnn:tiny"):  # no kernel at their peak takes more than planned
        assert predicted(exact) != predicted(tasks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "count"),
    [("mlp:tiny", cases(12, 4)), ("gpt2:tiny", cases(2, 1)), ("rnn:tiny", cases(3, 1))],
)
def test_the_peak_of_cut_operators_on_one_device_is_predicted_to_the_byte(
    spec: str, count: int
) -> None:
    """Slices, padding, assemblies and partial sums, without messages."""
    program, space = program_of(spec, True)
    for seed in range(count):
        strategy = draw(space, 1, Random(seed))
        tasks = lower(space, strategy, 1)
        executable = Executable(space, strategy, tasks)
        exact = with_storage(tasks, measure_storage(executable, 1))
        verify(exact)
        assert run(program, executable) == predicted(exact), seed


class Checked(_DryRun):
    """Runs every distinct call on real tensors too."""

    calls = 0

    def _run(self, op: Op, part: Part, given: Sequence[Any]) -> Any:
        call = super()._run(op, part, given)
        tensors = [
            None if form is None else torch.empty_strided(*form[:2], dtype=form[2]).zero_()
            for form in given
        ]
        context = Context(0, 0, lambda expression: 1.0, self.graph.bodies)
        with uncollected(), torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            run_part(self.space, op, part, tensors, context)
        results = sum(r.nbytes for r in call.results if r.alias < 0)
        assert allocated_peak(profile) == results + call.workspace, op
        self.calls += 1
        return call


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("spec", MODELS)
def test_every_call_allocates_what_is_measured(spec: str, double: bool) -> None:
    """Not only those at the peak."""
    _, space = program_of(spec, double)
    strategy = Strategy(
        tuple(unsplit_choice(space, op, (0,)) for op in range(len(space.graph.ops)))
    )
    checked = Checked(Executable(space, strategy, lower(space, strategy, 1)), 1)
    checked.run()
    assert checked.calls > 10


def test_measuring_changes_nothing_else() -> None:
    _, space = captured("mlp:tiny")
    strategy = draw(space, 3, Random(1))
    tasks = lower(space, strategy, 3)
    found = measure_storage(Executable(space, strategy, tasks), 1)
    assert measure_storage(Executable(space, strategy, tasks), 1) == found
    assert torch.get_num_threads() == 1
    exact = with_storage(tasks, found)
    assert exact.bytes_moved == tasks.bytes_moved
    assert (exact.slot_last >= tasks.slot_last).all()
    alias = np.flatnonzero(exact.slot_base >= 0)
    base = exact.slot_base[alias]
    assert (exact.slot_base[base] == -1).all()
    assert (exact.slot_last[base] >= exact.slot_last[alias]).all()
    assert (exact.slot_device[base] == exact.slot_device[alias]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "seeds"), [("mlp:tiny", 6), ("rnn:tiny", 3), ("gpt2:tiny", 2)])
def test_assemblies_say_what_the_copies_say(spec: str, seeds: int) -> None:
    _, space = captured(spec)
    for seed in range(seeds):
        tasks = lower(space, strategy := draw(space, 3, Random(seed)), 3)
        ways, executable = tasks.assemblies, Executable(space, strategy, tasks)
        assert ways.regions == tasks.boxes[: len(ways.regions)]
        assert ((ways.which >= 0) == (tasks.kind == ASSEMBLE)).all()
        for task in np.flatnonzero(ways.which >= 0).tolist():
            read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
            taken = [
                (box.sizes, box.adds, int(read[box.source]), box.source_sizes)
                if box.source >= 0
                else (box.sizes, box.adds, "message", ())
                for box in ways.distinct[ways.which[task]]
            ]
            assert taken == [
                (c.shape, c.term > 0, c.source, c.source_shape)
                if c.message < 0
                else (c.shape, c.term > 0, "message", ())
                for c in executable.copies[task]
            ]


def test_draws_that_differ_in_their_numbers_only_are_one_call() -> None:
    """Parts of two draws, at different places: one is run, and both have its storage. What is drawn
    is float32 at first."""
    make = Maker()
    make.op("apportion.random_uniform", [8, 4], 0, Dtype("bfloat16"), out=(8, 4))
    make.op("apportion.random_uniform", [8, 4], 1, Dtype("bfloat16"), out=(8, 4))
    space = make.space()
    strategy = Strategy((Choice((4, 1), (0, 1, 2, 3)),) * 2)
    measurement = _DryRun(Executable(space, strategy, lower(space, strategy, 4)), 1)
    found = measurement.run()
    assert len(measurement.found) == len(found.works) == 1
    assert len({size for _, size in found.workspace}) == 1 and len(found.workspace) == 8


# Storage and with_storage


def three_tasks() -> Tasks:
    make = Tasks(1)
    a = make.compute(0, flops=1)
    b = make.compute(0, flops=1, after=[a])
    c = make.compute(0, flops=1, after=[b])
    make.slot(0, 100, a, b)
    make.slot(0, 10, b, c)
    make.slot(0, 1, c, SURVIVES)
    return make


def peak(tasks: TaskGraph) -> int:
    return simulate(tasks, ports(1), EXACT).peak_bytes[0]


def test_without_storage_the_plan_holds() -> None:
    tasks = three_tasks().done()
    same = with_storage(tasks, Storage())
    assert peak(same) == peak(tasks) == 110
    assert same.workspace.tolist() == [0, 0, 0]


def test_a_slot_of_another_size_counts_as_that() -> None:
    tasks = with_storage(three_tasks().done(), Storage(slots=((1, -1, 64),)))
    assert peak(tasks) == 164


def test_storage_that_is_shared_lives_as_long_as_its_last_user() -> None:
    tasks = with_storage(three_tasks().done(), Storage(slots=((2, 0, 1),)))
    assert tasks.slot_last.tolist() == [3, 2, 3]
    assert peak(tasks) == 110
    assert simulate(tasks, ports(1), EXACT).curves[0].nbytes[-1] == 100


def test_workspace_is_held_while_its_task_runs() -> None:
    tasks = with_storage(three_tasks().done(), Storage(workspace=((0, 7), (2, 1000))))
    line = simulate(tasks, ports(1), EXACT)
    assert line.peak_bytes == (10 + 1 + 1000,)
    assert line.peak_categories[0]["workspace"] == 1000


def test_a_view_that_the_kernel_must_copy_has_storage_of_its_own() -> None:
    make = Maker()
    x = make.value(4, 6)
    y = make.op("aten.t.default", x, out=(6, 4))
    z = make.op("aten.reshape.default", y, [24], out=(24,))
    space = make.space()
    strategy = Strategy(tuple(Choice((1,) * len(space.axes(op)), (0,)) for op in range(2)))
    tasks = lower(space, strategy, 1)
    slot = {int(v): s for s, v in enumerate(tasks.slot_value)}
    assert tasks.slot_base[slot[z.index]] >= 0  # planned as a view
    exact = with_storage(tasks, measure_storage(Executable(space, strategy, tasks), 1))
    assert exact.slot_base[slot[z.index]] == -1
    assert exact.slot_nbytes[slot[z.index]] == 96
    assert exact.slot_base[slot[y.index]] == slot[x.index]


def test_a_kernel_that_cannot_run_without_data_is_taken_to_make_dense_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a view that may be too much; it is never too little."""
    make = Maker()
    x = make.value(4, 6)
    y = make.op("aten.t.default", x, out=(6, 4))
    make.op("aten.relu.default", y, out=(6, 4))
    space = make.space()
    strategy = Strategy((Choice((1, 1), (0,)),) * 2)
    tasks = lower(space, strategy, 1)
    executable = Executable(space, strategy, tasks)
    assert not measure_storage(executable, 1).slots

    def fails(*_: Any) -> Any:
        raise NotImplementedError("no kernel for tensors without data")

    monkeypatch.setattr(storage, "run_part", fails)
    (slot,) = np.flatnonzero(tasks.slot_value == y.index)
    assert measure_storage(executable, 1).slots == ((int(slot), -1, 96),)


@pytest.mark.slow
def test_elsewhere_workspace_is_not_known() -> None:
    _, space = captured("gpt2:tiny")
    strategy = draw(space, 1, Random(0))
    executable = Executable(space, strategy, lower(space, strategy, 1))
    assert measure_storage(executable, 1).workspace
    here, there = measure_storage(executable, 1), measure_storage(executable, None)
    assert here.slots == there.slots
    assert sum(n for _, n in there.workspace) < sum(n for _, n in here.workspace)


@pytest.mark.slow
def test_two_threads_need_no_less_than_one() -> None:
    _, space = captured("gpt2:tiny")
    strategy = draw(space, 1, Random(0))
    executable = Executable(space, strategy, lower(space, strategy, 1))
    one, two = (dict(measure_storage(executable, n).workspace) for n in (1, 2))
    assert all(two[task] >= n for task, n in one.items())
    assert sum(two.values()) > sum(one.values())


HALVES = ["mlp:tiny,precision=bf16", "llama:tiny,precision=bf16-mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*HALVES, "llama:tiny,precision=fp16-mixed"])
def test_every_call_in_half_precision_allocates_what_is_measured(spec: str) -> None:
    """Products reorder their operands, and operands of two types are converted to one."""
    test_every_call_allocates_what_is_measured(spec, False)


@pytest.mark.slow
@pytest.mark.parametrize("spec", HALVES)
def test_the_peak_in_half_precision_is_predicted_to_the_byte(spec: str) -> None:
    test_the_peak_of_one_device_is_predicted_to_the_byte(spec, False)


MIXED = {
    "float": torch.ones(9, 5),
    "half": torch.ones(9, 5, dtype=torch.bfloat16),
    "row": torch.ones(5, dtype=torch.bfloat16),
    "whole": torch.ones(9, 5, dtype=torch.int64),
    "bools": torch.ones(9, 5, dtype=torch.bool),
    "double scalar": torch.ones((), dtype=torch.float64),
    "whole scalar": torch.ones((), dtype=torch.int64),
}


@pytest.mark.parametrize("name", ["add.Tensor", "div.Tensor", "eq.Tensor", "maximum.default"])
def test_operands_of_two_types_are_converted(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    for left, x in MIXED.items():
        for right, y in MIXED.items():
            with memory_profile() as profile:
                operator(x, y)
            tracker, given = AllocationTracker(1), (x.to("meta"), y.to("meta"))
            with tracker:
                operator(*given)
            assert tracker.peak == allocated_peak(profile), (left, right)


@pytest.mark.slow
def test_measuring_writes_nothing_to_the_terminal() -> None:
    code = "import sys; from apportion.execute import memory_profile\nwith memory_profile(): pass"
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "" and "profiler" not in done.stderr
