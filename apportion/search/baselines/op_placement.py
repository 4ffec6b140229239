"""op-placement: every Op whole on one device, layers to devices in turn.

In: a Problem. Out: the Strategy in which nothing is cut, and layers are dealt out to the devices.

A layer is what one module does, at the depth at which modules repeat (`blocks.3`, `cells.0`):
the shallowest depth that has a layer for every device, else the deepest. Ops outside of such
modules belong to the layer that reads them, or, if they make less than they read, to the one they
read from. Backward Ops go with their forward Op, updates with the first Op that reads the
parameter.
"""

from __future__ import annotations

from apportion.graph import FORWARD, Graph, Op
from apportion.search.problem import Problem, SearchResult
from apportion.split import Strategy, unsplit_choice


def op_placement(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Layers round robin."""
    space, devices = problem.space, problem.devices
    layer = layers(space.graph, devices)
    number = {name: k for k, name in enumerate(dict.fromkeys(layer))}
    choices = tuple(
        unsplit_choice(space, op, (number[name] % devices,)) for op, name in enumerate(layer)
    )
    return SearchResult(Strategy(choices, digits=space.digits, opening=space.opening))


def layers(graph: Graph, wanted: int) -> list[str]:
    """The layer of every Op, `wanted` of them where modules nest deeply enough."""
    depths = 1 + max((op.module.count(".") for op in graph.ops), default=0)
    found: list[str] = []
    for depth in range(1, depths + 1):
        found = _at_depth(graph, depth)
        if len(set(found)) >= wanted:
            break
    return found


def _at_depth(graph: Graph, depth: int) -> list[str]:
    """The layer of every Op, modules told apart by `depth` numbers in their paths."""
    readers = _reading(graph, depth)
    found: list[str] = []
    for op, named in zip(graph.ops, readers, strict=True):
        if op.phase == FORWARD:
            found.append(named or _read(graph, found, op))
        elif op.forward is not None:
            found.append(found[op.forward])
        else:
            first = graph.consumers[op.parameter][0] if op.parameter is not None else len(found)
            found.append(found[first] if first < len(found) else _read(graph, found, op))
    start = next((name for name in found if name), "")
    return [name or start for name in found]


def _reading(graph: Graph, depth: int) -> list[str]:
    """Layers of the forward Ops of modules, and of those before them that make no less than they
    read, such as the states that a cell begins with; "" for the others."""
    found = [prefix(op.module, depth) if op.phase == FORWARD else "" for op in graph.ops]
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        made, read = (sum(graph.values[v].nbytes for v in vs) for vs in (op.outputs, op.inputs))
        if op.phase == FORWARD and not found[index] and made >= read:
            after = [r for v in op.outputs for r in graph.consumers[v]]
            found[index] = found[min(after)] if after else ""
    return found


def prefix(module: str, depth: int) -> str:
    """A module's path as far as its number of that depth; its first name if it has none."""
    names = module.split(".")
    numbered = [k for k, name in enumerate(names) if name.isdigit()]
    if not numbered:
        return ".".join(names[:depth])
    return ".".join(names[: numbered[min(depth, len(numbered)) - 1] + 1])


def _read(graph: Graph, found: list[str], op: Op) -> str:
    """The latest layer that makes something that is read."""
    made = [graph.producer[v] for v in op.inputs]
    return next((found[m[0]] for m in sorted((m for m in made if m), reverse=True)), "")
