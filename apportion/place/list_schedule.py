"""list-schedule: list scheduling by earliest finish, in a dozen variants, judged by the objective.

In: an Objective. Out: the best placement of VARIANTS. Nodes are taken by a priority, among them the
longest path to the end of the step (b-level; HEFT and DOPPLER's critical path), and each goes to
the device that has it done first, within the memory limits. None of these is best everywhere, and
all of them together take less time than a search needs to start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.columns import Floats, Ints, compiled, pop, push
from apportion.place.chains import joined_chains
from apportion.place.earliest_start import earliest_start
from apportion.place.levels import levels
from apportion.place.list_state import (
    FAR,
    ListCosts,
    ListState,
    empty_state,
    fits,
    least_excess,
    list_costs,
    ready_on,
    run_on,
    take,
)
from apportion.place.objective import Objective, PlacementResult, PlacerProgress, Report
from apportion.place.placement_problem import PlacementColumns, PlacementLinks, PlacementProblem
from apportion.place.unit_memory import excess_note, within_limits


@dataclass(frozen=True, slots=True)
class ListVariant:
    """One list scheduler.

    priority   "bottom": b-level with transfers; "compute": b-level without; "path": the longest
               path through the node; "order": the order of the nodes
    pairs      the pair of node and device that can start first (m-ETF), priorities for ties
    joined     chains of units are placed as one
    contend    messages wait for each other
    whole      devices are compared by what the whole unit takes; else by the start alone
    back       what a node waits for messages counts so many times more: gradients travel back
    fair       what a device would have beyond its share of all work counts as well
    """

    priority: str
    pairs: bool = False
    joined: bool = False
    contend: bool = True
    whole: bool = True
    back: int = 0
    fair: bool = False


VARIANTS: dict[str, ListVariant] = {
    "heft": ListVariant("bottom"),
    "heft-chains": ListVariant("bottom", joined=True, back=1),
    "heft-back": ListVariant("bottom", back=1),
    "heft-free-links": ListVariant("bottom", contend=False),
    "compute": ListVariant("compute"),
    "compute-back": ListVariant("compute", back=2),
    "critical-path": ListVariant("bottom", contend=False, whole=False),
    "through": ListVariant("path", back=1),
    "order": ListVariant("order"),
    "order-back": ListVariant("order", back=2),
    "fair": ListVariant("bottom", fair=True, back=1),
    "fair-order": ListVariant("order", fair=True, back=2),
    "first-start": ListVariant("bottom", pairs=True),
    "first-start-chains": ListVariant("bottom", pairs=True, joined=True, contend=False),
}


def list_schedule(
    objective: Objective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best of VARIANTS, or of those that the budget suffices for."""
    began = time.perf_counter()
    curve: list[tuple[float, int, float]] = []
    best, score, figures = np.zeros(0, np.int64), np.inf, {}
    chains = joined_chains(objective.problem)
    for name, variant in VARIANTS.items():
        if curve and time.perf_counter() - began > budget:
            break
        place, found = list_variant(objective, variant, chains)
        figures[name] = found
        if not curve or found < score:
            best, score, chosen = place, found, name
            curve.append((time.perf_counter() - began, objective.evaluations, found))
        if report is not None:
            report(PlacerProgress(score, None, objective.evaluations))
    notes = (f"the best variant is {chosen}", *excess_note(objective, best))
    return PlacementResult(best, notes=notes, curve=tuple(curve), figures=figures)


def list_variant(objective: Objective, variant: ListVariant, chains: Ints) -> tuple[Ints, float]:
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
    speed = 1.0 / np.maximum(costs.took.sum(axis=0), 1)
    fastest = np.where(costs.allowed, costs.took, FAR).min(axis=1, initial=FAR)
    share = np.full(len(room), FAR)
    if rules.fair:  # each device in proportion to its speed
        share = np.rint(fastest.sum() * speed.max() / speed.sum() * np.ones(len(room)))
    _schedule_nodes(
        problem.columns, problem.links, costs, state, order, rank, room, share.astype(np.int64),
        int(rules.whole), rules.back,
    )  # fmt: skip
    return state


@compiled
def _schedule_nodes(
    c: PlacementColumns, links: PlacementLinks, costs: ListCosts, state: ListState, order: Ints,
    rank: Ints, room: Floats, share: Ints, whole: int, back: int,
) -> None:  # fmt: skip
    n = len(order)
    pending = costs.input_start[1:] - costs.input_start[:-1]
    heap, size = np.empty((n + 1, 2), np.int64), 0
    for node in range(n):
        if pending[node] == 0:
            push(heap, size, rank[node], node)
            size += 1
    while size:
        node = heap[0, 1]
        pop(heap, size)
        size -= 1
        group = costs.group[node]
        if state.place[group] < 0:
            device = _choose(c, links, costs, state, room, share, whole, back, node)
            take(costs, state, group, device)
        run_on(c, links, costs, state, node, state.place[group], 0)
        for output in range(c.output_start[node], c.output_start[node + 1]):
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                later = c.reader[at]
                pending[later] -= 1
                if pending[later] == 0:
                    push(heap, size, rank[later], later)
                    size += 1


@compiled
def _choose(
    c: PlacementColumns, links: PlacementLinks, costs: ListCosts, state: ListState, room: Floats,
    share: Ints, whole: int, back: int, node: int,
) -> int:  # fmt: skip
    """The device on which a node's group is to run: the one that has it done first, then the one
    with the least work."""
    group, made = costs.group[node], np.int64(0)
    for at in range(costs.input_start[node], costs.input_start[node + 1]):
        made = max(made, state.end[c.source[costs.inputs[at]]])
    best, least = -1, FAR
    for device in range(len(room)):
        if not fits(costs, state, room, group, device):
            continue
        ready = ready_on(c, links, costs, state, node, device)
        key = max(ready, state.free[device]) + back * (ready - made)
        if whole:
            key += costs.extra[group, device]
        key += max(0, state.load[device] + costs.took[group, device] - share[device])
        if best < 0 or key < least or (key == least and state.load[device] < state.load[best]):
            best, least = device, key
    if best < 0:
        best = least_excess(costs, state, room, group)
    return best
