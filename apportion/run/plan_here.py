"""Planning with measured costs: what `plan` and `compare` of the public interface do.

Part of the room run. A Program and a Cluster come in, Plans go out (plan/ makes them).
On a local cluster the kernel calls of every strategy that a method finds are looked up in this
machine's measurements, and those that are missing are measured first. Elsewhere nothing is measured
and this is `make_plan` of the room plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from apportion.capture import Program
from apportion.graph import Graph
from apportion.machine import Cluster
from apportion.plan import (
    CostSource,
    DefaultCosts,
    Plan,
    PlanningProgress,
    PlanWarning,
    best_plans,
    compare_methods,
)
from apportion.run.calibrate import BUDGET, Calibrator
from apportion.run.pool import SharedPool
from apportion.run.step_source import StepSource, source_of
from apportion.run.trial import fastest_measured

Note = Callable[[str], None]


def plan(
    program: Program | Graph,
    cluster: Cluster,
    method: str = "auto",
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    calibrate: bool = True,
    note: Note | None = None,
    source: StepSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
    measure: int | None = None,
    processes: SharedPool | None = None,
    policy: Path | None = None,
) -> Plan:
    """A Plan for a captured step (or its Graph) on a cluster, by `method` within `budget` seconds.

    `memory_limit` is in bytes per device; None means the devices' own memory, math.inf that there
    is no limit. "auto" keeps the best plan of many methods: one within the limit, of those the
    fastest; the Plan's `method` says whose it is. The baselines are among them whatever the budget.
    Where nothing fits the Plan is the nearest one, not `feasible`, and its `notes` say what is over
    and how many devices would do. An interrupt gives the best plan so far.

    On `local:N` kernel calls that were never measured on this machine are measured on N processes
    first, for about 20 seconds at most, unless `calibrate` is false; `note` is told, or a
    PlanWarning says so. `source` says how to make the step's tensors, if not from the program.
    `progress` is told where planning stands. `processes` are those to measure on, if there are
    some already.

    With `measure`, so many of the best plans that differ each run a few real steps on N processes
    in the end, and the Plan is the one that was really the fastest; its `measured` has what was
    predicted and measured of each. That is for `local:N` only and needs the model.

    `policy` is the file of a policy, for the methods that learn.

    Raises ValueError for an unknown method or one that is not for this cluster; warns (PlanWarning)
    once for each kind of operator that runs unsplit because it has no description.
    """
    if measure is not None:
        _check_measurable(program, cluster, source, measure)
    with ExitStack() as stack:
        processes = processes or stack.enter_context(SharedPool(len(cluster.devices)))
        with _costs(program, cluster, calibrate, note, source, processes) as costs:
            how = (budget, memory_limit, seed, costs, progress, measure or 1)
            best = best_plans(program, cluster, method, *how, policy=policy)
        if measure is None:
            return best[0]
        return fastest_measured(best, source or source_of(program), note or _warn, processes)


def _check_measurable(
    program: Program | Graph, cluster: Cluster, source: StepSource | None, measure: int
) -> None:
    """Raises ValueError unless plans for this step can be run here."""
    if measure < 1:
        raise ValueError(f"{measure} plans cannot be measured; give at least 1")
    if not is_here(cluster):
        raise ValueError(
            f"plans for {cluster.name} cannot be measured: this machine has no such devices; "
            "only those for local:N can"
        )
    if isinstance(program, Graph) and source is None:
        raise ValueError("a Graph alone cannot be measured: give the captured Program")


def compare(
    program: Program | Graph,
    cluster: Cluster,
    methods: Sequence[str] | None = None,
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    calibrate: bool = True,
    note: Note | None = None,
    source: StepSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
    policy: Path | None = None,
) -> list[Plan]:
    """A Plan by each method (None: by all but those that first have to learn), under one simulator;
    measures what is missing as `plan` does.

    A method that is not for this cluster is left out with a PlanWarning; ValueError if none is.
    """
    with _costs(program, cluster, calibrate, note, source) as costs:
        how = (budget, memory_limit, seed, costs, progress)
        return compare_methods(program, cluster, methods, *how, policy=policy)


@contextmanager
def _costs(
    program: Program | Graph,
    cluster: Cluster,
    calibrate: bool,
    note: Note | None,
    source: StepSource | None,
    processes: SharedPool | None = None,
) -> Iterator[CostSource]:
    if not is_here(cluster):
        yield DefaultCosts(cluster)
        return
    given = source or source_of(program)
    budget = BUDGET if calibrate else 0.0
    with Calibrator(given, cluster, budget, note or _warn, processes) as costs:
        yield costs


def is_here(cluster: Cluster) -> bool:
    """Whether a cluster is processes on this machine."""
    return cluster.name.startswith("local:")


def _warn(text: str) -> None:
    warnings.warn(text, PlanWarning, stacklevel=2)
