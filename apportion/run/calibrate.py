"""Measures what a step's tasks cost on this machine, and keeps it.

Part of the room run. A step and a strategy come in, a CostModel goes out, which planning uses. What
is missing for a step is found out by rehearsals (rehearse.py) of the step divided in several ways,
put into a table (measured_table.py) and kept in a cache (cost_cache.py).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from apportion.execute import Executable, measure_storage, threads
from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import TaskGraph, runnable, with_storage
from apportion.machine import ASSUMED, EXCHANGE_LINE, Cluster, CostModel, CostTable
from apportion.run.cost_cache import cached_costs, condition_of, keep_costs, measured_cost
from apportion.run.measured_table import exchanges_of_all_sizes, with_exchanges, with_rehearsal
from apportion.run.pool import TIMEOUT, ProcessPool, SharedPool
from apportion.run.rehearse import ExchangeRequest, ExchangeTimes, RehearsalRequest
from apportion.run.step_source import StepSource
from apportion.simulate import simulate
from apportion.split import Strategy, space_of

ROUNDS = 12
BUDGET = 20.0  # seconds for measuring by itself what a plan needs
MOST_OF_ONE = 8.0  # seconds for one strategy
MESSAGE_BUDGET = 4.0
MEMORY_SHARE = 0.7  # of the free memory that a rehearsal may take
STATE = (PARAMETER, OPTIMIZER_STATE, BUFFER)
NOISY = 0.15  # relative spread of the reference kernel above which a warning is due
Note = Callable[[str], None]


@dataclass(frozen=True)
class LoweredStrategy:
    """A strategy with its tasks and their works."""

    strategy: Strategy
    tasks: TaskGraph


def lower_strategy(graph: Graph, strategy: Strategy, devices: int) -> LoweredStrategy:
    """The tasks of a strategy, with the signatures of their kernel calls."""
    space = space_of(graph, strategy)
    tasks = runnable(space, strategy, devices)
    storage = measure_storage(Executable(space, strategy, tasks), threads(devices))
    return LoweredStrategy(strategy, with_storage(tasks, storage))


def rehearsal_request(
    source: StepSource, one: LoweredStrategy, rounds: int, budget: float
) -> RehearsalRequest:
    """The request to rehearse a strategy."""
    return RehearsalRequest(source, one.strategy, one.tasks.devices, rounds, budget)


def rehearse_on(
    pool: ProcessPool,
    source: StepSource,
    one: LoweredStrategy,
    table: CostTable,
    rounds: int,
    budget: float,
) -> CostTable:
    """The table with what one rehearsal on a pool has measured."""
    answers = pool.ask(rehearsal_request(source, one, rounds, budget), TIMEOUT)
    return with_rehearsal(table, one.tasks, answers)


def exchange_on(pool: ProcessPool, table: CostTable, budget: float) -> CostTable:
    """The table with what messages cost between a pool's processes."""
    count = table.condition.processes
    if count < 2:
        return table
    return with_exchanges(table, count, [exchange_times(pool, count, ROUNDS, budget)])


def exchange_times(
    pool: ProcessPool, count: int, rounds: int, budget: float
) -> list[ExchangeTimes]:
    """What each process has measured of exchanges of many sizes."""
    request = ExchangeRequest(exchanges_of_all_sizes(count), rounds, budget)
    answers: list[ExchangeTimes] = pool.ask(request, TIMEOUT)
    return answers


def count_missing(table: CostTable, tasks: TaskGraph) -> int:
    """How many of the tasks' works are not in the table."""
    return sum(work not in table.works for work in tasks.works)


class Calibrator:
    """Costs of a step's tasks on a local cluster: those of the cache, and those that it measures
    when they are missing, on `processes` or on its own. A context manager.

    budget   seconds that all rehearsals together may take, about
    note     is told what is done
    seconds  that measuring has taken
    """

    def __init__(
        self,
        source: StepSource,
        cluster: Cluster,
        budget: float = BUDGET,
        note: Note = warnings.warn,
        processes: SharedPool | None = None,
    ) -> None:
        self.source, self.cluster, self.note = source, cluster, note
        self.left, self.seconds = budget, 0.0
        self.table = cached_costs().table(condition_of(cluster))
        self._own = ExitStack()
        count = len(cluster.devices)
        self.processes = processes or self._own.enter_context(SharedPool(count))

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._own.close()

    def known(self) -> CostModel:
        """The CostModel of what is known so far."""
        return measured_cost(self.table)

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        """The CostModel for a strategy's tasks; what is missing is measured first, within the
        budget."""
        lacking, count = count_missing(self.table, tasks), len(self.cluster.devices)
        if lacking and self.left > 0 and self.fits(tasks):
            self.note(f"measuring {lacking} kernel calls on {count} processes")
            began = time.perf_counter()
            try:
                self.measure(strategy, tasks)
            except (RuntimeError, ValueError) as error:  # planning goes on without
                self.note(f"not measured: {error}")
                self.left = 0.0
            finally:
                self.seconds += time.perf_counter() - began
        return self.known()

    def measure(self, strategy: Strategy, tasks: TaskGraph) -> None:
        """Rehearses a strategy and keeps what was measured."""
        began = time.perf_counter()
        pool = self.processes.pool()
        if EXCHANGE_LINE not in self.table.lines:
            self.table = exchange_on(pool, self.table, MESSAGE_BUDGET)
        share = min(self.left, MOST_OF_ONE)
        one = LoweredStrategy(strategy, tasks)
        self.table = rehearse_on(pool, self.source, one, self.table, ROUNDS, share)
        self.left -= time.perf_counter() - began
        keep_costs(self.table)
        if self.table.noise > NOISY:
            self.note(
                f"this machine is busy with something else: the same kernel took up to "
                f"{self.table.noise:.0%} longer, so predictions may be off by as much"
            )

    def fits(self, tasks: TaskGraph) -> bool:
        """Whether there is memory and time for a rehearsal."""
        guess = simulate(tasks, self.cluster, ASSUMED)
        state = sum(v.nbytes for v in self.source.graph.values if v.role in STATE)
        wanted = sum(guess.peak_bytes) + len(guess.peak_bytes) * state
        if wanted > MEMORY_SHARE * free_memory():
            self.note(f"not measured: that would need {wanted / 1e9:.1f} GB of memory")
            return False
        if guess.step_seconds > self.left:
            self.note(f"not measured: one step would take about {guess.step_seconds:.0f} s")
            return False
        return True


def free_memory() -> float:
    """Bytes of this machine's memory that programs can still have."""
    info = Path("/proc/meminfo")
    if info.exists():
        rows = dict(line.split(":") for line in info.read_text().splitlines() if ":" in line)
        if "MemAvailable" in rows:
            return float(rows["MemAvailable"].split()[0]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2
