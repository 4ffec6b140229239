"""The examples of loops, at a small size: they learn, serially and divided."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from table_threads import run_threads

import apportion.loops as loops
from apportion.loops.session import threads
from apportion.servers.table_store import StoreSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("sgd_mf", "mf_adaptive", "sparse_regression", "topics")
ORION_LINES = {"sgd_mf": 105, "mf_adaptive": 116, "sparse_regression": 117, "topics": 429}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _found_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def example(name: str) -> ModuleType:
    return __import__(name)


def small_ratings() -> tuple[np.ndarray, ...]:
    """Ratings of a hidden factorisation."""
    draw = np.random.default_rng(0)
    u, i = draw.integers(0, 50, 4000), draw.integers(0, 20, 4000)
    left, right = draw.normal(size=(50, 2)), draw.normal(size=(20, 2))
    return u, i, (left[u] * right[i]).sum(axis=1).astype(np.float32)


def falling(step: Any, given: tuple[Any, ...], name: str, passes: int) -> None:
    """On two ranks what is accumulated falls from pass to pass."""
    found = []
    with threads(2):
        for _ in range(passes):
            step(*given)
            found.append(loops.accumulated(name))
    assert found == sorted(found, reverse=True) and found[-1] < 0.9 * found[0], found


def test_sgd_mf(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("sgd_mf")
    monkeypatch.setattr(module, "made_up", small_ratings)
    step, W, H, _, decay = module.build()
    assert step.explain(W, H, 0.05, decay).kind == "2D"
    falling(step, (W, H, 0.05, decay), "error", 4)


def test_mf_adaptive(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("mf_adaptive")
    monkeypatch.setattr(module, "made_up", small_ratings)
    step, *given = module.build()
    falling(step, tuple(given), "error", 3)
    monkeypatch.setattr(module, "CHUNK", 200)
    parts = run_threads(2, StoreSettings(2), lambda store: module.work(store, 4))
    errors = np.sum(parts, axis=0)
    assert errors[-1] < 0.7 * errors[0], errors


def test_sparse_regression() -> None:
    module = example("sparse_regression")
    step, buffered, rate = module.build(module.made_up(samples=400, features=300))
    assert step.explain(buffered, rate).kind == "1D, buffered"
    falling(step, (loops.buffer(buffered.array, delay=20), rate), "loss", 3)


def test_topics() -> None:
    module = example("topics")
    words, documents = module.made_up(documents=60, words=80, length=30)
    sample, of_words, of_documents, *rest = module.build((words, documents), topics=5)
    found = []
    with threads(2):
        for _ in range(6):
            sample(of_words, of_documents, *rest)
            found.append(module.log_likelihood(of_words, of_documents, 0.1, 0.1))
        topics = sample.planner.over.numpy()
    assert found[-1] > found[0] + 0.05, found
    assert np.array_equal(of_words.numpy(), module.counts(words, topics, 80, 5))
    assert np.array_equal(of_documents.numpy(), module.counts(documents, topics, 60, 5))
    assert np.array_equal(rest[0].array.numpy(), np.bincount(topics, minlength=5))


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_no_longer_than_those_of_orion(name: str) -> None:
    """Lines that are neither blank nor comments, the text at the head left out."""
    text = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2]
    lines = [each for each in text.splitlines() if each.strip() and each.strip()[0] != "#"]
    assert len(lines) <= ORION_LINES[name]
