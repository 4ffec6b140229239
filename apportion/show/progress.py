"""Live progress of planning: a table that improves while a search goes on.

Part of the room show. PlanningProgress comes in. On a terminal out go the best plans so far, one
row for each method, and below them a line: the seconds that have passed, the best, the method at
work, what it says of its own best and bound, and whether something is compiled. Elsewhere a line
goes out whenever there is a better plan.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from apportion.quantity import format_quantity
from apportion.show.plain_table import plain_console, plain_table
from apportion.show.streams import note
from apportion.work_clock import WORK_CLOCK

if TYPE_CHECKING:
    from apportion.plan import PlanningProgress
    from apportion.search import Progress

REFRESHES = 4  # a second
SHOWN_METHODS = 6  # rows of the table
QUIET = 3.0  # seconds before the first line that is not on a terminal
BETWEEN_LINES = 2.0  # and between two of them
Rank = tuple[bool, float]
"""Does not fit, seconds of a step: less is better."""


@dataclass
class ProgressBoard:
    """What has been told so far; rich draws it anew by itself, so that the seconds run on."""

    began: float = field(default_factory=time.perf_counter)
    latest: PlanningProgress | None = None
    best: dict[str, PlanningProgress] = field(default_factory=dict)  # of each method

    def tell(self, progress: PlanningProgress) -> None:
        """Takes note of where planning stands."""
        self.latest = progress
        if progress.step_seconds is not None:
            known = self.best.get(progress.method)
            if known is None or _rank(progress) < _rank(known):
                self.best[progress.method] = progress

    def ranked(self) -> list[PlanningProgress]:
        """The best of each method, the best of all first."""
        return sorted(self.best.values(), key=_rank)

    def line(self) -> str:
        """All of it in one line, what matters most first: terminals are narrow."""
        parts = [f"{time.perf_counter() - self.began:.0f} s"]
        if self.best:
            first = self.ranked()[0]
            fits = "" if first.fits else ", over the memory limit"
            step = format_quantity(first.step_seconds or 0.0, "s")
            parts.append(f"best step {step} ({first.method}{fits})")
        if self.latest is not None:
            parts.append(self.latest.method + _of_itself(self.latest.progress))
        return " | ".join([*parts, *compiling()])

    def table(self) -> Table:
        """The best plans so far."""
        table = plain_table("so far", "step time", "peak memory", "bytes moved", "fits")
        for one in self.ranked()[:SHOWN_METHODS]:
            table.add_row(*_figures(one))
        return table

    def __rich__(self) -> Group:
        line = Text(self.line(), no_wrap=True, overflow="ellipsis")
        return Group(self.table(), line) if self.best else Group(line)


@dataclass
class ProgressLines:
    """The same where there is no terminal: a line whenever there is a better plan, but not too
    often."""

    say: Callable[[str], None]
    began: float = field(default_factory=time.perf_counter)
    best: PlanningProgress | None = None
    is_new: bool = False
    said: float = QUIET - BETWEEN_LINES

    def tell(self, progress: PlanningProgress) -> None:
        """Takes note of where planning stands, and says what is better than what was said."""
        better = self.best is None or _rank(progress) < _rank(self.best)
        if progress.step_seconds is not None and better:
            self.best, self.is_new = progress, True
        passed = time.perf_counter() - self.began
        if self.best is not None and self.is_new and passed - self.said >= BETWEEN_LINES:
            self.said, self.is_new = passed, False
            method, step, peak, moved, fits = _figures(self.best)
            over = "fits" if fits == "yes" else "does not fit"
            self.say(f"{passed:.0f} s: {method}, {step} a step, peak {peak}, {moved} moved, {over}")


def _rank(one: PlanningProgress) -> Rank:
    return not one.fits, one.step_seconds or 0.0


def _figures(one: PlanningProgress) -> tuple[str, str, str, str, str]:
    return (
        one.method,
        format_quantity(one.step_seconds or 0.0, "s"),
        format_quantity(one.peak_bytes, "B"),
        format_quantity(one.bytes_moved, "B"),
        "yes" if one.fits else "no",
    )


def compiling() -> list[str]:
    """That something is compiled at the moment, and for how long in all so far."""
    return [f"compiling, {WORK_CLOCK.stopped:.0f} s so far"] if WORK_CLOCK.is_stopped else []


def _of_itself(told: Progress | None) -> str:
    """What a method tells of its search."""
    if told is None:
        return ""
    figures = {"best": told.best, "bound": told.bound}
    parts = [
        f"{name} {format_quantity(n, told.unit)}" for name, n in figures.items() if n is not None
    ]
    if told.gap is not None:
        parts.append(f"gap {told.gap:.1%}")
    if told.per_second is not None:
        parts.append(f"{told.per_second:,.0f} proposals/s")
    elif told.proposals is not None:
        parts.append(f"{told.proposals:,} proposals")
    if told.accepted is not None:
        parts.append(f"{told.accepted:.0%} accepted")
    return ": " + ", ".join([*([told.what] if told.what else []), *parts])


@contextmanager
def progress(wanted: bool) -> Iterator[Callable[[PlanningProgress], None] | None]:
    """What planning tells is shown on stderr, if it is `wanted`."""
    if not wanted:
        yield None
        return
    if not sys.stderr.isatty():
        yield ProgressLines(note).tell
        return
    board = ProgressBoard()
    with Live(
        board, console=plain_console(stderr=True), refresh_per_second=REFRESHES, transient=True
    ):
        yield board.tell
