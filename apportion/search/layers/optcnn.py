"""optcnn: one grid of parts for every layer, for the smallest sum of seconds, exactly.

In: a Problem. Out: the Strategy that minimises

    t_O = sum over layers l   t_C(l, c_l) + t_S(l, c_l)
        + sum over edges      t_X(e, c_source, c_target)

A layer (layers.py) is cut along axes that index its output. A grid c has parts for each, whose
product divides the number of devices and which lie on devices 0, 1, ... in order, the last axis
fastest; fewer devices than all are allowed. t_C adds up, over the Ops of the layer, forward,
backward and update, what the slowest part takes by the CostModel. t_S and t_X are the exchanges
(exchange_seconds.py) of what a layer reads of itself (partial gradients of weights, statistics) and
of each other layer, forward and backward; a Value that several Ops of a layer read is fetched once.

The sum is a table per layer and one per pair of layers that exchange something, and its minimum is
found by variable elimination (eliminate.py). On series-parallel graphs that is the paper's node and
edge elimination; beyond, tables of several layers are made while they stay small. Where they do
not, the result is the best that descents and message passing find, with the bound they prove.

Deviations from the paper: layers may also run whole on all devices; exchanges take what their
busiest link takes, and weights are synchronised by the cheapest all-reduce (`paper` adds up all
transfers and has a parameter server instead); compute is what the CostModel says of each Op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from apportion.lower import lower
from apportion.search.layers.summed_seconds import SummedSeconds, most_grids
from apportion.search.problem import Problem, Progress, SearchResult
from apportion.search.tables.ascend import pass_messages
from apportion.search.tables.eliminate import Energy, TooWide, descend, eliminate
from apportion.simulate import simulate
from apportion.split import MOST_AXES, Strategy
from apportion.work_clock import work_seconds

WIDEST = 20_000_000  # entries of a table of the elimination
DESCENTS = 20
ROUNDS = 6  # of looking for the price of memory
ROOM = 2  # a plan whose state and saved activations fit this many times is taken to fit


def optcnn(problem: Problem, *, budget: float = 30.0, seed: int = 0) -> SearchResult:
    """The best grid of every layer by summed seconds; exact unless a note says otherwise."""
    return _search(SummedSeconds(problem), budget, seed)


def optcnn_paper(problem: Problem, *, budget: float = 30.0, seed: int = 0) -> SearchResult:
    """The same under the paper's costs: transfers add up, weights go to a parameter server."""
    return _search(SummedSeconds(problem, paper=True), budget, seed)


@dataclass(frozen=True)
class GridSolution:
    """A legal grid for every layer (its row), their summed seconds, and a bound on all others."""

    rows: list[int]
    seconds: float
    bound: float
    exact: bool


def _search(costs: SummedSeconds, budget: float, seed: int) -> SearchResult:
    problem, end = costs.problem, work_seconds() + budget
    found = minimise(costs, costs.energy, end, seed)
    problem.report_progress(Progress("optcnn", found.seconds, found.bound))
    notes = []
    if not found.exact:
        gap = found.seconds / found.bound - 1 if found.bound > 0 else float("inf")
        notes.append(
            "optcnn: the layers hang together too closely for exact elimination; the best grids "
            f"found are at most {gap:.2%} above the optimum of summed seconds"
        )
    left_out = sum(grids.left_out for grids in costs.grids)
    if left_out:
        notes.append(
            f"optcnn: of the grids of some layers the {most_grids(problem.devices)} on the most "
            f"devices were tried, {left_out} in all left out"
        )
    strategy = costs.strategy(found.rows)
    if problem.memory_limit is not None:
        strategy, more = _within_memory(costs, found, strategy, end, seed)
        notes += more
    return SearchResult(strategy, found.bound, _bound_of(costs), tuple(notes))


def _bound_of(costs: SummedSeconds) -> str:
    return (
        "summed seconds of compute, transfers and synchronisation, over one grid for each of "
        f"{len(costs.layers)} layers, cut along at most {MOST_AXES} axes that index its output"
    )


def minimise(costs: SummedSeconds, energy: Energy, end: float, seed: int) -> GridSolution:
    """The least sum over legal grids. A grid whose Ops cannot be cut along all of its axes at once
    is found out when it is chosen, and then costs more than everything else."""
    energy = replace(energy, unary=list(energy.unary))
    dear = energy.value([0] * len(energy.sizes)) + 1.0
    while True:
        found = _minimise_energy(energy, end, seed)
        wrong = costs.illegal(found.rows)
        if not wrong:
            return found
        for layer in wrong:
            energy.unary[layer] = energy.unary[layer].copy()
            energy.unary[layer][found.rows[layer]] = dear


def _minimise_energy(energy: Energy, end: float, seed: int) -> GridSolution:
    try:
        rows, seconds = eliminate(energy, WIDEST)
        return GridSolution(rows, seconds, seconds, True)
    except TooWide:
        rng = Random(seed)
        starts = [[0] * len(energy.sizes), [n - 1 for n in energy.sizes]]
        starts += [[rng.randrange(n) for n in energy.sizes] for _ in range(DESCENTS)]
        start, _ = min((descend(energy, start) for start in starts), key=lambda found: found[1])
        best = pass_messages(energy, deadline=end, start=start)
        return GridSolution(best.choice, best.value, best.bound, best.optimal)


# Memory


def _within_memory(
    costs: SummedSeconds, found: GridSolution, strategy: Strategy, end: float, seed: int
) -> tuple[Strategy, list[str]]:
    """The strategy of the fewest summed seconds that is found to fit the memory limit.

    Every byte that a layer keeps costs a price, which is raised until the plan fits and then halved
    back to where it just does.
    """
    problem = costs.problem
    assert problem.memory_limit is not None
    kept = costs.bytes_kept()
    least = min(problem.memory_limit)
    if ROOM * sum(float(k[row]) for k, row in zip(kept, found.rows, strict=True)) <= least:
        return strategy, []
    over = _bytes_over_limit(problem, strategy)
    if over <= 0:
        return strategy, []
    nearest, fitting, seconds = (over, strategy), None, 0.0
    low, high, price = 0.0, None, found.seconds / least / 4
    for _ in range(2 * ROUNDS):
        if work_seconds() > end:
            break
        unary = [u + price * k for u, k in zip(costs.energy.unary, kept, strict=True)]
        rows = minimise(costs, replace(costs.energy, unary=unary), end, seed).rows
        tried, value = costs.strategy(rows), costs.energy.value(rows)
        over = _bytes_over_limit(problem, tried)
        nearest = min(nearest, (over, tried), key=lambda pair: pair[0])
        if over <= 0:
            high = price
            if fitting is None or value < seconds:
                fitting, seconds = tried, value
            price = (low + price) / 2
        else:
            low = price
            price = 4 * price if high is None else (price + high) / 2
        if high is not None and high - low < high / 2**ROUNDS:
            break
    if fitting is not None:
        return fitting, [
            f"optcnn: grids that fit the memory limit take {seconds:.6g} summed seconds"
        ]
    return nearest[1], ["optcnn: no grids were found that fit the memory limit"]


def _bytes_over_limit(problem: Problem, strategy: Strategy) -> int:
    """By how many bytes a plan exceeds the limit of the device where that is most."""
    tasks = lower(problem.space, strategy, problem.devices)
    peaks = simulate(tasks, problem.cluster, problem.cost).peak_bytes
    assert problem.memory_limit is not None
    return max(peak - limit for peak, limit in zip(peaks, problem.memory_limit, strict=True))
