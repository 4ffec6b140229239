"""Memory that a step has freed stays with the process, for the next step to use.

Part of the room execute. Nothing comes in and nothing goes out: the C library of this process is
told. By default it hands large blocks back to the system when they are freed, and the system gives
them out anew page by page, each cleared first. A step frees and takes almost all that it uses, so
on a CPU that costs up to a tenth of a small network's step. What the process holds is then what it
held at its peak.
"""

from __future__ import annotations

import ctypes

# As in malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = -1


def keep_freed_memory() -> bool:
    """Keeps what is freed from now on; False where the C library has no such setting."""
    try:
        tell = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not the GNU C library
        return False
    return bool(tell(_TRIM_THRESHOLD, _NEVER)) and bool(tell(_MMAP_MAX, 0))
