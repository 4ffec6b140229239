"""What keeping and recomputing cost: bytes of Values and seconds of Ops on one device.

Part of the room memory. The tasks of a step and their Timeline come in, RecomputeCosts go out: what
planners estimate with before they simulate.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from apportion.graph import BACKWARD, FORWARD, Graph
from apportion.lower import COMPUTE, TaskGraph
from apportion.simulate import Timeline
from apportion.split import Space


@dataclass(frozen=True)
class RecomputeCosts:
    """Of a captured Graph on one device.

    seconds  for each Op what it takes to compute it once more
    nbytes   for each Value what it occupies beside what is there when the step begins, such as a
             parameter that was gathered; 0 if it shares the memory of another
    shares   for each Value the one whose memory it shares, or itself
    """

    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    shares: tuple[int, ...]


def recompute_costs(
    space: Space, tasks: TaskGraph, timeline: Timeline, device: int
) -> RecomputeCosts:
    """The costs of `space.source` on a device, from its tasks and when they run."""
    graph = space.source
    computes = np.flatnonzero((tasks.kind == COMPUTE) & (tasks.device == device))
    took = (timeline.end_ns - timeline.start_ns)[computes] / 1e9
    origins = np.array([*space.origins, len(graph.ops)])
    seconds = np.bincount(origins[tasks.op[computes]], took, len(graph.ops) + 1)
    here = np.flatnonzero(tasks.slot_device == device)
    here = here[tasks.slot_value[here] < len(graph.values)]
    values, bases = tasks.slot_value[here], tasks.slot_base[here]
    own = bases < 0
    made = here[own & (tasks.slot_first[here] >= 0)]
    nbytes = np.bincount(tasks.slot_value[made], tasks.slot_nbytes[made], len(graph.values))
    shares = list(range(len(graph.values)))
    for value, base in zip(values[~own].tolist(), bases[~own].tolist(), strict=True):
        shared = int(tasks.slot_value[base])
        if shared < len(shares) and not nbytes[value]:
            shares[value] = shared
    return RecomputeCosts(
        tuple(seconds[:-1].tolist()), tuple(map(int, nbytes.tolist())), _roots(shares)
    )


def _roots(shares: list[int]) -> tuple[int, ...]:
    """The ends of chains; a Value made later may share the memory of one made earlier only."""
    found = []
    for value in range(len(shares)):
        seen = {value}
        while shares[value] not in seen:
            value = shares[value]
            seen.add(value)
        found.append(value)
    return tuple(found)


def kept_values(graph: Graph, costs: RecomputeCosts, ops: Set[int]) -> set[int]:
    """The Values made before the backward that lie in memory until then, if it recomputes these
    Ops; parameters among them, which may have been gathered."""
    kept: set[int] = set()
    repeated: set[int] = set()
    waiting = [op for op, meant in enumerate(graph.ops) if meant.phase == BACKWARD]
    while waiting:
        for value in graph.ops[waiting.pop()].inputs:
            made = graph.producer[value]
            if made is not None and graph.ops[made[0]].phase != FORWARD:
                continue
            if made is None or made[0] not in ops:
                kept.add(costs.shares[value])
            elif made[0] not in repeated:
                repeated.add(made[0])
                waiting.append(made[0])
    return kept


class ForwardMemory:
    """What the forward keeps for the backward, and what is saved by recomputing few Ops: found by
    looking at these alone."""

    def __init__(self, graph: Graph, costs: RecomputeCosts) -> None:
        self.graph, self.costs = graph, costs
        self.kept = kept_values(graph, costs, frozenset())
        self.total = self._bytes(self.kept)
        self._read: dict[int, int] = {}  # what the backward reads, with the Op that makes it, or -1
        for op in graph.ops:
            for value in op.inputs if op.phase == BACKWARD else ():
                maker = self._maker(value)
                if maker is not None:
                    self._read[value] = maker
        self._readers: dict[int, set[int]] = {}  # of a memory, the makers of what is read of it
        for value, maker in self._read.items():
            self._readers.setdefault(costs.shares[value], set()).add(maker)

    def _maker(self, value: int) -> int | None:
        """The forward Op that makes a Value, -1 if it is there from the beginning; else None."""
        made = self.graph.producer[value]
        if made is None:
            return -1
        return made[0] if self.graph.ops[made[0]].phase == FORWARD else None

    def saved(self, ops: Set[int]) -> int:
        """Bytes less that are kept if these Ops are recomputed; negative if they are more."""
        graph, shares = self.graph, self.costs.shares
        waiting = [op for op in ops if any(v in self._read for v in graph.ops[op].outputs)]
        repeated, needed = set(waiting), set()
        while waiting:
            for value in graph.ops[waiting.pop()].inputs:
                maker = self._maker(value)
                if maker is None:
                    continue
                if maker not in ops:
                    needed.add(shares[value])
                elif maker not in repeated:
                    repeated.add(maker)
                    waiting.append(maker)
        made = {shares[v] for op in repeated for v in graph.ops[op].outputs}
        gone = {v for v in made & self.kept - needed if self._readers[v] <= ops}
        return self._bytes(gone) - self._bytes(needed - self.kept)

    def _bytes(self, values: Set[int]) -> int:
        return sum(self.costs.nbytes[v] for v in values)
