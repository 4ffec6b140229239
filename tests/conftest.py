"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are shared: how long an example takes says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


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
    """The cache of a test in which planning measures what is missing."""
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
