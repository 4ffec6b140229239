"""HeldBytes: the bytes that every device holds across the step, as far as Flows say. A part of
simulate/delta/.

In: the Flows of all Values, which may change. Out: bytes by device, of

    state        the pieces of parameters, optimizer state and buffers with which the step begins
    activations  the pieces that the forward pass makes or fetches and that backward Ops read, or
                 from which they fetch what they read; what is fetched later is soon gone

Values that share storage (a view and what it is a view of) count once: as the one of them of which
a device holds most. It is not the peak, which depends on the order of all tasks of a device, but it
is what a peak is made of, and a search can afford it for every proposal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np

from apportion.columns import Ints, compiled
from apportion.describe import (
    FROM_HOST_KIND,
    HOST_UPDATE_KIND,
    TO_HOST_KIND,
    find_description,
)
from apportion.graph import BUFFER, FORWARD, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import MADE, READ, FlowStore, Lowering, end_piece, first_piece

STATE = (PARAMETER, OPTIMIZER_STATE, BUFFER)
MEMORY = 1 << 16  # Flows whose bytes are remembered


class HeldBytes:
    """Bytes held per device under Flows that may change. Whoever changes one says so (`touch`)."""

    def __init__(self, lowering: Lowering, flows: Sequence[int]) -> None:
        self.lowering, self.flows = lowering, flows
        graph, devices = lowering.graph, lowering.devices
        self.stage = _late_stages(graph)
        self.shared = _storages(graph, self.stage)
        self.members: dict[int, list[int]] = {}
        for value, storage in self.shared.items():
            self.members.setdefault(storage, []).append(value)
        self.total = np.zeros(devices, np.int64)
        self.counted = {storage: np.zeros(devices, np.int64) for storage in self.members}
        self.touched = set(self.shared)  # Values
        self.seen: dict[int, int] = {}
        self._known: dict[tuple[int, int, bool], Ints] = {}

    def touch(self, values: Iterable[int]) -> None:
        """The Flows of these Values are others now."""
        self.touched.update(values)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Flows have other numbers now; those that are not named are gone."""
        self.seen = {v: numbers[f] for v, f in self.seen.items() if f in numbers}
        self._known = {
            (numbers[f], late, state): found
            for (f, late, state), found in self._known.items() if f in numbers
        }  # fmt: skip

    def nbytes(self) -> Ints:
        """Bytes by device under the Flows as they are."""
        flows, seen, storages = self.flows, self.seen, set()
        for value in self.touched:
            if value in self.shared and seen.get(value) != flows[value]:
                seen[value] = flows[value]
                storages.add(self.shared[value])
        self.touched.clear()
        for storage in storages:
            now = reduce(np.maximum, [self._of(value) for value in self.members[storage]])
            self.total += now - self.counted[storage]
            self.counted[storage] = now
        return self.total.copy()

    def _of(self, value: int) -> Ints:
        flow, (late, state) = self.flows[value], self.stage[value]
        found = self._known.get((flow, late, state))
        if found is None:
            if len(self._known) > MEMORY:
                self._known.clear()
            found = held_pieces(self.lowering.store, flow, late, state, self.lowering.devices)
            self._known[flow, late, state] = found
        return found


@compiled
def held_pieces(store: FlowStore, flow: int, late: int, state: bool, devices: int) -> Ints:
    """Bytes by device of the pieces of a Flow that are made before stage `late` and used from it
    on; of state also of all with which the step begins."""
    begin, end = first_piece(store, flow), end_piece(store, flow)
    stage, last = store.stage_start[flow] + late, store.stage_start[flow + 1] - 1
    first = store.piece_start[stage]
    used, held = np.zeros(end - begin, np.bool_), np.zeros(end - begin, np.bool_)
    for k in range(store.answer_start[stage], store.answer_start[last]):
        if 0 <= store.answer[k] < first:
            used[store.answer[k] - begin] = True
    for q in range(store.source_start[first], store.source_start[end]):
        if store.source[q] < first:
            used[store.source[q] - begin] = True
    if state:
        at = store.stage_start[flow] + MADE
        used[store.piece_start[at] - begin : store.piece_start[at + 1] - begin] = True
    found = np.zeros(devices, np.int64)
    for piece in range(begin, end):
        if not used[piece - begin]:
            continue
        root = piece
        while store.base[root] >= 0:  # a view holds what it is a view of
            root = store.base[root]
        if not held[root - begin]:
            held[root - begin] = True
            found[store.device[root]] += store.nbytes[root]
    return found


def _late_stages(graph: Graph) -> dict[int, tuple[int, bool]]:
    """Of every Value that may be held the stage of its first backward reader, and whether it is
    state."""
    found = {}
    for value, made in enumerate(graph.producer):
        readers = graph.consumers[value]
        early = sum(graph.ops[op].phase == FORWARD for op in readers)
        state = graph.values[value].role in STATE
        kinds = {graph.ops[op].kind for op in readers}
        if made is not None and graph.ops[made[0]].kind in (TO_HOST_KIND, HOST_UPDATE_KIND):
            continue  # it lies on the host
        if made is None and not kinds.isdisjoint((FROM_HOST_KIND, HOST_UPDATE_KIND)):
            continue
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
            description = find_description(op.kind)
            if description is None or not description.alias or not op.inputs:
                break
            root = op.inputs[0]
            made = graph.producer[root]
        found[value] = root
    return found
