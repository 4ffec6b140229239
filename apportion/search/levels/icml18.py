"""icml18: Tofu's recursion without reductions: no operator leaves partial values.

In: a Problem. Out: the best such Strategy by bytes moved, level by level.

What the Tofu paper calls ICML18: the space of OptCNN, in which the axes that an operator sums over
are never cut, under Tofu's objective. An Op that has nothing else to cut runs whole.
"""

from __future__ import annotations

from apportion.search.levels.level_costs import orders
from apportion.search.levels.level_grids import result_of_levels
from apportion.search.levels.levels import recurse
from apportion.search.levels.tofu import partition_notes, sites_of
from apportion.search.problem import Problem, SearchResult


def icml18(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The fewest bytes, level by level, without reductions."""
    sites = sites_of(problem.space, reductions=False)
    found = recurse(sites, orders(problem.cluster)[0])
    return result_of_levels(found, partition_notes(found))
