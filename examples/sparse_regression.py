"""Logistic regression on sparse features, by stochastic gradient descent.

    python examples/sparse_regression.py                       # serial, exact
    python examples/sparse_regression.py --processes 2         # weights may be seen late

Which weights a sample touches is in the data, so that any two samples may depend on each other and
no scheme keeps that. `loops.buffer(weights)` is the permission to see the changes of others late,
after at most so many samples. Which weights the next samples touch a slice of the body finds out
beforehand, once: `repeated` says that it is the same in every pass.
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

import apportion.loops as loops

RATE, DELAY = 0.1, 500


def made_up(samples: int = 20_000, features: int = 30_000) -> tuple[np.ndarray, ...]:
    """Starts of rows, features with their values, and labels; a few features are in most
    samples."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 40, samples)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    ids = (features * draw.power(0.3, starts[-1])).astype(np.int32)
    hidden = draw.normal(size=features)
    scores = np.add.reduceat(hidden[ids], starts[:-1])
    return starts, ids, np.ones(len(ids), np.float32), (scores > 0).astype(np.float32)


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def build(data: tuple[np.ndarray, ...] | None = None) -> tuple[Any, ...]:
    """The loop and its arguments."""
    starts, ids, values, labels = made_up() if data is None else data
    samples = loops.array.from_rows(starts, ids, values, labels=labels)
    weights = loops.array.zeros((int(ids.max()) + 1,))

    @loops.parallel(over=samples, repeated=True)
    def step(sample, row, weights, rate):  # type: ignore[no-untyped-def]
        label, ids, values = row
        score = 0.0
        for k in range(len(ids)):
            score += weights[ids[k]] * values[k]
        chance = sigmoid(score)
        loops.accumulate("loss", -math.log(max(chance if label > 0.5 else 1 - chance, 1e-12)))
        for k in range(len(ids)):
            weights[ids[k]] -= rate * (chance - label) * values[k]

    return step, loops.buffer(weights, delay=DELAY), RATE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int)
    parser.add_argument("--passes", type=int, default=10)
    given = parser.parse_args()
    step, *arguments = build()
    count = len(step.planner.over)
    with loops.processes(given.processes) if given.processes else nullcontext():
        for number in range(given.passes):
            step(*arguments)
            loss = loops.accumulated("loss") / count
            sys.stdout.write(f"pass {number}: mean loss {loss:.4f}\n")


if __name__ == "__main__":
    main()
