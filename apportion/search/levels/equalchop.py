"""equalchop: every tensor and operator chopped along one axis into all devices at once.

In: a Problem. Out: the best such Strategy by bytes moved.

Tofu's exact step without its recursion, as the Tofu paper compares with.
"""

from __future__ import annotations

from apportion.search.levels.level_grids import result_of_levels
from apportion.search.levels.levels import recurse
from apportion.search.levels.tofu import partition_notes, sites_of
from apportion.search.problem import Problem, SearchResult


def equalchop(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The fewest bytes with one cut of each Op and Value into all devices."""
    found = recurse(sites_of(problem.space), (problem.devices,))
    return result_of_levels(found, partition_notes(found))
