"""Reading what others wrote: plain data whose every number, text and list is checked.

Plans, graphs, strategies and cost tables are read by these functions. They take a value from parsed
JSON and what it is in words, and return it as the type that it should have; anything else raises
ValueError in one short sentence. Nothing is converted: a text is no number, true is not 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

LARGEST_WHOLE = 1 << 60  # bytes, counts and indices; sums of a few thousand stay in 64 bits
LARGEST_SECONDS = 1e6  # eleven days
LARGEST_NUMBER = 1e30  # operations, rates
LONGEST_TEXT = 20_000
LONGEST_CALL = 4_000_000  # a kernel call names all tensors, two for each product it adds up
MOST_NESTING = 32  # of lists within lists
SHOWN = 80  # characters of a wrong value that a message repeats

# What a terminal would obey, and halves of pairs, which cannot be written out.
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
T = TypeVar("T")


def brief(value: Any, most: int = SHOWN) -> str:
    """A value as a message may repeat it: short, and only text."""
    shown = value if isinstance(value, str) else repr(value)[: 10 * most]
    shown = " ".join(shown[: 4 * most].split())
    shown = OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), shown[: 2 * most])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def parse_json(text: bytes | str) -> Any:
    """The data that JSON says; ValueError for what is none, for numbers that no float can hold, and
    for what is nested too deeply."""
    try:
        return json.loads(text, parse_float=_finite_float, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not JSON: {error.msg} at {where}") from None
    except ValueError as error:
        raise ValueError(brief(str(error), 200)) from None


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {brief(text, 40)} is too large")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def read_text(value: Any, what: str, most: int = LONGEST_TEXT) -> str:
    """A text that can be shown."""
    if not isinstance(value, str):
        raise ValueError(f"{what}: {_shown(value)} is not a text")
    if len(value) > most:
        raise ValueError(f"{what} has {len(value):,} characters; {most:,} are the most")
    if OBEYED.search(value):
        raise ValueError(f"{what}: {_shown(value)} has characters that cannot be shown")
    return value


def read_call(value: Any, what: str) -> str:
    """The text of a kernel call, with all its tensors."""
    return read_text(value, what, LONGEST_CALL)


def read_whole(value: Any, what: str, least: int = 0, most: int = LARGEST_WHOLE) -> int:
    """A whole number in a range."""
    if type(value) is not int:
        raise ValueError(f"{what}: {_shown(value)} is not a whole number")
    if value < least:
        raise ValueError(f"{what}: {_shown(value)} is less than {least}")
    if value > most:
        raise ValueError(f"{what}: {_shown(value)} is more than {most:,}")
    return value


def read_number(value: Any, what: str, least: float = 0.0, most: float = LARGEST_NUMBER) -> float:
    """A finite number in a range."""
    if type(value) not in (int, float) or value != value:
        raise ValueError(f"{what}: {_shown(value)} is not a number")
    if value < least:
        raise ValueError(f"{what}: {_shown(value)} is less than {least:g}")
    if value > most:
        raise ValueError(f"{what}: {_shown(value)} is more than {most:g}")
    return float(value)


def _shown(value: Any) -> str:
    """A wrong value in a message; texts in quotes."""
    return repr(brief(value)) if isinstance(value, str) else brief(value)


def read_seconds(value: Any, what: str) -> float:
    """So many seconds, from none to eleven days."""
    return read_number(value, what, 0.0, LARGEST_SECONDS)


def read_flag(value: Any, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{what}: {_shown(value)} is neither true nor false")
    return value


def read_list(value: Any, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{what}: {_shown(value)} is not a list")
    return list(value)


def read_row(value: Any, what: str, *lengths: int) -> list[Any]:
    """A list with one of these lengths."""
    found = read_list(value, what)
    if len(found) not in lengths:
        expected = " or ".join(map(str, lengths))
        raise ValueError(f"{what} has {len(found)} entries, not {expected}")
    return found


def read_every(value: Any, what: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    """A list whose entries are all read by a function."""
    return tuple([read(item, what) for item in read_list(value, what)])


def read_wholes(
    value: Any, what: str, least: int = 0, most: int = LARGEST_WHOLE
) -> tuple[int, ...]:
    """A list of whole numbers in a range."""
    return tuple([read_whole(item, what, least, most) for item in read_list(value, what)])


def read_mapping(value: Any, what: str) -> dict[str, Any]:
    """A mapping from texts."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {_shown(value)} is not a mapping")
    for key in value:
        read_text(key, f"a name in {what}")
    return value


def read_field(data: dict[str, Any], key: str, what: str = "it") -> Any:
    """What a mapping has under a key that it must have."""
    if key not in data:
        of = "" if what == "it" else f" of {what}"
        raise ValueError(f"field {key!r}{of} is missing")
    return data[key]


def check_plain(value: Any, what: str, depth: int = 0) -> None:
    """Raises ValueError for texts in some data that cannot be shown, and for deep nesting; for data
    whose meaning is not known here."""
    if depth > MOST_NESTING:
        raise ValueError(f"{what} is nested more than {MOST_NESTING} times")
    if isinstance(value, str):
        read_text(value, f"a text in {what}")
    elif isinstance(value, dict):
        for key, item in value.items():
            read_text(key, f"a name in {what}")
            check_plain(item, what, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_plain(item, what, depth + 1)
