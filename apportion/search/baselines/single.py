"""single: everything unsplit on device 0.

In: a Problem. Out: the Strategy that every speed-up is measured against.
"""

from __future__ import annotations

from apportion.search.problem import Problem, SearchResult
from apportion.split import Strategy, unsplit_choice


def single(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The step as it was written."""
    space = problem.space
    choices = tuple(unsplit_choice(space, o, (0,)) for o in range(len(space.graph.ops)))
    return SearchResult(Strategy(choices, opening=space.opening))
