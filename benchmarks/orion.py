"""Loops that keep their meaning against loops that do not, and against other people's programs.

    python benchmarks/orion.py convergence --packages FOLDER     real data: quality per pass
    python benchmarks/orion.py throughput --ratings 20           made-up data: updates a second
    python benchmarks/orion.py serial --ratings 3                one process, by processor seconds
    python benchmarks/orion.py memory                            bytes of arrays in a process
    ... --peers peers/bin/python                                 and LIBMF, cmfrec, lda, tomotopy,
                                                                 scikit-learn, one thread each

What is compared, always with the body of an example and the same beginning:

    serial     one process, elements in the order in which they are given
    2D         the scheme that the analysis finds, on so many processes
    data       data parallelism: every process has a part of the elements and works on copies,
               whose changes are added up once a pass, or after so many elements
    hogwild    threads of one process that change the same arrays without any lock

Real data are too small to be divided with profit: they are for convergence, on ranks that are
threads of this process, which do bit for bit what processes do. For throughput there are made-up
ratings of Netflix's size, and processes. loop_data.py says where the real data come from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from loop_data import (
    NETFLIX,
    Numbers,
    features,
    movielens,
    netflix,
    newsgroups,
    nyt,
    packages_option,
    tokens,
    vocabulary,
)
from numba import njit

import apportion.loops as loops
from apportion.loops.parallel_loop import ParallelLoop
from apportion.loops.schemes import Scheme
from apportion.loops.session import PoolSession, held_bytes, threads

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import sparse_regression
import topics

RANK, RATE, DECAY = 16, 0.01, 0.05
BY_HAND = 4000  # users in a block of the hand-written kernel: half a megabyte
GROUP, REGRESSION_RATE = "rec.sport.hockey", 0.5
Curve = dict[str, Any]


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# Matrix factorisation


def factors(shape: tuple[int, int], rank: int) -> tuple[Any, Any]:
    return (
        loops.array.normal((rank, shape[0]), 0.1, seed=1),
        loops.array.normal((rank, shape[1]), 0.1, seed=2),
    )


def factorisation(over: Any) -> ParallelLoop:
    @loops.parallel(over=over)
    def step(key, rating, W, H, rate, decay):  # type: ignore[no-untyped-def]
        u, i = key
        error = rating - W[:, u] @ H[:, i]
        w_change = error * H[:, i] - decay * W[:, u]
        h_change = error * W[:, u] - decay * H[:, i]
        W[:, u] += rate * w_change
        H[:, i] += rate * h_change

    return step


def factorisation_by_number(over: Any) -> ParallelLoop:
    """The same body over numbered ratings, so that processes get any of them: data parallelism."""

    @loops.parallel(over=over)
    def step(key, rating, W, H, rate, decay):  # type: ignore[no-untyped-def]
        _n, u, i = key
        error = rating - W[:, u] @ H[:, i]
        w_change = error * H[:, i] - decay * W[:, u]
        h_change = error * W[:, u] - decay * H[:, i]
        W[:, u] += rate * w_change
        H[:, i] += rate * h_change

    step.planner.forced = Scheme("1d", 0)
    return step


def factorise(
    data: tuple[Numbers, ...],
    passes: int,
    rate: float,
    ranks: int = 1,
    delay: int | None = -1,
) -> Curve:
    """Errors over all ratings after each pass; with a `delay` of elements data parallelism, None
    being a whole pass, and with -1 dependences are kept."""
    users, items, ratings = data
    shape = int(users.max()) + 1, int(items.max()) + 1
    W, H = factors(shape, RANK)
    if delay == -1:
        step, given = factorisation(loops.array.from_coordinates(*data)), (W, H)
    else:
        numbers = np.arange(len(users), dtype=np.int32)
        step = factorisation_by_number(loops.array.from_coordinates(numbers, *data))
        given = loops.buffer(W, delay), loops.buffer(H, delay)  # type: ignore[assignment]
    errors, seconds = [], []
    with threads(ranks) if ranks > 1 else nullcontext():
        for _ in range(passes):
            step(*given, rate, DECAY)
            seconds.append(max(report.seconds for report in step.last))
            w, h = W.numpy(), H.numpy()
            missed = ratings - np.einsum("kn,kn->n", w[:, users], h[:, items])
            errors.append(float(np.sqrt((missed**2).mean())))
    return {"errors": errors, "seconds": float(np.median(seconds))}


@njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _sgd(users, items, ratings, w, h, rate, decay):  # type: ignore[no-untyped-def]
    for n in range(len(users)):
        u, i = users[n], items[n]
        error = ratings[n]
        for k in range(w.shape[1]):
            error -= w[u, k] * h[i, k]
        for k in range(w.shape[1]):
            before = w[u, k]
            w[u, k] += rate * (error * h[i, k] - decay * before)
            h[i, k] += rate * (error * before - decay * h[i, k])


def hogwild(
    data: tuple[Numbers, ...], passes: int, rate: float, count: int, rank: int = RANK
) -> Curve:
    """Threads that change the same factors without locks; written by hand."""
    users, items, ratings = data
    shape = int(users.max()) + 1, int(items.max()) + 1
    w, h = (np.ascontiguousarray(each.numpy().T) for each in factors(shape, rank))
    parts = [tuple(column[k::count].copy() for column in data) for k in range(count)]
    settings = np.float32(rate), np.float32(DECAY)
    _sgd(*(column[:1] for column in data), w.copy(), h.copy(), *settings)
    errors, seconds = [], []
    for _ in range(passes):
        began = time.perf_counter()
        workers = [threading.Thread(target=_sgd, args=(*p, w, h, *settings)) for p in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds.append(time.perf_counter() - began)
        if len(users) < 1_000_000:
            missed = ratings - np.einsum("nk,nk->n", w[users], h[items])
            errors.append(float(np.sqrt((missed**2).mean())))
    return {"errors": errors, "seconds": float(np.median(seconds))}


# Topics and regression


def sample_topics(
    data: tuple[Numbers, ...], count: int, passes: int, ranks: int = 1, copies: bool = False
) -> Curve:
    """Log likelihoods a token after each pass; with `copies` all counts are buffered and documents
    are divided: data parallelism."""
    sample, of_words, of_documents, *rest = topics.build(data, count)
    given = of_words, of_documents
    if copies:
        given = loops.buffer(of_words), loops.buffer(of_documents)
        sample.planner.forced = Scheme("1d", 1)
    found, seconds = [], []
    with threads(ranks) if ranks > 1 else nullcontext():
        for _ in range(passes):
            sample(*given, *rest)
            seconds.append(max(report.seconds for report in sample.last))
            found.append(topics.log_likelihood(of_words, of_documents, 0.1, 0.1))
    return {"likelihoods": found, "seconds": float(np.median(seconds))}


def regress(data: tuple[Numbers, ...], passes: int, ranks: int, delay: int) -> Curve:
    """Mean losses over all samples after each pass."""
    step, buffered, _ = sparse_regression.build(data)
    given = loops.buffer(buffered.array, delay)
    starts, ids, values, labels = data
    found, seconds = [], []
    with threads(ranks) if ranks > 1 else nullcontext():
        for _ in range(passes):
            step(given, REGRESSION_RATE)
            seconds.append(max(report.seconds for report in step.last))
            weights = buffered.array.numpy().astype(np.float64)
            scores = np.add.reduceat(np.append(weights[ids] * values, 0), starts[:-1])
            scores[np.diff(starts) == 0] = 0
            found.append(float(np.logaddexp(0, np.where(labels > 0.5, -scores, scores)).mean()))
    return {"losses": found, "seconds": float(np.median(seconds))}


# The parts of the benchmark


def show(title: str, rows: dict[str, Curve], passes: int, best_of: str) -> None:
    shown = [each for each in (1, 2, 3, 5, 10, 20, 40) if each <= passes]
    write(f"\n{title}\n{'':24}" + "".join(f"{each:>10}" for each in shown) + "   ms a pass")
    for name, curve in rows.items():
        numbers = "".join(f"{curve[best_of][each - 1]:10.4f}" for each in shown)
        seconds = curve.get("seconds")
        time_text = f"{1000 * seconds:12.1f}" if isinstance(seconds, float) else ""
        write(f"{name:24}{numbers}{time_text}")


def convergence(given: argparse.Namespace) -> None:
    """Quality after each pass on real data."""
    many, passes = given.ranks, given.passes
    ask = peer_runner(given.peers)
    if "mf" in given.tasks:
        data = movielens(given.packages)
        named = dict(zip(("users", "items", "ratings"), data, strict=True))
        peers = ask("LIBMF", "libmf_curve", named, RANK, passes)
        peers |= ask("cmfrec, ALS", "cmfrec_curve", named, RANK, passes)
        for rate in given.rates:
            rows = {
                "serial": factorise(data, passes, rate),
                f"2D, {many} ranks": factorise(data, passes, rate, many),
                f"hogwild, {many} threads": hogwild(data, passes, rate, many),
                "data, every 500": factorise(data, passes, rate, many, 500),
                "data, once a pass": factorise(data, passes, rate, many, None),
            }
            title = f"MovieLens-100K, rank {RANK}, step {rate}: root mean square error"
            show(title, rows, passes, "errors")
        if peers:
            show("Peers, with step sizes of their own", peers, passes, "errors")
    corpora: dict[str, Callable[[], tuple[Numbers, ...]]] = {
        "nyt": lambda: nyt(given.packages),
        "newsgroups": lambda: _newsgroup_tokens(given.packages),
    }
    for name in [each for each in corpora if each in given.tasks]:
        data = corpora[name]()
        rows = {
            "serial": sample_topics(data, given.topics, passes),
            f"2D, {many} ranks": sample_topics(data, given.topics, passes, many),
            f"data, {many} ranks": sample_topics(data, given.topics, passes, many, True),
        }
        named = {"words": data[0], "documents": data[1]}
        rows |= ask("tomotopy", "tomotopy_curve", named, given.topics, passes)
        rows |= ask("lda", "lda_curve", named, given.topics, passes)
        show(f"{name}, {given.topics} topics: log likelihood a token", rows, passes, "likelihoods")
    if "slr" in given.tasks:
        documents = newsgroups(given.packages)  # group after group
        np.random.default_rng(0).shuffle(documents)  # type: ignore[arg-type]
        data = features(documents, vocabulary(documents, 1), GROUP)
        rows = {
            "serial": regress(data, passes, 1, 1),
            f"{many} ranks, every 50": regress(data, passes, many, 50),
            f"{many} ranks, every 500": regress(data, passes, many, 500),
        }
        named = dict(zip(("starts", "ids", "values", "labels"), data, strict=True))
        named["rate"] = np.array(REGRESSION_RATE)
        rows |= ask("scikit-learn", "regression_curve", named, passes)
        show(f"newsgroups, {GROUP} or not: mean loss", rows, passes, "losses")


def _newsgroup_tokens(folder: Path) -> tuple[Numbers, ...]:
    documents = newsgroups(folder)
    return tokens(documents, vocabulary(documents))


def throughput(given: argparse.Namespace) -> None:
    """Updates a second on made-up ratings, one process against several and against LIBMF."""
    count = given.ratings * 1_000_000
    rows: dict[str, float] = {}
    for processes in range(1, given.processes + 1):
        over = loops.array.from_shards(netflix, range(given.ratings), NETFLIX)
        W, H = factors(NETFLIX, given.rank)
        step = factorisation(over)
        with loops.processes(processes) as session:
            assert isinstance(session, PoolSession)
            seconds, used = [], []
            for _ in range(given.passes + 1):
                before = [processor_seconds(child.pid) for child in session.pool.children]
                step(W, H, RATE, DECAY)
                after = [processor_seconds(child.pid) for child in session.pool.children]
                seconds.append(max(report.seconds for report in step.last))
                used.append(max(b - a for a, b in zip(before, after, strict=True)))
            held = max(held_bytes())
        rows[f"{processes} processes"] = min(seconds[1:])
        write(
            f"{processes}: {[round(each, 3) for each in seconds]} s, of the processor at least "
            f"{min(used[1:]):.3f} s in the busiest; {held / 1e6:.1f} MB arrays"
        )
    if given.peers is not None:
        data = made_up_ratings(given.ratings)
        named = dict(zip(("users", "items", "ratings"), data, strict=True))
        ask = peer_runner(given.peers)
        theirs = ask("LIBMF", "libmf_seconds", named, given.rank, 3)
        rows |= {name: found["seconds"] for name, found in theirs.items()}
        rows["hogwild, 1 thread"] = hogwild(data, 2, RATE, 1, given.rank)["seconds"]
        rows["hogwild, 2 threads"] = hogwild(data, 2, RATE, 2, given.rank)["seconds"]
    one = rows["1 processes"]
    write(f"\n{given.ratings} million made-up ratings, rank {given.rank}, the best pass of each")
    for name, best in rows.items():
        write(f"{name:20}{best:8.3f} s{count / best / 1e6:8.2f} M updates/s{one / best:8.2f} x one")


def serial(given: argparse.Namespace) -> None:
    """Seconds of the processor for a pass in this process, and for one of LIBMF: what else the
    machine does matters little to these."""
    data = made_up_ratings(given.ratings)
    W, H = factors(NETFLIX, given.rank)
    step = factorisation(loops.array.from_coordinates(*data, shape=NETFLIX))
    seconds = []
    for _ in range(given.passes + 1):
        began = time.process_time()
        step(W, H, RATE, DECAY)
        seconds.append(time.process_time() - began)
    named = dict(zip(("users", "items", "ratings"), data, strict=True))
    blocks = np.argsort(data[0] // BY_HAND, kind="stable")
    rows = {
        "this loop": min(seconds[1:]),
        "by hand": by_hand(data, given),
        "by hand, in blocks": by_hand(tuple(column[blocks] for column in data), given),
    }
    theirs = peer_runner(given.peers)("LIBMF", "libmf_seconds", named, given.rank, 3)
    rows |= {name: found["cpu"] for name, found in theirs.items()}
    for name, best in rows.items():
        write(f"{name:20}{best:8.3f} s of a core, {best / len(data[0]) * 1e9:6.1f} ns an update")


def by_hand(data: tuple[Numbers, ...], given: argparse.Namespace) -> float:
    """Seconds of the processor of the hand-written kernel, in the order of the data."""
    w, h = (np.ascontiguousarray(each.numpy().T) for each in factors(NETFLIX, given.rank))
    settings, seconds = (np.float32(RATE), np.float32(DECAY)), []
    for _ in range(given.passes + 1):
        began = time.process_time()
        _sgd(*data, w, h, *settings)
        seconds.append(time.process_time() - began)
    return min(seconds[1:])


def made_up_ratings(millions: int) -> tuple[Numbers, ...]:
    parts = [netflix(shard) for shard in range(millions)]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def memory(given: argparse.Namespace) -> None:
    """Bytes of arrays in the process that has most, and all bytes that it has in memory, before
    and after a pass over 4 million ratings."""
    for rank in (given.rank, 4 * given.rank):
        for processes in (1, 2, 4):
            over = loops.array.from_shards(netflix, range(4), NETFLIX)
            W, H = factors(NETFLIX, rank)
            whole = W.nbytes + H.nbytes
            step = factorisation(over)
            with loops.processes(processes) as session:
                assert isinstance(session, PoolSession)
                held_bytes()  # all have started
                before = max(resident_bytes(child.pid) for child in session.pool.children)
                step(W, H, RATE, DECAY)
                after = max(resident_bytes(child.pid) for child in session.pool.children)
                held = max(held_bytes())
            write(
                f"rank {rank:3}, {processes} processes: {held / 1e6:6.1f} MB of arrays, "
                f"{held * processes / whole:.3f} of a share; in memory {before / 1e6:.0f} MB "
                f"and {after / 1e6:.0f} MB"
            )


def processor_seconds(process: int | None) -> float:
    """Seconds that the threads of a process have run, those that have ended not counted."""
    threads_of = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads_of) / 1e9


def resident_bytes(process: int | None) -> int:
    """Bytes that a process has in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peer_runner(python: str | None) -> Callable[..., dict[str, Curve]]:
    """A function that lets loop_peers.py measure; without a Python it measures nothing."""

    def ask(title: str, name: str, data: dict[str, Numbers], *numbers: int) -> dict[str, Curve]:
        if python is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder, "data.npz"), **data)  # type: ignore[arg-type]
            script = str(Path(__file__).with_name("loop_peers.py"))
            done = subprocess.run(
                [python, "-W", "ignore", script, name, f"{folder}/data.npz", *map(str, numbers)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        if done.returncode:
            write(f"{title} cannot be measured: {done.stderr.strip().splitlines()[-1]}")
            return {}
        return {title: json.loads(done.stdout.splitlines()[-1])}

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = {
        "convergence": convergence, "throughput": throughput, "serial": serial, "memory": memory,
    }  # fmt: skip
    parser.add_argument("part", choices=parts)
    packages_option(parser)
    parser.add_argument("--peers", metavar="PYTHON", help="the Python that has the peers")
    parser.add_argument("--tasks", nargs="+", default=["mf", "nyt", "newsgroups", "slr"])
    parser.add_argument("--processes", type=int, default=2, help="for throughput, at most")
    parser.add_argument("--ranks", type=int, default=16, help="threads, for convergence")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.04])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--ratings", type=int, default=10, help="millions of made-up ratings")
    given = parser.parse_args()
    if given.peers is not None and shutil.which(given.peers) is None:
        raise SystemExit(f"there is no program {given.peers}; loop_peers.py says how to make one")
    parts[given.part](given)


if __name__ == "__main__":
    main()
