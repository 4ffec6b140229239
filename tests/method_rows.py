"""Methods that exist only in a test: rows of the registry with functions of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from apportion.search import METHODS
from apportion.search.problem import SearchResult
from apportion.search.registry import Method

Search = Callable[..., SearchResult]


def row(name: str, search: Search) -> Method:
    """The row of that name with another function, or a new row that auto does not try."""
    return replace(METHODS[name], search=search) if name in METHODS else Method(search, "a test's")


class Searches:
    """The registry as a test changes it: a function given to a name takes that name's row, but has
    nothing to compile."""

    def __init__(self, rows: dict[str, Method]) -> None:
        self.rows = rows

    def __setitem__(self, name: str, search: Search) -> None:
        row = self.rows.get(name, Method(search, "a test's"))
        METHODS[name] = replace(row, search=search, compiling="")


@contextmanager
def only(*names: str) -> Iterator[Searches]:
    """The registry with these methods alone, to be added to."""
    kept = dict(METHODS)
    for name in kept.keys() - set(names):
        del METHODS[name]
    try:
        yield Searches(kept)
    finally:
        METHODS.clear()
        METHODS.update(kept)
