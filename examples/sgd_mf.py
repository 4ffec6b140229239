"""Matrix factorisation by stochastic gradient descent, as a loop over ratings.

    python examples/sgd_mf.py                                  # serial
    python examples/sgd_mf.py --processes 2                    # the same loop on two processes
    torchrun --nproc-per-node 2 examples/sgd_mf.py             # or on several machines
    python examples/sgd_mf.py --ratings u.data                 # lines of user, item and rating
    apportion loops show examples/sgd_mf.py:build --cluster local:4

Nothing in the body says how it is divided: that each process keeps a part of W and that parts of H
go round follows from its subscripts. Without --ratings the ratings are made up.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

import apportion.loops as loops

RANK, RATE, DECAY = 16, 0.01, 0.05


def made_up(users: int = 2000, items: int = 500, count: int = 200_000) -> tuple[np.ndarray, ...]:
    """Ratings of a hidden factorisation with noise; some users and items have far more of them."""
    draw = np.random.default_rng(0)
    u = (users * draw.power(0.6, count)).astype(np.int32)
    i = (items * draw.power(0.6, count)).astype(np.int32)
    left, right = draw.normal(0, 0.6, (users, 4)), draw.normal(0, 0.6, (items, 4))
    ratings = (left[u] * right[i]).sum(axis=1) + draw.normal(0, 0.3, count)
    return u, i, ratings.astype(np.float32)


def read(path: str) -> tuple[np.ndarray, ...]:
    u, i, ratings = np.loadtxt(path, usecols=(0, 1, 2)).T
    return u.astype(np.int32), i.astype(np.int32), (ratings - ratings.mean()).astype(np.float32)


def build(path: str | None = None) -> tuple[Any, ...]:
    """The loop and its arguments."""
    users, items, ratings = made_up() if path is None else read(path)
    data = loops.array.from_coordinates(users, items, ratings)
    W = loops.array.normal((RANK, data.shape[0]), 0.1, seed=1)
    H = loops.array.normal((RANK, data.shape[1]), 0.1, seed=2)

    @loops.parallel(over=data)
    def step(key, rating, W, H, rate, decay):  # type: ignore[no-untyped-def]
        u, i = key
        error = rating - W[:, u] @ H[:, i]
        w_change = error * H[:, i] - decay * W[:, u]
        h_change = error * W[:, u] - decay * H[:, i]
        W[:, u] += rate * w_change
        H[:, i] += rate * h_change
        loops.accumulate("error", error * error)

    return step, W, H, RATE, DECAY


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratings")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--passes", type=int, default=10)
    given = parser.parse_args()
    step, *arguments = build(given.ratings)
    count = len(step.planner.over)
    started = "WORLD_SIZE" in os.environ or given.processes
    with loops.processes(given.processes) if started else nullcontext() as session:
        for number in range(given.passes):
            step(*arguments)
            error = (loops.accumulated("error") / count) ** 0.5
            if session is None or session.is_first:
                sys.stdout.write(f"pass {number}: root mean square error {error:.4f}\n")


if __name__ == "__main__":
    main()
