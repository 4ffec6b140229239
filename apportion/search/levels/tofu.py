"""tofu: recursive partitioning. Every level cuts everything by one factor of the devices, exactly.

In: a Problem. Out: the Strategy of the fewest bytes moved that recursion finds.

The factors of the device count are taken one after the other (levels.py), each level the optimum
given those before it; then level after level is decided anew given all others, until nothing
improves. Orders of factors that follow the cluster's hosts, or not, are tried, as is one cut into
all devices (EqualChop), and the fewest bytes win. What is minimised is what lowering moves: a
Value that is fetched is counted once however many Ops read it, and any Value may be stored
replicated or held as a copy, so that data parallelism and sharded state are among the plans.

An Op is left whole on all devices only if nothing of it can be cut, if it is a view, if it updates
state, or if no sample comes into it and it is little work: leaving everything whole would move
nothing. Graphs are not coarsened, except that Ops of one line and module, such as the steps of an
unrolled loop, are cut alike where elimination is too wide without that.

Composites (softmax, norms, attention) are opened where that moves less (open_composites.py): all
are, first, and those that were then cut inside stay open.

Where a step has many equal layers (repeats.py), which composites to open, and the levels to begin
with, are found on the step with four of them; every level is then decided anew on all of it.

Deviations from the paper: the levels are revised; `tofu-paper` counts every reader, as the paper
does, and stores every Value cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from apportion.columns import Floats, Ints
from apportion.lower import bytes_moved as count
from apportion.lower import termwise
from apportion.machine import Cluster
from apportion.search.baselines.data import data, sample_classes
from apportion.search.baselines.fsdp import fsdp
from apportion.search.levels.level_costs import orders
from apportion.search.levels.level_grids import checked_result, result_of_levels
from apportion.search.levels.levels import (
    Levels,
    fewest_bytes,
    levels_from_likes,
    polish,
    recurse,
)
from apportion.search.levels.memory_price import bytes_held, search_within_limit
from apportion.search.levels.sites import Sites, find_sites, largest_loop, matching_sites
from apportion.search.problem import Problem, Progress, SearchResult
from apportion.search.tables.elimination_order import EliminationOrder
from apportion.split import (
    STATISTICS,
    Choice,
    ShortenedGraph,
    Space,
    Strategy,
    composites,
    one_cut,
    shorten,
    space_of,
)

MARGIN = 0.95  # of uneven parts and cut windows half a percent more was moved than modelled
UNROLLED = 4  # Ops of one line and call in a module; more are the steps of a loop


def tofu(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The strategy that moves the fewest bytes among recursion's, data parallelism and sharded
    state.

    Those two are lowered and counted only if recursion does not move less than they must.
    """
    short = _short_step(problem)
    found = _partition(problem, short)
    return _better_of_levels_and_data(problem, short, found)


def better_of_levels_and_data(problem: Problem, levels: Levels) -> SearchResult:
    """The strategy of levels, or of data parallelism or sharded state if they move fewer bytes."""
    return _better_of_levels_and_data(problem, _short_step(problem), levels)


def _better_of_levels_and_data(
    problem: Problem, short: _ShortStep | None, levels: Levels
) -> SearchResult:
    made, kept = checked_result(levels, partition_notes(levels))
    if levels.objective.burden is not None:  # bytes were given up to hold less; so would they be
        return made
    margin = 1.0 if _is_even(levels) else MARGIN
    if not kept or levels.bytes_moved > margin * _least_bytes_of_data(problem, short):
        known = (replace(m(problem), notes=made.notes) for m in (data, fsdp))
        return min((made, *known), key=lambda r: bytes_moved(problem, r.strategy))
    return made


