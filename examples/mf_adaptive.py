"""Matrix factorisation with step sizes of their own for each number: AdaGrad, and adaptive
revision.

    python examples/mf_adaptive.py --processes 2               # AdaGrad, dependences kept
    python examples/mf_adaptive.py --processes 2 --stale 2     # on tables that may be 2 clocks old

With its dependences kept no gradient is ever late, and adaptive revision (McMahan and Streeter,
NIPS 2014) is AdaGrad: the sums of squares are arrays beside the factors and move with them. On
tables gradients are late, and the table corrects each by what has landed since its factors were
read.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
from sgd_mf import made_up

import apportion.loops as loops
import apportion.tables as tables

RANK, ALPHA, CHUNK = 16, 0.08, 2000


def build() -> tuple[Any, ...]:
    """The loop and its arguments."""
    data = loops.array.from_coordinates(*made_up())
    users, items = data.shape
    W, H = loops.array.normal((RANK, users), 0.1, 1), loops.array.normal((RANK, items), 0.1, 2)
    W_squares, H_squares = (
        loops.array.full((RANK, users), 1.0),
        loops.array.full((RANK, items), 1.0),
    )

    @loops.parallel(over=data)
    def step(key, rating, W, H, W_squares, H_squares, alpha):  # type: ignore[no-untyped-def]
        u, i = key
        error = rating - W[:, u] @ H[:, i]
        gw = -2 * error * H[:, i]
        gh = -2 * error * W[:, u]
        W_squares[:, u] += gw * gw
        H_squares[:, i] += gh * gh
        W[:, u] -= alpha * gw / np.sqrt(W_squares[:, u])
        H[:, i] -= alpha * gh / np.sqrt(H_squares[:, i])
        loops.accumulate("error", error * error)

    return step, W, H, W_squares, H_squares, ALPHA


def work(store: tables.TableStore, passes: int) -> list[float]:
    """What each process does on tables: gradients of a chunk of its ratings at a time."""
    u, i, ratings = (column[store.rank :: store.count] for column in made_up())
    users, items = int(u.max()) + 1, int(i.max()) + 1
    first = np.random.default_rng(1)
    W = store.table("W", users, RANK, first.normal(0, 0.1, (users, RANK)), adaptive=ALPHA)
    H = store.table("H", items, RANK, first.normal(0, 0.1, (items, RANK)), adaptive=ALPHA)
    errors = []
    for _ in range(passes):
        total = 0.0
        for low in range(0, len(u), CHUNK):
            chunk = slice(low, low + CHUNK)
            mine_u, at_u = np.unique(u[chunk], return_inverse=True)
            mine_i, at_i = np.unique(i[chunk], return_inverse=True)
            w, h = W.get(mine_u)[at_u], H.get(mine_i)[at_i]
            error = ratings[chunk] - (w * h).sum(axis=1)
            gw, gh = np.zeros((len(mine_u), RANK)), np.zeros((len(mine_i), RANK))
            np.add.at(gw, at_u, -2 * error[:, None] * h)
            np.add.at(gh, at_i, -2 * error[:, None] * w)
            W.inc(mine_u, gw)
            H.inc(mine_i, gh)
            store.clock()
            total += float((error * error).sum())
        errors.append(total)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int)
    parser.add_argument("--stale", type=int)
    parser.add_argument("--passes", type=int, default=10)
    given = parser.parse_args()
    count = len(made_up()[0])
    if given.stale is not None:
        found = tables.run(work, given.processes or 2, given.passes, staleness=given.stale)
        for number, parts in enumerate(zip(*found, strict=True)):
            error = (sum(parts) / count) ** 0.5
            sys.stdout.write(f"pass {number}: root mean square error {error:.4f}\n")
        return
    step, *arguments = build()
    with loops.processes(given.processes) if given.processes else nullcontext():
        for number in range(given.passes):
            step(*arguments)
            error = (loops.accumulated("error") / count) ** 0.5
            sys.stdout.write(f"pass {number}: root mean square error {error:.4f}\n")


if __name__ == "__main__":
    main()
