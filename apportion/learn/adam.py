"""adam: weights as one column, and a step of Adam on it, with moments that can be kept in a file.

In: weights, their gradient, the moments so far, a rate. Out: new weights and moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float32]
Weights = Mapping[str, npt.NDArray[np.float32]]

BETAS = (0.9, 0.999)
EPSILON = 1e-8


class AdamMoments(NamedTuple):
    """What Adam remembers of earlier gradients."""

    steps: int
    mean: Column
    square: Column


def no_moments(size: int) -> AdamMoments:
    """Before the first step."""
    return AdamMoments(0, np.zeros(size, np.float32), np.zeros(size, np.float32))


def adam_step(
    weights: Column, gradient: Column, moments: AdamMoments, rate: float
) -> tuple[Column, AdamMoments]:
    """Weights and moments after a step (Kingma and Ba, 2015)."""
    steps = moments.steps + 1
    mean = BETAS[0] * moments.mean + (1 - BETAS[0]) * gradient
    square = BETAS[1] * moments.square + (1 - BETAS[1]) * gradient**2
    up = mean / (1 - BETAS[0] ** steps)
    down = np.sqrt(square / (1 - BETAS[1] ** steps)) + EPSILON
    return (weights - rate * up / down).astype(np.float32), AdamMoments(steps, mean, square)


def clipped(gradient: Column, norm: float) -> Column:
    """The gradient, made shorter where it is longer than `norm`."""
    return gradient / np.float32(max(1.0, float(np.linalg.norm(gradient)) / norm))


def flat(weights: Weights) -> Column:
    """All weights as one column."""
    return np.concatenate([tensor.ravel() for tensor in weights.values()])


def unflat(column: Column, like: Weights) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a column, in the shapes of others."""
    ends = np.cumsum([tensor.size for tensor in like.values()])
    parts = np.split(column, ends[:-1])
    return {
        name: part.reshape(tensor.shape)
        for part, (name, tensor) in zip(parts, like.items(), strict=True)
    }
