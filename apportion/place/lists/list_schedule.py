"""list-schedule: list scheduling by earliest finish, in a dozen variants, judged by the objective.

In: an objective. Out: the best placement of VARIANTS. Nodes are taken by a priority, among them the
longest path to the end of the step (b-level; HEFT and DOPPLER's critical path), and each goes to
the device that has it done first, within the memory limits. None of these is best everywhere, and
all of them together take less time than a search needs to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from apportion.columns import Floats, Ints, compiled, pop, push
from apportion.place.best_of import best_of
from apportion.place.lists.chains import joined_chains
from apportion.place.lists.earliest_start import earliest_start
from apportion.place.lists.list_state import (
    ListCosts,
    ListState,
    empty_state,
    fits,
    least_excess,
    list_costs,
    pending_inputs,
    ready_on,
    run_on,
    settle,
    take,
)
from apportion.place.lists.path_levels import levels
from apportion.place.lists.unit_memory import within_limits
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.placement_problem import PlacementProblem


@dataclass(frozen=True, slots=True)
class ListVariant:
    """One list scheduler.

    priority   "bottom": b-level with transfers; "compute": b-level without; "path": the longest
               path through the node; "order": the order of the nodes
    pairs      the pair of node and device that can start first (m-ETF), priorities for ties
    joined     chains of units are placed as one
    contend    messages wait for each other
    whole      devices are compared by what the whole unit takes; else by the start alone
    pull       so much of what all messages take between the unit and those on other devices: a
               start tells only of those that are received before it
    """

    priority: str
    pairs: bool = False
    joined: bool = False
    contend: bool = True
    whole: bool = True
    pull: float = 0.0


# The first eleven were chosen among 116 variants on the 64 problems of 32 models that `policy` is
# trained on too, on four clusters; each is the one with which the geometric mean of the best so far
# falls most. Then follow those by which list schedulers are known: ETF, HEFT, and the critical path
# of DOPPLER. Of ETF the priority and the free links were chosen on other problems, those of
# benchmarks/placement_problems.py named gdp, unseen and placeto: on these it is not untuned.
VARIANTS: dict[str, ListVariant] = {
    "order-pull-4": ListVariant("order", pull=4.0),
    "chains-free": ListVariant("order", joined=True, contend=False),
    "chains-pull-4": ListVariant("order", joined=True, pull=4.0),
    "order-pull": ListVariant("order", pull=0.5),
    "order-pull-4-free": ListVariant("order", pull=4.0, contend=False),
    "order-free": ListVariant("order", contend=False),
    "bottom-chains-pull-2": ListVariant("bottom", joined=True, pull=2.0, contend=False),
    "compute-pull": ListVariant("compute", pull=1.0, contend=False),
    "order": ListVariant("order"),
    "path-chains-pull-4": ListVariant("path", joined=True, pull=4.0),
    "order-pull-2": ListVariant("order", pull=2.0),
    "etf": ListVariant("path", pairs=True, contend=False),
    "heft": ListVariant("bottom"),
    "critical-path": ListVariant("bottom", contend=False, whole=False),
}


def list_schedule(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best of VARIANTS, or of those that the budget suffices for."""
    chains = joined_chains(objective.problem)
    attempts = (
        (name, partial(list_variant, objective, variant, chains))
        for name, variant in VARIANTS.items()
    )
    return best_of(objective, attempts, budget, report)


def list_variant(
    objective: PlacementObjective, variant: ListVariant, chains: Ints
) -> tuple[Ints, float]:
    """What one variant finds, and its score."""
    problem = objective.problem
    costs = list_costs(problem, chains if variant.joined else None, variant.contend)
    order = priority_order(problem, variant.priority)

    def fill(room: Floats) -> Ints:
        if variant.pairs:
            place = earliest_start(problem, costs, order, room).place
        else:
            place = earliest_finish(problem, costs, order, room, variant).place
        return place[chains] if variant.joined else place

    return within_limits(objective, fill)


def priority_order(problem: PlacementProblem, priority: str) -> Ints:
    """All nodes, those first that are to be scheduled first."""
    n = len(problem.columns.unit)
    if priority == "order":
        return np.arange(n)
    below, above = levels(problem, 0.0 if priority == "compute" else 1.0)
    keys = below + above if priority == "path" else below
    return np.argsort(-keys, kind="stable").astype(np.int64)


def earliest_finish(
    problem: PlacementProblem, costs: ListCosts, order: Ints, room: Floats, rules: ListVariant
) -> ListState:
    """The schedule that takes ready nodes by `order` and puts each where it is done first."""
    state = empty_state(problem, costs)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    _schedule_nodes(
        costs, state, pending_inputs(problem, costs), order,
        rank, room, int(rules.whole), float(rules.pull),
    )  # fmt: skip
    settle(costs, state)
    return state


@compiled
def _schedule_nodes(
    costs: ListCosts, state: ListState, pending: Ints,
    order: Ints, rank: Ints, room: Floats, whole: int, pull: float,
) -> None:  # fmt: skip
    n = len(order)
    heap, size = np.empty((n + 1, 2), np.int64), 0
    for node in range(n):
        if pending[node] == 0 and not costs.given[node]:
            push(heap, size, rank[node], node)
            size += 1
    while size:
        node = heap[0, 1]
        pop(heap, size)
        size -= 1
        group = costs.group[node]
        if state.place[group] < 0:
            device = _choose(costs, state, room, whole, pull, node)
            take(costs, state, group, device)
        run_on(costs, state, node, state.place[group], 0)
        for output in range(costs.output_start[node], costs.output_start[node + 1]):
            for at in range(costs.reader_start[output], costs.reader_start[output + 1]):
                later = costs.reader[at]
                pending[later] -= 1
                if pending[later] == 0:
                    push(heap, size, rank[later], later)
                    size += 1


@compiled
def _choose(
    costs: ListCosts, state: ListState, room: Floats,
    whole: int, pull: float, node: int,
) -> int:  # fmt: skip
    """The device on which a node's group is to run: the one that has it done first, then the one
    with the least work."""
    group = costs.group[node]
    best, least = -1, np.inf
    for device in range(len(room)):
        if not fits(costs, state, room, group, device):
            continue
        ready = ready_on(costs, state, node, device)
        key = float(max(ready, state.free[device]))
        if whole:
            key += costs.extra[group, device]
        if pull > 0:
            apart = 0.0
            for at in range(costs.tie_start[group], costs.tie_start[group + 1]):
                there = state.place[costs.tie[at]]
                if there >= 0 and there != device:
                    apart += costs.tie_ticks[at]
            key += pull * apart
        if best < 0 or key < least or (key == least and state.load[device] < state.load[best]):
            best, least = device, key
    if best < 0:
        best = least_excess(costs, state, room, group)
    return best
