"""offload: Values of the forward that lie in the host's memory until the backward reads them.

Part of the room memory. A Graph and Offloads come in, an OffloadedGraph goes out, in which whoever
reads such a Value after the forward reads a copy that was to the host and back:

    y = gelu(x)   h = to_host(y)   z = y @ w   on_host(y, h)   ...   y' = from_host(h)
                                                                     dw = y'.T @ dz

    to_host    begins right after the Op that makes the Value
    on_host    is the moment from which on the Value's memory on the device can be used for
               something else: the device does not go on before the copy is complete. No sooner
               than the last Op of the forward that reads the Value
    from_host  begins when the device has done what stands before it, and no sooner, so that memory
               is what the order says; no later than the first Op that reads it

Each is an Op like any other. Values keep their numbers, new ones come after them, as in
recompute.py, whose Graph may be the one that comes in: then copies of recomputed Ops read what
comes back from the host too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from apportion.describe import FROM_HOST_KIND, HOST_KINDS, ON_HOST_KIND, TO_HOST_KIND
from apportion.graph import ACTIVATION, BACKWARD, FORWARD, Graph, Op, Ref
from apportion.memory.recompute import recompute


@dataclass(frozen=True, slots=True)
class Offload:
    """A Value that is offloaded. Ops are those of the Graph with recomputed Ops.

    value  made by an Op of the forward
    gone   the Op before which its memory is free for something else, at the soonest
    back   the Op before which it begins to come back, at the latest
    """

    value: int
    gone: int
    back: int


@dataclass(frozen=True)
class OffloadedGraph:
    """A Graph with Ops that copy to the host and back.

    origins  for each Op the one of the Graph before that it is; of a copy the one that made the
             Value
    values   for each Value the one of the Graph before that it equals
    """

    graph: Graph
    origins: tuple[int, ...]
    values: tuple[int, ...]

    def is_copy(self, op: int) -> bool:
        """Whether an Op copies to the host or back, or waits for that."""
        return self.graph.ops[op].kind in HOST_KINDS


def planned_graph(graph: Graph, recomputed: Iterable[int], offloads: Iterable[Offload]) -> Graph:
    """The Graph that runs: with recomputed Ops and offloaded Values; ValueError as these raise."""
    return offload(recompute(graph, recomputed).graph, offloads).graph


def offload(graph: Graph, offloads: Iterable[Offload]) -> OffloadedGraph:
    """The Graph in which these Values are offloaded; raises ValueError for one that cannot be.
    What nobody reads after the forward is left as it is."""
    chosen = sorted(offloads, key=lambda each: each.value)
    builder = _HostBuilder(graph)
    for number, each in enumerate(chosen):
        _check(graph, each)
        if number and chosen[number - 1].value == each.value:
            raise ValueError(f"value {graph.values[each.value].name!r} is offloaded twice")
        builder.add(each)
    return builder.built()


def _check(graph: Graph, each: Offload) -> None:
    if not 0 <= each.value < len(graph.values):
        raise ValueError(
            f"there is no value {each.value} to offload; there are {len(graph.values)}"
        )
    maker = graph.producer[each.value]
    if maker is None or graph.ops[maker[0]].phase != FORWARD:
        raise ValueError(
            f"value {graph.values[each.value].name!r} is not made by the forward; only what is can "
            "be offloaded"
        )


def later_readers(graph: Graph, value: int) -> list[int]:
    """The Ops that read a Value and are not of the forward."""
    return [op for op in graph.consumers[value] if graph.ops[op].phase != FORWARD]


class _HostBuilder:
    """The new Ops by where they stand, and the Values so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values, self.equal = list(graph.values), list(range(len(graph.values)))
        self.names = {value.name for value in graph.values}
        self.before: dict[int, list[tuple[int, int, Op]]] = {}  # (order, who made the Value, Op)
        self.instead: dict[tuple[int, int], int] = {}  # by reader and Value, what it reads

    def add(self, each: Offload) -> None:
        graph, value = self.graph, each.value
        readers, made = later_readers(graph, value), graph.producer[value]
        if not readers or made is None:
            return
        maker = made[0]
        early = [op for op in graph.consumers[value] if op not in readers]
        back = max(min(each.back, readers[0]), maker + 1)
        gone = max(min(each.gone, back), max(early, default=maker) + 1)
        host, done, copy = (self._value(value, how) for how in ("host", "gone", "back"))
        one, both = (Ref(0),), (Ref(0), Ref(1))
        self._stand(maker + 1, 0, maker, TO_HOST_KIND, (value,), host, one, FORWARD)
        self._stand(gone, 1, maker, ON_HOST_KIND, (value, host), done, both, FORWARD)
        self._stand(back, 2, maker, FROM_HOST_KIND, (host,), copy, one, BACKWARD)
        for reader in readers:
            self.instead[reader, value] = copy

    def _value(self, value: int, how: str) -> int:
        name = f"{self.graph.values[value].name}.{how}"
        while name in self.names:
            name = f"{name}.{how}"
        self.names.add(name)
        self.values.append(replace(self.graph.values[value], name=name, role=ACTIVATION))
        self.equal.append(value)
        return len(self.values) - 1

    def _stand(
        self, place: int, order: int, maker: int, kind: str, inputs: tuple[int, ...], output: int,
        args: tuple[Ref, ...], phase: str,
    ) -> None:  # fmt: skip
        first = self.graph.ops[maker]
        op = Op(
            f"{self.values[output].name}.{kind.rpartition('.')[2]}", kind, inputs, (output,), args,
            phase, first.line, first.module, maker if phase == BACKWARD else None,
        )  # fmt: skip
        self.before.setdefault(place, []).append((order, maker, op))

    def built(self) -> OffloadedGraph:
        graph = self.graph
        if not self.before:
            return OffloadedGraph(graph, tuple(range(len(graph.ops))), tuple(self.equal))
        ops: list[Op] = []
        origins: list[int] = []
        moved: list[int] = []
        for index in range(len(graph.ops) + 1):
            for _, maker, op in sorted(self.before.get(index, ()), key=lambda row: row[0]):
                ops.append(op)
                origins.append(maker)
            if index < len(graph.ops):
                moved.append(len(ops))
                ops.append(self._reading_copies(index))
                origins.append(index)
        ops = [op if op.forward is None else replace(op, forward=moved[op.forward]) for op in ops]
        made = replace(graph, values=tuple(self.values), ops=tuple(ops))
        return OffloadedGraph(made, tuple(origins), tuple(self.equal))

    def _reading_copies(self, index: int) -> Op:
        op = self.graph.ops[index]
        inputs = tuple([self.instead.get((index, value), value) for value in op.inputs])
        return op if inputs == op.inputs else replace(op, inputs=inputs)
