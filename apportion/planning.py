"""Planning with measured costs: what `plan` and `compare` of the public interface do.

On a local cluster the kernel calls of every strategy that a method finds are looked up in this
machine's measurements, and those that are missing are measured first. Elsewhere nothing is measured
and this is `plan.plan`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from apportion.calibrate import BUDGET, Calibrator, Source, source_of
from apportion.capture import Program
from apportion.cluster import Cluster
from apportion.graph import Graph
from apportion.plan import Plan, PlanWarning, Prices, Shipped
from apportion.plan import compare as compare_plans
from apportion.plan import plan as make_plan
from apportion.search import SEARCHES

Note = Callable[[str], None]


def plan(
    program: Program | Graph,
    cluster: Cluster,
    method: str = "auto",
    budget: float = 30.0,
    memory_limit: int | None = None,
    seed: int = 0,
    calibrate: bool = True,
    note: Note | None = None,
    source: Source | None = None,
) -> Plan:
    """A Plan for a captured step (or its Graph) on a cluster, by `method` within `budget` seconds.

    `memory_limit` is in bytes per device; None means the devices' own memory. "auto" plans by data,
    fsdp and, on 2, 4, 8, ... devices, tofu, with a third of the budget each, and keeps the fastest
    feasible plan: the Plan's `method` says which.

    On `local:N` kernel calls that were never measured on this machine are measured on N processes
    first, for about 20 seconds at most, unless `calibrate` is false; `note` is told, or a
    PlanWarning says so. `source` says how to make the step's tensors, if not from the program.

    Raises ValueError for an unknown method or one that is not for this cluster; warns (PlanWarning)
    once for each kind of operator that runs unsplit because it has no description.
    """
    with _prices(program, cluster, calibrate, note, source) as prices:
        return make_plan(program, cluster, method, budget, memory_limit, seed, prices)


def compare(
    program: Program | Graph,
    cluster: Cluster,
    methods: Sequence[str] = tuple(SEARCHES),
    budget: float = 30.0,
    memory_limit: int | None = None,
    seed: int = 0,
    calibrate: bool = True,
    note: Note | None = None,
    source: Source | None = None,
) -> list[Plan]:
    """A Plan by each method, under one simulator; measures what is missing as `plan` does.

    A method that is not for this cluster is left out with a PlanWarning; ValueError if none is.
    """
    with _prices(program, cluster, calibrate, note, source) as prices:
        return compare_plans(program, cluster, methods, budget, memory_limit, seed, prices)


@contextmanager
def _prices(
    program: Program | Graph,
    cluster: Cluster,
    calibrate: bool,
    note: Note | None,
    source: Source | None,
) -> Iterator[Prices]:
    if not is_here(cluster):
        yield Shipped(cluster)
        return
    given = source or source_of(program)
    budget = BUDGET if calibrate else 0.0
    with Calibrator(given, cluster, budget, note or _warn) as prices:
        yield prices


def is_here(cluster: Cluster) -> bool:
    """Whether a cluster is processes on this machine."""
    return cluster.name.startswith("local:")


def _warn(text: str) -> None:
    warnings.warn(text, PlanWarning, stacklevel=2)
