"""What a command writes where: results to stdout, everything else to stderr.

Part of the room show. With `--json` stdout gets exactly one JSON object, whatever is printed
meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.table import Table
from rich.text import Text

from apportion.show.json_facts import finite
from apportion.show.plain_table import plain_console, printable


@contextmanager
def stdout_kept(as_json: bool) -> Iterator[None]:
    """With --json: what this process, a user's file or a child prints meanwhile goes to stderr."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # for children
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def warnings_noted() -> Iterator[None]:
    """Our own warnings become notes on stderr, one line each; others are shown as ever."""
    from apportion.plan import PlanWarning

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, PlanWarning):
                note(f"note: {message}")
            else:
                usual(message, category, *place)

        warnings.simplefilter("always", PlanWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def answer(as_json: bool, facts: dict[str, Any], shown: Table | list[Table | str]) -> None:
    """Prints a result: its facts as one JSON object, or what is to be shown."""
    if as_json:
        print(json.dumps(finite(facts), allow_nan=False), flush=True)
        return
    for item in shown if isinstance(shown, list) else [shown]:
        say(item)


def say(item: Table | str) -> None:
    """Prints a table or a text; on a terminal it is wrapped between words."""
    if isinstance(item, str) and not sys.stdout.isatty():
        print(printable(item), flush=True)
    else:
        plain_console().print(Text(printable(item)) if isinstance(item, str) else item)


def note(text: str) -> None:
    """Prints a line on stderr."""
    print(printable(text), file=sys.stderr, flush=True)
