"""Tables and texts as they reach a terminal: no word broken, nothing obeyed.

Part of the room show. Names from files and models are only ever text: what a terminal would obey
(escape sequences, characters that turn the direction of writing) is shown by its code, and brackets
are no markup. Whoever prints goes through `printable` or a PlainTable.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from apportion.checked import OBEYED


def printable(text: str) -> str:
    """The text with the codes of characters that a terminal would obey."""
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


WHOLE_WORD = 44  # characters of a name for which the other columns make room


class PlainTable(Table):
    """A table without lines, whose cells are printable. Cells are wrapped between words, and a
    column of names, which have nowhere to be wrapped, is as wide as they are."""

    def __init__(self, *headings: str, title: str | None = None) -> None:
        shown = None if title is None else printable(title)
        super().__init__(
            title=shown, title_justify="left", box=None, pad_edge=False, header_style="bold"
        )
        for heading in headings:
            shown = printable(heading)
            self.add_column(shown, overflow="ellipsis", no_wrap=_is_name(shown))

    def add_row(self, *cells: Any, **how: Any) -> None:
        """A further row; texts among its cells become printable."""
        super().add_row(*(printable(c) if isinstance(c, str) else c for c in cells), **how)
        for column, cell in zip(self.columns, cells, strict=False):
            column.no_wrap = column.no_wrap and isinstance(cell, str) and _is_name(cell)


def _is_name(text: str) -> bool:
    """Whether a text is one word, and not so long that it would have a table to itself."""
    return len(text) <= WHOLE_WORD and len(text.split()) <= 1


def plain_table(*headings: str) -> PlainTable:
    """An empty table with these headings."""
    return PlainTable(*headings)


def plain_console(stderr: bool = False) -> Console:
    """Where tables are printed: brackets and colons mean nothing, and nothing is coloured by what
    it looks like."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
