"""exact: all levels decided jointly, and how far from the best that may be.

In: a Problem. Out: the Strategy of the fewest bytes that was found, and a proven lower bound.

The devices are cut by their prime factors, one level each. What all levels cost together is one sum
of tables over the sites (joint_levels.py), with a value for each way to decide all levels of a
site. It is minimised as far as the budget allows (linear.py): bounds and choices by message
passing, values that cannot be in a better choice dropped; what is left by elimination where tables
stay small, else by an integer program on HiGHS, unless it has too many columns. This is done twice:

    free     over a space that has every partition: this yields the bound; and the optimum, if what
             is found is a partition
    given    over the partitions that leave every class to the levels that cut it so far, from
             the levels that tofu finds: never worse than these

Steps of unrolled loops, which tofu may tie to be cut alike, are free of each other. Where the
tables of all levels would be too large, levels are decided in runs of as many as can be, given the
others, and the bound is that of the first run: further levels never make bytes fewer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from apportion.lower import is_linear
from apportion.search.levels.joint_levels import (
    LevelSets,
    disputed_class,
    free_sets,
    given_sets,
    joint_energy,
    levels_of,
    levels_on_sites,
    picks_of,
    table_entries,
)
from apportion.search.levels.level_costs import primes
from apportion.search.levels.levels import Levels, fewest_bytes, polish, recurse
from apportion.search.levels.sites import find_sites
from apportion.search.levels.tofu import better_of_levels_and_data, partition, partition_notes
from apportion.search.problem import Problem, Progress, SearchResult
from apportion.search.tables.linear import Certificate, minimise_with_bound
from apportion.split import PARTIAL, AxisEffects
from apportion.work_clock import work_seconds

ENTRIES = 40_000_000  # of all tables of a joint energy
TIES = 0.6e-3  # bytes by which a choice of a site is preferred to another at most, per level
SHARE = 0.5  # of the time, for the bound
CLOSE = 1e-6  # a bound this close leaves nothing to look for

ProgressCallback = Callable[[float, float], None]


@dataclass(frozen=True)
class JointSolution:
    """The best levels found, a bound on the bytes of all that there are, and how many levels it
    looked at jointly."""

    levels: Levels
    bound: float
    depth: int


def exact(problem: Problem, *, budget: float = 60.0, seed: int = 0) -> SearchResult:
    """The strategy that moves the fewest bytes of all that were found, and a proven bound.

    Where the memory limit made tofu give up bytes, its levels are kept: what would be better is not
    known to hold as little. The bound is that without a limit.
    """
    deadline = work_seconds() + budget
    limited = partition(problem)
    start = _without_burden(limited)
    factors = tuple(primes(problem.devices))
    inside = start if start.factors == factors else polish(recurse(start.sites, factors))
    found = solve_jointly(untie_loops(inside), deadline, problem)
    best = min((start, found.levels), key=lambda levels: levels.bytes_moved)
    if start is not limited:
        best = limited
    bound = min(
        max(0.0, found.bound - _overcounted_bytes(best) - _bytes_saved_by_adding_first(best)),
        best.bytes_moved,
    )
    remarks = (*partition_notes(best), *_gap_note(best, bound))
    made = better_of_levels_and_data(problem, best)
    return replace(
        made, lower_bound=bound, bound_of=_bound_description(factors, found), notes=remarks
    )


def _without_burden(levels: Levels) -> Levels:
    """The same decisions, of which nothing but bytes is counted."""
    if levels.objective.burden is None:
        return levels
    plain = fewest_bytes(len(levels.factors))
    return Levels(levels.sites, levels.factors, plain, list(levels.chosen), levels.exact)


def _overcounted_bytes(levels: Levels) -> float:
    """Bytes by which levels count too many for partial Values that nothing can cut, such as a loss:
    each device is charged every term, where lowering may add them up on one and send the sum."""
    n, sites = math.prod(levels.factors), levels.sites
    values = sites.space.graph.values
    whole = {site for site in sites.copy.values() if not sites.atoms[site]}
    held = sum(values[int(sites.first[site])].nbytes for site in whole)
    return float(held * (n * n - n - 2 * (n - 1)))


def _bytes_saved_by_adding_first(levels: Levels) -> float:
    """Bytes that lowering may save where a plan leaves a sum of partial Values whole: the terms are
    added before they are reduced (termwise.py), and levels have each reduced by itself."""
    space, sites = levels.sites.space, levels.sites
    graph, effects, total = space.graph, AxisEffects(space), 0.0
    devices = math.prod(levels.factors)
    partial: set[int] = set()
    for index, op in enumerate(graph.ops):
        for _, effect in effects.legal(index):
            several = zip(op.outputs, effect.outputs, strict=True)
            partial |= {value for value, cut in several if cut == PARTIAL}
        terms = [value for value in op.inputs if value in partial]
        if terms and sites.uncut[sites.op_site[index]] and is_linear(op):
            partial.update(op.outputs)
            total += sum(graph.values[v].nbytes for v in terms[1:]) * (devices - 1)
    return total


def _bound_description(factors: Sequence[int], found: JointSolution) -> str:
    names = " x ".join(map(str, factors)) or "1"
    first = f", from the first {found.depth} levels" if found.depth < len(factors) else ""
    return (
        f"bytes moved as modelled, over grids of {names}, every Op cut at every level where it "
        f"can be{first}"
    )


def _gap_note(levels: Levels, bound: float) -> tuple[str, ...]:
    if bound >= _bound_to_reach(levels):
        return ("no partition of this space moves fewer bytes",)
    if bound <= 0:
        return ()
    return (f"at most {levels.bytes_moved / bound - 1:.2%} above the best of this space",)


def certify_levels(levels: Levels, deadline: float | None = None) -> Certificate:
    """How far the bytes of all levels are from the best of their space at most, loops untied."""
    found = solve_jointly(untie_loops(levels), math.inf if deadline is None else deadline)
    value = levels.bytes_moved
    bound = min(found.bound, value)
    return Certificate(
        value, bound, (value - bound) / value if value else 0.0, "all levels jointly"
    )


def untie_loops(levels: Levels) -> Levels:
    """The same decisions on sites that no loop ties."""
    sites = find_sites(levels.sites.space, shared=levels.sites.shared)
    return levels if len(sites) == len(levels.sites) else levels_on_sites(levels, sites)


def solve_jointly(levels: Levels, deadline: float, problem: Problem | None = None) -> JointSolution:
    """The best found from these levels on, and a bound on all levels of these factors."""
    depth = _joint_depth(levels)
    window = range(depth)
    if not depth:
        return JointSolution(levels, 0.0, depth)
    now = work_seconds()
    found, bound = _solve_free(levels, window, now + SHARE * (deadline - now), problem)
    for first in range(0, len(levels.factors), depth):
        if bound < _bound_to_reach(found) and work_seconds() < deadline:
            run = range(first, min(first + depth, len(levels.factors)))
            found = _solve_given(found, run, deadline, problem, bound)
    return JointSolution(found, bound, depth)


def _joint_depth(levels: Levels) -> int:
    """How many levels the tables of a joint energy can be for."""
    found = 0
    for depth in range(1, len(levels.factors) + 1):
        window = range(depth)
        if table_entries(levels.sites, window, free_sets(levels, window)) > ENTRIES:
            break
        found = depth
    return found


def _solve_free(
    levels: Levels, window: range, deadline: float, problem: Problem | None
) -> tuple[Levels, float]:
    """Better levels, and a bound from the first levels on their own.

    The sum of all partitions and more is minimised; where its sites dispute a class, that is tried
    with each of its sets in turn, the one of least bound first.
    """
    root = free_sets(levels, window)
    whole = len(window) == len(levels.factors)
    best, closed, serial = levels, math.inf, itertools.count()
    waiting: list[tuple[float, int, list[LevelSets]]] = [(0.0, next(serial), root)]
    while waiting and waiting[0][0] < _bound_to_reach(best) and work_seconds() < deadline:
        bound, _, sets = heapq.heappop(waiting)
        found, proven = _solve_relaxed(
            best, window, sets, deadline, _progress_callback(problem, best, bound)
        )
        bound = max(bound, proven)
        class_ = disputed_class(found, sets) if whole else None
        if class_ is None:
            closed = min(closed, bound)
            if whole and found.bytes_moved < best.bytes_moved and not found.scattered:
                best = found
            continue
        for some in _sets_to_try(levels, sets[class_], sets is root):
            child = [*sets[:class_], (some,), *sets[class_ + 1 :]]
            heapq.heappush(waiting, (bound, next(serial), child))
    return best, min([closed, *(bound for bound, _, _ in waiting)])


def _solve_relaxed(
    levels: Levels,
    window: range,
    sets: list[LevelSets],
    deadline: float,
    report: ProgressCallback | None,
) -> tuple[Levels, float]:
    """What the minimum over these sets decides, and its bound in bytes."""
    alone = Levels(levels.sites, levels.factors, levels.objective)
    shared, domains = joint_energy(alone, window, sets)
    start = picks_of(levels, window, domains).tolist()
    solved = minimise_with_bound(shared.energy(), deadline, start, report=report)
    bound = solved.bound - _tie_bytes(levels, len(window))
    return levels_of(levels, window, domains, solved.choice), max(0.0, bound)


def _sets_to_try(levels: Levels, sets: LevelSets, first: bool) -> LevelSets:
    """The sets to try: of the first class, if all levels are alike, one of each size."""
    if not first or len(set(levels.factors)) > 1 or len(set(levels.objective.weights)) > 1:
        return sets
    return tuple({len(some): some for some in sets}.values())


def _bound_to_reach(levels: Levels) -> float:
    """What a bound must reach to leave nothing better, ties aside."""
    return levels.bytes_moved * (1 - CLOSE) - _tie_bytes(levels, len(levels.factors))


def _tie_bytes(levels: Levels, depth: int) -> float:
    """Bytes that tables of so many levels may have been raised by to break ties."""
    return TIES * len(levels.sites) * depth


def _solve_given(
    levels: Levels, window: range, deadline: float, problem: Problem | None, bound: float
) -> Levels:
    """These levels decided jointly given the others, if that is better."""
    sets = given_sets(levels, window)
    if table_entries(levels.sites, window, sets) > ENTRIES:
        return levels
    shared, domains = joint_energy(levels, window, sets)
    start = picks_of(levels, window, domains).tolist()
    solved = minimise_with_bound(shared.energy(), deadline, start)
    found = levels_of(levels, window, domains, solved.choice)
    if found.bytes_moved >= levels.bytes_moved or found.scattered:
        return levels
    if problem is not None:
        problem.report_progress(Progress("exact", found.bytes_moved, bound, "B"))
    return found


def _progress_callback(
    problem: Problem | None, levels: Levels, known: float
) -> ProgressCallback | None:
    """Reports a bound as it rises, beside the bytes of the levels known."""
    if problem is None:
        return None
    best, ties = levels.bytes_moved, _tie_bytes(levels, len(levels.factors))

    def report(_: float, bound: float) -> None:
        problem.report_progress(Progress("exact", best, max(known, min(bound - ties, best)), "B"))

    return report
