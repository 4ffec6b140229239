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
