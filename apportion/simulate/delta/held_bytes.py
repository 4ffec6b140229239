"""held: the bytes that every device holds across the step, as far as Flows say.

    state        the pieces of parameters, optimizer state and buffers with which the step begins
    activations  the pieces that the forward pass makes or fetches and that backward Ops read, or
                 from which they fetch what they read; what is fetched later is soon gone

Values that share storage (a view and what it is a view of) count once: as the one of them of which
a device holds most. It is not the peak, which depends on the order of all tasks of a device, but it
is what a peak is made of, and a search can afford it for every proposal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from apportion.columns import Ints, compiled
from apportion.describe import lookup
from apportion.graph import BUFFER, FORWARD, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import HEAD, MADE, READ, Flow

STATE = (PARAMETER, OPTIMIZER_STATE, BUFFER)
MEMORY = 1 << 16  # Flows whose bytes are remembered


class Held:
    """Bytes held per device under Flows that may change. Whoever changes one says so (`touch`)."""

    def __init__(self, graph: Graph, flows: Sequence[Flow], devices: int) -> None:
        self.flows, self.devices = flows, devices
        self.stage = _late_stages(graph)
        self.shared = _storages(graph, self.stage)
        self.members: dict[int, list[int]] = {}
        for value, storage in self.shared.items():
            self.members.setdefault(storage, []).append(value)
        self.total = np.zeros(devices, np.int64)
        self.counted = {storage: np.zeros(devices, np.int64) for storage in self.members}
        self.touched = set(self.shared)  # Values
        self.seen: dict[int, Flow] = {}
        self._known: dict[tuple[int, int, bool], tuple[Flow, Ints]] = {}

    def touch(self, values: Iterable[int]) -> None:
        """The Flows of these Values are others now."""
        self.touched.update(values)

    def nbytes(self) -> Ints:
        """Bytes by device under the Flows as they are."""
        flows, seen, storages = self.flows, self.seen, set()
        for value in self.touched:
            if value in self.shared and seen.get(value) is not flows[value]:
                seen[value] = flows[value]
                storages.add(self.shared[value])
        self.touched.clear()
        for storage in storages:
            now = reduce(np.maximum, [self._of(value) for value in self.members[storage]])
            self.total += now - self.counted[storage]
            self.counted[storage] = now
        return self.total.copy()

    def _of(self, value: int) -> Ints:
        flow, key = self.flows[value], self.stage[value]
        found = self._known.get((id(flow), *key))
        if found is None:
            if len(self._known) > MEMORY:
                self._known.clear()
            made: Ints = held_pieces(flow.core, *key, self.devices)
            found = self._known[id(flow), *key] = (flow, made)
        return found[1]


@compiled
def held_pieces(core: Ints, late: int, state: bool, devices: int) -> Ints:
    """Bytes by device of the pieces of a Flow that are made before stage `late` and used from it
    on; of state also of all with which the step begins."""
    pieces, sources, wants, stages = core[1], core[2], core[3], core[4]
    made, answered = HEAD, HEAD + stages + 1
    device = answered + stages + 1
    nbytes, base, source_start = device + pieces, device + 2 * pieces, device + 3 * pieces
    answer = source_start + pieces + 1
    source, first = answer + wants, core[made + late]
    used = np.zeros(pieces, np.bool_)
    for k in range(answer + core[answered + late], source):
        if 0 <= core[k] < first:
            used[core[k]] = True
    for k in range(source + core[source_start + first], source + sources):
        if core[k] < first:
            used[core[k]] = True
    if state:
        used[core[made + MADE] : core[made + MADE + 1]] = True
    held, found = np.zeros(pieces, np.bool_), np.zeros(devices, np.int64)
    for piece in np.flatnonzero(used):
        root = piece
        while core[base + root] >= 0:  # a view holds what it is a view of
            root = core[base + root]
        if not held[root]:
            held[root] = True
            found[core[device + root]] += core[nbytes + root]
    return found


def _late_stages(graph: Graph) -> dict[int, tuple[int, bool]]:
    """Of every Value that may be held the stage of its first backward reader, and whether it is
    state."""
    found = {}
    for value, made in enumerate(graph.producer):
        readers = graph.consumers[value]
        early = sum(graph.ops[op].phase == FORWARD for op in readers)
        state = graph.values[value].role in STATE
        if (made is None and state) or (
            made is not None and graph.ops[made[0]].phase == FORWARD and early < len(readers)
        ):
            found[value] = (READ + early, state)
    return found


def _storages(graph: Graph, held: Iterable[int]) -> dict[int, int]:
    """For every Value that is held the one whose storage it shares, maybe itself."""
    found = {}
    for value in held:
        root, made = value, graph.producer[value]
        while made is not None:
            op = graph.ops[made[0]]
            description = lookup(op.kind)
            if description is None or not description.alias or not op.inputs:
                break
            root = op.inputs[0]
            made = graph.producer[root]
        found[value] = root
    return found
