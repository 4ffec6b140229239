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


def compiled_part(function: Callable[..., Any]) -> Any:
    """Compile a part of other compiled functions, so that calling it costs nothing.

    It gets no call of its own, and counts no references to the columns of the structures that it is
    given; with both, a call with 30 columns takes 200 ns. It must not make arrays, nor call what
    does.
    """
    without_references: dict[str, Any] = {"_nrt": False}
    return njit(cache=True, forceinline=True, **without_references)(function)


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


# Compiled parts that several rooms use. All numbers are int64, and no step overflows, so that they
# give the same when they are not compiled.

HALF = (1 << 31) - 1
WHOLE = (1 << 62) - 1
FACTOR = 0x9E3779B1  # odd, and below 2 ** 32: a product with half a number fits in an int64


@compiled
def mixed(found: int, number: int) -> int:
    """A hash of 62 bits, of one so far and of a further number. As the low half is multiplied by an
    odd number and the high half is then changed by the result, two hashes that differ stay
    different if the same number follows."""
    found = (found ^ number) & WHOLE
    product = (found & HALF) * FACTOR
    return ((product & HALF) << 31) | ((found >> 31) ^ ((product >> 31) & HALF))


@compiled
def hash_table(count: int) -> Ints:
    """An empty table with open addresses for so many rows; it holds rows, or -1."""
    room = 16
    while room < 2 * count:
        room *= 2
    return np.full(room, -1)


@compiled
def is_new_pair(table: Ints, one: Ints, other: Ints, row: int) -> bool:
    """Whether no row in the table is equal to this one in both columns; then it is put there."""
    last = len(table) - 1
    place = mixed(mixed(np.int64(0), one[row]), other[row]) & last
    while table[place] >= 0:
        if one[table[place]] == one[row] and other[table[place]] == other[row]:
            return False
        place = (place + 1) & last
    table[place] = row
    return True


@compiled
def push(heap: Ints, size: int, key: int, item: int) -> None:
    """Adds a row (key, item) to the heap heap[:size], which has the smallest row first."""
    hole = size
    while hole > 0:
        above = (hole - 1) >> 1
        if heap[above, 0] < key or (heap[above, 0] == key and heap[above, 1] < item):
            break
        heap[hole, 0], heap[hole, 1] = heap[above, 0], heap[above, 1]
        hole = above
    heap[hole, 0], heap[hole, 1] = key, item


@compiled
def pop(heap: Ints, size: int) -> None:
    """Removes the first row of the heap heap[:size]."""
    last = size - 1
    key, item, hole, below = heap[last, 0], heap[last, 1], 0, 1
    while below < last:
        if below + 1 < last and (
            heap[below + 1, 0] < heap[below, 0]
            or (heap[below + 1, 0] == heap[below, 0] and heap[below + 1, 1] < heap[below, 1])
        ):
            below += 1
        if key < heap[below, 0] or (key == heap[below, 0] and item < heap[below, 1]):
            break
        heap[hole, 0], heap[hole, 1] = heap[below, 0], heap[below, 1]
        hole, below = below, 2 * below + 1
    heap[hole, 0], heap[hole, 1] = key, item


@compiled
def sort(numbers: Ints) -> None:
    """Sorts numbers in place, most of which are in order: Shell's way, over falling distances."""
    far = 1
    while 3 * far < len(numbers):
        far = 3 * far + 1
    while far > 0:
        for k in range(far, len(numbers)):
            number, place = numbers[k], k
            while place >= far and numbers[place - far] > number:
                numbers[place] = numbers[place - far]
                place -= far
            numbers[place] = number
        far //= 3
