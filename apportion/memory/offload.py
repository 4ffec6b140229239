"""offload: Values of the forward that lie in the host's memory until the backward reads them.

Part of the room memory. A Graph and Offloads come in, a RewrittenGraph goes out, in which whoever
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

from apportion.describe import FROM_HOST_KIND, ON_HOST_KIND, TO_HOST_KIND
from apportion.graph import ACTIVATION, BACKWARD, FORWARD, Graph
from apportion.memory.insert_ops import InsertedOps, host_op
from apportion.memory.rewritten_graph import NewValues, RewrittenGraph, unchanged


@dataclass(frozen=True, slots=True)
class Offload:
    """A Value that is offloaded. Ops are those of the Graph with recomputed Ops.

    value  made by an Op of the forward
    gone   the Op before which its memory is free for something else, at the soonest
    back   the Op before which it begins to come back, at the latest
    out    the Op before which it begins to leave, at the soonest: right after it is made if 0
    """

    value: int
    gone: int
    back: int
    out: int = 0


ENDINGS = ("host", "gone", "back")  # of the names of Values on the host, gone, and back again


def offload(graph: Graph, offloads: Iterable[Offload]) -> RewrittenGraph:
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
        self.graph, self.values = graph, NewValues(graph.values)
        self.inserted = InsertedOps(graph)

    def add(self, each: Offload) -> None:
        graph, value = self.graph, each.value
        readers, made = later_readers(graph, value), graph.producer[value]
        if not readers or made is None:
            return
        maker = made[0]
        early = [op for op in graph.consumers[value] if op not in readers]
        back = max(min(each.back, readers[0]), maker + 1)
        gone = max(min(each.gone, back), max(early, default=maker) + 1)
        out = min(max(each.out, maker + 1), gone, back)
        host, done, copy = (self.values.add(value, how, ACTIVATION) for how in ENDINGS)
        self._stand(out, (0, maker), maker, TO_HOST_KIND, (value,), host, FORWARD)
        self._stand(gone, (1, maker), maker, ON_HOST_KIND, (value, host), done, FORWARD)
        self._stand(back, (2, readers[0]), maker, FROM_HOST_KIND, (host,), copy, BACKWARD)
        for reader in readers:
            self.inserted.read_instead(reader, value, copy)

    def _stand(
        self, place: int, turn: tuple[int, int], maker: int, kind: str, inputs: tuple[int, ...],
        output: int, phase: str,
    ) -> None:  # fmt: skip
        name = self.values.values[output].name
        op = host_op(kind, name, inputs, output, phase, self.graph.ops[maker])
        forward = maker if phase == BACKWARD else None
        self.inserted.add(place, turn, maker, replace(op, forward=forward))

    def built(self) -> RewrittenGraph:
        if not self.inserted.any:
            return unchanged(self.graph)
        return self.inserted.built(self.values)
