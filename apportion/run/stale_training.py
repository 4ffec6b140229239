"""Training on parameters that may be stale: a captured step on processes that share a table.

Part of the room run. A Program and a Plan of the method ssp come in. Every rank has the whole model
and takes the step by plain PyTorch, on its part of the batch; the change that its own optimizer
makes, divided by the number of ranks, is added to a table of all parameters (servers/), from which
it takes them before the next step. With staleness 0 and plain SGD that is data parallelism;
otherwise the result is not the single device's, and every output says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from apportion.capture import Program, eager_step, flatten
from apportion.execute import Executable, Rank, peer_errors
from apportion.plan import Plan
from apportion.run.process import PoolProcess
from apportion.run.step_source import StepSource
from apportion.servers import GlooMessages, StoreSettings, TableStore

COLUMNS = 256  # of the table's rows
Part = tuple[tuple[int, tuple[slice, ...]], ...]
"""What a rank takes of a batch: a slice per dimension of some of its leaves."""


class ParameterRows:
    """The trained parameters of a Program as rows of numbers, one after the other."""

    def __init__(self, program: Program) -> None:
        groups = program.live.param_groups
        found = {id(p): p for group in groups for p in group["params"]}
        self.parameters = list(found.values())
        self.size = sum(each.numel() for each in self.parameters)
        self.rows = max(1, -(-self.size // COLUMNS))

    def values(self) -> npt.NDArray[np.float32]:
        """The parameters as they are."""
        found = np.zeros(self.rows * COLUMNS, np.float32)
        flat = [each.detach().reshape(-1).float() for each in self.parameters]
        found[: self.size] = torch.cat(flat).cpu().numpy()
        return found.reshape(self.rows, COLUMNS)

    def load(self, values: npt.NDArray[np.float32]) -> None:
        """Gives the parameters other values."""
        flat, at = torch.from_numpy(values.reshape(-1)), 0
        with torch.no_grad():
            for each in self.parameters:
                each.copy_(flat[at : at + each.numel()].reshape(each.shape))
                at += each.numel()


class StaleRunner:
    """One rank's side of a step whose parameters may be stale. It changes the live model and
    optimizer. `finish` waits until all ranks have sent everything, and leaves the same parameters
    on all of them."""

    def __init__(self, program: Program, part: Part, store: TableStore) -> None:
        self.program, self.part, self.store = program, part, store
        self.rows = ParameterRows(program)
        first = self.rows.values()
        self.table = store.table("parameters", self.rows.rows, COLUMNS, lambda rows: first[rows])

    def step(self, batch: Any) -> torch.Tensor:
        """One training step on this rank's part of a batch; returns the loss of that part."""
        old = self.table.get()
        self.rows.load(old)
        loss = eager_step(self.program, self._own(batch)).loss
        change = (self.rows.values() - old) / self.store.count
        rows = np.flatnonzero(change.any(axis=1))
        self.table.inc(rows, change[rows])
        self.store.clock()
        return loss

    def train(self, batches: Iterable[Any]) -> Iterator[torch.Tensor]:
        """A training step for each batch; yields the losses of this rank's parts."""
        for batch in batches:
            yield self.step(batch)
        self.finish()

    def finish(self) -> None:
        """Waits for all ranks; then all have the same parameters."""
        self.store.synchronise()
        self.rows.load(self.table.get())

    def close(self) -> None:
        """Ends the table; all ranks have to."""
        self.store.close()

    def _own(self, batch: Any) -> Any:
        whole = flatten(batch)
        leaves = list(whole.leaves)
        for position, spans in self.part:
            leaves[position] = leaves[position][spans]
        return whole.rebuild(leaves)


def batch_parts(program: Program, plan: Plan) -> tuple[Part, ...]:
    """What each rank of a plan takes of a batch. Raises ValueError if that is not a slice."""
    positions = dict(program.inputs)
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    found = []
    for device in range(len(plan.cluster.devices)):
        mine = []
        for region in Rank(executable, device).inputs:
            if region.spans is None:
                raise ValueError(
                    f"{region.name} is not cut along whole dimensions, which training on stale "
                    "parameters needs; plan with another method"
                )
            mine.append((positions[region.value], region.spans))
        found.append(tuple(mine))
    return tuple(found)


def stale_runner(program: Program, plan: Plan) -> StaleRunner:
    """The StaleRunner of this rank; all ranks have to make theirs."""
    assert plan.staleness is not None
    messages = _messages(dist.get_rank())
    store = TableStore(messages, StoreSettings(plan.staleness))
    return StaleRunner(program, batch_parts(program, plan)[dist.get_rank()], store)


def _messages(rank: int) -> GlooMessages:
    with peer_errors():
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return GlooMessages(rank, dist.get_world_size(), group)


@dataclass(frozen=True)
class StaleResult:
    """What a rank answers: the loss of its part and the seconds of every step, bytes sent, and how
    long it waited for rows that were too old."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    sent_bytes: int
    waited_seconds: float


@dataclass(frozen=True)
class StaleRequest:
    """Train so many steps on stale parameters."""

    source: StepSource
    parts: tuple[Part, ...]
    steps: int
    seed: int
    staleness: int

    def __call__(self, process: PoolProcess) -> StaleResult:
        program, _ = process.program(self.source)
        torch.manual_seed(self.seed + process.rank)
        store = TableStore(_messages(process.rank), StoreSettings(self.staleness))
        runner = StaleRunner(program, self.parts[process.rank], store)
        losses, seconds = [], []
        for _ in range(self.steps):
            began = time.perf_counter()
            losses.append(float(runner.step(program.batch)))
            seconds.append(time.perf_counter() - began)
        runner.finish()
        found = StaleResult(tuple(losses), tuple(seconds), store.sent_bytes, store.waited_seconds)
        runner.close()
        return found


def mean_losses(ranks: list[StaleResult]) -> list[float]:
    """The loss of every step: the mean over the ranks' parts."""
    return [statistics.fmean(losses) for losses in zip(*(r.losses for r in ranks), strict=True)]
