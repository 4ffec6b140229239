"""Measures what a step's tasks cost on this machine, and keeps it.

Part of the room run. A step and a strategy come in, a CostModel goes out, which planning uses. What
is missing for a step is found out by rehearsals (rehearse.py) of the step divided in several ways,
put into a table (measured_table.py) and kept in a cache (cost_cache.py).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from apportion.execute import Executable, measure_storage, threads
from apportion.free_memory import free_memory
from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import TaskGraph, runnable, with_storage
from apportion.machine import (
    ASSUMED,
    EXCHANGE_LINE,
    GENERATED,
    Cluster,
    CostModel,
    CostTable,
    ReferenceTime,
)
from apportion.run.core_use import core_use, taken
from apportion.run.cost_cache import (
    BUDGET,
    cached_costs,
    condition_of,
    keep_costs,
    measured_cost,
)
from apportion.run.measured_table import (
    exchanges_of_all_sizes,
    noise,
    with_exchanges,
    with_rehearsal,
)
from apportion.run.pool import TIMEOUT, ProcessPool, SharedPool
from apportion.run.reference_kernels import DISTURBED, MachineSpeed, changed, machine_speed
from apportion.run.rehearse import ExchangeRequest, ExchangeTimes, RehearsalRequest
from apportion.run.renewal import count_lacking, drift, with_marks, without_provisional
from apportion.run.step_source import StepSource
from apportion.simulate import simulate
from apportion.split import Strategy, space_of
from apportion.work_clock import work_seconds

ROUNDS = 12
MOST_OF_ONE = 8.0  # seconds for one strategy
MESSAGE_BUDGET = 4.0
MEMORY_SHARE = 0.7  # of the free memory that a rehearsal may take
STATE = (PARAMETER, OPTIMIZER_STATE, BUFFER)
NOISY = 0.15  # relative spread of a kernel above which a machine is disturbed, if nothing else says
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
    source: StepSource,
    one: LoweredStrategy,
    rounds: int,
    budget: float,
    mode: str = GENERATED,
) -> RehearsalRequest:
    """The request to rehearse a strategy."""
    return RehearsalRequest(source, one.strategy, one.tasks.devices, rounds, budget, mode)


def rehearse_on(
    pool: ProcessPool,
    source: StepSource,
    one: LoweredStrategy,
    table: CostTable,
    rounds: int,
    budget: float,
) -> CostTable:
    """The table with what one rehearsal on a pool has measured."""
    mode = table.condition.mode
    answers = pool.ask(rehearsal_request(source, one, rounds, budget, mode), TIMEOUT)
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


class Calibrator:
    """Costs of a step's tasks on a local cluster: those of the cache, as long as they are of this
    machine as it is now, and those that it measures when they are missing, on `processes` or on its
    own. A context manager.

    budget   seconds that all rehearsals together may take, about; with 0 nothing is measured, and
             what the cache has is taken as it is
    note     is told what is done
    before   the table of the cache when it began
    mode     how segments will run, of execute/
    seconds  that measuring has taken
    speed    of this machine, once it was looked at
    """

    def __init__(
        self,
        source: StepSource,
        cluster: Cluster,
        budget: float = BUDGET,
        note: Note = warnings.warn,
        processes: SharedPool | None = None,
        mode: str = GENERATED,
    ) -> None:
        self.source, self.cluster, self.note = source, cluster, note
        self.left, self.seconds = budget, 0.0
        self.table = self.before = cached_costs().table(condition_of(cluster, mode))
        self.speed: MachineSpeed | None = None
        self._compared = False  # what was measured before with what is measured now
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
        began = work_seconds()
        if self.left > 0:
            self.check()
        lacking, count = count_lacking(self.table, tasks, self.quiet), len(self.cluster.devices)
        if lacking and self.left > 0 and self.fits(tasks):
            most = min(self.left, MOST_OF_ONE)
            self.note(
                f"measuring {lacking} kernel calls on {count} processes, up to {most:.0f} s; that "
                "is kept"
            )
            try:
                self.measure(strategy, tasks)
            except (RuntimeError, ValueError) as error:  # planning goes on without
                self.note(f"not measured: {error}")
                self.left = 0.0
        self.seconds += work_seconds() - began
        return self.known()

    @property
    def quiet(self) -> bool:
        """Whether this machine was looked at and no other programs ran."""
        return self.speed is not None and not self.speed.disturbed

    def check(self) -> None:
        """Looks how fast this machine is, once; what was measured when it was another one, or in
        another state, is forgotten."""
        if self.speed is None:
            self.speed = machine_speed(self.table.condition)
            if self.table.works and (why := changed(self.table, self.speed)):
                self.forget(why)

    def forget(self, why: str) -> None:
        """Begins with an empty table."""
        when = self.table.measured or "an unknown day"
        self.note(f"what was measured on {when} no longer holds and is measured again: {why}")
        self.table = CostTable(self.table.condition)

    def measure(self, strategy: Strategy, tasks: TaskGraph) -> None:
        """Rehearses a strategy and keeps what was measured."""
        self.check()
        began = time.perf_counter()
        at, pool = self.table.condition, self.processes.pool()
        numbers = [child.pid for child in pool.children]
        before = core_use(numbers)
        old = without_provisional(self.table) if self.quiet else self.table
        exchanged = (
            exchange_on(pool, old, MESSAGE_BUDGET) if EXCHANGE_LINE not in old.lines else old
        )
        one = LoweredStrategy(strategy, tasks)
        share = min(self.left, MOST_OF_ONE)
        request = rehearsal_request(self.source, one, ROUNDS, share, at.mode)
        answers = pool.ask(request, TIMEOUT)
        lost = taken(before, core_use(numbers), at.threads * at.processes)
        disturbed = noise(answers) > NOISY if lost is None else lost > DISTURBED
        new = with_rehearsal(exchanged, tasks, answers, disturbed)
        first, self._compared = not self._compared, True
        if first and not disturbed and (ratio := drift(old, new)) is not None:
            self.forget(f"the same kernel calls take {ratio:.2g} times what they took")
            old = self.table
            new = with_rehearsal(exchange_on(pool, old, MESSAGE_BUDGET), tasks, answers)
        self.table = with_marks(old, new, None if disturbed else self.references())
        self.left -= time.perf_counter() - began
        keep_costs(self.table, self.before)
        if disturbed:
            self.speed = MachineSpeed({}, 1.0 if lost is None else lost)
            what = "part" if lost is None else f"{lost:.0%}"
            self.note(
                f"other programs had {what} of the cores meanwhile: predictions may be off, and "
                "these calls are measured again when this machine is quieter"
            )

    def references(self) -> Mapping[str, ReferenceTime]:
        """What reference kernels take; nothing if other programs disturb them."""
        if not self.quiet:
            self.speed = machine_speed(self.table.condition)
        return self.speed.references if self.speed and self.quiet else {}

    def fits(self, tasks: TaskGraph) -> bool:
        """Whether there is memory and time for a rehearsal."""
        guess = simulate(tasks, self.cluster, ASSUMED)
        state = sum(v.nbytes for v in self.source.graph.values if v.role in STATE)
        wanted = sum(guess.peak_bytes) + len(guess.peak_bytes) * state
        if wanted > MEMORY_SHARE * free_memory():
            self.note(f"not measured: that would need {wanted / 1e9:.1f} GB of memory")
            return False
        if guess.step_seconds > self.left:
            self.note(
                f"not measured: one step would take about {guess.step_seconds:.1f} s, and of the "
                f"time for measuring {self.left:.1f} s are left"
            )
            self.left = 0.0  # so that this is said once
            return False
        return True
