"""What kernels of loops call, in plain Python: checks of subscripts, random numbers, and look-ups.

Part of the room loops. kernel_parts.py has the same functions compiled, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_ELEVEN, _27, _30, _31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)


def compiled_helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call, as it is."""
    return function


compiled_sum = compiled_helper


def at(index: int, extent: int, code: int, element: int, fault: Any) -> int:
    """The index, if the extent has it; else note where and raise."""
    if index < 0 or index >= extent:
        fault[0], fault[1], fault[2] = code, element, index
        raise IndexError("a subscript is out of range")
    return index


def mix(seed: int, number: int) -> np.uint64:
    """The state from which an element draws random numbers."""
    bits = np.uint64(seed) * _GOLDEN + np.uint64(number)
    bits = (bits ^ (bits >> _30)) * _FIRST
    bits = (bits ^ (bits >> _27)) * _SECOND
    return bits ^ (bits >> _31)


def uniform(state: Any) -> float:
    """A random number from 0 to 1, and the next state: splitmix64."""
    state[0] += _GOLDEN
    bits = state[0]
    bits = (bits ^ (bits >> _30)) * _FIRST
    bits = (bits ^ (bits >> _27)) * _SECOND
    bits = bits ^ (bits >> _31)
    return float(bits >> _ELEVEN) * 2.0**-53


def find(slots: Any, places: Any, key: int) -> int:
    """The place of a key in a table of open addresses; -1 if it is not there."""
    last = len(slots) - 1
    slot = (key ^ (key >> 15) ^ (key >> 31)) & last
    while slots[slot] != key:
        if slots[slot] < 0:
            return -1
        slot = (slot + 1) & last
    found: int = places[slot]
    return found


def fill_slots(slots: Any, places: Any, keys: Any) -> None:
    """Put keys into a table of open addresses, each with its number among them."""
    last = len(slots) - 1
    for place in range(len(keys)):
        key = keys[place]
        slot = (key ^ (key >> 15) ^ (key >> 31)) & last
        while slots[slot] >= 0:
            slot = (slot + 1) & last
        slots[slot] = key
        places[slot] = place


def emit(found: Any, count: int, key: int, rows: int) -> int:
    """Note a row that is going to be touched, if there is room; how many there are now. Rows that
    do not exist are left to the kernel to complain of."""
    if key < 0 or key >= rows:
        return count
    if count < len(found):
        found[count] = key
    return count + 1
