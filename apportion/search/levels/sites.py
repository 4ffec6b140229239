"""sites: what the levels of a partition decide, and which Values pass between the decisions.

In: a Space. Out: Sites, in columns, since a step has ten thousand of them.

A **site** is an Op, a state Value's storage, or a copy. Each choice of a site names what it cuts
(an axis of the Op, an atom of the Value; the last choice cuts nothing) and so cuts each Value that
the site touches in one way: on one of its atoms, not at all, into partial values, or so that only
the first part needs it. A **dependency** is a Value that one site leaves and another needs;
dependencies that are alike are one, with their bytes added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from apportion.columns import Bools, Floats, Ints
from apportion.describe import (
    Access,
    Affine,
    Apply,
    Box,
    Expr,
    Factors,
    Formula,
    Gather,
    Opaque,
    Position,
    Reduce,
    find_description,
    volume,
)
from apportion.graph import UPDATE
from apportion.search.baselines.data import sample_classes
from apportion.split import PARTIAL, SEVERAL, WHOLE, AxisEffects, ShortenedGraph, Space

OP, STORE, COPY = 0, 1, 2
MINOR = 0.002  # an Op that does less of the step's work than this may run whole everywhere

ValueCuts = tuple[tuple[int, float], ...]
"""How each choice of a site cuts one Value: the atom, or WHOLE, PARTIAL or FIRST_ONLY; and the
halo, what two neighbouring parts both read, as a share of what the Op reads."""


@dataclass(frozen=True)
class Sites:
    """The variables of a partition, in columns.

    kind            OP, STORE or COPY
    first           for an Op its index (the first of those cut alike), else a Value
    at, classes     each site's choices: the class that it cuts, -1 for the last one
    uncut           whether it may be left whole while something can be cut
    atoms           for each distinct tuple of choices the positions of axes or atoms
    extents         per class; rigid: cut once, contiguously, since windows and slices run over it
    placed          pairs (site, class): Ops whose parts must each be one range of a class, since
                    the place along it is a value, such as the number of a word
    patterns        distinct pairs of ValueCuts: how the source cuts a Value, and the target
    """

    space: Space
    shared: bool
    kind: Ints
    first: Ints
    at: Ints
    classes: Ints
    uncut: Bools
    atoms: tuple[tuple[int, ...], ...]
    extents: Ints
    rigid: Bools
    placed: Ints
    samples: Bools
    op_site: Ints
    store: dict[int, int]
    copy: dict[int, int]
    patterns: tuple[tuple[ValueCuts, ValueCuts], ...]
    source: Ints
    target: Ints
    pattern: Ints
    nbytes: Floats
    count: Floats

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
    return _SiteFinder(space, shared, tied, reductions).sites()


def largest_loop(space: Space) -> int:
    """How many Ops the largest family of Ops of one user line, module and call has."""
    counts: dict[tuple[object, ...], int] = {}
    for index, op in enumerate(space.graph.ops):
        if op.line and op.phase != UPDATE:
            key = (op.module, op.line, op.phase, space.alike[index])
            counts[key] = counts.get(key, 0) + 1
    return max(counts.values(), default=0)


def matching_sites(sites: Sites, few: Sites, short: ShortenedGraph) -> Ints | None:
    """For each site the one of the short step, opened alike, that stands for it; None if one has
    none that has the same choices."""
    space, here = sites.space, few.space
    first, first_here = _first_opened_ops(space), _first_opened_ops(here)
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


def _first_opened_ops(space: Space) -> Ints:
    """The first Op that comes from each Op of the closed Graph, and the number of all."""
    every = np.arange(len(space.source.ops) + 1)
    return np.searchsorted(np.array(space.origins, np.int64), every).astype(np.int64)


class _SiteFinder:
    """Finds sites and dependencies. What depends on a call only is worked out once for it."""

    def __init__(self, space: Space, shared: bool, tied: bool, reductions: bool) -> None:
        self.space, self.shared, self.tied, self.reductions = space, shared, tied, reductions
        self.graph = space.graph
        self.after = dict(self.graph.state)
        self.before = {after: before for before, after in self.graph.state}
        self.effects = AxisEffects(space)
        self.samples = sample_classes(space)
        self.kind: list[int] = []
        self.first: list[int] = []
        self.atoms: list[tuple[int, ...]] = []
        self.classes: list[tuple[int, ...]] = []
        self.uncut: list[bool] = []
        self.extents: dict[int, int] = {}
        self.studied: dict[object, tuple[int, ...]] = {}
        self.sized: set[tuple[int, ...]] = set()
        self.op_site: list[int] = []
        self.store: dict[int, int] = {}
        self.copy: dict[int, int] = {}
        self.distinct: dict[ValueCuts, int] = {}
        self.shares: dict[object, float] = {}
        self.calls: list[_CallFacts | None] = [None] * (max(space.alike, default=-1) + 1)
        self.minor = MINOR * sum(self._call(op).work for op in range(len(self.graph.ops)))

    def sites(self) -> Sites:
        self._make_op_sites()
        self._make_value_sites()
        dependencies = self._make_dependencies()
        groups = self.space.classes
        extents = np.ones(groups, np.int64)
        extents[list(self.extents)] = list(self.extents.values())
        counts = [len(row) + 1 for row in self.classes]
        classes: list[int] = []
        for row in self.classes:
            classes += row
            classes.append(-1)
        rigid, samples = np.zeros(groups, np.bool_), np.zeros(groups, np.bool_)
        rigid[list(self._rigid())] = True
        samples[list(self.samples)] = True
        return Sites(
            self.space,
            self.shared,
            np.array(self.kind, np.int64),
            np.array(self.first, np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.array(classes, np.int64),
            np.array(self.uncut, np.bool_),
            tuple(self.atoms),
            extents,
            rigid,
            self._placed_pairs(),
            samples,
            np.array(self.op_site, np.int64),
            self.store,
            self.copy,
            *self._merge_alike(dependencies),
        )

    # Sites

    def _call(self, op: int) -> _CallFacts:
        found = self.calls[self.space.alike[op]]
        if found is None:
            found = self.calls[self.space.alike[op]] = self._study_call(op)
        return found

    def _study_call(self, op: int) -> _CallFacts:
        space = self.space
        axes = space.axes(op)
        effects = dict(self.effects.legal(op))
        if not self.reductions:
            effects = {k: effect for k, effect in effects.items() if not effect.is_partial}
        it, able, whole = self.graph.ops[op], tuple(effects), space.split(op, [1] * len(axes))

        def numbered(cuts: Iterable[tuple[int, float]]) -> int:
            """The number of a Value's cuts. Of a Value that is cut along several atoms at once a
            part is taken to need the whole."""
            known = [(WHOLE if atom == SEVERAL else atom, halo) for atom, halo in cuts]
            return self.distinct.setdefault((*known, (WHOLE, 0.0)), len(self.distinct))

        description = find_description(it.kind)
        inputs, outputs = range(len(it.inputs)), range(len(it.outputs))
        return _CallFacts(
            able,
            tuple(axes[k].extent for k in able),
            tuple(numbered((e.inputs[n], e.halos[n]) for e in effects.values()) for n in inputs),
            tuple(numbered((e.outputs[n], 0.0) for e in effects.values()) for n in outputs),
            tuple(any(e.outputs[n] == PARTIAL for e in effects.values()) for n in outputs),
            tuple(
                _share(region, space.factors(value))
                for region, value in zip(whole.parts[0].inputs, it.inputs, strict=True)
            ),
            whole.parts[0].inputs,
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
            if tied and op.line and op.phase != UPDATE:
                key = (op.module, op.line, op.phase, space.alike[index], groups)
                known = alike.get(key)
                if known is not None:
                    self.op_site.append(known)
                    continue
                alike[key] = len(self.kind)
            classes = tuple([groups[k] for k in call.able])
            if classes not in self.sized:
                self.sized.add(classes)
                for group, extent in zip(classes, call.extents, strict=True):
                    extents.setdefault(group, extent)
            free = self.shared and (
                op.phase == UPDATE or call.alias or self._is_minor(call, classes)
            )
            self.op_site.append(self._add(OP, index, call.able, classes, free))

    def _is_minor(self, call: _CallFacts, classes: tuple[int, ...]) -> bool:
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

    def _placed_pairs(self) -> Ints:
        """Pairs (site, class) of Ops for which the place along a class is a value."""
        known: list[frozenset[str] | None] = [None] * len(self.calls)
        found: dict[tuple[int, int], None] = {}
        for index, formula in enumerate(self.space.formulas):
            call = self.space.alike[index]
            names = known[call]
            if names is None:
                names = known[call] = frozenset() if formula is None else positions_of(formula)
            if names:
                site = self.op_site[index]
                classes = self.space.atoms.axis_classes[index]
                groups = {group for name in names for group in classes[name]}
                found.update(dict.fromkeys((site, g) for g in self.classes[site] if g in groups))
        return np.array(list(found), np.int64).reshape(-1, 2)

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
        groups, dims = self.space.atoms.value_classes[value], self.space.atoms.dims[value]
        able = self.studied.get(dims)
        if able is None:
            factors = [f for dim in dims for f in dim]
            able = self.studied[dims] = tuple([k for k, f in enumerate(factors) if f > 1])
        classes = tuple([groups[k] for k in able])
        if classes not in self.sized:
            self.sized.add(classes)
            factors = [f for dim in dims for f in dim]
            for k in able:
                self.extents.setdefault(groups[k], factors[k])
        return self._add(kind, value, able, classes, self.shared)

    # Dependencies

    def _make_dependencies(self) -> list[_Dependencies]:
        """All dependencies: from makers to where Values are stored, to copies, and to readers."""
        values, there, shares, readers = self._inputs_read()
        source, here = self._outputs_made()
        nbytes = np.array([v.nbytes for v in self.graph.values], np.float64)
        together = np.zeros(len(nbytes))  # share that all readers want
        np.maximum.at(together, values, shares)
        for value in self.copy:
            if together[value] < 1:
                together[value] = self._share_wanted(value)
        stores = {**self.store}
        stores.update({a: self.store[b] for a, b in self.before.items() if b in self.store})
        dependencies = []
        for kept, wanted in ((stores, nbytes), (self.copy, nbytes * together)):
            own = np.array([v for v in kept if nbytes[v]], np.int64)
            sites = np.array([kept[v] for v in own.tolist()], np.int64)
            cuts = np.array([self._own_cuts(site) for site in sites.tolist()], np.int64)
            begun = source[own] >= 0
            dependencies.append(
                _Dependencies(source[own], sites, here[own], cuts, wanted[own]).where(begun)
            )
            moved = begun if kept is self.copy else ~begun | (not self.shared)
            source[own[moved]], here[own[moved]] = sites[moved], cuts[moved]
        dependencies.append(
            _Dependencies(
                source[values], readers, here[values], there, nbytes[values] * shares
            ).where((source[values] >= 0) & (nbytes[values] > 0))
        )
        return dependencies

    def _share_wanted(self, value: int) -> float:
        """The share of a Value that its readers want together."""
        boxes = frozenset(
            [
                region
                for op in self.graph.consumers[value]
                for v, region in zip(self.graph.ops[op].inputs, self._call(op).regions, strict=True)
                if v == value
            ]
        )
        known = self.shares.get((boxes, self.space.atoms.dims[value]))
        if known is None:
            size = math.prod(self.space.factors(value))
            known = elements_covered(boxes) / max(size, 1) if boxes else 0.0
            self.shares[boxes, self.space.atoms.dims[value]] = known
        return known

    def _inputs_read(self) -> tuple[Ints, Ints, Floats, Ints]:
        """Of every input of every Op: the Value, its cuts, the share that is read, the site."""
        values: list[int] = []
        there: list[int] = []
        shares: list[float] = []
        counts: list[int] = []
        calls, alike = self.calls, self.space.alike
        for op, number in zip(self.graph.ops, alike, strict=True):
            call = calls[number]
            assert call is not None
            values += op.inputs
            there += call.inputs
            shares += call.shares
            counts.append(len(op.inputs))
        return (
            np.array(values, np.int64),
            np.array(there, np.int64),
            np.array(shares, np.float64),
            np.repeat(np.array(self.op_site, np.int64), counts),
        )

    def _outputs_made(self) -> tuple[Ints, Ints]:
        """Of every Value the site that makes it, -1 for none, and its cuts."""
        values: list[int] = []
        cuts: list[int] = []
        counts: list[int] = []
        for op, number in zip(self.graph.ops, self.space.alike, strict=True):
            call = self.calls[number]
            assert call is not None
            values += op.outputs
            cuts += call.outputs
            counts.append(len(op.outputs))
        source = np.full(len(self.graph.values), -1, np.int64)
        here = np.full(len(self.graph.values), -1, np.int64)
        source[values] = np.repeat(np.array(self.op_site, np.int64), counts)
        here[values] = cuts
        return source, here

    def _own_cuts(self, site: int) -> int:
        """The cuts of a Value's own site."""
        key = (*[(atom, 0.0) for atom in self.atoms[site]], (WHOLE, 0.0))
        return self.distinct.setdefault(key, len(self.distinct))

    def _merge_alike(self, dependencies: list[_Dependencies]) -> tuple[Any, ...]:
        """Patterns, and in columns the dependencies: those that are alike added up."""
        source, target, here, there, nbytes = (
            np.concatenate([getattr(f, name) for f in dependencies])
            for name in ("source", "target", "here", "there", "nbytes")
        )
        cuts = list(self.distinct)
        pairs, pattern = np.unique(here * len(cuts) + there, return_inverse=True)
        keys = (source * max(len(self.kind), 1) + target) * max(len(pairs), 1) + pattern
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        return (
            tuple((cuts[n // len(cuts)], cuts[n % len(cuts)]) for n in pairs.tolist()),
            source[first],
            target[first],
            pattern[first].astype(np.int64),
            np.bincount(which, nbytes, len(first)),
            np.bincount(which, minlength=len(first)).astype(np.float64),
        )


@dataclass(frozen=True)
class _Dependencies:
    """Dependencies in columns: from which site to which, how each cuts the Value, and the bytes."""

    source: Ints
    target: Ints
    here: Ints
    there: Ints
    nbytes: Floats

    def where(self, which: Bools) -> _Dependencies:
        return _Dependencies(
            self.source[which],
            self.target[which],
            self.here[which],
            self.there[which],
            self.nbytes[which],
        )


@dataclass(frozen=True, slots=True)
class _CallFacts:
    """What sites need of a call: its axes that can be cut, their extents, the cuts of each input
    and output, which outputs can be partial, the share of each input that it reads and where that
    is, whether it is a view, and the size of its iteration space."""

    able: tuple[int, ...]
    extents: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    partial: tuple[bool, ...]
    shares: tuple[float, ...]
    regions: tuple[Box, ...]
    alias: bool
    work: float


def positions_of(formula: Formula) -> frozenset[str]:
    """The axes of a formula whose positions are values."""
    bodies = (output.body for output in formula.outputs if output is not None)
    return frozenset([name for body in bodies for name in _positions(body)])


def _positions(expr: Expr) -> Iterator[str]:
    if isinstance(expr, Position):
        yield from (name for name, _ in expr.form.terms)
    elif isinstance(expr, Access):
        for item in (item for index in expr.index for item in index):
            if isinstance(item, Gather):
                yield from _positions(item.source)
    elif isinstance(expr, Reduce):
        yield from _positions(expr.body)
    elif isinstance(expr, Apply | Opaque):
        for arg in expr.args:
            yield from _positions(arg)


def elements_covered(boxes: frozenset[Box]) -> int:
    """How many elements are in any of the boxes."""
    one = next(iter(boxes))
    differing = (k for k in range(len(one)) if len({box[k] for box in boxes}) > 1)
    along = next(differing, None)
    if along is None:
        return volume(one)
    total = 0
    for low, high in pairwise(sorted({end for box in boxes for end in box[along]})):
        inside = frozenset(
            [
                (*box[:along], (low, high), *box[along + 1 :])
                for box in boxes
                if box[along][0] <= low and high <= box[along][1]
            ]
        )
        total += elements_covered(inside) if inside else 0
    return total


def _share(region: Box, factors: Factors) -> float:
    """The share of a Value that a region of it is."""
    share = 1.0
    for (low, high), factor in zip(region, factors, strict=True):
        share *= (high - low) / max(factor, 1)
    return share
