"""Live progress: a table and a line on terminals, a line for every better plan elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from apportion.cli import main as cli
from apportion.plan.candidates import PlanningProgress
from apportion.search.problem import Progress
from apportion.show.progress import ProgressBoard, ProgressLines, progress
from apportion.work_clock import WORK_CLOCK


def test_the_board_says_where_planning_stands() -> None:
    board = ProgressBoard()
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


def test_the_board_says_that_something_is_compiled() -> None:
    board = ProgressBoard()
    board.tell(PlanningProgress("flexflow"))
    WORK_CLOCK.stop()
    try:
        assert "0 s | flexflow | compiling, " in board.line()
    finally:
        WORK_CLOCK.go_on()
    assert "compiling" not in board.line()


def test_the_table_has_the_best_plan_of_each_method_the_best_first() -> None:
    board = ProgressBoard()
    for method, seconds, fits in (("data", 0.4, False), ("fsdp", 0.75, True), ("fsdp", 0.5, True)):
        board.tell(PlanningProgress(method, None, seconds, fits, 3 * 10**9, 10**6))
    screen = io.StringIO()
    Console(file=screen, width=80).print(board)
    head, *rows, line = screen.getvalue().splitlines()
    assert head.split("  ")[0] == "so far" and line.startswith("0 s | best step 500 ms (fsdp)")
    assert [row.split() for row in rows] == [
        ["fsdp", "500", "ms", "3", "GB", "1", "MB", "yes"],
        ["data", "400", "ms", "3", "GB", "1", "MB", "no"],
    ]


def test_without_a_terminal_better_plans_are_said_in_lines() -> None:
    said: list[str] = []
    lines = ProgressLines(said.append)
    lines.tell(PlanningProgress("single", None, 0.5, False))
    assert said == []  # what is quick needs no progress
    lines.began -= 4
    lines.tell(PlanningProgress("data", None, 0.4, False, 10**9, 2))
    lines.tell(PlanningProgress("fsdp", None, 0.6, True, 10**9, 2))  # too soon to be said
    lines.began -= 6
    lines.tell(PlanningProgress("tofu", None, 0.7, True))
    lines.began -= 6
    lines.tell(PlanningProgress("tofu"))
    assert said == [
        "4 s: data, 400 ms a step, peak 1 GB, 2 B moved, does not fit",
        "10 s: fsdp, 600 ms a step, peak 1 GB, 2 B moved, fits",
    ]


def test_progress_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
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
        Console(stderr=True).print("")
    assert "tofu" in screen.getvalue() and "\x1b" in screen.getvalue()
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with progress(wanted=True) as told:
        assert told is not None
        told(PlanningProgress("tofu", None, 0.5, True))
    assert plain.getvalue() == ""


def test_every_command_says_that_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    cli.status(["--version"])
    WORK_CLOCK.announce_compiling()
    WORK_CLOCK.announce_compiling()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compiling loops for this machine: up to a minute, once;")
