"""tofu-seconds: Tofu's levels, for the fewest seconds on the cluster at hand instead of bytes.

In: a Problem. Out: the Strategy of the fewest seconds, added up, that recursion finds.

A byte costs what the links that its level crosses take for it, when all devices exchange at once; a
transfer costs their latency, however small; an Op costs the seconds of its parts, so that leaving
one whole on all devices is charged, and then allowed. The seconds are added up as if nothing
overlapped: the simulator judges the result.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from apportion.columns import Floats
from apportion.lower import lower
from apportion.machine import first_devices
from apportion.search.baselines.single import single
from apportion.search.levels.level_costs import orders, seconds_per_byte, seconds_per_transfer
from apportion.search.levels.level_grids import result_of_levels
from apportion.search.levels.levels import Levels, Objective, polish, recurse
from apportion.search.levels.memory_price import bytes_held, search_within_limit
from apportion.search.levels.sites import Sites
from apportion.search.levels.tofu import sites_of
from apportion.search.problem import Problem, Progress, SearchResult
from apportion.simulate import nanoseconds


def tofu_seconds(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The fewest seconds of computing and moving, added up."""
    sites = sites_of(problem.space)
    sites = replace(sites, uncut=np.ones(len(sites), np.bool_))
    seconds = site_seconds(problem, sites)
    best: Levels | None = None
    least = (True, math.inf)
    for factors in orders(problem.cluster):
        found, fits = _partition(problem, sites, factors, seconds)
        cost = (not fits, found.cost)
        if best is None or cost < least:
            best, least = found, cost
            names = " x ".join(map(str, factors))
            problem.report_progress(Progress(f"levels of {names}", found.cost))
    assert best is not None
    names = " x ".join(map(str, best.factors))
    note = f"levels of {names}: {best.cost:.4g} s if nothing overlapped"
    return result_of_levels(best, (note,))


def _partition(
    problem: Problem, sites: Sites, factors: tuple[int, ...], seconds: Floats
) -> tuple[Levels, bool]:
    """The levels of one order of factors, and whether they are within the memory limit, as far as
    that can be seen here."""
    weights = seconds_per_byte(problem.cluster, factors)
    fixed = seconds_per_transfer(problem.cluster, factors)
    objective = Objective(weights, fixed, seconds)

    def search(burden: Floats | None) -> Levels:
        total = seconds if burden is None else seconds + burden
        return polish(recurse(sites, factors, replace(objective, burden=total)))

    if problem.memory_limit is None:
        return search(None), True
    found, fits = search_within_limit(min(problem.memory_limit), bytes_held(sites), search)
    return Levels(sites, factors, objective, found.chosen, found.exact), fits


def site_seconds(problem: Problem, sites: Sites) -> Floats:
    """Per site the seconds that its Ops take whole, on the first device."""
    tasks = lower(sites.space, single(replace(problem, space=sites.space)).strategy, 1)
    one = first_devices(problem.cluster, 1, problem.cluster.name)
    taken = nanoseconds(tasks, one, problem.cost) / 1e9
    found = np.zeros(len(sites))
    per_op = np.bincount(tasks.op[tasks.op >= 0], taken[tasks.op >= 0], len(sites.op_site))
    np.add.at(found, sites.op_site, per_op)
    return found
