"""Problem and SearchResult: what every search is given and returns."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.cluster import Cluster
from apportion.cost import CostModel
from apportion.splits import Space
from apportion.strategy import Strategy


@dataclass(frozen=True)
class Problem:
    """A Graph's Space, the devices it is for, and what things cost there."""

    space: Space
    cluster: Cluster
    cost: CostModel

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)


class Unsuitable(ValueError):
    """The method cannot be used on this cluster or this step; the message says which would do."""


@dataclass(frozen=True)
class SearchResult:
    """A Strategy, and a proven bound on what was minimised where the method gives one."""

    strategy: Strategy
    lower_bound: float | None = None
