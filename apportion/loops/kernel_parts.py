"""What kernels of loops call, compiled by Numba: plain_kernel_parts.py has what it is.

Part of the room loops. The text of a kernel imports these functions by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from apportion.loops import plain_kernel_parts as plain


def compiled_helper(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def compiled_sum(function: Callable[..., Any]) -> Any:
    """Compile a sum over a part of an array, whose terms may be added in any order: always the same
    one for the same number of terms."""
    fast = {"reassoc", "contract", "nsz"}
    return numba.njit(nogil=True, error_model="numpy", fastmath=fast)(function)


at = compiled_helper(plain.at)
mix = compiled_helper(plain.mix)
uniform = compiled_helper(plain.uniform)
find = compiled_helper(plain.find)
fill_slots = compiled_helper(plain.fill_slots)
emit = compiled_helper(plain.emit)
