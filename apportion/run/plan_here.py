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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from apportion.capture import Program
from apportion.graph import Graph
from apportion.machine import (
    GENERATED,
    Cluster,
    CostFile,
    check_kinds,
    load_cost_file,
    predicted_mode,
)
from apportion.machine import cluster as named_cluster
from apportion.plan import (
    SSP,
    CostSource,
    DefaultCosts,
    Pins,
    Plan,
    PlanningProgress,
    PlanWarning,
    best_plans,
    compare_methods,
    memory_defaults,
    with_staleness,
)
from apportion.run.cost_cache import BUDGET, cached_costs
from apportion.run.step_source import StepSource, source_of
from apportion.split import AUTO

if TYPE_CHECKING:
    from apportion.run.pool import SharedPool  # where nothing is measured, nobody loads processes

Note = Callable[[str], None]


def plan(
    program: Program | Graph,
    cluster: Cluster | str,
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
    costs: str | Path | None = None,
    compile: str = GENERATED,
    wire: str = "",
    recompute: str | None = None,
    offload: str | None = None,
    communication: str = AUTO,
    staleness: int | None = None,
    host_state: str | None = None,
    pins: Pins | None = None,
) -> Plan:
    """A Plan for a captured step (or its Graph) on a cluster, by `method` within `budget` seconds.
    The cluster may be given by its name, such as "8xh100".

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

    `recompute`, `offload` and `host_state` say what may be done for a plan to fit, each "none" or
    "auto", as much as it must be, together with the others: what the backward computes again
    ("full": all but what segments of the forward hand on; "modules": as few whole layers as must
    be, which `export` can write), what lies on the host until the backward reads it ("full":
    whatever the forward keeps), and which parameters lie there with their optimizer's state
    ("host", "device": all large ones, updated there or on the device). With a `memory_limit` and
    none of the three, all are "auto"; on processes of this machine only `recompute` is. `pins`
    decide by hand for some modules: the path of a module, as in `named_modules`, to one or several
    of "keep" and "recompute" (what its operators make), "resident", "host" and "device" (its
    parameters).

    `compile` is how ranks are compiled in the steps that are predicted: "none", "generated",
    "graph", "inductor", or "auto". `costs` is a file of `apportion calibrate --out` for devices
    that are not processes of this machine; what this machine has measured of such devices itself is
    taken from its cache.

    With `wire`, "bfloat16", partial sums of float32 gradients travel in that precision and are
    added up in float32: fewer bytes, and gradients wrong by its rounding.

    `communication` says when gradients travel, in which order and in what pieces: "none", when the
    backward is over; "wfbp", while it goes on, and a step ends when all parameters are new; "p3",
    the next step begins meanwhile and waits for each parameter where it first reads it, and slices
    of what is read first overtake others; "tictac" and "bytescheduler", likewise in an order and in
    slices that are worked out; "auto", whichever is predicted to be fastest. The results are the
    same. `plan.strategy.communication` has what was decided.

    `staleness` is for the method "ssp" only: how many steps old the parameters may be that ranks
    train on. Its result is not the single device's.

    Raises ValueError for an unknown method or one that is not for this cluster; warns (PlanWarning)
    once for each kind of operator that runs unsplit because it has no description.
    """
    cluster = _named(cluster)
    if measure is not None:
        _check_measurable(program, cluster, source, measure)
    _check_staleness(method, staleness)
    with ExitStack() as stack:
        if is_here(cluster):
            from apportion.run.pool import SharedPool

            processes = processes or stack.enter_context(SharedPool(len(cluster.devices)))
        given = _Given(costs, compile)
        with _costs(program, cluster, calibrate, note, source, processes, given) as prices:
            how = (budget, memory_limit, seed, prices, progress, measure or 1)
            modes = memory_defaults(cluster, memory_limit, recompute, offload, host_state)
            also = (policy, wire, *modes[:2], communication, modes[2])
            best = best_plans(program, cluster, method, *how, *also, pins=pins)
        if measure is None or method == SSP:
            return with_staleness(best[0], staleness)
        from apportion.run.trial import fastest_measured

        assert processes is not None  # plans are measured here only
        return fastest_measured(best, source or source_of(program), note or _warn, processes)


