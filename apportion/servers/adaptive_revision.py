"""Adaptive revision: AdaGrad that knows how late a gradient is (McMahan and Streeter, NIPS 2014).

Part of the room servers. For each element the server keeps x, the sums z and z' and the sum of all
gradients gbar. A client sends its gradient g with the gbar that it had read, and with b = gbar -
that, what has landed in between,

    eta_old = alpha / sqrt(z');   z += g*g + 2*g*b;   z' = max(z, z');   eta = alpha / sqrt(z')
    x += -eta*g + (eta_old - eta)*b;   gbar += g

With b = 0 it is AdaGrad. z can fall, therefore the maximum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
X, LARGEST, GBAR, Z = 0, 1, 2, 3
"""Where a row of the server has what; clients get the first three."""
FIRST_Z = 1.0


def revise(state: Numbers, gradients: Numbers, read: Numbers, alpha: float) -> None:
    """Applies gradients to rows of shape (rows, 4, columns); `read` is the gbar that each was made
    with."""
    behind = state[:, GBAR] - read
    old_rate = alpha / np.sqrt(state[:, LARGEST])
    state[:, Z] += gradients * gradients + 2 * gradients * behind
    state[:, LARGEST] = np.maximum(state[:, Z], state[:, LARGEST])
    rate = alpha / np.sqrt(state[:, LARGEST])
    state[:, X] += -rate * gradients + (old_rate - rate) * behind
    state[:, GBAR] += gradients


def first_state(values: Numbers) -> Numbers:
    """The state of rows that begin with these values."""
    found = np.zeros((len(values), 4, values.shape[1]), values.dtype)
    found[:, X] = values
    found[:, LARGEST] = found[:, Z] = FIRST_Z
    return found
