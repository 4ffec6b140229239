"""Tests of processes are tried once more if a rank was aborted while Python ended.

A thread of gloo that frees a tensor while Python ends aborts the process with the words below, when
all work is done and all losses are printed (docs/design/023). Our own runner ends these threads
first; programs of plain PyTorch that some tests start beside it do not. Only these words are reason
to try again, and once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from page_reader import Reader
from rank_launch import Launch, RankServer

ABORTED = "terminate called without an active exception"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed and ABORTED in report.longreprtext for report in reports):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Runs programs on ranks, forked from one process that has imported torch."""
    server = RankServer(tmp_path_factory.mktemp("said"))
    yield server.run
    server.close()


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Reader:
    """Somebody who follows a page in an empty folder, on a screen of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return Reader(capfd)
