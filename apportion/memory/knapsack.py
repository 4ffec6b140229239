"""knapsack: one option for each item, so that enough is saved in the least time.

Part of the room memory. Options of items come in, each with the bytes that it saves and the seconds
that it costs, and the bytes that are to be saved; out goes which option each item takes:

    least(k, need) = min over options of item k of seconds + least(k + 1, need - bytes)

Bytes are counted in steps, those of options rounded down, so that what is said to be saved is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.columns import Ints

STEPS = 2000  # that the wanted bytes are counted in


@dataclass(frozen=True, slots=True)
class Saving:
    """What an option saves, and what it costs."""

    nbytes: int
    seconds: float


def least_seconds(items: Sequence[Sequence[Saving]], wanted: int) -> list[int] | None:
    """For each item the number of its option, so that together they save what is wanted in the
    least time; None if they cannot."""
    unit = max(wanted / STEPS, 1.0)
    goal = max(math.ceil(wanted / unit), 0)
    needs = np.arange(goal + 1)
    least = np.where(needs > 0, math.inf, 0.0)
    chosen: list[Ints] = []
    for options in reversed(items):
        rows = np.stack([option.seconds + least[_rest(needs, option, unit)] for option in options])
        chosen.append(rows.argmin(axis=0))
        least = rows.min(axis=0)
    if not math.isfinite(least[goal]):
        return None
    found, need = [], np.array(goal)
    for options, which in zip(items, reversed(chosen), strict=True):
        number = int(which[need])
        found.append(number)
        need = _rest(need, options[number], unit)
    return found


def _rest(needs: Ints, option: Saving, unit: float) -> Ints:
    """What is still needed after an option, in steps."""
    return np.maximum(needs - math.floor(option.nbytes / unit), 0)
