"""Live progress: one line that says where planning stands, on terminals only."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from apportion.columns import PATIENCE
from apportion.plan.candidates import PlanningProgress
from apportion.search.problem import Progress
from apportion.show.progress import ProgressLine, progress


def test_the_board_says_where_planning_stands() -> None:
    board = ProgressLine()
    board.tell(PlanningProgress("data"))
    assert board.line() == "0 s | data"
    board.tell(PlanningProgress("data", None, 0.5, False))
    assert board.line() == "0 s | best step 500 ms (data, over the memory limit) | data"
    board.tell(PlanningProgress("fsdp", None, 0.75, True))
    board.tell(PlanningProgress("exact", Progress("level 2", best=4e9, bound=2e9, unit="B")))
    assert board.line() == (
        "0 s | best step 750 ms (fsdp) | exact: level 2, best 4 GB, bound 2 GB, gap 100.0%"
    )
    told = Progress("2 chains", 1.23, proposals=5000, per_second=1234.4, accepted=0.118)
    board.tell(PlanningProgress("flexflow", told))
    assert board.line().endswith(
        "| flexflow: 2 chains, best 1.23 s, 1,234 proposals/s, 12% accepted"
    )
    board.tell(PlanningProgress("flexflow", Progress("", 0.5, proposals=5000)))
    assert board.line().endswith("| flexflow: best 500 ms, 5,000 proposals")


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress(wanted=False) as told:
        assert told is None
    with progress(wanted=True) as told:
        assert told is not None
        told(PlanningProgress("tofu"))
        assert PATIENCE.announce is not None
        PATIENCE.announce("compiling something")
        Console(stderr=True).print("")
    assert "tofu" in screen.getvalue() and "compiling something" in screen.getvalue()
    assert PATIENCE.announce is None
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress(wanted=True) as told:
        assert told is None
