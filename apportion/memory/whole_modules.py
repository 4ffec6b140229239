"""whole_modules: what the backward computes again where whole modules are checkpointed.

Part of the room memory. A Graph and paths of modules come in, forward Ops go out.

A checkpointed module keeps what it is called with and computes the rest of itself again. So of its
Ops all are computed again but those whose results leave it: these are what others are called with,
or what stands at the end. (If they were computed again too, then a module would have to wait for
all modules before it, and nothing would be saved.) It is what torch.utils.checkpoint does to a
module, and so what can be written with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from apportion.graph import FORWARD, Graph

_NUMBERED = re.compile(r"(?:[^.\d][^.]*\.)+\d+")


def modules_of(graph: Graph) -> list[str]:
    """The paths of all modules that forward Ops are in, outer ones first."""
    found: dict[str, None] = {}
    for op in graph.ops:
        parts = op.module.split(".") if op.phase == FORWARD and op.module else []
        for count in range(1, len(parts) + 1):
            found[".".join(parts[:count])] = None
    return sorted(found, key=lambda path: path.count("."))


def numbered_modules(graph: Graph) -> list[str]:
    """The layers: modules whose paths end with the first number in them."""
    return [path for path in modules_of(graph) if _NUMBERED.fullmatch(path)]


def is_within(module: str, path: str) -> bool:
    """Whether a module is the one of that path, or inside it."""
    return module == path or module.startswith(f"{path}.")


def inside_modules(graph: Graph, paths: Collection[str]) -> list[int]:
    """The forward Ops inside these modules, but for those whose results leave the outermost of
    these that they are in."""
    home = homes_of(graph, paths)
    return [
        index
        for index, path in enumerate(home)
        if path is not None and not _leaves(graph, index, home)
    ]


def homes_of(graph: Graph, paths: Iterable[str]) -> list[str | None]:
    """For each Op the outermost of these modules that it is in, None for none and for Ops that are
    not of the forward."""
    outer_first = sorted(set(paths), key=lambda path: path.count("."))
    known: dict[str, str | None] = {
        module: next((path for path in outer_first if is_within(module, path)), None)
        for module in {op.module for op in graph.ops}
    }
    return [known[op.module] if op.phase == FORWARD else None for op in graph.ops]


def _leaves(graph: Graph, index: int, home: list[str | None]) -> bool:
    """Whether the forward reads a result of an Op outside its module."""
    return any(
        graph.ops[reader].phase == FORWARD and home[reader] != home[index]
        for value in graph.ops[index].outputs
        for reader in graph.consumers[value]
    )
