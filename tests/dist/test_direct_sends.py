"""What is sent without being packed is what would have been packed."""

from __future__ import annotations

import numpy as np
import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.direct_sends import lasting_slots
from apportion.execute.executable import Executable
from apportion.execute.rank_buffers import DIRECT
from apportion.execute.rank_steps import rank_steps
from apportion.lower.runnable import runnable
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest, TrainingResult
from apportion.search import METHODS, Problem
from apportion.split.space import Space
from apportion.split.strategy import Strategy

SPEC = "mlp:layers=4,width=128,batch=64"


@pytest.fixture(scope="module")
def space() -> Space:
    it = zoo.load(SPEC, 0)
    return Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)


def strategy_of(space: Space, method: str) -> Strategy:
    machine = cluster("local:2")
    return METHODS[method](Problem(space, machine, default_cost(machine)), seed=3).strategy


def test_gradients_are_sent_as_they_are(space: Space) -> None:
    strategy = strategy_of(space, "data")
    executable = Executable(space, strategy, runnable(space, strategy, 2))
    steps = rank_steps(executable, 0)
    found = lasting_slots(executable, steps)
    sent = {message for message, each in enumerate(executable.messages) if each.sender == 0}
    assert found.keys() == sent
    matrices = {
        slot for slots in found.values() for slot in slots
        if executable.slots[slot].shape == (128, 128)
    }  # fmt: skip
    assert len(matrices) == 4  # one gradient a layer
    assert DIRECT <= 128 * 128 * 4


@pytest.mark.parametrize("method", ["data", "fsdp", "megatron", "random"])
def test_both_ways_of_sending_train_alike(
    space: Space, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = zoo.load(SPEC, 0)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    source, strategy = source_of_model(program, SPEC, 0), strategy_of(space, method)
    found: list[list[TrainingResult]] = []
    for carrier in ("gloo", "memory"):
        monkeypatch.setenv("APPORTION_TRANSPORT", carrier)
        with ProcessPool(2, 100.0) as pool:
            found.append(pool.train(TrainingRequest(source, strategy, 2, 3, 0, state=True)))
    for one, other in zip(*found, strict=True):
        assert one.losses == other.losses
        assert one.sent_bytes == other.sent_bytes
        assert one.peak_bytes == other.peak_bytes
        for (slot, array), (same, copy) in zip(one.state, other.state, strict=True):
            assert slot == same
            assert np.array_equal(array, copy), slot
