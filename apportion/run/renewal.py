"""What of a CostTable has to be measured again.

Part of the room run. A table comes in, or one from before a measurement and one from after it; what
is missing, marked or no longer true goes out. Reasons to measure a call that is in the table:

    provisional  it was measured while other programs ran, and now none do
    unknown      the table does not say how fast the machine was when it was measured (files of
                 before): some works are measured again and compared
    changed      reference kernels take another time than then (reference_kernels.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from apportion.lower import TaskGraph
from apportion.machine import CostTable, ReferenceTime, cost_fit

DRIFT = 1.35  # how many times longer or shorter works may take, in the median, when measured again
SHORTEST, FEWEST = 2e-6, 5  # seconds of a work, and number of works, that can show a drift


def count_missing(table: CostTable, tasks: TaskGraph) -> int:
    """How many of the tasks' works are not in the table."""
    return sum(work not in table.works for work in tasks.works)


def count_lacking(table: CostTable, tasks: TaskGraph, quiet: bool) -> int:
    """How many of the tasks' works have to be measured; more on a quiet machine, where what is
    measured can be relied on."""
    if quiet and table.works and not table.references:
        return len(tasks.works)
    return count_missing(without_provisional(table) if quiet else table, tasks)


def without_provisional(table: CostTable) -> CostTable:
    """The table without what was measured while other programs ran."""
    if not table.provisional:
        return table
    marked = set(table.provisional)
    works = {name: work for name, work in table.works.items() if name not in marked}
    lines = {name: line for name, line in table.lines.items() if name not in marked}
    return replace(table, works=works, lines=lines, fits=cost_fit.fits(works), provisional=())


def with_marks(
    old: CostTable, new: CostTable, references: Mapping[str, ReferenceTime] | None
) -> CostTable:
    """The new table with marks at what is not in the old one, if there are no references because
    other programs ran; and else without marks there, and with the references."""
    fresh = {name for name, work in new.works.items() if old.works.get(name) is not work}
    fresh |= {name for name, line in new.lines.items() if old.lines.get(name) is not line}
    if references is None:
        return replace(new, provisional=tuple(sorted({*new.provisional, *fresh})))
    left = tuple(name for name in new.provisional if name not in fresh)
    return replace(new, provisional=left, references=new.references or references)


def drift(old: CostTable, new: CostTable) -> float | None:
    """How many times longer the works take that were measured again, if that is beyond what two
    measurements differ by; marked ones and the shortest say nothing."""
    sure = old.works.keys() - {*old.provisional}
    ratios = [
        work.seconds / old.works[name].seconds
        for name, work in new.works.items()
        if name in sure and old.works[name] is not work and old.works[name].seconds > SHORTEST
    ]
    ratio = float(np.median(ratios)) if len(ratios) >= FEWEST else 1.0
    return None if 1 / DRIFT <= ratio <= DRIFT else ratio
