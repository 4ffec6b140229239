"""Is a loop ever divided wrongly? Random loops against brute force, and delayed tables by stamps.

    python benchmarks/loops_soundness.py                     20,000 loops, 1,000 of them also run
    python benchmarks/loops_soundness.py --loops 2000 --runs 100 --tables 20

Three parts:

loops   the body of a random loop is analysed, and every scheme that this permits is held against
        what plain Python sees the iterations touch (tests/loop_oracle.py). What Orion's release
        would have found is compared.
runs    every permitted scheme of some loops runs on 2 and 3 ranks; the arrays have to be equal, bit
        for bit, to the serial loop if it is ordered, else to the serial run over the tiles.
tables  processes count their clocks in every row while messages are held back at random and one
        process stops now and then; nobody may see a row older than allowed, and in the end nothing
        may be lost or be there twice.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import permutations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from loop_oracle import judge, run_divided, run_plain, wrong_meetings
from random_loops import RandomLoop, accesses, conflicts, random_loop
from released_orion import released_scheme, released_vectors
from table_threads import run_threads

from apportion.loops.loop_body import read_body
from apportion.loops.plan_loop import LoopAnalysis, analyse_body
from apportion.loops.schemes import WAVEFRONT, Scheme
from apportion.loops.session import threads
from apportion.servers.priorities import PRIORITIES
from apportion.servers.table_store import StoreSettings, TableStore

CHUNK = 50
ROWS, CLOCKS = 30, 12


def judge_loop(seed: int) -> Counter[str]:
    """How one loop fares under the oracle, and under the released analysis."""
    loop = random_loop(seed)
    verdict = judge(loop)
    dims = len(loop.shape)
    theirs = released_scheme(verdict.analysis.references.found, dims, loop.ordered)
    ours = bool(verdict.analysis.schemes)
    found = Counter(loops=1, divided=int(ours), release=int(bool(theirs)))
    found["unsound"] = int(bool(verdict.wrong))
    found["schemes"] = len(verdict.analysis.schemes)
    if theirs and not ours:
        # In an ordered loop of three dims a vector such as (0, +, *) is 0 in the first, and may be
        # negative in the last: time would run backwards.
        found["release alone" if loop.ordered and dims == 3 else "missed"] += 1
        found["release alone, contradicted"] += _contradicted(loop, verdict.analysis)
    return found


def _contradicted(loop: RandomLoop, analysis: LoopAnalysis) -> bool:
    """Whether every wavefront that the release permits breaks the order of this loop's data."""
    dims = len(loop.shape)
    vectors = released_vectors(analysis.references.found, dims, loop.ordered)
    moving = [each for each in vectors if any(part != 0 for part in each)]
    pairs = [
        (i, j)
        for i, j in permutations(range(dims), 2)
        if all(vector[i] == 0 or vector[j] == 0 for vector in moving)
    ]
    meetings = list(conflicts(accesses(loop)))
    return all(
        any(
            wrong_meetings(loop, analysis, Scheme(WAVEFRONT, *pair), count, 2, meetings)
            for count in (2, 3)
        )
        for pair in pairs
    )


def run_loop(seed: int) -> Counter[str]:
    """Runs one loop under all its schemes on 2 and 3 ranks."""
    loop, found = random_loop(seed), Counter[str](loops=1)
    arrays: dict[str, int | None] = {k: len(v) for k, v in loop.arrays.items()}
    known = analyse_body(read_body(loop.function), arrays, len(loop.shape), loop.ordered)
    for scheme in known.schemes:
        for count in (2, 3):
            got, order = run_divided(loop, scheme, threads(count))
            if loop.ordered:
                order = sorted(range(len(loop.keys)), key=lambda each: loop.keys[each])
            same = zip(got, run_plain(loop, order), strict=True)
            found["runs"] += 1
            found["different"] += not all(np.array_equal(a, b) for a, b in same)
    return found


def run_tables(seed: int) -> Counter[str]:
    """Processes with random settings count their clocks in every row of two tables."""
    draw = random.Random(seed)
    count, staleness = draw.choice((2, 3, 4)), draw.choice((0, 1, 2, 3, 5))
    settings = StoreSettings(
        staleness, draw.choice((None, 2e4, 1e5, 1e6)), draw.choice(list(PRIORITIES)),
        draw.choice((0, 1, 2)), draw.choice((200, 2000, 100_000)), seed, 60.0,
    )  # fmt: skip
    stops = {draw.randrange(count): draw.randrange(CLOCKS)}

    def work(store: TableStore) -> Counter[str]:
        tables = [store.table(f"stamps {rows}", rows, count, dtype=np.int64) for rows in (ROWS, 3)]
        mine, seen = random.Random(seed * 7 + store.rank), Counter[str]()
        for clock in range(CLOCKS):
            for table in tables:
                size = table.spec.rows
                stamps = table.get(np.array(mine.sample(range(size), mine.randint(1, size))))
                seen["reads"] += stamps.size
                seen["too old"] += int((stamps < clock - staleness).sum())
                seen["late"] += int((stamps < clock).sum())
                seen["own unseen"] += int((stamps[:, store.rank] != clock).sum())
            if stops.get(store.rank) == clock:
                time.sleep(0.1)
            for table in tables:
                for part in np.array_split(np.arange(table.spec.rows), mine.randint(1, 3)):
                    deltas = np.zeros((len(part), count), np.int64)
                    deltas[:, store.rank] = 1
                    table.inc(part, deltas)
                    time.sleep(mine.random() * 0.003)
            store.clock()
        store.synchronise()
        seen["lost or twice"] = sum(int((table.get() != CLOCKS).sum()) for table in tables)
        seen["early bytes"] = store.early_bytes
        return seen

    delay = draw.choice((0.0, 0.002, 0.01))
    found = Counter[str](stores=1)
    for seen in run_threads(count, settings, work, delay):
        found.update(seen)  # a sum would drop zeros
    return found


def count_all(
    name: str, work: Callable[[int], Counter[str]], seeds: range, workers: int
) -> dict[str, int]:
    """The sum over seeds, with progress on the error stream."""
    total, done, began = Counter[str](), 0, time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for found in pool.map(work, seeds, chunksize=min(CHUNK, max(1, len(seeds) // workers))):
            total.update(found)
            done += 1
            if done % 500 == 0:
                sys.stderr.write(f"{name}: {done} of {len(seeds)}\n")
    return {**total, "seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loops", type=int, default=20_000, help="loops held against the oracle")
    parser.add_argument("--runs", type=int, default=1000, help="loops that also run")
    parser.add_argument("--tables", type=int, default=300, help="random settings of tables")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    parts: dict[str, tuple[Callable[[int], Counter[str]], int]] = {
        "loops": (judge_loop, given.loops),
        "runs": (run_loop, given.runs),
        "tables": (run_tables, given.tables),
    }
    found: dict[str, Any] = {
        name: count_all(name, work, range(count), given.workers)
        for name, (work, count) in parts.items()
        if count
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    bad = ("unsound", "missed", "different", "too old", "own unseen", "lost or twice")
    return int(any(part.get(each) for part in found.values() for each in bad))


if __name__ == "__main__":
    sys.exit(main())
