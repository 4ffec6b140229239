"""Training on stale parameters: without staleness it is data parallelism, and all ranks agree in
the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from table_threads import run_threads

import apportion as ap
from apportion.capture.program import Program
from apportion.run.stale_training import StaleRunner, batch_parts
from apportion.servers.table_store import StoreSettings, TableStore

STEPS, RANKS = 4, 2


def small_step() -> tuple[Any, ...]:
    """A step with its model, optimizer and batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = torch.randn(8, 6), torch.randn(8, 3)

    def step(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    return step, model, optimizer, batch


def small_program() -> Program:
    return ap.capture(*small_step())


def serial() -> tuple[list[float], np.ndarray]:
    """Losses and parameters of one device."""
    step, model, optimizer, batch = small_step()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, _flat(model)


def _flat(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).numpy()


def stale(staleness: int) -> list[tuple[list[float], np.ndarray, int]]:
    """Losses, parameters and clocks of each rank."""
    programs = [small_program() for _ in range(RANKS)]
    plan = ap.plan(programs[0], ap.cluster(f"local:{RANKS}"), method="ssp", staleness=staleness)
    parts = batch_parts(programs[0], plan)

    def work(store: TableStore) -> tuple[list[float], np.ndarray, int]:
        program = programs[store.rank]
        runner = StaleRunner(program, parts[store.rank], store)
        losses = [float(loss) for loss in runner.train([program.batch] * STEPS)]
        return losses, runner.rows.values(), store.ticks

    return run_threads(RANKS, StoreSettings(staleness), work, 0.002)


@pytest.mark.slow
def test_without_staleness_it_is_data_parallelism() -> None:
    losses, parameters = serial()
    found = stale(0)
    assert np.mean([each[0] for each in found], axis=0) == pytest.approx(losses, rel=1e-5)
    for _, rows, ticks in found:
        assert rows.reshape(-1)[: len(parameters)] == pytest.approx(parameters, rel=1e-4, abs=1e-6)
        assert ticks == STEPS


def test_stale_ranks_agree_in_the_end_and_learn() -> None:
    found = stale(2)
    assert np.array_equal(found[0][1], found[1][1])
    losses = np.mean([each[0] for each in found], axis=0)
    assert losses[-1] < losses[0]


def test_a_plan_says_that_it_is_not_the_single_device() -> None:
    program = small_program()
    plan = ap.plan(program, ap.cluster("local:2"), method="ssp", staleness=2)
    assert plan.staleness == 2
    assert any("its result is not the single device's" in note for note in plan.notes)
    assert any("2 steps old" in note for note in plan.notes)
    assert ap.plan(program, ap.cluster("local:2"), method="data").staleness is None
