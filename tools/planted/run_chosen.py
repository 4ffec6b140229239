"""A plugin of pytest: runs the chosen tests only, in the order in which they were chosen, and
writes down the first one that fails. Unlike names on the command line, a test that is no longer
there is no error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = json.loads(Path(os.environ["PLANTED_TESTS"]).read_text())
    order = {name: k for k, name in enumerate(chosen)}
    items[:] = sorted(
        (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        Path(os.environ["PLANTED_FAILED"]).write_text(report.nodeid)
