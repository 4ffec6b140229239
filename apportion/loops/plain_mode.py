"""Functions that bodies of loops call, and what they do where a body runs as plain Python.

Part of the room loops. In a kernel they become code (kernel_text.py). A body is also run as plain
Python, on a sample of elements (check_accesses.py); then accumulating does nothing, and random
numbers come from NumPy. Anywhere else calling them is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from apportion.loops.loop_body import LoopError

_RANDOM: ContextVar[np.random.Generator | None] = ContextVar("_RANDOM", default=None)


def accumulate(name: str, number: float, how: str = "sum") -> None:
    """In the body of a loop: add to the number of that name, or keep the "max" or "min"."""
    if _RANDOM.get() is None:
        raise LoopError("loops.accumulate has a meaning in the body of a loop only")


def uniform() -> float:
    """In the body of a loop: a random number from 0 to 1, a function of the element and the
    pass."""
    generator = _RANDOM.get()
    if generator is None:
        raise LoopError("loops.uniform has a meaning in the body of a loop only")
    return float(generator.random())


SPECIAL: Mapping[str, Callable[..., Any]] = {"accumulate": accumulate, "uniform": uniform}


@contextmanager
def plain_mode(seed: int = 0) -> Iterator[None]:
    """A context in which a body can be called."""
    token = _RANDOM.set(np.random.default_rng(seed))
    try:
        yield
    finally:
        _RANDOM.reset(token)
