"""On a GPU: steps that do not wait, batches copied beside them, several ranks, device times."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as
from apportion.execute.backends import NCCL, Backends
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool, SharedPool
from apportion.run.process import PoolProcess
from apportion.run.run import run
from apportion.run.runner import Runner
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest, vary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SPEC = "gpt2:tiny"


@pytest.fixture(scope="module")
def program() -> Program:
    it = zoo.load(SPEC, 0)
    return capture(it.step, it.model, it.optimizer, it.batch)


@pytest.fixture(scope="module")
def plan(program: Program) -> Plan:
    return make_plan(program, cluster("1xh200"), "single")


def runner_of(program: Program, plan: Plan, mode: str = "generated") -> Runner:
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    return Runner(program, worker(executable, 0, "cuda:0", mode))


def batches(program: Program, count: int) -> list[Any]:
    return [vary(program.batch, 0, number) for number in range(count)]


def refuse_to_wait(mode: str) -> None:
    """With "error" torch raises where an operation would wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("mode", ["none", "generated"])
def test_a_step_does_not_wait_for_the_device(mode: str) -> None:
    """Of a model with few kernels: a device's queue has room for about a thousand."""
    it = zoo.load("mlp:tiny", 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    runner = runner_of(program, make_plan(program, cluster("1xh200"), "single"), mode)
    some = batches(program, 4)
    for batch in some[:3]:
        runner.step(batch)
    torch.cuda.synchronize()
    refuse_to_wait("error")
    try:
        began = time.perf_counter()
        torch.cuda._sleep(2_000_000_000)  # about a second
        loss = runner.step(some[3])
        issued = time.perf_counter() - began
    finally:
        refuse_to_wait("default")
    assert loss.is_cuda
    float(loss)
    waited = time.perf_counter() - began
    assert waited > 0.4 and issued < waited / 2


def test_loaders_steps_and_batches_that_change_train_the_same(program: Program, plan: Plan) -> None:
    some = batches(program, 5)
    one = runner_of(program, plan)
    expected = [float(one.step(batch)) for batch in some]
    assert len(set(expected)) == 5
    data = TensorDataset(*(torch.cat(leaves) for leaves in zip(*some, strict=True)))
    for pinned in (False, True):
        loader = DataLoader(data, batch_size=len(some[0][0]), pin_memory=pinned)
        found = list(runner_of(program, plan).train(loader))
        assert [float(loss) for loss in found] == expected
    changed, found = runner_of(program, plan), []
    room = tuple(leaf.clone().pin_memory() for leaf in some[0])
    for batch in some:
        for leaf, given in zip(room, batch, strict=True):
            leaf.copy_(given)
        torch.cuda._sleep(20_000_000)
        found.append(changed.step(room))  # and overwritten while it is under way
    assert [float(loss) for loss in found] == expected
    on_device = runner_of(program, plan)
    there = [tuple(leaf.cuda() for leaf in batch) for batch in some]
    assert [float(on_device.step(batch)) for batch in there] == expected


def test_slots_of_the_batch_stay_where_they_are(program: Program, plan: Plan) -> None:
    runner, found = runner_of(program, plan), set()
    for batch in batches(program, 3):
        context = runner.begin(batch)
        slots = [region.slot for region in runner.worker.rank.inputs]
        found.add(tuple(runner.worker.rank.tensors[slot].data_ptr() for slot in slots))
        runner.worker.run(context)
    assert len(found) == 1


def test_device_times_cover_the_step(plan: Plan, program: Program) -> None:
    with SharedPool(1) as processes:
        done = run(SPEC, plan, 3, program=program, processes=processes)
    line = done.timeline
    order = line.start_ns.argsort()
    start, end = line.start_ns[order], line.end_ns[order]
    assert (end >= start).all() and (start[1:] + 1000 >= end[:-1]).all()
    assert 0 < int(end.max()) / 1e9 < 1.5 * done.measured_steps[-1]


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessPool]:
    with ProcessPool(2, 120.0) as made:
        yield made


@pytest.mark.parametrize("method", ["data", "megatron"])
def test_two_ranks_share_a_gpu(two: ProcessPool, program: Program, method: str) -> None:
    made = make_plan(program, cluster("local:2"), method)
    source = source_of_model(program, SPEC, 0)
    request = TrainingRequest(
        source, made.strategy, 2, 2, 0, double=True, state=True, place="cuda:0", replicas=True
    )
    ranks = two.train(request)
    exact = capture_as(program, torch.float64)
    found = compare_with_eager(exact, made, ranks, 2, 0)
    assert found.equal, found
    assert sum(rank.sent_bytes for rank in ranks) > 0


@dataclass(frozen=True)
class NcclRequest:
    """A group of one rank over NCCL."""

    def __call__(self, process: PoolProcess) -> list[float]:
        torch.cuda.set_device(0)
        group = dist.new_group([0], backend=NCCL)
        backends = Backends("cuda:0", (NCCL,), group)
        assert backends.post((), ()) == []
        tensor = torch.full((4,), 2.5, device="cuda:0")
        dist.all_reduce(tensor, group=group)
        gathered = torch.empty(4, device="cuda:0")
        dist.all_to_all_single(gathered, tensor, group=group)
        return [float(each) for each in gathered]


def test_nccl_with_one_rank() -> None:
    with ProcessPool(1, 120.0) as one:
        assert one.ask(NcclRequest()) == [[2.5] * 4]
