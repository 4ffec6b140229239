"""Live progress of placing, on a terminal.

Part of the room show. PlacerProgress comes in; one line goes out: the seconds that have passed, the
best so far, the bound, and how many placements have been evaluated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from apportion.show.plain_table import plain_console
from apportion.show.progress import compiling

if TYPE_CHECKING:
    from apportion.place import PlacerProgress

REFRESHES = 4  # a second


@dataclass
class PlacementLine:
    """What a placer has told so far; rich draws it anew by itself, so that the seconds run on."""

    unit: str
    began: float = field(default_factory=time.perf_counter)
    best: float | None = None
    bound: float | None = None
    evaluations: int = 0

    def tell(self, progress: PlacerProgress) -> None:
        """Takes note of where the search stands; bests of several placers one after the other."""
        if progress.best is not None:
            self.best = progress.best if self.best is None else min(self.best, progress.best)
        if progress.bound is not None:
            self.bound = progress.bound if self.bound is None else max(self.bound, progress.bound)
        self.evaluations = max(self.evaluations, progress.evaluations)

    def line(self) -> str:
        """All of it in one line."""
        parts = [f"{time.perf_counter() - self.began:.0f} s"]
        if self.best is not None:
            parts.append(f"best {self.best:.6g} {self.unit}")
        if self.bound is not None:
            parts.append(f"bound {self.bound:.6g}")
        if self.evaluations:
            parts.append(f"{self.evaluations:,} evaluations")
        return " | ".join([*parts, *compiling()])

    def __rich__(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis")


@contextmanager
def placement_progress(
    wanted: bool, unit: str
) -> Iterator[Callable[[PlacerProgress], None] | None]:
    """What placers tell is shown on stderr, if that is a terminal and it is `wanted`."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    board, console = PlacementLine(unit), plain_console(stderr=True)
    with Live(board, console=console, refresh_per_second=REFRESHES, transient=True):
        yield board.tell
