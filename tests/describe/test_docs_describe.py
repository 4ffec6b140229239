"""docs/describe.md, as written: every Python block runs, in order, in one namespace. A text block
behind one is what it prints; blocks may assert."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import apportion as ap
from apportion.describe import descriptions, language

PAGE = Path(__file__).parent.parent.parent / "docs" / "describe.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMES = re.compile(r"differs by [\d.e+-]+")  # how far off a wrong result is depends on the machine


def blocks() -> Iterator[tuple[str, str | None]]:
    """Python blocks, each with the text behind it."""
    found = list(FENCE.finditer(PAGE.read_text()))
    for block, behind in zip(found, [*found[1:], None], strict=True):
        if block[1] == "python":
            shown = behind[2] if behind is not None and behind[1] == "text" else None
            yield block[2], shown


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page describes is gone after it."""
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))
    monkeypatch.setattr(descriptions, "REASONS", dict(descriptions.REASONS))


@pytest.mark.slow
@pytest.mark.usefixtures("_table")
def test_the_page_does_what_it_says() -> None:
    space: dict[str, Any] = {"__name__": "describe"}
    ran = compared = 0
    for code, shown in blocks():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "my_ops.py", "exec"), space)
        ran += 1
        if printed.getvalue() or shown is not None:
            assert _plain(printed.getvalue()) == _plain(shown or ""), code
            compared += 1
    assert ran > 20 and compared > 15


def _plain(text: str) -> list[str]:
    return [TIMES.sub("differs", line.rstrip()) for line in text.strip().splitlines()]


def test_the_page_names_everything_public_about_descriptions() -> None:
    text = PAGE.read_text()
    public = ("describe", "Sum", "Max", "Min", "Prod", "Output", "ALL", "f", "opaque")
    for name in (*public, "check_splits"):
        assert name in ap.__all__ and f"ap.{name}" in text, name
    documented = {
        name
        for module in (language, descriptions)
        for name, item in vars(module).items()
        if getattr(item, "__module__", "") == module.__name__
        if name.islower() and name[0] != "_"
    }
    internal = {"as_expr", "evaluate", "parameter_axes", "reason_unsplit", "find_description"}
    assert {name for name in documented - internal if f"{name}(" not in text} == set()
