"""A plugin of pytest: writes down for every test which blocks it has reached (planting.py), in all
of its processes, how long it took, by the clock and of processors, and whether it passed."""

from __future__ import annotations

import base64
import builtins
import json
import os
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import planting
import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_failed: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    if planting.REACHED is not None:
        planting.share(planting.REACHED / f"marks-{WORKER}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        _failed.add(report.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if planting.REACHED is None:
        return (yield)
    marks: Any = builtins._reached_  # type: ignore[attr-defined]
    marks[:] = bytes(len(marks))
    began, used = time.perf_counter(), _processor_seconds()
    done = yield
    seconds = time.perf_counter() - began
    packed = np.packbits(np.frombuffer(marks, np.uint8) > 0)
    row = {
        "test": item.nodeid,
        "seconds": round(seconds, 3),
        "processor": round(_processor_seconds() - used, 3),
        "passed": item.nodeid not in _failed,
        "slow": item.get_closest_marker("slow") is not None,
        "reached": base64.b64encode(zlib.compress(packed.tobytes())).decode(),
    }
    with Path(planting.REACHED, f"tests-{WORKER}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return done


def _processor_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])
