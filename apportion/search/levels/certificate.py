"""certificate: how good tofu's partition is, proven: its first cut, and all its levels together.

In: a Problem and a budget. Out: two sentences, each with a gap that is proven.

Both are compared with the bound of their joint sum over sites that no loop ties (exact.py). Bounds
hold for grids of the factors named, every Op cut at every level where it can be, and for bytes as
they are modelled.
"""

from __future__ import annotations

from apportion.search.levels.exact import certify_levels
from apportion.search.levels.level_costs import orders
from apportion.search.levels.levels import recurse
from apportion.search.levels.tofu import partition, sites_of
from apportion.search.problem import Problem
from apportion.search.tables.linear import Certificate
from apportion.work_clock import work_seconds

SHARE = 0.25  # of the time, for the first cut


def certify(problem: Problem, budget: float = 60.0) -> tuple[str, ...]:
    """Two sentences: what is proven of the first cut, and of all levels."""
    if problem.devices == 1:
        return ("on one device nothing moves",)
    return tuple(_sentence(what, found) for what, found in certificates(problem, budget))


def certificates(problem: Problem, budget: float) -> list[tuple[str, Certificate]]:
    """What is certified, and how."""
    now = work_seconds()
    levels = partition(problem)
    k = orders(problem.cluster)[0][0]
    first = recurse(sites_of(levels.sites.space), (k,))
    found = [(f"one cut into {k}", certify_levels(first, now + SHARE * budget))]
    if len(levels.factors) > 1:
        names = " x ".join(map(str, levels.factors))
        found.append((f"levels of {names}", certify_levels(levels, now + budget)))
    return found


def _sentence(what: str, found: Certificate) -> str:
    moved = f"{what}: {found.value:.6g} bytes, as modelled,"
    if found.gap < 1e-6:
        return f"{moved} are proven to be the fewest of such grids"
    return f"{moved} are at most {found.gap:.3%} above the fewest of such grids ({found.bound:.6g})"
