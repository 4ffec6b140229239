"""Candidate: what a method found, lowered and simulated. A part of plan/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apportion.lower import Storage, TaskGraph
from apportion.machine import CostModel
from apportion.memory import MemoryPlan
from apportion.search import SearchResult
from apportion.simulate import Timeline
from apportion.split import Space

Curve = tuple[tuple[float, float], ...]
"""(seconds of search, seconds of a step) whenever the best improved."""


@dataclass(frozen=True)
class Candidate:
    """What a method found, lowered and simulated. `curve` and `figures` are those of the whole
    search that it is the outcome of. `memory` is what is decided about memory; `space` is that of
    the Graph in which it is so."""

    method: str
    found: SearchResult
    search_seconds: float
    space: Space
    tasks: TaskGraph
    storage: Storage
    cost: CostModel
    timeline: Timeline
    notes: tuple[str, ...] = ()
    curve: Curve = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
