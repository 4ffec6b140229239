"""Repeats: the equal layers of a step, and the same step with few of them.

Layers are an offer of split/ to searches, which decide for a short step sooner than for a long one.
They are recognised by numbers in the paths of modules (`blocks.7.attn`), and accepted only if the
Graph agrees: the layers between the first and the last hold equal Ops in equal order, each reads
the same Values of itself, of the layer before and of the one after, or Values that all share, and
nobody else reads what a layer makes. Then all but the first two and the last two can be left out;
what the ends of the gap read of it, they read of each other.

A search on the short step decides for the long one: every Op that was left out gets the Choice of
its counterpart in the second layer; a sweep over the long step then improves single Choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from apportion.graph import Graph, Op

LAYERS = 16  # fewer are not worth leaving any out
KEPT = 2  # layers at each end


@dataclass(frozen=True)
class ShortenedGraph:
    """A Graph with few of its equal layers.

    ops, values     for each Op and Value of the whole Graph the one here that stands for it
    """

    graph: Graph
    ops: tuple[int, ...]
    values: tuple[int, ...]


def shorten(graph: Graph, kinds: Sequence[int]) -> ShortenedGraph | None:
    """The Graph without its middle layers; None if it has no long row of equal ones. `kinds`
    numbers the Ops, equal for equal calls."""
    layers = layers_of(graph)
    count = 1 + max(layers, default=-1)
    if count < LAYERS:
        return None
    rows: list[list[int]] = [[] for _ in range(count)]
    for index, layer in enumerate(layers):
        if layer >= 0:
            rows[layer].append(index)
    middle = rows[1:-1]
    calls = [[kinds[op] for op in row] for row in middle]
    if any(row != calls[0] for row in calls):
        return None
    slots = _LayerSlots(graph, layers, rows)
    like = [slots.signature(op, KEPT) for op in rows[KEPT]]
    for layer in range(KEPT + 1, count - KEPT):
        if any(slots.signature(op, layer) != s for op, s in zip(rows[layer], like, strict=True)):
            return None
    if None in like or slots.read_elsewhere(KEPT, count - KEPT):
        return None
    places = slots.places(count)
    if any(place.keys() != places[1].keys() for place in places[1:-1]):
        return None
    return _GraphShortener(graph, rows, slots, places).short()


def layers_of(graph: Graph) -> list[int]:
    """For each Op its layer in the row of layers that holds most Ops, -1 for none."""
    found: dict[str, list[tuple[str, int]]] = {}
    sizes = Counter[str]()
    for module, ops in Counter(op.module for op in graph.ops).items():
        path = module.split(".")
        found[module] = [
            (".".join(path[:depth]), int(part))
            for depth, part in enumerate(path)
            if part.isdecimal()
        ]
        for row, _ in found[module]:
            sizes[row] += ops
    if not sizes:
        return [-1] * len(graph.ops)
    best = max(sizes, key=lambda row: (sizes[row], row))
    layer = {module: dict(rows).get(best, -1) for module, rows in found.items()}
    return [layer[op.module] for op in graph.ops]


class _LayerSlots:
    """The place of each Value in its layer: the position of the Op that makes it and of the output,
    or those of its first reader if no Op makes it and only one layer reads it."""

    def __init__(self, graph: Graph, layers: list[int], rows: list[list[int]]) -> None:
        self.graph, self.layers = graph, layers
        self.layer = [-1] * len(graph.values)
        self.slot = [-1] * len(graph.values)
        numbers: dict[tuple[bool, int, int], int] = {}
        made: set[int] = set()
        for op in graph.ops:
            made.update(op.outputs)
        readers: dict[int, int] = {}
        for op, layer in zip(graph.ops, layers, strict=True):
            for value in op.inputs:
                if value not in made and readers.setdefault(value, layer) != layer:
                    readers[value] = -1
        for layer, row in enumerate(rows):
            for position, index in enumerate(row):
                op = graph.ops[index]
                for k, value in enumerate(op.outputs):
                    self.layer[value] = layer
                    self.slot[value] = numbers.setdefault((True, position, k), len(numbers))
                for k, value in enumerate(op.inputs):
                    if self.slot[value] < 0 and readers.get(value, -1) == layer:
                        self.layer[value] = layer
                        self.slot[value] = numbers.setdefault((False, position, k), len(numbers))

    def signature(self, index: int, layer: int) -> list[int] | None:
        """What an Op of a layer reads, as seen from there; None if that is too far away."""
        found = []
        for value in self.graph.ops[index].inputs:
            own = self.layer[value]
            if own < 0:
                found.append(-1 - value)
            elif -1 <= own - layer <= 1:
                found.append(3 * self.slot[value] + own - layer + 1)
            else:
                return None
        return found

    def places(self, count: int) -> list[dict[int, int]]:
        """The Value at each place of each layer."""
        found: list[dict[int, int]] = [{} for _ in range(count)]
        for value, layer in enumerate(self.layer):
            if layer >= 0:
                found[layer][self.slot[value]] = value
        return found

    def read_elsewhere(self, first: int, last: int) -> bool:
        """Whether an Op outside of layers `first` to `last` reads them from afar, or the step
        ends with something of theirs that is no state."""
        inside = [first <= layer < last for layer in self.layer]
        if self.graph.loss is not None and inside[self.graph.loss]:
            return True
        if any(inside[after] and not inside[before] for before, after in self.graph.state):
            return True  # something that the step returns
        for op, layer in zip(self.graph.ops, self.layers, strict=True):
            if first <= layer < last:
                continue
            if any(inside[v] and abs(self.layer[v] - layer) > 1 for v in op.inputs):
                return True
            if layer < 0 and any(inside[v] for v in op.inputs):
                return True
        return False


class _GraphShortener:
    """Leaves out the layers between the first `KEPT` and the last `KEPT`."""

    def __init__(
        self, graph: Graph, rows: list[list[int]], slots: _LayerSlots, places: list[dict[int, int]]
    ) -> None:
        self.graph, self.rows, self.slots, self.places = graph, rows, slots, places
        self.before, self.after = KEPT - 1, len(rows) - KEPT

    def short(self) -> ShortenedGraph:
        graph, slots = self.graph, self.slots
        before, after = self.places[self.before], self.places[self.after]
        gone = [self.before < layer < self.after for layer in slots.layer]
        stand_in = list(range(len(graph.ops)))
        for row in self.rows[self.before + 1 : self.after]:
            for index, like in zip(row, self.rows[self.before], strict=True):
                stand_in[index] = like
        values = list(range(len(graph.values)))
        for value, is_gone in enumerate(gone):
            if is_gone:
                values[value] = before[slots.slot[value]]
        kept_ops = [n for n, like in enumerate(stand_in) if n == like]
        kept_values = [v for v, is_gone in enumerate(gone) if not is_gone]
        op_number = {n: k for k, n in enumerate(kept_ops)}
        number = {v: k for k, v in enumerate(kept_values)}
        ends = dict.fromkeys(self.rows[self.before], after)

        def renamed(index: int) -> Op:
            op = graph.ops[index]
            other = ends.get(index, before)
            inputs = [other[slots.slot[v]] if gone[v] else v for v in op.inputs]
            forward = None if op.forward is None else op_number.get(op.forward)
            return replace(
                op,
                inputs=tuple([number[v] for v in inputs]),
                outputs=tuple([number[v] for v in op.outputs]),
                forward=forward,
                parameter=None if op.parameter is None else number[op.parameter],
            )

        short = replace(
            graph,
            values=tuple([graph.values[v] for v in kept_values]),
            ops=tuple([renamed(index) for index in kept_ops]),
            state=tuple((number[a], number[b]) for a, b in graph.state if not gone[a]),
            loss=None if graph.loss is None else number[graph.loss],
        )
        return ShortenedGraph(
            short,
            tuple([op_number[n] for n in stand_in]),
            tuple([number[v] for v in values]),
        )
