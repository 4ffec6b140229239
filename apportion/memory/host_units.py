"""host_units: what of a step may lie on the host, and what each option means, by chunks.

Part of the room memory. A Graph, what its Ops take and hold, and the rates of the host come in; out
goes a ChunkModel (chunk_model.py), whose units are the large parameters of a layer, together, and
single activations. Repeated layers so have one decision each, and may differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.columns import Ints
from apportion.graph import FORWARD, Graph
from apportion.machine import HostRates
from apportion.memory.chunk_model import (
    OFFLOADED,
    ON_HOST,
    RESIDENT,
    STREAMED,
    ChunkModel,
    Fetch,
    HostUnit,
    Leave,
    UnitOption,
)
from apportion.memory.host_state import (
    DEVICE,
    FIXED,
    HOST,
    moved_state,
    parameters_on_host,
    readers_on_device,
    shadow_dtype,
    travelling_gradient,
    update_of,
)
from apportion.memory.recompute_costs import RecomputeCosts
from apportion.memory.rewritten_graph import in_dtype, unchanged
from apportion.memory.time_host_state import chunk_starts
from apportion.memory.time_offloads import op_starts
from apportion.split import layers_of

SMALL = 1 << 20  # bytes under which a parameter is not worth a copy, if the step has larger ones


def large_parameters(graph: Graph) -> list[int]:
    """The parameters that are worth a copy: of at least SMALL bytes, or all that are not far
    smaller than the largest if none is so large."""
    every = parameters_on_host(graph)
    most = max((graph.values[v].nbytes for v in every), default=0)
    least = SMALL if most >= SMALL else most // 4
    return [value for value in every if graph.values[value].nbytes >= least]


@dataclass(frozen=True)
class HostMaterial:
    """What a ChunkModel is made of.

    graph   with recomputed Ops, in the order in which it runs
    costs   of that Graph
    levels  bytes that the device holds at most while each Op runs
    """

    graph: Graph
    costs: RecomputeCosts
    levels: Ints


def chunk_model(
    material: HostMaterial,
    rates: HostRates,
    updates: Collection[str] = (HOST, DEVICE),
    activations: Iterable[int] = (),
    lookahead: int = 2,
    pinned: Mapping[int, str] | None = None,
) -> ChunkModel:
    """The model of a step whose parameters may be updated so, and whose activations, of these
    Values, may be offloaded. `pinned` parameters have one option only."""
    return _UnitFinder(material, lookahead, pinned or {}).model(rates, updates, activations)


class _UnitFinder:
    def __init__(self, material: HostMaterial, lookahead: int, pinned: Mapping[int, str]) -> None:
        self.graph, self.costs, self.lookahead = material.graph, material.costs, lookahead
        self.pinned = pinned
        made = unchanged(self.graph)
        self.chunks = chunk_starts(made, self.costs)
        starts = op_starts(made, self.costs)
        ends = [*self.chunks[1:], len(self.graph.ops)]
        self.seconds = tuple(starts[b] - starts[a] for a, b in zip(self.chunks, ends, strict=True))
        self.levels = np.maximum.reduceat(material.levels, self.chunks)

    def model(
        self, rates: HostRates, updates: Collection[str], activations: Iterable[int]
    ) -> ChunkModel:
        units = [self._state_unit(members, updates) for members in self._groups()]
        units += [self._activation(value) for value in activations]
        real = tuple(unit for unit in units if unit is not None and len(unit.options) > 1)
        return ChunkModel(self.seconds, self.levels, rates, real)

    def chunk(self, op: int) -> int:
        """The chunk that an Op is in."""
        return bisect_right(self.chunks, op) - 1

    def _groups(self) -> list[tuple[int, ...]]:
        """The large parameters of each layer; others by themselves."""
        graph, layers = self.graph, layers_of(self.graph)
        found: dict[object, list[int]] = {}
        for value in large_parameters(graph):
            layer = layers[graph.consumers[value][0]]
            alike = (value not in graph.after, self.pinned.get(value, ""))
            found.setdefault((layer, alike) if layer >= 0 else ("", value), []).append(value)
        return [tuple(members) for members in found.values()]

    def _state_unit(self, members: Sequence[int], updates: Collection[str]) -> HostUnit | None:
        place = min(self.chunk(self.graph.consumers[v][0]) for v in members)
        options = [UnitOption(RESIDENT)]
        fixed, pin = members[0] not in self.graph.after, self.pinned.get(members[0])
        if pin is not None:
            updates = () if pin == RESIDENT else (pin,)
        for update in (FIXED,) if fixed and (updates or pin is None) else updates:
            parts = [self._parameter(value, update) for value in members]
            name = ON_HOST if update == HOST else STREAMED
            options.append(_together(FIXED if fixed else name, parts))
        if pin is not None and pin != RESIDENT:
            options = options[1:] * 2  # there is no other
        return HostUnit(tuple(members), tuple(options), place)

    def _parameter(self, value: int, update: str) -> UnitOption:
        """What one parameter on the host means."""
        graph, own = self.graph, update_of(self.graph, value)
        whole = graph.values[value]
        shadow = shadow_dtype(graph, value) if update == HOST else None
        nbytes = whole.nbytes if shadow is None else in_dtype(whole, shadow).nbytes
        fetches = self._fetches(readers_on_device(graph, value, update), nbytes)
        if own is None:
            return UnitOption(FIXED, whole.nbytes, fetches, host=whole.nbytes)
        inputs = graph.ops[own].inputs
        state = [graph.values[v].nbytes for v in inputs[2:]]
        here = self.chunk(own)
        if update == HOST:
            leaving = graph.values[travelling_gradient(graph, own)].nbytes
            made = graph.producer[travelling_gradient(graph, own)]
            leave = Leave(leaving, 1, here if made is None else self.chunk(made[0]), leaving)
            extra = 0 if shadow is None else nbytes
            work = 2 * (whole.nbytes + sum(state)) + leaving + extra
            saved = whole.nbytes + sum(state)
            return UnitOption(ON_HOST, saved, fetches, (leave,), work, saved + leaving + extra)
        moved = [graph.values[inputs[k]].nbytes for k in moved_state(graph, value, own)]
        after = min(here + 1, len(self.chunks) - 1)  # it is updated when the chunk is over
        come = Fetch(sum(moved), len(moved), after, after)
        out = whole.nbytes + sum(moved)
        leave = Leave(out, 1 + len(moved), here, out)
        return UnitOption(STREAMED, out, (*fetches, come), (leave,), 0, out)

    def _fetches(self, readers: Sequence[int], nbytes: int) -> tuple[Fetch, ...]:
        """One copy for readers that are near each other."""
        found: list[Fetch] = []
        for reader in readers:
            chunk = self.chunk(reader)
            if found and chunk - found[-1].last <= self.lookahead:
                found[-1] = replace(found[-1], last=chunk)
            else:
                found.append(Fetch(nbytes, 1, chunk, chunk))
        return tuple(found)

    def _activation(self, value: int) -> HostUnit | None:
        """A Value that the forward makes and the backward reads much later."""
        graph, nbytes = self.graph, self.costs.nbytes[value]
        made = graph.producer[value]
        assert made is not None, "only what the forward makes is offloaded"
        readers = graph.consumers[value]
        early = [op for op in readers if graph.ops[op].phase == FORWARD]
        late = [op for op in readers if graph.ops[op].phase != FORWARD]
        if not late or not nbytes:
            return None
        leaves, back = self.chunk(max(early, default=made[0])), self.chunk(late[0])
        if back - leaves <= 2 * self.lookahead + 1:
            return None
        last = self.chunk(late[-1])
        leave = Leave(nbytes, 1, self.chunk(made[0]), 0)
        away = UnitOption(
            OFFLOADED, nbytes, (Fetch(nbytes, 1, back, last, False),), (leave,), 0, nbytes
        )
        return HostUnit((value,), (UnitOption(RESIDENT), away), self.chunk(made[0]))


def _together(name: str, parts: Sequence[UnitOption]) -> UnitOption:
    """One option for several parameters: what is needed, or made, in one chunk travels as one."""
    fetches: dict[tuple[int, int], Fetch] = {}
    for fetch in (fetch for part in parts for fetch in part.fetches):
        key = (fetch.need, fetch.last)
        old = fetches.get(key)
        fetches[key] = (
            fetch
            if old is None
            else replace(old, nbytes=old.nbytes + fetch.nbytes, copies=old.copies + fetch.copies)
        )
    leaves: dict[int, Leave] = {}
    for leave in (leave for part in parts for leave in part.leaves):
        before = leaves.get(leave.made)
        leaves[leave.made] = leave if before is None else replace(
            before, nbytes=before.nbytes + leave.nbytes, copies=before.copies + leave.copies,
            held=before.held + leave.held,
        )  # fmt: skip
    return UnitOption(
        name,
        sum(part.saved for part in parts),
        tuple(sorted(fetches.values(), key=lambda each: (each.need, each.last))),
        tuple(sorted(leaves.values(), key=lambda each: each.made)),
        sum(part.work for part in parts),
        sum(part.host for part in parts),
    )
