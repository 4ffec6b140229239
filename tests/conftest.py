"""Settings for all tests, and what keeps `make quick` quick.

Tests that take more than about a fifth of a second are marked `slow`, and `make quick` runs the
others, compiles nothing for them that an earlier run has not compiled, and lists what took longest.
A test that takes ten seconds without the mark fails; so does a `make quick` in which a room has
hardly any tests left. All tests that need several processes or a GPU are slow without saying so.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import soak
from hypothesis import settings
from numba.core import event
from test_imports import ROOMS

from apportion.columns import compile_nothing

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are shared: how long an example takes says nothing.
settings.register_profile("shared", deadline=None, max_examples=20)
settings.register_profile("soak", deadline=None, max_examples=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="all cases of every test: it takes hours")


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported, say how many cases they are to draw."""
    soak.ALL = config.getoption("soak")
    if _is_quick(config):
        compile_nothing()
    settings.load_profile("soak" if soak.ALL else "shared")


# As the command line does: else Python looks at all of torch and of the tests every few seconds.
gc.set_threshold(100_000, 50, 50)

# Of processor time that a test may take without the mark: machines differ, and with a cold cache
# loops run interpreted before they are compiled.
QUICK_SECONDS = 10.0
TESTS = Path(__file__).parent
LEFT = 1 / 3  # of a room's tests that must be quick
SLOW_ROOMS = ("dist", "gpu")


class _Compilation(event.Listener):  # type: ignore[misc]
    """Sums the processor time that Numba has spent compiling; with a warm cache that is none."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._began = 0.0, 0, 0.0

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            self._began = time.process_time()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.process_time() - self._began


_compilation = _Compilation()
event.register("numba:compile", _compilation)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run the test; in `make quick`, fail if it is slow. A run of all tests does not judge that: it
    may share its cores and compile what others wait for."""
    before = time.process_time() - _compilation.seconds
    yield
    took = time.process_time() - _compilation.seconds - before
    if took > QUICK_SECONDS and _is_quick(item.config):
        pytest.fail(
            f"It takes {took:.1f} s of processor time, and {QUICK_SECONDS} s are the most that a "
            "test may take which `make quick` runs: make it shorter, or mark it slow.",
            pytrace=False,
        )


def _room(item: pytest.Item) -> str:
    return item.path.parent.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Run the test; after the last one of a file, forget what the tests have remembered in it, and
    after the last one of a room, what their helpers have. A capture looks at all objects that there
    are, so every test after it would take longer."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _forget(Path(item.path))
        if nextitem is None or _room(nextitem) != _room(item):
            _forget(*TESTS.glob("*.py"), *item.path.parent.glob("*.py"))
    return done


def _forget(*files: Path) -> None:
    """Empties the functions of these files that remember results."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and Path(path) in files:
            for each in vars(module).values():
                if isinstance(each, functools._lru_cache_wrapper):
                    each.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Let pytest deselect; raise UsageError if that leaves too little of a room for a quick run.

    Tests run in the order of their rooms. Of two workers, that share them half and half at first,
    one thereby begins with tests that need little compiled code, and does not compile what the
    other compiles at the same time.
    """
    items.sort(key=lambda item: ROOMS.index(room) if (room := _room(item)) in ROOMS else len(ROOMS))
    for item in items:
        if _room(item) in SLOW_ROOMS:
            item.add_marker("slow")
    if not soak.ALL:
        left_out = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
    before = Counter(room for item in items if (room := _room(item)) not in SLOW_ROOMS)
    yield
    after = Counter(map(_room, items))
    for room, count in before.items():
        if _is_quick(config) and after[room] < LEFT * count:
            raise pytest.UsageError(
                f"{after[room]} of {count} tests of {room} are quick, and a third should be: "
                "shorten some that are marked slow."
            )


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Measurements of costs neither come from the user's cache nor go there."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["APPORTION_CACHE"] = str(folder)
    yield folder
    del os.environ["APPORTION_CACHE"]


@pytest.fixture(autouse=True)
def _not_calibrating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning measures nothing by itself, except in tests that ask for it: that takes seconds."""
    if "calibrating" not in request.fixturenames:
        monkeypatch.setattr("apportion.run.plan_here.BUDGET", 0.0)


@pytest.fixture
def calibrating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a test in which planning measures what is missing, on a machine that is quiet
    and always equally fast."""
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "cache"))
    from apportion.machine.cost_table import ReferenceTime
    from apportion.run.reference_kernels import MachineSpeed

    steady = MachineSpeed({"matmul": ReferenceTime(1e-3, 0.0)}, 0.0)
    monkeypatch.setattr("apportion.run.calibrate.machine_speed", lambda condition: steady)
    monkeypatch.setattr("apportion.run.calibrate.taken", lambda *given: 0.0)
    return tmp_path / "cache"
