"""random_draws: random numbers that compiled and interpreted loops draw alike.

In: a seed. Out: a state of two numbers, which every draw changes. L'Ecuyer's combination of two
multiplicative generators (Communications of the ACM 31, 1988): no product leaves 47 bits, and the
period is 2.3e18.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints, compiled_part

ONE, OTHER = 2147483563, 2147483399  # primes
MOST = ONE - 1


def random_state(seed: int, stream: int = 0) -> Ints:
    """A state for a seed; streams of one seed have nothing in common."""
    words = np.random.SeedSequence([abs(seed), seed < 0, stream]).generate_state(2)
    return np.array([1 + words[0] % (ONE - 1), 1 + words[1] % (OTHER - 1)], np.int64)


@compiled_part
def _drawn(state: Ints) -> int:
    """One of MOST numbers, from 0."""
    state[0] = state[0] * 40014 % ONE
    state[1] = state[1] * 40692 % OTHER
    found: int = (state[0] - state[1]) % MOST
    return found


@compiled_part
def draw_below(state: Ints, count: int) -> int:
    """A number from 0, below `count`."""
    found: int = _drawn(state) * count // MOST
    return found


@compiled_part
def draw_share(state: Ints) -> float:
    """A number above 0 and below 1."""
    found: float = (_drawn(state) + 0.5) / MOST
    return found
