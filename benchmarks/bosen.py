"""What travels first over a slow cable, and does it matter? Four machines share stale tables.

    sudo python benchmarks/bosen.py --packages FOLDER                 topics of the NYT, three rates
    sudo python benchmarks/bosen.py --task mf --rates 1.25e6 --staleness 2

Each process lives in a network namespace of its own on a cable to a switch, and a token bucket
(`tc tbf`) at both ends of the cable lets so many bytes a second through. All processes work through
their part of the data; a clock is a part of a pass. Compared are

    bsp         a staleness of 0: everybody waits for everybody's changes at every clock
    at clocks   stale rows are allowed; changes are sent at clocks only
    fifo, random, relative, absolute
                managed communication (Bösen): what the cable has left between clocks is filled with
                rows, in the order of that priority

Quality after each pass: of topics the log likelihood of all tokens, of ratings the error of each
before its update. The time is the mean of the processes', and so are the seconds that they waited
for rows, and those of the processor that they used, for messages too. Needs Linux, root, `ip` and
`tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from loop_data import Numbers, movielens, nyt, packages_option
from loop_peers import likelihood
from namespaces import INTERFACE, Cable, switched, why_not
from numba import njit

import apportion.tables as tables

VARIANTS = ("bsp", "at clocks", "fifo", "random", "relative", "absolute")
COUNT, PORT, TIMEOUT = 4, 29600, 300
ALPHA = BETA = 0.1
RANK, RATE, DECAY = 64, 0.04, 0.05
Work = Callable[[tables.TableStore, argparse.Namespace, Any], dict[str, Any]]


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _sample(words, documents, topics, w, d, sums, vocabulary, chances, drawn):  # type: ignore[no-untyped-def]
    for n in range(len(words)):
        word, document, old = words[n], documents[n], topics[n]
        w[word, old] -= 1
        d[document, old] -= 1
        sums[old] -= 1
        total = 0.0
        for k in range(len(sums)):
            seen, whole = max(w[word, k], 0.0), max(sums[k], 0.0)  # copies may be stale
            total += (d[document, k] + ALPHA) * (seen + BETA) / (whole + BETA * vocabulary)
            chances[k] = total
        new, wanted = 0, drawn[n] * total
        while new < len(sums) - 1 and chances[new] < wanted:
            new += 1
        w[word, new] += 1
        d[document, new] += 1
        sums[new] += 1
        topics[n] = new


@njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _descend(users, items, ratings, w, h, rate, decay):  # type: ignore[no-untyped-def]
    squares = 0.0
    for n in range(len(users)):
        u, i = users[n], items[n]
        error = ratings[n]
        for k in range(w.shape[1]):
            error -= w[u, k] * h[i, k]
        squares += error * error
        for k in range(w.shape[1]):
            before = w[u, k]
            w[u, k] += rate * (error * h[i, k] - decay * before)
            h[i, k] += rate * (error * before - decay * h[i, k])
    return squares


def part(store: tables.TableStore, columns: tuple[Numbers, ...]) -> tuple[Numbers, ...]:
    """The rows of a process."""
    return tuple(column[store.rank :: store.count] for column in columns)


def begin_together(store: tables.TableStore, *all_tables: tables.Table) -> None:
    """Everybody has all rows, and begins now."""
    for table in all_tables:
        table.get()
    store.clock()
    store.synchronise()


def sample_topics(store: tables.TableStore, given: argparse.Namespace, data: Any) -> dict[str, Any]:
    """What each process does for topics: documents are its own, counts of words are shared."""
    words, documents = data
    vocabulary, count = int(words.max()) + 1, given.topics
    first = np.random.default_rng(0).integers(0, count, len(words)).astype(np.int32)
    whole = np.bincount(words.astype(np.int64) * count + first, minlength=vocabulary * count)
    whole = whole.reshape(vocabulary, count).astype(np.float32)
    mine = documents % store.count == store.rank
    words, topics = words[mine], first[mine]
    documents = np.unique(documents[mine], return_inverse=True)[1]
    d = np.bincount(documents * count + topics, minlength=(documents.max() + 1) * count)
    d = d.reshape(-1, count).astype(np.float32)
    of_words = store.table("words", vocabulary, count, whole)
    sums = store.table("sums", 1, count, whole.sum(axis=0, keepdims=True))
    batches = np.array_split(np.arange(len(words)), given.batches)
    rows = [np.unique(words[each], return_inverse=True) for each in batches]
    draw, chances = np.random.default_rng(store.rank), np.empty(count)
    none, one = np.zeros(0, np.int64), (whole[:1].copy(), d[:1].copy())
    _sample(none, none, topics[:0], *one, whole[0].copy(), vocabulary, chances, np.zeros(0))
    begin_together(store, of_words, sums)
    times, history, began, used = [], [], time.perf_counter(), time.process_time()
    for _ in range(given.passes):
        for number, (batch, (ids, places)) in enumerate(zip(batches, rows, strict=True)):
            before, total = of_words.get(ids), sums.get()
            w, s, mixed = before.copy(), total.copy(), topics[batch]
            random = draw.random(len(batch))
            _sample(places, documents[batch], mixed, w, d, s[0], vocabulary, chances, random)
            topics[batch] = mixed
            of_words.inc(ids, w - before)
            sums.inc(None, s - total)
            if (number + 1) % given.clock == 0:
                store.clock()
        times.append(time.perf_counter() - began)
        history.append(np.bincount(words.astype(np.int64) * count + topics,
                                   minlength=vocabulary * count).astype(np.int32))  # fmt: skip
        history.append(d.astype(np.int16))
    used = time.process_time() - used
    store.synchronise()
    return {"times": times, "used": used, "words": history[::2], "documents": history[1::2]}


def factorise(store: tables.TableStore, given: argparse.Namespace, data: Any) -> dict[str, Any]:
    """What each process does for ratings: both factors are shared."""
    users, items = int(data[0].max()) + 1, int(data[1].max()) + 1
    draw = np.random.default_rng(1)
    W = store.table("W", users, RANK, draw.normal(0, 0.1, (users, RANK)))
    H = store.table("H", items, RANK, draw.normal(0, 0.1, (items, RANK)))
    u, i, ratings = part(store, data)
    batches = np.array_split(np.arange(len(u)), given.batches)
    rows = [[np.unique(column[each], return_inverse=True) for column in (u, i)] for each in batches]
    _descend(none := np.zeros(0, np.int64), none, ratings[:0], W.get([0]), H.get([0]), RATE, DECAY)
    begin_together(store, W, H)
    times, errors, began, used = [], [], time.perf_counter(), time.process_time()
    for _ in range(given.passes):
        squares = 0.0
        for number, (batch, both) in enumerate(zip(batches, rows, strict=True)):
            (mine_u, at_u), (mine_i, at_i) = both
            w_before, h_before = W.get(mine_u), H.get(mine_i)
            w, h = w_before.copy(), h_before.copy()
            for _ in range(given.sweeps):
                error = _descend(at_u, at_i, ratings[batch], w, h, RATE, DECAY)
            squares += error
            W.inc(mine_u, w - w_before)
            H.inc(mine_i, h - h_before)
            if (number + 1) % given.clock == 0:
                store.clock()
        times.append(time.perf_counter() - began)
        errors.append(squares)
    used = time.process_time() - used
    store.synchronise()
    return {"times": times, "used": used, "errors": errors}


# A process


def settings(variant: str, given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of tables.join."""
    if variant == "bsp":
        return {"staleness": 0}
    if variant == "at clocks":
        return {"staleness": given.staleness}
    return {
        "staleness": given.staleness,
        "bandwidth": given.share * given.rates[0],
        "priority": variant,
        "push_bytes": given.push_bytes,
        "tolerance": given.tolerance,
    }