def _named(given: Cluster | str) -> Cluster:
    return named_cluster(given) if isinstance(given, str) else given


def _check_staleness(method: str, staleness: int | None) -> None:
    """Raises ValueError unless ranks of the method may train on older parameters."""
    if method != SSP and staleness is not None:
        raise ValueError(
            f"a staleness is for the method {SSP}; ranks of others wait for each other"
        )


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
    cluster: Cluster | str,
    methods: Sequence[str] | None = None,
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    calibrate: bool = True,
    note: Note | None = None,
    source: StepSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
    policy: Path | None = None,
    costs: str | Path | None = None,
    compile: str = GENERATED,
    processes: SharedPool | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    communication: str = AUTO,
    host_state: str | None = None,
) -> list[Plan]:
    """A Plan by each method (None: by all but those that first have to learn), under one simulator;
    measures what is missing as `plan` does, which `costs`, `compile`, `processes`, `recompute`,
    `offload`, `host_state` and `communication` are as in.

    A method that is not for this cluster is left out with a PlanWarning; ValueError if none is.
    """
    given = _Given(costs, compile)
    cluster = _named(cluster)
    with _costs(program, cluster, calibrate, note, source, processes, given) as prices:
        how = (budget, memory_limit, seed, prices, progress)
        again, away, there = memory_defaults(cluster, memory_limit, recompute, offload, host_state)
        also = (policy, again, away, communication, there)
        return compare_methods(program, cluster, methods, *how, *also)


class _Given(NamedTuple):
    """What a user says of costs: a file of them, and how ranks are compiled."""

    costs: str | Path | None
    compile: str


def own_costs(cluster: Cluster, path: str | Path | None) -> tuple[CostFile, ...]:
    """What this machine has measured of a cluster's devices, and a file, which counts for more;
    ValueError if that is not one of costs of such devices."""
    cached = cached_costs()
    kinds = {device.kind for device in cluster.devices}
    own = tuple(table for table in cached.tables if table.condition.kind in kinds)
    found = (replace(cached, tables=own),) if own else ()
    if path is None:
        return found
    file = load_cost_file(path)
    check_kinds(file, path, cluster)
    return (*found, file)


@contextmanager
def planning_costs(
    program: Program,
    cluster: Cluster,
    calibrate: bool,
    note: Note,
    source: StepSource,
    costs: str | Path | None,
    compile: str,
) -> Iterator[CostSource]:
    """What `plan` takes costs from, for a plan that no search has to find."""
    given = _Given(costs, compile)
    with _costs(program, cluster, calibrate, note, source, None, given) as found:
        yield found


@contextmanager
def _costs(
    program: Program | Graph,
    cluster: Cluster,
    calibrate: bool,
    note: Note | None,
    source: StepSource | None,
    processes: SharedPool | None,
    wanted: _Given,
) -> Iterator[CostSource]:
    mode = predicted_mode(wanted.compile, cluster)
    if not is_here(cluster):
        yield DefaultCosts(cluster, mode=mode, own=own_costs(cluster, wanted.costs))
        return
    if wanted.costs is not None:
        raise ValueError(
            f"costs of {cluster.name} are measured here and kept in the cache; a file of costs is "
            "for other devices"
        )
    from apportion.run.calibrate import Calibrator

    given = source or source_of(program)
    budget = BUDGET if calibrate else 0.0
    with Calibrator(given, cluster, budget, note or _warn, processes, mode) as costs:
        yield costs


def is_here(cluster: Cluster) -> bool:
    """Whether a cluster is processes on this machine."""
    return cluster.name.startswith("local:")


def _warn(text: str) -> None:
    warnings.warn(text, PlanWarning, stacklevel=2)
