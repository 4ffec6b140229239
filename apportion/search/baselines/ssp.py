"""ssp: data parallelism whose ranks do not wait for each other's gradients.

In: a Problem. Out: the Strategy of `data`, by which the batch is cut. The parameters are rows of a
table of servers/, and may be stale (plan/stale.py): the result is not the single device's.
"""

from __future__ import annotations

from dataclasses import replace

from apportion.search.baselines.data import data
from apportion.search.problem import Problem, SearchResult

NOT_THE_SAME = (
    "ssp trains on parameters that may be stale: its result is not the single device's, and "
    "differs from run to run"
)


def ssp(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The batch cut as for data parallelism, and a note about what that means."""
    found = data(problem, budget=budget, seed=seed)
    return replace(found, notes=(NOT_THE_SAME, *found.notes))
