"""Bounds between parts of a dim, such that all parts have about as many elements.

Part of the room loops. Counts of elements by index come in, or by groups of neighbouring indices
where there are too many; bounds go out. Data is skewed: some users rate a thousand times as much as
others. A single index cannot be divided, so a part may still be too large; `imbalance` says by how
much.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints

MOST_GROUPS = 1 << 20


def group_width(extent: int) -> int:
    """How many neighbouring indices are counted together."""
    return max(1, -(-extent // MOST_GROUPS))


def counts_by_group(indices: Ints, extent: int) -> Ints:
    """How many of some elements have an index in each group."""
    width = group_width(extent)
    groups = -(-extent // width)
    return np.bincount(indices // width if width > 1 else indices, minlength=groups)


def balanced_bounds(counts: Ints, extent: int, parts: int) -> tuple[int, ...]:
    """parts + 1 bounds, rising from 0 to `extent`: each is where the elements before it are nearest
    to their share. `counts` are those of `counts_by_group`."""
    width = group_width(extent)
    before = np.concatenate(([0], np.cumsum(counts)))
    total = int(before[-1])
    if total == 0:
        return even_bounds(extent, parts)
    shares = total * np.arange(1, parts) / parts
    high = np.searchsorted(before, shares)
    low = np.maximum(high - 1, 0)
    nearest = np.where(shares - before[low] <= before[high] - shares, low, high)
    inner = np.maximum.accumulate(np.minimum(nearest * width, extent))
    return (0, *(int(each) for each in inner), extent)


def even_bounds(extent: int, parts: int) -> tuple[int, ...]:
    """parts + 1 bounds of parts with as many indices each, or one more."""
    return tuple(extent * part // parts for part in range(parts + 1))


def imbalance(elements: Ints) -> float:
    """By which factor the largest of some parts is above their mean."""
    mean = float(elements.mean()) if elements.size else 0.0
    return float(elements.max()) / mean if mean else 1.0
