"""Compiled functions: interpreted while that is quicker, compiled after that, equal either way."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import captured

import apportion as ap
from apportion.columns import (
    PATIENCE,
    SECONDS_PER_BYTE,
    CompiledFunction,
    Ints,
    Patience,
    compile_at_once,
    compiled,
    compiled_sooner,
    inlined,
)
from apportion.lower.post_order import place
from apportion.simulate.schedule import _schedule
from apportion.work_clock import WORK_CLOCK, work_seconds


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """A test begins with the usual patience, and what it sets is undone."""
    kept = dataclasses.asdict(PATIENCE)
    for name, value in dataclasses.asdict(Patience()).items():
        setattr(PATIENCE, name, value)
    yield
    for name, value in kept.items():
        setattr(PATIENCE, name, value)


def interpreted_always() -> None:
    PATIENCE.load_seconds, PATIENCE.elements = math.inf, 1 << 62


def add_at(numbers: Ints, at: int, more: int) -> int:
    numbers[at] += more
    return at + 1


def make() -> tuple[CompiledFunction, CompiledFunction]:
    """A compiled function, and one that calls it."""
    inner = compiled(add_at)

    def outer(numbers: Ints) -> int:
        at = inner(numbers, 0, 1)
        at = inner(numbers, at, 2)
        return inner(numbers, at, len(numbers))  # type: ignore[no-any-return]

    return inner, compiled(outer)


def test_a_function_is_interpreted_until_that_has_taken_long_enough() -> None:
    _, outer = make()
    assert outer(np.zeros(4, np.int64)) == 3 and outer.native is None
    outer.seconds = outer.compile_seconds()
    assert 0 < outer.seconds < PATIENCE.load_seconds
    outer(np.zeros(4, np.int64))
    assert outer.native is None  # to load what compiles it takes longer
    outer.seconds = PATIENCE.load_seconds
    found = np.zeros(4, np.int64)
    assert outer(found) == 3 and outer.native is not None
    assert found.tolist() == [1, 2, 4, 0]


def test_work_that_will_last_is_compiled_sooner() -> None:
    PATIENCE.load_seconds = PATIENCE.load_next_seconds  # Numba is there
    _, outer = make()
    outer.seconds, PATIENCE.compile_share = 0.1, math.inf
    with compiled_sooner(0.2):
        outer(np.zeros(4, np.int64))
        assert outer.native is None
    with compiled_sooner(0.05):
        outer(np.zeros(4, np.int64))
    assert outer.native is not None and PATIENCE.soon_seconds == Patience().soon_seconds


def test_what_takes_longer_to_compile_is_interpreted_for_longer() -> None:
    """With its parts, of which there are none left to compile in the end."""
    alone, whole = _schedule.compile_seconds(), place.compile_seconds()
    assert 0.1 < alone < whole < 30
    own = len(place.function.__code__.co_code) * SECONDS_PER_BYTE
    assert whole > 4 * own
    place.seconds, PATIENCE.load_seconds = 0.9 * whole, 0.0
    try:
        assert not place._is_due() or place._is_kept
        place.seconds = whole
        assert place._is_due()
    finally:
        place.seconds = 0.0


def test_a_part_of_a_long_call_is_compiled_while_the_call_goes_on() -> None:
    inner, outer = make()
    inner.seconds = PATIENCE.load_seconds
    assert outer(np.zeros(4, np.int64)) == 3
    assert outer.native is None and inner.native is None  # the call is not long yet
    PATIENCE.whole_seconds = 0.0
    assert outer(np.zeros(4, np.int64)) == 3
    assert outer.native is None and inner.native is not None


@pytest.mark.parametrize("kept", [False, True])
def test_a_large_call_is_not_interpreted(kept: bool) -> None:
    _, outer = make()
    PATIENCE.elements, PATIENCE.kept_elements = 4, 3
    outer._is_kept = kept
    outer(np.zeros(4, np.int64))
    assert (outer.native is not None) == kept
    outer(np.zeros(5, np.int64))
    assert outer.native is not None


def test_literals_do_not_compile_a_function_again() -> None:
    compile_at_once()
    inner, outer = make()
    outer(np.zeros(4, np.int64))
    assert len(inner.dispatcher.overloads) == 1


def test_who_waits_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_at_once()
    told: list[str] = []
    monkeypatch.setattr(WORK_CLOCK, "announce", told.append)
    for _ in range(2):
        make()[1](np.zeros(4, np.int64))
    assert len(told) == 1 and "compiling" in told[0]


def test_budgets_do_not_run_while_something_is_compiled() -> None:
    compile_at_once()
    _, outer = make()
    wall, work, stopped = time.perf_counter(), work_seconds(), WORK_CLOCK.stopped
    outer(np.zeros(4, np.int64))
    wall, work = time.perf_counter() - wall, work_seconds() - work
    assert outer.native is not None and not WORK_CLOCK.is_stopped
    assert WORK_CLOCK.stopped - stopped > 0.8 * wall
    assert work == pytest.approx(wall - (WORK_CLOCK.stopped - stopped), abs=0.01)


def test_an_interpreted_form_of_its_own() -> None:
    function = compiled(plain=lambda numbers: -1)(lambda numbers: len(numbers))
    assert function(np.zeros(4, np.int64)) == -1
    function.seconds = PATIENCE.load_seconds
    assert function(np.zeros(4, np.int64)) == 4


def test_a_kept_form_that_cannot_be_read_is_dropped(tmp_path: Path) -> None:
    """As after an update of the package: the index on the disk names a class that is gone."""
    source = "from typing import NamedTuple\nclass {0}(NamedTuple):\n    a: int\n"
    source += "def f(it): return it.a\n"
    for name in ("OldName", "New"):
        path = tmp_path / "kept_module.py"
        path.write_text(source.format(name))
        spec = importlib.util.spec_from_file_location("kept_module", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["kept_module"] = module
        spec.loader.exec_module(module)
        function = compiled(module.f)
        assert function.dispatcher(getattr(module, name)(3)) == 3
    del sys.modules["kept_module"]


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from numba.core import caching

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(add_at).dispatcher(np.zeros(2, np.int64), 0, 1) == 1


def test_an_inlined_part_is_the_same_in_both_forms() -> None:
    part = inlined(add_at)

    def outer(numbers: Ints) -> int:
        return part(numbers, 1, 7)  # type: ignore[no-any-return]

    function, found = compiled(outer), []
    for set_patience in (interpreted_always, compile_at_once):
        set_patience()
        numbers = np.zeros(3, np.int64)
        found.append((function(numbers), numbers.tolist()))
    assert function.native is not None and found == [(2, [0, 7, 0])] * 2


def test_hashes_that_overflow_are_not_warned_of() -> None:
    interpreted_always()
    square = compiled(lambda numbers: numbers[0] * numbers[0])
    assert square(np.array([1 << 40])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "tofu", "optcnn"])
@pytest.mark.parametrize("spec", ["gpt2:tiny,layers=1", "lenet:tiny"])
def test_plans_are_the_same_in_both_forms(spec: str, method: str, tmp_path: Path) -> None:
    def saved() -> dict[str, Any]:
        plan = ap.plan(captured(spec)[0], ap.cluster("4xh100"), method=method)
        plan.save(tmp_path / "p.json")
        data: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
        return {k: v for k, v in data.items() if k not in ("search_seconds", "curve")}

    for it in gc.get_objects():
        if type(it) is CompiledFunction:
            it.native = None  # other tests may have had them compiled
    interpreted_always()
    plain = saved()
    compile_at_once()
    assert saved() == plain
