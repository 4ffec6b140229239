"""Pins: what a user decides about the memory of some modules by hand.

Part of the room plan. Paths of modules with words come in, as a user writes them, and MemoryPins go
out for a Graph: what host_residence.py leaves as it is while it decides the rest.

    keep       what the operators of the module make is kept for the backward
    recompute  it is computed again there
    resident   the module's parameters stay on the device
    host       they lie on the host and are updated there
    device     they lie on the host and are updated on the device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.graph import FORWARD, PARAMETER, Graph
from apportion.memory import DEVICE, HOST

KEPT, AGAIN, RESIDENT = "keep", "recompute", "resident"
WORDS = (KEPT, AGAIN, RESIDENT, HOST, DEVICE)
Pins = Mapping[str, str | Sequence[str]]
"""By path of a module, one or several words."""


@dataclass(frozen=True)
class MemoryPins:
    """What is decided: Ops that are kept and that are recomputed, and where the state of parameters
    lies, by Value."""

    kept: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    state: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.kept or self.recomputed or self.state)


def read_pins(pins: Pins | None, graph: Graph) -> MemoryPins:
    """What pins mean for a Graph; raises ValueError for a word or a path that there is not, or for
    two that contradict each other."""
    kept: set[int] = set()
    again: set[int] = set()
    state: dict[int, str] = {}
    for path, given in (pins or {}).items():
        words = [given] if isinstance(given, str) else list(given)
        for word in words:
            _check(path, word, words)
        ops = [k for k, op in enumerate(graph.ops) if op.phase == FORWARD and _in(op.module, path)]
        values = [
            v
            for v, value in enumerate(graph.values)
            if value.role == PARAMETER and graph.producer[v] is None
            if _in(value.name.rpartition(".")[0], path) or value.name == path
        ]
        if not ops and not values:
            raise ValueError(f"the step has no module {path!r} to pin")
        kept |= set(ops) if KEPT in words else set()
        again |= set(ops) if AGAIN in words else set()
        for word in words:
            state |= dict.fromkeys(values, word) if word in (RESIDENT, HOST, DEVICE) else {}
    return MemoryPins(frozenset(kept - again), frozenset(again), tuple(sorted(state.items())))


def _check(path: str, word: str, words: Sequence[str]) -> None:
    if word not in WORDS:
        raise ValueError(f"module {path!r} cannot be pinned {word!r}; choose of {', '.join(WORDS)}")
    opposed = ({KEPT, AGAIN}, {RESIDENT, HOST, DEVICE})
    if any(len(set(words) & some) > 1 for some in opposed):
        raise ValueError(f"module {path!r} is pinned in two ways: {', '.join(words)}")


def _in(module: str, path: str) -> bool:
    """Whether a module is the one of that path, or within it."""
    return module == path or module.startswith(f"{path}.")
