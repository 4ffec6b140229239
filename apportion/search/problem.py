"""problem: what every search is given and what it returns.

In: a Space, a Cluster and a CostModel, which make a Problem. Out: a SearchResult, and Progress
reports on the way. Unsuitable is raised by a method that cannot be used on a Problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from apportion.machine import Cluster, CostModel
from apportion.split import Space, Strategy


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: the best cost found, a proven bound on it, and in which `unit`; of one
    that proposes changes, how many proposals there were, how many a second, and the share of them
    that was accepted."""

    what: str
    best: float | None = None
    bound: float | None = None
    unit: str = "s"
    proposals: int | None = None
    per_second: float | None = None
    accepted: float | None = None

    @property
    def gap(self) -> float | None:
        """How far the best may be above the optimum, as a share of it."""
        if self.best is None or not self.bound:
            return None
        return self.best / self.bound - 1


@dataclass(frozen=True)
class Problem:
    """A Graph's Space, the devices it is for, and what things cost there.

    memory_limit  bytes per device that the plan should stay under; None: it does not matter
    report        is called with every Progress
    enough        whether a search that could go on should end, with the best so far
    """

    space: Space
    cluster: Cluster
    cost: CostModel
    memory_limit: tuple[int, ...] | None = None
    report: Callable[[Progress], None] | None = None
    enough: Callable[[], bool] = lambda: False

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)

    def report_progress(self, progress: Progress) -> None:
        """Calls `report`, if there is one."""
        if self.report is not None:
            self.report(progress)


class UnsuitableMethod(ValueError):
    """The method cannot be used on this cluster or this step; the message says which would do."""


@dataclass(frozen=True)
class SearchResult:
    """A Strategy, and a proven bound on what was minimised where the method gives one.

    bound_of     what the bound is a bound of, and for which space: "bytes moved, over grids of ..."
    notes        what the user should know of how it was found, a sentence each
    space        the Space that the Strategy is about, if the method made one
    others       further good Strategies, distinct, best first, each with the Space that it is about
                 (None: that of the Problem)
    curve        (seconds of search, seconds of a step) whenever the best improved
    figures      counts of the search by name: proposals, accepted, proposals_per_second
    interrupted  by the user, and this is the best so far: nothing else is to be tried
    """

    strategy: Strategy
    lower_bound: float | None = None
    bound_of: str = ""
    notes: tuple[str, ...] = ()
    space: Space | None = field(default=None, compare=False, repr=False)
    others: tuple[tuple[Strategy, Space | None], ...] = field(default=(), compare=False, repr=False)
    curve: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    figures: Mapping[str, float] = field(default_factory=dict, compare=False)
    interrupted: bool = False