def tofu_paper(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Recursion under the paper's counting: every Value stored cut, every reader fetches for
    itself. Factors in falling order, no level revised."""
    sites = sites_of(problem.space, shared=False)
    found = recurse(sites, orders(problem.cluster)[0])
    return result_of_levels(found, partition_notes(found))


def partition(problem: Problem) -> Levels:
    """The best levels found, composites opened where that moves less."""
    return _partition(problem, _short_step(problem))


@dataclass(frozen=True)
class _ShortStep:
    """The step with few of its layers: its Space, and which Ops stand for those of the step."""

    likes: ShortenedGraph
    space: Space


def _short_step(problem: Problem) -> _ShortStep | None:
    """The step with few of its layers, if it has many that are equal."""
    space = problem.space
    short = None if space.opening else shorten(space.source, space.kinds)
    return None if short is None else _ShortStep(short, Space(short.graph))


def _partition(problem: Problem, short: _ShortStep | None) -> Levels:
    """As `partition`, begun on few layers if there are many."""
    space = problem.space
    if short is None:
        return _best_levels(problem, _sites_opened_where_cut(problem.cluster, space))
    start = _sites_opened_where_cut(problem.cluster, short.space)
    inside = set(start.space.opening)
    opening = tuple(op for op, like in enumerate(short.likes.ops) if like in inside)
    sites = find_sites(space.opened(opening), tied=largest_loop(short.space) > UNROLLED)
    likes = matching_sites(sites, start, short.likes)
    return _best_levels(problem, sites, start if likes is not None else None, likes)


def _sites_opened_where_cut(cluster: Cluster, closed: Space) -> Sites:
    """The sites of a Space, those composites opened that are then cut inside."""
    several = () if closed.opening else composites(closed.source)
    if not several:
        return sites_of(closed)
    sites = sites_of(closed.opened(several))
    inside = _cut_inside(recurse(sites, orders(cluster)[0]))
    if inside == several:
        return sites
    return sites_of(closed.opened(inside))


def _best_levels(
    problem: Problem, sites: Sites, few: Sites | None = None, likes: Ints | None = None
) -> Levels:
    """The best of several orders of factors, each polished; begun on `few` sites, if given, where
    each site has its like."""
    best: Levels | None = None
    least = (True, math.inf)
    steps: EliminationOrder | None = None
    for factors in orders(problem.cluster):
        known = best.steps if best and min(best.factors) <= min(factors) else None
        start = None
        if few is not None and likes is not None and len(factors) > 1:
            made = polish(recurse(few, factors, steps=steps if known else None))
            start, steps = levels_from_likes(sites, made, likes), made.steps
        levels, fits = _levels_of_order(problem, sites, factors, known, start)
        cost = (not fits, levels.bytes_moved)
        if best is None or cost < least:
            best, least = levels, cost
            names = " x ".join(map(str, factors))
            problem.report_progress(Progress(f"levels of {names}", levels.bytes_moved, unit="B"))
    assert best is not None
    return best


def _levels_of_order(
    problem: Problem,
    sites: Sites,
    factors: tuple[int, ...],
    steps: EliminationOrder | None,
    start: Levels | None = None,
) -> tuple[Levels, bool]:
    """The fewest bytes that one order of factors gives, from levels to start with if there are
    any, and whether they are within the memory limit, as far as that can be seen here."""

    def search(burden: Floats | None) -> Levels:
        if start is not None and burden is None:
            start.steps = start.steps or steps
            return polish(start)
        objective = replace(fewest_bytes(len(factors)), burden=burden)
        return polish(recurse(sites, factors, objective, steps=steps))

    if problem.memory_limit is None:
        return search(None), True
    return search_within_limit(min(problem.memory_limit), bytes_held(sites), search)


def sites_of(space: Space, *, shared: bool = True, reductions: bool = True) -> Sites:
    """The sites of a Space, the steps of loops tied if elimination is too wide otherwise."""
    if largest_loop(space) <= UNROLLED:
        return find_sites(space, shared=shared, reductions=reductions)
    return find_sites(space, shared=shared, tied=True, reductions=reductions)


def partition_notes(levels: Levels) -> tuple[str, ...]:
    """How a partition was found, for the user."""
    names = " x ".join(map(str, levels.factors))
    bytes_of = ", ".join(f"{n / 1e9:.4g}" for n in levels.bytes_by_level())
    how = "each exact given the others" if levels.exact else "not all exact"
    return (f"levels of {names}, {how}, move {bytes_of} GB",)


def _cut_inside(levels: Levels) -> tuple[int, ...]:
    """The opened Ops some of whose statistics are partial."""
    space = levels.sites.space
    origins = space.origins
    found = set()
    for index, op in enumerate(space.graph.ops):
        if op.kind not in STATISTICS:
            continue
        site = int(levels.sites.op_site[index])
        atoms = levels.sites.atoms[site]
        for chosen in levels.chosen:
            assert chosen is not None
            if chosen[site] < len(atoms):
                cut = atoms[chosen[site]]
                parts = one_cut(len(space.groups(index)), cut)
                if max(space.split(index, parts).terms) > 1:
                    found.add(origins[index])
    return tuple(sorted(found))


def _is_even(levels: Levels) -> bool:
    """Whether all parts are equal and no window is cut: then lowering moves what is modelled."""
    divided = np.ones(len(levels.sites.extents), np.int64)
    for level in levels.decided():
        divided[levels.classes_cut(level)] *= levels.factors[level]
    cut = divided > 1
    uneven = levels.sites.extents % divided != 0
    return not (cut & (uneven | levels.sites.rigid)).any()


def _least_bytes_of_data(problem: Problem, short: _ShortStep | None) -> int:
    """Bytes that data parallelism, its state sharded or not, must move.

    A gradient that is a partial sum on k devices is reduced, and it or its parameter gathered.
    Whether it is one is seen where samples are cut in two, on few layers if there are many.
    """
    graph = problem.space.graph
    space = problem.space if short is None else short.space
    likes = range(len(graph.ops)) if short is None else short.likes.ops
    partial, samples = _partial_gradients(space)
    nbytes = [
        graph.values[op.inputs[1]].nbytes
        for op, like in zip(graph.ops, likes, strict=True)
        if like in partial
    ]
    return 2 * (min(problem.devices, samples) - 1) * sum(nbytes)


def _partial_gradients(space: Space) -> tuple[set[int], int]:
    """The updates whose gradients are partial sums if samples are cut, and the number of
    samples."""
    samples, count = sample_classes(space), 1
    choices, splits = [], []
    for index in range(len(space.graph.ops)):
        groups, able = space.groups(index), space.cuttable(index)
        cut = next((k for k, group in enumerate(groups) if group in samples and able[k]), -1)
        parts = one_cut(len(groups), cut)
        choices.append(Choice(parts, (0, 1)))
        splits.append(space.split(index, parts))
        if cut >= 0:
            count = max(count, space.axes(index)[cut].extent)
    added = termwise(space, Strategy(tuple(choices), opening=space.opening), splits)
    found = set()
    for index, op in enumerate(space.graph.ops):
        made = space.graph.producer[op.inputs[1]] if op.parameter is not None else None
        if made is not None and (made[0] in added or splits[made[0]].terms[made[1]] > 1):
            found.add(index)
    return found, count


def bytes_moved(problem: Problem, strategy: Strategy) -> int:
    """What a step of the strategy really moves."""
    space = problem.space
    if (strategy.digits, strategy.opening) != (space.digits, space.opening):
        space = space_of(space.source, strategy, space)
    return count(space, strategy, problem.devices)
