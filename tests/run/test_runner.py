"""A Runner takes batches from a loader, refuses bad ones and goes on, and does not wait."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.pending_loss import pending_loss
from apportion.run.runner import Runner
from apportion.run.training import vary


@pytest.fixture
def program() -> Program:
    it = zoo.load("mlp:tiny", 3)
    return capture(it.step, it.model, it.optimizer, it.batch)


def runner_of(program: Program) -> Runner:
    made = make_plan(program, cluster("local:1"), "single")
    return Runner(program, worker(Executable(made.space, made.strategy, made.tasks), 0))


def batches(program: Program, count: int) -> list[Any]:
    return [vary(program.batch, 0, k) for k in range(count)]


@pytest.mark.slow
def test_training_with_a_loader_is_step_after_step(program: Program) -> None:
    some = batches(program, 4)
    one, other = runner_of(program), runner_of(program)
    expected = [float(one.step(batch)) for batch in some]
    size = len(some[0][0])
    data = TensorDataset(*(torch.cat(leaves) for leaves in zip(*some, strict=True)))
    loader = DataLoader(data, batch_size=size)  # which makes lists of tuples
    assert [float(loss) for loss in other.train(loader)] == expected
    assert len(set(expected)) == 4


@pytest.mark.slow
def test_a_scheduler_follows_every_step(program: Program) -> None:
    """Without torch's warning that no step was taken before it, which is an error here."""
    runner = runner_of(program)
    schedule = torch.optim.lr_scheduler.StepLR(program.optimizer, 1, gamma=0.0)
    before = float(runner.step(program.batch))
    schedule.step()
    after = [float(runner.step(program.batch)) for _ in range(2)]
    assert after[0] == after[1] != before


@pytest.mark.slow
def test_the_slots_of_the_batch_are_not_the_callers(program: Program) -> None:
    """What the caller does with its batch afterwards does not matter."""
    one, other = runner_of(program), runner_of(program)
    batch = vary(program.batch, 0, 1)
    context = one.begin(batch)
    batch[0].zero_()
    loss = one.worker.run(context)
    assert loss is not None and torch.equal(loss, other.step(vary(program.batch, 0, 1)))


@pytest.mark.slow
def test_only_the_slots_keep_the_batch(program: Program) -> None:
    """So that its memory is free after its last use."""
    runner = runner_of(program)
    staged = runner._staged(program.batch)
    runner._fed(staged)
    tensors, slots = runner.worker.rank.tensors, [r.slot for r in runner.worker.rank.inputs]
    kept = [weakref.ref(tensors.pop(slot)) for slot in slots]
    assert kept and not any(ref() is not None for ref in kept)


def test_a_bad_batch_is_refused_and_the_runner_goes_on(program: Program) -> None:
    runner, whole = runner_of(program), runner_of(program)
    x, y = program.batch
    for bad, said in [
        ((x[1:], y), "leaf 0 of the batch is"),
        ((x.double(), y), "leaf 0 of the batch is torch.float64"),
        ((x,), "the batch has another structure than the one that the step was captured with"),
        (x, "batch is a Tensor, not a sequence"),
        (lambda name, region: torch.zeros(1), "the batch function returned"),
    ]:
        with pytest.raises(ValueError, match=said) as raised:
            runner.step(bad)
        assert "\n" not in str(raised.value)
    assert torch.equal(runner.step(program.batch), whole.step(program.batch))
    assert runner.steps_done == 1


@pytest.mark.slow
def test_a_bad_batch_of_a_loader(program: Program) -> None:
    runner, whole = runner_of(program), runner_of(program)
    good = batches(program, 3)
    losses = []
    with pytest.raises(ValueError, match="the batch has another structure"):
        for loss in runner.train([good[0], good[1][0], good[2]]):
            losses.append(float(loss))
    losses.append(float(runner.step(good[2])))
    assert losses == [float(whole.step(good[0])), float(whole.step(good[2]))]


@pytest.mark.slow
def test_what_is_no_loader(program: Program) -> None:
    runner = runner_of(program)
    with pytest.raises(ValueError, match="train wants batches that can be iterated"):
        list(runner.train(3))  # type: ignore[arg-type]
    used = iter(batches(program, 1))
    assert len(list(runner.train(used))) == 1
    with pytest.raises(ValueError, match="there is no batch to train with"):
        list(runner.train(used))


@pytest.mark.slow
def test_batches_are_taken_one_at_a_time_on_a_cpu(program: Program) -> None:
    taken = []

    def loader() -> Iterator[Any]:
        for number, batch in enumerate(batches(program, 3)):
            taken.append(number)
            yield batch

    for number, _ in enumerate(runner_of(program).train(loader())):
        assert taken == list(range(number + 1))


def test_a_pending_loss_waits_once_and_is_a_plain_tensor_then() -> None:
    room, waited = torch.zeros(()), []

    def fill() -> None:
        waited.append(True)
        room.fill_(2.5)

    loss = pending_loss(room, fill)
    assert isinstance(loss, torch.Tensor) and not waited
    assert float(loss) == 2.5 and loss.item() == 2.5 and f"{loss:.1f}" == "2.5"
    assert type(loss + 1) is torch.Tensor
    assert torch.stack([loss, loss]).tolist() == [2.5, 2.5]
    assert len(waited) == 1
