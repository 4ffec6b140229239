"""Sites and flows: what the levels of a partition decide, and what moves between the decisions.

A **site** is an Op, a state Value's storage, or a copy. Each choice of a site names what it cuts
(an axis of the Op, an atom of the Value; the last choice cuts nothing), and *hits* each Value that
it touches in one way: cuts it on one of its atoms, leaves it whole, leaves partial values, or needs
it whole on the first part only. A **flow** is a Value between two sites; flows that are alike are
one, with their bytes added. All is in columns: a step has ten thousand of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apportion.graph import UPDATE
from apportion.interval import Affine, Box, Factors
from apportion.search.data import sample_classes
from apportion.segments import Short
from apportion.splits import Space, Split
from apportion.tdl import Access, lookup

WHOLE, PARTIAL, FIRST = -1, -2, -3
OP, STORE, COPY = 0, 1, 2
MINOR = 0.002  # an Op that does less of the step's work than this may run whole everywhere

Ints = npt.NDArray[np.int64]
Hits = tuple[int, ...]


@dataclass(frozen=True)
class Sites:
    """The variables of a partition, in columns.

    kind            OP, STORE or COPY
    first           for an Op its index (the first of those cut alike), else a Value
    at, classes     each site's choices: the class that it cuts, -1 for the last one
    uncut           whether it may be left whole while something can be cut
    atoms           for each distinct tuple of choices the positions of axes or atoms
    extents         per class; rigid: cut once, contiguously, since windows and slices run over it
    patterns        distinct pairs of hits: per choice of the source, per choice of the target
    """

    space: Space
    shared: bool
    kind: Ints
    first: Ints
    at: Ints
    classes: Ints
    uncut: npt.NDArray[np.bool_]
    atoms: tuple[tuple[int, ...], ...]
    extents: Ints
    rigid: npt.NDArray[np.bool_]
    samples: npt.NDArray[np.bool_]
    op_site: Ints
    store: dict[int, int]
    copy: dict[int, int]
    patterns: tuple[tuple[Hits, Hits], ...]
    source: Ints
    target: Ints
    pattern: Ints
    nbytes: npt.NDArray[np.float64]
    count: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def choices(self) -> Ints:
        """How many choices each site has."""
        return np.diff(self.at)


def find_sites(
    space: Space, *, shared: bool = True, tied: bool = False, reductions: bool = True
) -> Sites:
    """The sites of a Space.

    shared      a Value that several Ops read is fetched once, and state may be replicated; else
                each reader fetches for itself, and every Value is stored cut
    tied        Ops of one user line, module and call (the steps of an unrolled loop) are cut alike
    reductions  whether partial values may arise
    """
    return _Finder(space, shared, tied, reductions).sites()


def ties(space: Space) -> int:
    """How many Ops the largest family of Ops of one user line, module and call has."""
    counts: dict[tuple[object, ...], int] = {}
    for index, op in enumerate(space.graph.ops):
        if op.line and op.phase != UPDATE:
            key = (op.module, op.line, op.phase, space.alike[index])
            counts[key] = counts.get(key, 0) + 1
    return max(counts.values(), default=0)


def stand_ins(sites: Sites, few: Sites, short: Short) -> Ints | None:
    """For each site the one of the short step, opened alike, that stands for it; None if one has
    none that has the same choices."""
    space, here = sites.space, few.space
    first, first_here = _firsts(space), _firsts(here)
    origins = np.array(space.origins, np.int64)
    ops = first_here[np.array(short.ops, np.int64)[origins]]
    ops += np.arange(len(origins)) - first[origins]
    values = list(short.values)
    values += [-1] * (len(space.graph.values) - len(values))
    for index in set(space.opening):
        for op in range(first[index], first[index + 1]):
            like = here.graph.ops[ops[op]]
            for value, stand_in in zip(space.graph.ops[op].outputs, like.outputs, strict=True):
                values[value] = stand_in
    found = np.full(len(sites), -1, np.int64)
    found[sites.kind == OP] = few.op_site[ops[sites.first[sites.kind == OP]]]
    for known, own in ((sites.store, few.store), (sites.copy, few.copy)):
        for value, site in known.items():
            found[site] = own.get(values[value], -1)
    likes = found.tolist()
    if min(likes, default=-1) < 0:
        return None
    same = all(a == few.atoms[like] for a, like in zip(sites.atoms, likes, strict=True))
    return found if same else None


def _firsts(space: Space) -> Ints:
    """The first Op that comes from each Op of the closed Graph, and the number of all."""
    every = np.arange(len(space.source.ops) + 1)
    return np.searchsorted(np.array(space.origins, np.int64), every).astype(np.int64)


class _Finder:
    """Sites and flows in the making. What depends on a call only is worked out once for it."""

    def __init__(self, space: Space, shared: bool, tied: bool, reductions: bool) -> None:
        self.space, self.shared, self.tied, self.reductions = space, shared, tied, reductions
        self.graph = space.graph
        self.after = dict(self.graph.state)
        self.before = {after: before for before, after in self.graph.state}
        self.samples = sample_classes(space)
        self.kind: list[int] = []
        self.first: list[int] = []
        self.atoms: list[tuple[int, ...]] = []
        self.classes: list[tuple[int, ...]] = []
        self.uncut: list[bool] = []
        self.extents: dict[int, int] = {}
        self.last_class = -1
        self.op_site: list[int] = []
        self.store: dict[int, int] = {}
        self.copy: dict[int, int] = {}
        self.flows: dict[tuple[int, int, int], list[float]] = {}
        self.distinct: dict[Hits, int] = {}
        self.patterns: dict[tuple[int, int], int] = {}
        self.calls: list[_Call | None] = [None] * (max(space.alike, default=-1) + 1)
        self.minor = MINOR * sum(self._call(op).work for op in range(len(self.graph.ops)))

    def sites(self) -> Sites:
        self._make_op_sites()
        self._make_value_sites()
        self._make_flows()
        value_classes = self.space.atoms.value_classes
        groups = 1 + max(
            max(map(max, filter(None, value_classes)), default=-1),
            self.last_class,
        )
        extents = np.ones(groups, np.int64)
        extents[list(self.extents)] = list(self.extents.values())
        keys = np.array(list(self.flows), np.int64).reshape(-1, 3)
        amounts = np.array(list(self.flows.values()), np.float64).reshape(-1, 2)
        counts = [len(row) + 1 for row in self.classes]
        rigid, samples = np.zeros(groups, np.bool_), np.zeros(groups, np.bool_)
        rigid[[g for g in self._rigid() if g < groups]] = True
        samples[[g for g in self.samples if g < groups]] = True
        hits = list(self.distinct)
        return Sites(
            self.space,
            self.shared,
            np.array(self.kind, np.int64),
            np.array(self.first, np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.array([g for row in self.classes for g in (*row, -1)], np.int64),
            np.array(self.uncut, np.bool_),
            tuple(self.atoms),
            extents,
            rigid,
            samples,
            np.array(self.op_site, np.int64),
            self.store,
            self.copy,
            tuple((hits[here], hits[there]) for here, there in self.patterns),
            keys[:, 0].copy(),
            keys[:, 1].copy(),
            keys[:, 2].copy(),
            amounts[:, 0].copy(),
            amounts[:, 1].copy(),
        )

    # Sites

    def _call(self, op: int) -> _Call:
        found = self.calls[self.space.alike[op]]
        if found is None:
            found = self.calls[self.space.alike[op]] = self._study(op)
        return found

    def _study(self, op: int) -> _Call:
        space = self.space
        axes = space.axes(op)
        able = tuple(k for k, yes in enumerate(space.cuttable(op)) if yes)
        whole = space.split(op, [1] * len(axes))
        halves = {k: space.split(op, [2 if n == k else 1 for n in range(len(axes))]) for k in able}
        if not self.reductions:
            able = tuple(k for k in able if max(halves[k].terms, default=1) == 1)
        it = self.graph.ops[op]

        def hits(output: bool, position: int) -> int:
            found = (*[hit(halves[k], whole, output, position) for k in able], WHOLE)
            return self.distinct.setdefault(found, len(self.distinct))

        description = lookup(it.kind)
        outputs = range(len(it.outputs))
        return _Call(
            able,
            tuple(axes[k].extent for k in able),
            tuple(hits(False, n) for n in range(len(it.inputs))),
            tuple(hits(True, n) for n in outputs),
            tuple(any(halves[k].terms[n] > 1 for k in able) for n in outputs),
            tuple(
                _share(region, space.factors(value))
                for region, value in zip(whole.parts[0].inputs, it.inputs, strict=True)
            ),
            description is not None and description.alias,
            math.prod([float(axis.extent) for axis in axes]),
        )

    def _add(
        self, kind: int, first: int, atoms: tuple[int, ...], classes: tuple[int, ...], uncut: bool
    ) -> int:
        self.kind.append(kind)
        self.first.append(first)
        self.atoms.append(atoms)
        self.classes.append(classes)
        self.uncut.append(uncut)
        return len(self.kind) - 1

    def _make_op_sites(self) -> None:
        alike: dict[tuple[object, ...], int] = {}
        space, tied, extents = self.space, self.tied, self.extents
        for index, op in enumerate(self.graph.ops):
            call, groups = self._call(index), space.groups(index)
            self.last_class = max(self.last_class, *groups, -1)
            if tied and op.line and op.phase != UPDATE:
                key = (op.module, op.line, op.phase, space.alike[index], groups)
                known = alike.get(key)
                if known is not None:
                    self.op_site.append(known)
                    continue
                alike[key] = len(self.kind)
            classes = tuple([groups[k] for k in call.able])
            for group, extent in zip(classes, call.extents, strict=True):
                extents.setdefault(group, extent)
            free = self.shared and (op.phase == UPDATE or call.alias or self._minor(call, classes))
            self.op_site.append(self._add(OP, index, call.able, classes, free))

    def _minor(self, call: _Call, classes: tuple[int, ...]) -> bool:
        """Whether all may do an Op: no sample comes into it, and it is little work."""
        return call.work < self.minor and self.samples.isdisjoint(classes)

    def _rigid(self) -> set[int]:
        """Classes whose digits would not be boxes for an Op that reads x[i + 1] or a range of x."""
        rigid: set[int] = set()
        places: list[list[tuple[int, int, list[str]]] | None] = [None] * len(self.calls)
        atoms = self.space.atoms
        for index, formula in enumerate(self.space.formulas):
            if formula is None:
                continue
            call = self.space.alike[index]
            found = places[call]
            if found is None:
                found = places[call] = [
                    place for access in formula.accesses for place in self._shifted(index, access)
                ]
            for tensor, place, names in found:
                rigid.add(atoms.value_classes[self.graph.ops[index].inputs[tensor]][place])
                for name in names:
                    rigid.update(atoms.axis_classes[index][name])
        return rigid

    def _shifted(self, op: int, access: Access) -> list[tuple[int, int, list[str]]]:
        atoms, value = self.space.atoms, self.graph.ops[op].inputs[access.tensor]
        found, place = [], 0
        for index, factors in zip(access.index, atoms.dims[value], strict=True):
            places = range(place, place + len(factors))
            place += len(factors)
            form = index[0]
            if len(index) > 1 or not isinstance(form, Affine) or not form.terms:
                continue
            if form.axis is None or atoms.axes[op][form.axis] != factors:
                names = [name for name, _ in form.terms]
                found += [(access.tensor, k, names) for k in places]
        return found

    def _make_value_sites(self) -> None:
        copies: dict[tuple[int, int], int] = {}
        graph = self.graph
        for value, meant in enumerate(graph.values):
            if value in self.after or (not self.shared and value not in self.before):
                self.store[value] = self._value_site(STORE, value)
            if not self.shared or not meant.nbytes:
                continue
            made = graph.producer[value]
            if made is None:
                if len(graph.consumers[value]) > 1:
                    self.copy[value] = self._value_site(COPY, value)
            elif len(graph.consumers[value]) > 1 or self._call(made[0]).partial[made[1]]:
                # Copies of Values that Ops cut alike make are one site, as the Ops are.
                key = (self.op_site[made[0]], made[1])
                known = copies.get(key)
                if known is None:
                    known = copies[key] = self._value_site(COPY, value)
                self.copy[value] = known

    def _value_site(self, kind: int, value: int) -> int:
        groups = self.space.atoms.value_classes[value]
        factors = [f for dim in self.space.atoms.dims[value] for f in dim]
        able = tuple([k for k, factor in enumerate(factors) if factor > 1])
        for k in able:
            self.extents.setdefault(groups[k], factors[k])
        return self._add(kind, value, able, tuple([groups[k] for k in able]), self.shared)

    # Flows

    def _make_flows(self) -> None:
        graph, values = self.graph, self.graph.values
        read = [0.0] * len(values)  # the largest share that a reader wants
        for index, op in enumerate(graph.ops):
            for value, share in zip(op.inputs, self._call(index).shares, strict=True):
                if share > read[value]:
                    read[value] = share
        found: list[tuple[int, int]] = [(-1, -1)] * len(values)
        for value, meant in enumerate(values):
            if meant.nbytes:
                found[value] = self._begin(value, meant.nbytes, read[value])
        for index, op in enumerate(graph.ops):
            site, call = self.op_site[index], self._call(index)
            for value, there, share in zip(op.inputs, call.inputs, call.shares, strict=True):
                source, here = found[value]
                if source >= 0:
                    self._flow(source, site, here, there, values[value].nbytes * share)

    def _begin(self, value: int, nbytes: int, read: float) -> tuple[int, int]:
        """Flows from a Value's producer to where it is kept; returns the site that its readers find
        it at (-1: nowhere), and how its choices hit it."""
        made = self.graph.producer[value]
        source, here = -1, -1
        if made is not None:
            source, here = self.op_site[made[0]], self._call(made[0]).outputs[made[1]]
        for kept in (self.store.get(self.before.get(value, value)), self.copy.get(value)):
            if kept is None:
                continue
            stored = self.kind[kept] == STORE
            hits = (*self.atoms[kept], WHOLE)
            there = self.distinct.setdefault(hits, len(self.distinct))
            if source >= 0:
                self._flow(source, kept, here, there, nbytes if stored else nbytes * read)
            if not stored and source < 0:
                continue
            if source < 0 or not stored or not self.shared:
                source, here = kept, there
        return source, here

    def _flow(self, source: int, target: int, here: int, there: int, nbytes: float) -> None:
        pattern = self.patterns.setdefault((here, there), len(self.patterns))
        known = self.flows.get((source, target, pattern))
        if known is None:
            self.flows[source, target, pattern] = [nbytes, 1.0]
        else:
            known[0] += nbytes
            known[1] += 1.0


@dataclass(frozen=True, slots=True)
class _Call:
    """What sites need of a call: its axes that can be cut, their extents, the hits of each input
    and output, which outputs can be partial, the share of each input that it reads, whether it is
    a view, and the size of its iteration space."""

    able: tuple[int, ...]
    extents: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    partial: tuple[bool, ...]
    shares: tuple[float, ...]
    alias: bool
    work: float


def _share(region: Box, factors: Factors) -> float:
    """The share of a Value that a region of it is."""
    share = 1.0
    for (low, high), factor in zip(region, factors, strict=True):
        share *= (high - low) / max(factor, 1)
    return share


def hit(split: Split, whole: Split, output: bool, position: int) -> int:
    """How a split in two hits one input or output: the atom that it cuts, or WHOLE, PARTIAL,
    FIRST."""
    first, second = split.parts
    if output:
        if split.terms[position] > 1:
            return PARTIAL
        a, b = first.outputs[position], second.outputs[position]
        full = whole.parts[0].outputs[position]
    else:
        if position in second.zeros:
            return FIRST
        a, b = first.inputs[position], second.inputs[position]
        full = whole.parts[0].inputs[position]
    cut = [k for k, (x, y, z) in enumerate(zip(a, b, full, strict=True)) if not (x == z and y == z)]
    return cut[0] if len(cut) == 1 else WHOLE
