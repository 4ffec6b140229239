"""Optimizer state that is kept in lists, tuples and dicts, as one entry for each tensor in them.

Part of capture/. A Graph knows state by names: `Q` that is a list of two tensors becomes `Q[0]` and
`Q[1]`, a tuple `Q(0)`, a dict `Q{key}`, or `Q{=0.9}` where the key is a number. `nested_state` puts
back what `flat_state` took apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", dict: "{}"}
_NUMBER = "="
NUMBERED = "{" + _NUMBER  # in the name of what a dict has under a number
_PLACE = re.compile(r"\[(\d+)\]$|\((\d+)\)$|\{([^{}]*)\}$")


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state, those of lists, tuples and dicts one by one. Empty ones stay."""
    return {name: value for key, each in state.items() for name, value in _flat(key, each)}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    brackets = _BRACKETS.get(type(value))
    if brackets is None or not value or not _is_plain(value):
        yield name, value
        return
    entries = value.items() if type(value) is dict else enumerate(value)
    for place, each in entries:
        number = type(value) is dict and not isinstance(place, str)
        told = f"{_NUMBER}{place!r}" if number else place
        yield from _flat(f"{name}{brackets[0]}{told}{brackets[1]}", each)


def _is_plain(value: Any) -> bool:
    """Whether the entries can be told by names."""
    return type(value) is not dict or all(map(_is_plain_key, value))


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, str):
        return not key.startswith(_NUMBER) and not set(key) & set("[](){}")
    return type(key) is int or (type(key) is float and math.isfinite(key))


def _key(told: str) -> str | int | float:
    if not told.startswith(_NUMBER):
        return told
    number = told.removeprefix(_NUMBER)
    return int(number) if number.lstrip("-").isdigit() else float(number)


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The state whose entries these are."""
    found: dict[str, Any] = dict(flat)
    while True:
        deepest = max((n for n in found if _PLACE.search(n)), key=_depth, default=None)
        if deepest is None:
            return found
        match = _PLACE.search(deepest)
        assert match is not None
        owner, kind = deepest[: match.start()], deepest[match.start()]
        own = {n: found.pop(n) for n in list(found) if _owner(n) == (owner, kind)}
        found[owner] = _container(kind, own)


def _depth(name: str) -> int:
    match = _PLACE.search(name)
    return 0 if match is None else 1 + _depth(name[: match.start()])


def _owner(name: str) -> tuple[str, str] | None:
    match = _PLACE.search(name)
    return None if match is None else (name[: match.start()], name[match.start()])


def _container(kind: str, entries: Mapping[str, Any]) -> Any:
    places = {}
    for name, value in entries.items():
        match = _PLACE.search(name)
        assert match is not None
        places[match[0][1:-1]] = value
    if kind == "{":
        return {_key(told): value for told, value in places.items()}
    ordered = [places[place] for place in sorted(places, key=int)]
    return tuple(ordered) if kind == "(" else ordered
