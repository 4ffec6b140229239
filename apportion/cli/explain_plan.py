"""What `apportion explain` does: the alternatives of one operator of a saved plan.

Part of the room cli. A file of a Plan comes in, an explanation goes out as data and as text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from apportion.plan import Plan


def explained(
    plan: Path, op: str, alternatives: int, budget: float, live: bool
) -> tuple[dict[str, Any], str]:
    """An explanation as plain data and as text; `live` shows on a terminal how far it is."""
    made = Plan.load(plan)
    with _bar(wanted=live) as told:
        found = made.explain(op, alternatives, budget, told)
    known = {"model": made.model, "cluster": made.cluster.name, "method": made.method}
    return known | found.to_json(), str(found)


@contextmanager
def _bar(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("simulating alternatives"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def tell(done: int, known: int) -> None:
            bar.update(task, completed=done, total=known)

        yield tell
