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

import numpy as np

from apportion.flow import MADE, READ, Flow
from apportion.graph import BUFFER, FORWARD, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.tasks import Ints
from apportion.tdl import lookup

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
        self._known: dict[tuple[int, int, bool], tuple[Flow, Ints]] = {}

    def touch(self, values: Iterable[int]) -> None:
        """The Flows of these Values are others now."""
        self.touched.update(values)

    def nbytes(self) -> Ints:
        """Bytes by device under the Flows as they are."""
        for storage in {self.shared[v] for v in self.touched if v in self.shared}:
            now = np.max([self._of(value) for value in self.members[storage]], axis=0)
            self.total += now - self.counted[storage]
            self.counted[storage] = now
        self.touched.clear()
        return self.total.copy()

    def _of(self, value: int) -> Ints:
        flow, key = self.flows[value], self.stage[value]
        found = self._known.get((id(flow), *key))
        if found is None:
            if len(self._known) > MEMORY:
                self._known.clear()
            found = self._known[id(flow), *key] = (flow, held_pieces(flow, *key, self.devices))
        return found[1]


def held_pieces(flow: Flow, late: int, state: bool, devices: int) -> Ints:
    """Bytes by device of the pieces that are made before stage `late` and used from it on; of state
    also of all with which the step begins."""
    first = int(np.searchsorted(flow.stage, late))
    read = flow.answer[flow.answer_start[late] :]
    fetched = flow.source[flow.source_start[first] :]
    used = np.concatenate([read[(read >= 0) & (read < first)], fetched[fetched < first]])
    if state:
        used = np.concatenate([used, np.arange(*flow.made_at(MADE))])
    while True:  # a view holds what it is a view of
        base = flow.base[used]
        if (base < 0).all():
            break
        used = np.where(base < 0, used, base)
    used = np.unique(used)
    count = np.bincount(flow.device[used], flow.nbytes[used], devices)
    return count.astype(np.int64)


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
