"""Live progress of planning, on a terminal.

Part of the room show. PlanningProgress comes in; one line goes out: the seconds that have passed,
the best plan so far, the method at work and what it says of its own best and bound.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from apportion.columns import PATIENCE
from apportion.quantity import format_quantity

if TYPE_CHECKING:
    from apportion.plan import PlanningProgress
    from apportion.search import Progress

REFRESHES = 4  # a second


@dataclass
class ProgressLine:
    """What has been told so far; rich draws it anew by itself, so that the seconds run on."""

    began: float = field(default_factory=time.perf_counter)
    latest: PlanningProgress | None = None
    best: tuple[bool, float, str] | None = None  # does not fit, seconds of a step, method

    def tell(self, progress: PlanningProgress) -> None:
        """Takes note of where planning stands."""
        self.latest = progress
        if progress.step_seconds is not None:
            found = (not progress.fits, progress.step_seconds, progress.method)
            self.best = found if self.best is None else min(self.best, found)

    def line(self) -> str:
        """All of it in one line, what matters most first: terminals are narrow."""
        parts = [f"{time.perf_counter() - self.began:.0f} s"]
        if self.best is not None:
            over, seconds, method = self.best
            fits = ", over the memory limit" if over else ""
            parts.append(f"best step {format_quantity(seconds, 's')} ({method}{fits})")
        if self.latest is not None:
            parts.append(self.latest.method + _of_itself(self.latest.progress))
        return " | ".join(parts)

    def __rich__(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis")


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
    """What planning tells is shown on stderr, if that is a terminal and it is `wanted`; so is that
    something is compiled meanwhile."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    board = ProgressLine()
    console = Console(stderr=True)
    PATIENCE.announce = lambda text: console.print(text, style="dim")
    try:
        with Live(board, console=console, refresh_per_second=REFRESHES, transient=True):
            yield board.tell
    finally:
        PATIENCE.announce = None
