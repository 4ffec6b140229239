"""Columns of numbers, and the compiled functions that work on them.

Tables with many rows (tasks, messages, pieces of Values) are kept as NumPy columns, and the loops
over them are compiled by Numba. This module has what all of them share: the types of columns, a few
operations on them, and the decorator of compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function with Numba when it is first called, and keep the result on disk."""
    return njit(cache=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """As `compiled`, but the body takes the place of every call: for parts of a loop that are
    given many columns, since handing columns over takes longer than a few operations on them."""
    return njit(inline="always", cache=True)(function)


def offsets(counts: Ints) -> Ints:
    """Where each of several stretches begins, and the end of the last."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def distinct(numbers: Ints) -> Ints:
    """The distinct numbers, rising; for many of them numpy's own way takes several times longer."""
    rising = np.sort(numbers)
    found: Ints = rising[np.append(True, rising[1:] != rising[:-1])[: len(rising)]]
    return found


def plain(column: Ints) -> Ints:
    """The column as compiled code knows it, however it was made."""
    return np.ascontiguousarray(column, np.int64)


# Hash sets. Each is an array of slots, a power of two of them, -1 where a slot is free.


def free_slots(most: int) -> Ints:
    """The slots of a hash set of at most so many numbers."""
    return np.full(1 << max(4, (2 * most - 1).bit_length()), -1, np.int64)


@compiled
def slot_of(slots: Ints, number: int) -> int:
    """The slot that holds a number which is not negative, or the free one where it belongs."""
    slot = (number * 2654435761) & (len(slots) - 1)
    while slots[slot] != -1 and slots[slot] != number:
        slot = (slot + 1) & (len(slots) - 1)
    return slot


@compiled
def with_more_slots(slots: Ints) -> Ints:
    """The same set of numbers in twice as many slots."""
    more = np.full(2 * len(slots), -1, np.int64)
    for number in slots:
        if number != -1:
            more[slot_of(more, number)] = number
    return more


@compiled
def row_hash(row: Ints, length: int) -> np.int64:
    """A number that is the same for rows whose first `length` numbers are equal (FNV-1a)."""
    code = np.int64(1469598103934665603)
    for k in range(length):
        code = (code ^ row[k]) * np.int64(1099511628211)
        code ^= code >> 29
    return code


def distinct_rows(rows: npt.NDArray[np.generic]) -> tuple[Ints, Ints]:
    """One index of each distinct row, and for each row which of these it equals."""
    data = np.ascontiguousarray(rows)
    if data.dtype == np.bool_:
        data = np.packbits(data, axis=1)
        pad = -data.shape[1] % 8
        data = np.pad(data, ((0, 0), (0, pad)))
    words = data.view(np.int64).reshape(len(data), -1)
    first, which = _distinct_rows(words, free_slots(len(words)))
    return first, which


@compiled
def _distinct_rows(words: Ints, slots: Ints) -> tuple[Ints, Ints]:
    count, width = words.shape
    first, which = np.empty(count, np.int64), np.empty(count, np.int64)
    found = 0
    for row in range(count):
        slot = row_hash(words[row], width) & (len(slots) - 1)
        while slots[slot] >= 0:
            other = first[slots[slot]]
            same = True
            for k in range(width):
                if words[other, k] != words[row, k]:
                    same = False
                    break
            if same:
                break
            slot = (slot + 1) & (len(slots) - 1)
        if slots[slot] < 0:
            slots[slot] = found
            first[found] = row
            found += 1
        which[row] = slots[slot]
    return first[:found].copy(), which