def work(given: argparse.Namespace) -> None:
    """Runs all variants in turn, as one of the processes; results go into files."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data = nyt(given.packages) if given.task == "topics" else movielens(given.packages)
    todo: Work = sample_topics if given.task == "topics" else factorise
    for turn in range(given.rounds):
        for variant in given.variants:
            with tables.join(**settings(variant, given), timeout=TIMEOUT) as store:
                found = todo(store, given, data)
                found |= {"waited": store.waited_seconds, "sent": store.sent_bytes}
                found["early"] = store.early_bytes
            name = f"{variant}-{turn}-{dist.get_rank()}.npz"
            np.savez(Path(given.worker, name), **found)
            dist.barrier()
    dist.destroy_process_group()


# All of them


def run_at(given: argparse.Namespace, rate: float) -> dict[str, list[dict[str, Any]]]:
    """All variants at one rate: for each variant, what the rounds came to."""
    burst = max(int(0.25e-3 * rate), 2 * 1514)
    with switched(COUNT, Cable(rate, burst)) as machines, tempfile.TemporaryDirectory() as folder:
        started = []
        for rank, machine in enumerate(machines):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(COUNT),
                "MASTER_ADDR": machines[0].address, "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", folder, "--rates"]
            started.append(machine.start([*command, str(rate)], env=environment))
        codes = [each.wait() for each in started]
        if any(codes):
            raise SystemExit(f"the processes ended with {codes}")
        return {
            variant: [together(Path(folder), f"{variant}-{turn}") for turn in range(given.rounds)]
            for variant in given.variants
        }


def together(folder: Path, name: str) -> dict[str, Any]:
    """What all processes found in one run: quality and mean time after each pass."""
    parts = [dict(np.load(folder / f"{name}-{rank}.npz")) for rank in range(COUNT)]
    found: dict[str, Any] = {
        "times": np.mean([each["times"] for each in parts], axis=0).tolist(),
        "waited": mean(float(each["waited"]) for each in parts),
        "used": mean(float(each["used"]) for each in parts),
        "sent": mean(int(each["sent"]) for each in parts),
        "early": mean(int(each["early"]) for each in parts),
    }
    if "errors" in parts[0]:
        squares = np.sum([each["errors"] for each in parts], axis=0)
        return {**found, "quality": (-np.sqrt(squares / 100_000)).tolist()}
    words = np.sum([each["words"] for each in parts], axis=0)
    topics = parts[0]["documents"].shape[-1]
    quality = [
        likelihood(
            words[number].reshape(-1, topics).astype(np.float64),
            np.concatenate([each["documents"][number] for each in parts]).astype(np.float64),
        )
        for number in range(len(words))
    ]
    return {**found, "quality": quality}


def seconds_to(run: dict[str, Any], goal: float) -> float:
    """When a run reaches a quality, between passes by interpolation; infinite if it does not."""
    quality, times = run["quality"], run["times"]
    for at, value in enumerate(quality):
        if value >= goal:
            if at == 0:
                return float(times[0])
            share = (goal - quality[at - 1]) / (value - quality[at - 1])
            return float(times[at - 1] + share * (times[at] - times[at - 1]))
    return float("inf")


def show(given: argparse.Namespace, rate: float, runs: dict[str, list[dict[str, Any]]]) -> None:
    goal = min(run["quality"][-1] for rounds in runs.values() for run in rounds)
    shown = [each for each in (1, 3, 5, 10, 15, 20, 40) if each <= given.passes]
    head = "".join(f"{f'pass {each}':>10}" for each in shown)
    sys.stdout.write(f"\n{8 * rate / 1e6:g} Mbit/s, goal {goal:.4f}\n{'':12}{head}")
    sys.stdout.write("   s/pass  waited    used   MB sent   early  s to goal\n")
    for variant, rounds in runs.items():
        curve = np.median([run["quality"] for run in rounds], axis=0)
        numbers = "".join(f"{curve[each - 1]:10.4f}" for each in shown)
        each_pass = median(run["times"][-1] / given.passes for run in rounds)
        waited, used = (median(run[key] for run in rounds) for key in ("waited", "used"))
        sent, early = (median(run[key] for run in rounds) / 1e6 for key in ("sent", "early"))
        needed = [seconds_to(run, goal) for run in rounds]
        sys.stdout.write(
            f"{variant:12}{numbers}{each_pass:9.3f}{waited:8.2f}{used:8.2f}{sent:10.1f}{early:8.1f}"
            f"{median(needed):11.2f}  ({', '.join(f'{each:.2f}' for each in needed)})\n"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    packages_option(parser)
    parser.add_argument("--task", choices=("topics", "mf"), default="topics")
    parser.add_argument("--rates", nargs="+", type=float, default=[6.25e6, 25e6, 100e6])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--batches", type=int, default=8, help="reads of rows in a pass")
    parser.add_argument("--clock", type=int, default=8, help="batches in a clock")
    parser.add_argument("--sweeps", type=int, default=1, help="times that mf goes over a batch")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--tolerance", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.8, help="of a cable that rows may take")
    parser.add_argument("--push-bytes", type=int, default=100_000)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    lacking = why_not()
    if lacking:
        raise SystemExit(lacking)
    for rate in given.rates:
        runs = run_at(given, rate)
        show(given, rate, runs)
        if given.json:
            sys.stdout.write(json.dumps({"rate": rate, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
