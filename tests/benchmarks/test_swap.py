"""The model of swapping that stands in the tables of Tofu's evaluation."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from graphs import problem

from apportion.lower.lower import lower
from apportion.lower.task_graph import TaskGraph
from apportion.search.baselines.single import single
from apportion.simulate.simulate import simulate

pytestmark = pytest.mark.slow  # the first one compiles the model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks"))
    import swap

    return swap


@cache
def tasks() -> TaskGraph:
    given = problem(1, "gpt2:tiny")
    return lower(given.space, single(given).strategy, 1)


def nanoseconds() -> Any:
    return np.full(len(tasks()), 1_000_000)


def peak() -> int:
    given = problem(1, "gpt2:tiny")
    return max(simulate(tasks(), given.cluster, given.cost).peak_bytes)


def test_what_fits_is_not_swapped(model: Any) -> None:
    found = model.swap(tasks(), nanoseconds(), peak(), 1e9)
    assert (found.read_bytes, found.written_bytes) == (0, 0)
    assert found.step_seconds == pytest.approx(found.compute_seconds)


def test_what_no_task_can_do_is_refused(model: Any) -> None:
    assert model.swap(tasks(), nanoseconds(), 1000, 1e9) is None


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e7, 1e9])
def test_less_memory_takes_longer_within_the_bounds_of_overlap(
    model: Any, bandwidth: float
) -> None:
    moved = []
    for share in (0.9, 0.7, 0.5, 0.3):
        found = model.swap(tasks(), nanoseconds(), int(share * peak()), bandwidth)
        link = (found.read_bytes + found.written_bytes) / bandwidth
        assert max(link, found.compute_seconds) <= found.step_seconds + 1e-9
        assert found.step_seconds <= link + found.compute_seconds + 1e-9
        moved.append(found.read_bytes + found.written_bytes)
    assert moved[0] > 0
    assert moved == sorted(moved)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_transfers_that_begin_early_never_exceed_the_memory(model: Any, share: float) -> None:
    memory = int(share * peak())
    state = model.State(model.blocks_of(tasks()), memory, 1e7)
    for _ in range(3):
        assert state.step(nanoseconds())
    taken = [change for _, change in sorted(state.log, key=lambda entry: (entry[0], entry[1]))]
    assert memory * 0.8 < np.cumsum(taken).max() <= memory


def stack(model: Any, count: int) -> Any:
    """Makes blocks of one byte, then reads them, the last first."""
    uses = {k: [k, 2 * count - 1 - k] for k in range(count)}
    reads = [[] for _ in range(count)] + [[k] for k in reversed(range(count))]
    begins = [[k] for k in range(count)] + [[] for _ in range(count)]
    return model.Blocks(
        dict.fromkeys(uses, 1), uses, reads, [set() for _ in reads], begins, [0] * len(reads)
    )


@pytest.mark.parametrize("memory", [1, 3, 6, 8])
def test_of_a_stack_only_what_does_not_fit_is_moved(model: Any, memory: int) -> None:
    found = model.run(stack(model, 8), np.ones(16, np.int64), memory, 1e9)
    assert found.written_bytes == found.read_bytes == 8 - memory


def test_reading_ahead_hides_behind_computing(model: Any) -> None:
    """A block takes as long to move as a task: with memory for half of them, writing the first
    half overlaps making the second."""
    for slower in (1, 4):
        found = model.run(stack(model, 8), np.full(16, 1000, np.int64), 4, 1e6 / slower)
        link = slower * (found.read_bytes + found.written_bytes) / 1e6
        least = max(found.compute_seconds, link)
        assert least <= found.step_seconds * (1 + 1e-9) <= 1.2 * least


def test_what_is_only_read_is_written_once(model: Any) -> None:
    """Two blocks of state in turn, of which one fits; the one that changes is written each time."""
    uses = {0: [0], 1: [1]}
    blocks = model.Blocks(
        {0: 1, 1: 1}, uses, [[0], [1]], [{0}, set()], [[], []], [0, 0], {0: 0, 1: 1}
    )
    found = model.run(blocks, np.ones(2, np.int64), 1, 1e9)
    assert (found.read_bytes, found.written_bytes) == (2, 1)


def fewest_reads(reads: list[int], memory: int) -> int:
    """By trying what to keep at every step."""
    best = {frozenset[int](): 0}
    for block in reads:
        after: dict[frozenset[int], int] = {}
        for here, count in best.items():
            if block in here:
                options = [(here, count)]
            elif len(here) < memory:
                options = [(here | {block}, count + 1)]
            else:
                options = [((here - {out}) | {block}, count + 1) for out in here]
            for kept, total in options:
                after[kept] = min(after.get(kept, total), total)
        best = after
    return min(best.values())


@pytest.mark.parametrize("seed", range(20))
def test_reads_are_the_fewest_there_can_be(model: Any, seed: int) -> None:
    rng = Random(seed)
    reads, memory = [rng.randrange(6) for _ in range(14)], rng.randint(1, 4)
    uses: dict[int, list[int]] = {}
    for task, block in enumerate(reads):
        uses.setdefault(block, []).append(task)
    count = len(reads)
    blocks = model.Blocks(
        dict.fromkeys(uses, 1), uses, [[b] for b in reads], [set() for _ in reads],
        [[] for _ in reads], [0] * count, {b: b for b in uses},
    )  # fmt: skip
    found = model.run(blocks, np.ones(count, np.int64), memory, 1e9, steps=1)
    assert found.read_bytes == fewest_reads(reads, memory)
