"""Loops and tables on real processes: equal to threads, and what happens when one dies or stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_loops import function_of
from table_processes import count_stamps, fail_at_once

import apportion.loops as loops
import apportion.tables as tables
from apportion.loops.session import held_bytes, threads

MF = """
def body(key, rating, W, H, rate):
    u, i = key
    error = rating - W[:, u] @ H[:, i]
    gw = error * H[:, i]
    gh = error * W[:, u]
    W[:, u] += rate * gw
    H[:, i] += rate * gh
    loops.accumulate("error", error * error)
"""

STENCIL = """
def body(key, value, A):
    i, j = key
    A[i + 1, j + 1] = 0.25 * (A[i, j + 2] + A[i + 1, j] + A[i + 2, j + 1] + A[i, j])
"""

SPARSE = """
def body(i, row, w, rate):
    ids, xs = row
    total = 0.0
    for k in range(len(ids)):
        total += w[ids[k]] * xs[k]
    for k in range(len(ids)):
        w[ids[k]] += rate * (1.0 - total) * xs[k]
"""


def factorise(session: Any, passes: int = 2) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    data = draw.integers(0, 70, 2000), draw.integers(0, 30, 2000), draw.normal(size=2000)
    over = loops.array.from_coordinates(*data)
    step = loops.parallel(over=over)(function_of(MF, loops=loops))
    W, H = loops.array.normal((8, 70), 0.1, 1), loops.array.normal((8, 30), 0.1, 2)
    with session:
        for _ in range(passes):
            step(W, H, 0.05)
        held = held_bytes()
        assert max(held) < 1.3 * (W.nbytes + H.nbytes) / len(held)
        return [W.numpy(), H.numpy(), np.array(loops.accumulated("error"))]


def relax(session: Any) -> list[np.ndarray]:
    step = loops.parallel(over=loops.array.indices(14, 11), ordered=True)(function_of(STENCIL))
    A = loops.array.normal((16, 13), dtype=np.float64)
    with session:
        step(A)
        assert step.explain(A).kind == "unimodular"
    return [A.numpy()]


def regress(session: Any) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    ids = np.concatenate([draw.choice(20_000, 8, replace=False) for _ in range(60)])
    over = loops.array.from_rows(np.arange(61) * 8, ids, draw.normal(size=480))
    w, v = (loops.array.zeros((20_000,), np.float64) for _ in range(2))
    step = loops.parallel(over=over, repeated=True)(function_of(SPARSE))
    with session:
        for _ in range(2):
            step(loops.buffer(w, delay=7), 0.3)
            step(loops.stale(v, staleness=0, delay=7), 0.3)
    assert np.array_equal(w.numpy(), v.numpy())
    return [w.numpy()]


def test_processes_do_what_threads_do() -> None:
    with loops.processes(2):
        pool = loops.session.current_session()
        for work in (factorise, relax, regress):
            for a, b in zip(work(_borrowed(pool)), work(threads(2)), strict=True):
                assert np.array_equal(a, b), work.__name__


class _borrowed:
    """A session that is open already, and stays so."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __enter__(self) -> Any:
        return self.session

    def __exit__(self, *given: object) -> None:
        self.session.bring_back()


def test_a_killed_process_ends_the_loop_and_the_checkpoint_resumes(tmp_path: Path) -> None:
    over = loops.array.from_coordinates(np.arange(400) % 20, np.arange(400) % 9, np.ones(400))
    step = loops.parallel(over=over)(function_of(MF, loops=loops))
    W, H = loops.array.normal((4, 20), 0.1, 1), loops.array.normal((4, 9), 0.1, 2)
    with pytest.raises(RuntimeError, match=r"rank 1 was ended by signal SIGKILL; loops\.load"):  # noqa: SIM117
        with loops.processes(2) as session:
            step(W, H, 0.01)
            loops.save(tmp_path, W=W, H=H, passes=1)
            saved = W.numpy()
            victim = session.pool.children[1].pid
            threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
            for _ in range(100_000):
                step(W, H, 0.01)
    with pytest.raises(RuntimeError, match="were lost when rank 1 was ended by signal SIGKILL"):
        W.numpy()
    assert loops.load(tmp_path, W=W, H=H) == {"passes": 1}
    assert np.array_equal(W.numpy(), saved)
    with threads(3):
        step(W, H, 0.01)


def test_rows_stay_fresh_though_a_process_stops() -> None:
    """One process is stopped for a while, at a clock of its own: the others wait for it."""
    began = time.monotonic()
    found = tables.run(count_stamps, 3, 10, 1.0, staleness=2, bandwidth=1e6, priority="relative")
    assert time.monotonic() - began > 1.0
    assert max(oldest for oldest, _ in found) <= 2
    assert max(waited for _, waited in found) > 0.5


def test_a_table_process_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed: this one does not want to"):
        tables.run(fail_at_once, 2, staleness=1, timeout=60)


def test_functions_that_other_processes_cannot_find_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be found by other processes"):
        tables.run(lambda store: None, 2)


SCRIPT = """
import numpy as np, sys
import apportion.loops as loops
over = loops.array.from_coordinates(np.arange(300) % 20, np.arange(300) % 9, np.ones(300))
W, H = loops.array.normal((4, 20), 0.1, 1), loops.array.normal((4, 9), 0.1, 2)
@loops.parallel(over=over)
def step(key, rating, W, H, rate):
    u, i = key
    error = rating - W[:, u] @ H[:, i]
    W[:, u] += rate * error * H[:, i]
    loops.accumulate("error", error * error)
def main():
    with loops.processes() as session:
        for _ in range(2):
            step(W, H, 0.05)
        loops.save(sys.argv[1], W=W, passes=2)
        total = loops.accumulated("error")
    if session.is_first:
        np.save(sys.argv[1] + "/W.npy", W.numpy())
        print(repr(total))
if __name__ == "__main__":
    main()
"""


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "mine.py"), str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    W = loops.array.zeros((4, 20))
    assert loops.load(tmp_path, W=W) == {"passes": 2}
    assert np.array_equal(W.numpy(), np.load(tmp_path / "W.npy")) and float(done.stdout) > 0
