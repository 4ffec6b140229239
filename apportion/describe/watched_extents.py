"""Extents that notice when somebody looks at them, so that describe/ evaluates less.

A description that never looks at sizes says the same of calls of all sizes. It is evaluated on
WatchedExtents, which stand for "longer than 1", "1" and "nothing"; as soon as it computes with one,
compares it, or puts it into the formula, its ExtentWatch knows, and the result is for that call
alone.
"""

from __future__ import annotations

from typing import Any


class ExtentWatch:
    """Whether an extent was looked at."""

    def __init__(self) -> None:
        self.seen = False


class WatchedExtent:
    """The length of a dimension, watched."""

    __slots__ = ("_number", "_watch")

    def __init__(self, number: int, watch: ExtentWatch) -> None:
        self._number = number
        self._watch = watch

    @property
    def single(self) -> bool:
        """Whether it is 1: a dimension that broadcasts. This may be asked freely, since calls that
        differ in it are told apart."""
        return self._number == 1

    def __index__(self) -> int:
        self._watch.seen = True
        return self._number

    def __repr__(self) -> str:
        return str(self.__index__())

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __bool__(self) -> bool:
        return bool(self.__index__())


def _forward(name: str) -> Any:
    def method(self: WatchedExtent, *others: Any) -> Any:
        plain = [int(o) if isinstance(o, WatchedExtent) else o for o in others]
        return getattr(self.__index__(), name)(*plain)

    return method


_NAMES = """
eq ne lt le gt ge add radd sub rsub mul rmul floordiv rfloordiv mod rmod truediv rtruediv divmod
rdivmod pow rpow neg pos abs int float round and rand or ror lshift rshift format
"""
for _name in _NAMES.split():
    setattr(WatchedExtent, f"__{_name}__", _forward(f"__{_name}__"))


def shape_pattern(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as far as it may be asked freely: 0, 1, or 2 for anything longer."""
    return tuple(min(n, 2) for n in shape)


def single(extent: Any) -> bool:
    """Whether a dimension is 1 long; does not count as looking."""
    return extent.single if isinstance(extent, WatchedExtent) else extent == 1
