"""Making Plans: by one method or by "auto", the best few, or one by each of several methods.

Part of the room plan. A Program (or its Graph) and a Cluster come in, Plans go out. auto.py chooses
among what the methods find; where nothing fits, devices_needed.py says what would.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from apportion import graph as graphs
from apportion.machine import Cluster, CostModel
from apportion.plan.auto import choose
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import (
    CostSource,
    DefaultCosts,
    PlanningProgress,
    PlanRequest,
    ranking_key,
)
from apportion.plan.decide_memory import decide_memory, memory_seconds
from apportion.plan.devices_needed import QUICK_METHODS, enough, shortfall
from apportion.plan.host_residence import MemoryModes, check_host_state
from apportion.plan.memory_pins import Pins, read_pins
from apportion.plan.offloading import check_offload
from apportion.plan.plan import Plan, PlanWarning, SimulatedStep, prediction_of
from apportion.plan.recomputation import KEEP, MODULES, check_recompute
from apportion.plan.schedule_exchanges import check_communication
from apportion.search import METHODS, UnsuitableMethod, compared_by_default, tried_by_auto
from apportion.split import AUTO, Space, check_wire
from apportion.work_clock import work_seconds

if TYPE_CHECKING:
    from apportion.capture import Program


def make_plan(
    program: Program | graphs.Graph,
    cluster: Cluster,
    method: str = "auto",
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    costs: CostSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
    policy: Path | None = None,
    wire: str = "",
    recompute: str = KEEP,
    offload: str = KEEP,
    communication: str = AUTO,
    host_state: str = KEEP,
    pins: Pins | None = None,
) -> Plan:
    """A Plan for a captured step (or its Graph) on a cluster, by `method` within `budget` seconds.

    `memory_limit` is in bytes per device; None means the devices' own memory, math.inf that there
    is no limit. "auto" keeps the best plan of many methods: one within the limit, of those the
    fastest; the Plan's `method` says whose it is. The baselines are among them whatever the budget.
    Where nothing fits the Plan is the nearest one, not `feasible`, and its `notes` say what is over
    and how many devices would do. An interrupt gives the best plan so far.

    Raises ValueError for an unknown method or one that is not for this cluster; warns (PlanWarning)
    once for each kind of operator that runs unsplit because it has no description. `progress` is
    told where planning stands. `policy` is the file of a policy, for the methods that learn. With
    `wire`, "bfloat16", partial sums of float32 gradients travel so; searches do not know of it.
    `recompute` says what the backward may compute again instead of keeping it: "none" nothing,
    "auto" what it must for the plan to fit, "modules" as few whole layers as must be for that,
    "full" whatever is not a boundary between segments.
    `offload` says likewise what lies in the host's memory until the backward: "none" nothing,
    "auto" what must for the plan to fit, "full" whatever the forward keeps.
    `host_state` says likewise which parameters lie on the host with their optimizer's state: "none"
    none, "auto" what must for the plan to fit, "host" and "device" all large ones, updated there or
    on the device. `pins` decide by hand for some modules (memory_pins.py).
    `communication` says when gradients travel, in which order and in what pieces: "none" when the
    backward is over, "wfbp" while it goes on, "p3", "tictac" and "bytescheduler" while the next
    step begins, as published by these names, "auto" whichever is predicted to be fastest.
    """
    how = (memory_limit, seed, costs, progress, 1, policy, wire, recompute, offload, communication)
    return best_plans(program, cluster, method, budget, *how, host_state, pins)[0]


def best_plans(
    program: Program | graphs.Graph,
    cluster: Cluster,
    method: str,
    budget: float,
    memory_limit: float | None,
    seed: int,
    costs: CostSource | None,
    progress: Callable[[PlanningProgress], None] | None,
    keep: int,
    policy: Path | None = None,
    wire: str = "",
    recompute: str = KEEP,
    offload: str = KEEP,
    communication: str = AUTO,
    host_state: str = KEEP,
    pins: Pins | None = None,
) -> list[Plan]:
    """As `plan`, but the `keep` best that differ, best first; all but the first are feasible."""
    _check_methods([method], policy)
    modes = _modes(recompute, offload, host_state, pins)
    began = work_seconds()
    request = plan_request(program, cluster, memory_limit, seed, costs, progress, policy)
    modes = replace(modes, pins=read_pins(pins, request.space.source))
    request = replace(request, wire=check_wire(wire))
    request = replace(request, communication=check_communication(communication))
    warn_unsplit(request.space, level=4)
    chosen = choose(request, method, budget, keep, memory_seconds(modes, budget))
    chosen = decide_memory(request, chosen, modes, budget)
    found = [made_plan(request, c, budget) for c in (chosen.best, *chosen.others)]
    found[0] = replace(found[0], tried=chosen.tried)
    found = [
        _with_step(made, c) for made, c in zip(found, (chosen.best, *chosen.others), strict=True)
    ]
    if found[0].feasible:
        return found
    left = 0.0 if chosen.interrupted else budget - (work_seconds() - began)
    several = method == "auto"
    return [_explained(found[0], request, chosen.best, left, several, several, modes)]


def compare_methods(
    program: Program | graphs.Graph,
    cluster: Cluster,
    methods: Sequence[str] | None = None,
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    costs: CostSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
    policy: Path | None = None,
    recompute: str = KEEP,
    offload: str = KEEP,
    communication: str = AUTO,
    host_state: str = KEEP,
) -> list[Plan]:
    """A Plan by each method, each within `budget` seconds, under one simulator; None: by all but
    those that first have to learn. `recompute`, `offload`, `host_state` and `communication` are as
    in `make_plan`.

    A method that is not for this cluster or step is left out with a PlanWarning; ValueError if none
    is for it. An interrupt leaves out the methods that are not done. If no plan fits, the notes of
    the nearest say why.
    """
    methods = compared_by_default() if methods is None else methods
    _check_methods(methods, policy)
    modes = _modes(recompute, offload, host_state)
    request = plan_request(program, cluster, memory_limit, seed, costs, progress, policy)
    request = replace(request, communication=check_communication(communication))
    warn_unsplit(request.space)
    plans: list[Plan] = []
    refused: dict[str, UnsuitableMethod] = {}
    best: Candidate | None = None
    at, interrupted = 0, False
    try:
        for method in methods:
            try:
                chosen = choose(request, method, budget, 1, memory_seconds(modes, budget))
                chosen = decide_memory(request, chosen, modes, budget)
            except UnsuitableMethod as why:
                refused[method] = why
                continue
            if best is None or ranking_key(request, chosen.best) < ranking_key(request, best):
                best, at = chosen.best, len(plans)
            plans.append(replace(made_plan(request, chosen.best, budget), method=method))
            interrupted = chosen.interrupted
            if interrupted:
                break
    except KeyboardInterrupt:
        if not plans:
            raise
        interrupted = True
    if best is None:
        raise next(iter(refused.values()), ValueError("there are no methods to compare"))
    for method, refusal in refused.items():
        warnings.warn(f"{method} is left out: {refusal}", PlanWarning, stacklevel=2)
    if interrupted:
        done = {p.method for p in plans} | refused.keys()
        missing = ", ".join(m for m in methods if m not in done) or "none"
        warnings.warn(f"interrupted; methods not tried: {missing}", PlanWarning, stacklevel=2)
    plans[at] = _with_step(plans[at], best)
    if not isinstance(request.costs, DefaultCosts):
        plans = [_priced(plan, request.costs.known()) for plan in plans]
    if not plans[at].feasible:
        left = 0.0 if interrupted else budget
        tried = "auto" in methods or set(QUICK_METHODS) <= {plan.method for plan in plans}
        plans[at] = _explained(plans[at], request, best, left, len(plans) > 1, tried, modes)
    return plans


def _modes(recompute: str, offload: str, host_state: str, pins: Pins | None = None) -> MemoryModes:
    check_recompute(recompute)
    check_offload(offload)
    check_host_state(host_state)
    if recompute == MODULES and (pins or {offload, host_state} != {KEEP}):
        raise ValueError(
            f"--recompute {MODULES} decides about whole modules alone: leave --offload, "
            "--host-state and pins out, or take --recompute auto"
        )
    return MemoryModes(recompute, offload, host_state)


def _priced(made: Plan, cost: CostModel) -> Plan:
    """The Plan judged by what is known in the end: for later ones more may have been measured."""
    return made if made.cost == cost else replace(made, cost=cost).simulate()


def plan_request(
    program: Program | graphs.Graph,
    cluster: Cluster,
    memory_limit: float | None,
    seed: int,
    costs: CostSource | None,
    progress: Callable[[PlanningProgress], None] | None,
    policy: Path | None,
) -> PlanRequest:
    limits: tuple[int, ...] | None = tuple(d.memory_bytes for d in cluster.devices)
    if memory_limit is not None:
        count = len(cluster.devices)
        limits = None if math.isinf(memory_limit) else (int(memory_limit),) * count
    space = Space(program if isinstance(program, graphs.Graph) else program.graph)
    costs = costs or DefaultCosts(cluster)
    return PlanRequest(space, cluster, costs, limits, seed, progress, policy)


def made_plan(request: PlanRequest, found: Candidate, budget: float) -> Plan:
    """The Plan of a Candidate, without what was worked out for it: of many Plans that is much."""
    return Plan(
        graph=found.space.source,
        cluster=request.cluster,
        strategy=found.found.strategy,
        method=found.method,
        seed=request.seed,
        budget=budget,
        search_seconds=found.search_seconds,
        predicted=prediction_of(found.timeline),
        memory_limit=request.memory_limit,
        cost=found.cost,
        lower_bound=None if request.wire else found.found.lower_bound,
        storage=found.storage,
        lower_bound_of=found.found.bound_of,
        notes=(*found.notes, *_on_the_wire(request), *_on_replicas(request, found)),
        curve=found.curve,
        figures=found.figures,
        memory=found.memory,
    )


def _on_the_wire(request: PlanRequest) -> tuple[str, ...]:
    if not request.wire:
        return ()
    return (
        f"partial sums of float32 gradients travel in {request.wire} and are added up in float32",
    )


def _on_replicas(request: PlanRequest, found: Candidate) -> tuple[str, ...]:
    """Which copies of the state may not be bit-equal."""
    from apportion.execute import Executable, replica_notes  # which needs torch

    on_gpu = any(device.kind != "cpu" for device in request.cluster.devices)
    return replica_notes(Executable(found.space, found.found.strategy, found.tasks), on_gpu)


def _with_step(made: Plan, found: Candidate) -> Plan:
    """The Plan with what was worked out for its Candidate."""
    step = SimulatedStep(made, found.space, found.tasks, found.timeline)
    return replace(made, simulated=step)


def _explained(
    made: Plan,
    request: PlanRequest,
    nearest: Candidate,
    budget: float,
    several: bool,
    tried: bool,
    modes: MemoryModes,
) -> Plan:
    """A Plan that does not fit, with notes that say why and how many devices would do."""
    notes = [shortfall(request, nearest, several)]
    try:
        spared = "" if modes == MemoryModes() else " (with nothing recomputed)"
        notes.append(enough(request, budget, tried) + spared)
    except KeyboardInterrupt:
        notes.append("interrupted before the number of devices that would do was found")
    return _with_step(replace(made, notes=(*made.notes, *notes)), nearest)


def warn_unsplit(space: Space, level: int = 3) -> None:
    """One PlanWarning for each kind of operator that runs unsplit for want of a description, so
    many calls up."""
    graph = space.graph
    for kind, why in space.undescribed.items():
        ops = [
            op
            for index, op in enumerate(graph.ops)
            if op.kind == kind
            and not space.axes(index)
            and any(_several(graph.values[v].shape) for v in op.outputs)
        ]
        if ops:
            count = f"{len(ops)} operators, first" if len(ops) > 1 else "1 operator,"
            where = next((op.line for op in ops if op.line), ops[0].name)
            reason = "it has no description (ap.describe)" if why == "no description" else why
            text = f"{kind} runs unsplit ({count} at {where}): {reason}"
            warnings.warn(text, PlanWarning, stacklevel=level)


def _several(shape: tuple[int, ...] | None) -> bool:
    return shape is None or math.prod(shape) > 1


def _check_methods(names: Sequence[str], policy: Path | None) -> None:
    for name in names:
        if name != "auto" and name not in METHODS:
            raise ValueError(f"unknown method {name!r}; known: auto, {', '.join(METHODS)}")
    asked = {one for name in names for one in (tried_by_auto() if name == "auto" else [name])}
    learned = [name for name, row in METHODS.items() if row.takes_policy]
    if policy is not None and not asked.intersection(learned):
        raise ValueError(f"a policy is for the methods {', '.join(learned)} only")
