"""The levels of a recursive partition: tables of one level, and the strategy of all.

Variables are **sites**: an Op, a state Value's storage, a copy. Each choice of a site *hits* each
Value it touches in one way: cuts it on one of its atoms, leaves it whole, leaves partial values, or
needs it whole on the first half only. A **flow** is a Value between two sites; flows with equal
ends are one, with their bytes added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from apportion.graph import UPDATE
from apportion.interval import Affine
from apportion.root import Refused
from apportion.search.data import sample_classes
from apportion.search.eliminate import Energy, Table, TooWide, descend, eliminate
from apportion.splits import Space, Split
from apportion.strategy import Choice, Layout, Strategy, whole
from apportion.tdl import Access, lookup

WHOLE, PARTIAL, FIRST = -1, -2, -3
UNCUT = -1  # the choice that cuts nothing


@dataclass(frozen=True, slots=True)
class Site:
    """A variable of every level: `op` for Ops (one of several that are cut alike), else a Value.

    atoms  what each choice cuts: positions of axes (of an Op) or of atoms (of a Value)
    uncut  whether it may be left whole while something can be cut
    """

    kind: str
    members: tuple[int, ...]
    atoms: tuple[int, ...]
    classes: tuple[int, ...]
    uncut: bool


@dataclass
class Flow:
    """A Value that goes from one site to another. The hits are per choice of each, UNCUT last."""

    source: int
    target: int
    source_hits: dict[int, int]
    target_hits: dict[int, int]
    rho: float
    phi: float


@dataclass
class _Class:
    """What is left of a class of atoms: its extent, and the levels that have taken a digit of
    it."""

    extent: int
    levels: list[int] = field(default_factory=list)
    spent: bool = False


class Levels:
    """The two-way problems of a recursion, one after the other."""

    def __init__(self, space: Space, shared: bool) -> None:
        self.space = space
        self.shared = shared
        self.graph = space.graph
        self.after = dict(self.graph.state)
        self.before = {after: before for before, after in self.graph.state}
        self.sites: list[Site] = []
        self.op_site: list[int] = []
        self.store: dict[int, int] = {}
        self.copy: dict[int, int] = {}
        self.flows: dict[tuple[int, int, tuple[int, ...]], Flow] = {}
        self.chosen: list[list[int]] = []
        self.exact = True
        self.samples = sample_classes(space)
        self.classes: dict[int, _Class] = {}
        self._hits: dict[tuple[object, ...], dict[int, int]] = {}
        self._make_op_sites()
        self._make_value_sites()
        self._make_flows()

    # Sites

    def _make_op_sites(self) -> None:
        alike: dict[tuple[object, ...], int] = {}
        members: list[list[int]] = []
        for index, op in enumerate(self.graph.ops):
            groups = tuple(axis.group for axis in self.space.axes(index))
            call = self.space.calls[index]
            key: tuple[object, ...] = (op.module, op.line, op.phase, call, groups)
            if not op.line or op.phase == UPDATE:
                key = (index,)
            number = alike.setdefault(key, len(members))
            if number == len(members):
                members.append([])
            members[number].append(index)
            self.op_site.append(number)
        for group in members:
            first = group[0]
            axes, legal = self.space.axes(first), self.space.cuttable(first)
            able = tuple(k for k, yes in enumerate(legal) if yes)
            self._know([axis.group for axis in axes], [axis.extent for axis in axes])
            cut = tuple(axes[k].group for k in able)
            free = self._free(first)
            self.sites.append(Site("op", tuple(group), able, cut, free))
        self._find_rigid()

    def _free(self, op: int) -> bool:
        """Whether an Op may run whole everywhere: views cost nothing, and state may be
        replicated."""
        if not self.shared:
            return False
        description = lookup(self.graph.ops[op].kind)
        return self.graph.ops[op].phase == UPDATE or (description is not None and description.alias)

    def _know(self, groups: list[int], extents: list[int]) -> None:
        for group, extent in zip(groups, extents, strict=True):
            self.classes.setdefault(group, _Class(extent))

    def _find_rigid(self) -> None:
        """Classes that are cut once, contiguously: windows and slices run over them.

        Their digits would not be boxes for an Op that reads x[i + 1] or a range of x.
        """
        self.rigid: set[int] = set()
        for index, formula in enumerate(self.space.formulas):
            for access in formula.accesses if formula else ():
                self._add_rigid(index, access)

    def _add_rigid(self, op: int, access: Access) -> None:
        atoms, value = self.space.atoms, self.graph.ops[op].inputs[access.tensor]
        place = 0
        for index, factors in zip(access.index, atoms.dims[value], strict=True):
            groups = atoms.value_classes[value][place : place + len(factors)]
            place += len(factors)
            form = index[0]
            if len(index) > 1 or not isinstance(form, Affine) or not form.terms:
                continue
            if form.axis is None or atoms.axes[op][form.axis] != factors:
                self.rigid.update(groups)
                for name, _ in form.terms:
                    self.rigid.update(atoms.axis_classes[op][name])

    def _halves(self, op: int, position: int) -> Split:
        count = len(self.space.axes(op))
        return self.space.split(op, [2 if k == position else 1 for k in range(count)])

    def _whole(self, op: int) -> Split:
        return self.space.split(op, [1] * len(self.space.axes(op)))

    def _make_value_sites(self) -> None:
        for value in range(len(self.graph.values)):
            made, readers = self.graph.producer[value], self.graph.consumers[value]
            if value in self.after or (not self.shared and self._stored(value)):
                self.store[value] = self._value_site("store", value)
            if self.shared and (len(readers) > 1 or (made and self._may_be_partial(*made))):
                self.copy[value] = self._value_site("copy", value)
        if self.shared:
            self._tie_copies()

    def _stored(self, value: int) -> bool:
        """Under the paper's counting every Value is stored; state that ends a step where it began
        is stored once."""
        return value not in self.before

    def _may_be_partial(self, op: int, position: int) -> bool:
        site = self.sites[self.op_site[op]]
        return any(self._halves(op, k).terms[position] > 1 for k in site.atoms)

    def _value_site(self, kind: str, value: int) -> int:
        factors, groups = self.space.factors(value), self.space.atoms.value_classes[value]
        able = tuple(k for k, factor in enumerate(factors) if factor > 1)
        self._know(list(groups), list(factors))
        site = Site(kind, (value,), able, tuple(groups[k] for k in able), self.shared)
        self.sites.append(site)
        return len(self.sites) - 1

    def _tie_copies(self) -> None:
        """Copies of Values that Ops cut alike make are one site, as the Ops are."""
        first: dict[tuple[int, int], int] = {}
        for value, site in self.copy.items():
            made = self.graph.producer[value]
            if made is not None:
                self.copy[value] = first.setdefault((self.op_site[made[0]], made[1]), site)

    # Flows

    def _make_flows(self) -> None:
        for value, meant in enumerate(self.graph.values):
            source = self._begin_flows(value) if meant.nbytes else None
            if source is None:
                continue
            for reader in self.graph.consumers[value]:
                for k, v in enumerate(self.graph.ops[reader].inputs):
                    if v == value:
                        self._flow(source, self.op_site[reader], value, reader=(reader, k))

    def _begin_flows(self, value: int) -> int | None:
        """Flows from a Value's producer to where it is kept; returns the site that its readers find
        it at."""
        made = self.graph.producer[value]
        source = None if made is None else self.op_site[made[0]]
        stored = self.store.get(self.before.get(value, value))
        if source is not None and stored is not None:
            self._flow(source, stored, value)
        if stored is not None and (source is None or not self.shared):
            source = stored
        copy = self.copy.get(value)
        if source is not None and copy is not None:
            self._flow(source, copy, value)
            return copy
        return source

    def _flow(
        self,
        source: int,
        target: int,
        value: int,
        reader: tuple[int, int] | None = None,
    ) -> None:
        here = self._hits_of(source, value, None)
        there = self._hits_of(target, value, reader)
        nbytes = float(self.graph.values[value].nbytes)
        key = (source, target, (*here.values(), -9, *there.values()))
        known = self.flows.get(key)
        if known is None:
            self.flows[key] = Flow(source, target, here, there, nbytes, nbytes)
        else:
            known.rho += nbytes
            known.phi += nbytes

    def _hits_of(
        self, site_number: int, value: int, reader: tuple[int, int] | None
    ) -> dict[int, int]:
        """How each choice of a site hits a Value: the atom cut, or WHOLE, PARTIAL, FIRST."""
        site = self.sites[site_number]
        if site.kind != "op":
            return {k: k for k in site.atoms} | {UNCUT: WHOLE}
        if reader is not None:
            op, position = reader
            return self._op_hits(op, "in", position, site)
        made = self.graph.producer[value]
        assert made is not None
        return self._op_hits(made[0], "out", made[1], site)

    def _op_hits(self, op: int, side: str, position: int, site: Site) -> dict[int, int]:
        key = (self.space.calls[op], side, position)
        found = self._hits.get(key)
        if found is None:
            whole = self._whole(op)
            found = self._hits[key] = {
                k: _hit(self._halves(op, k), whole, side, position) for k in site.atoms
            } | {UNCUT: WHOLE}
        return found

    # One level

    def solve(self) -> None:
        """Finds the best cut of everything in two, and applies it."""
        energy = Energy()
        domains = [self._domain(site) for site in self.sites]
        for site, domain in zip(self.sites, domains, strict=True):
            energy.variable([self._preference(site, choice) for choice in domain])
        for flow in self.flows.values():
            table = _table(flow, domains[flow.source], domains[flow.target])
            energy.pair(flow.source, flow.target, table)
        try:
            picks, _ = eliminate(energy)
        except TooWide:
            self.exact = False
            picks, _ = descend(energy, self._start(domains))
        self._apply([domain[pick] for domain, pick in zip(domains, picks, strict=True)])

    def _domain(self, site: Site) -> list[int]:
        able = [
            k
            for k, group in zip(site.atoms, site.classes, strict=True)
            if not self.classes[group].spent and self.classes[group].extent > 1
        ]
        return [*able, UNCUT] if site.uncut or not able else able

    def _preference(self, site: Site, choice: int) -> float:
        """Breaks ties, in thousandths of bytes: long classes first, so that none is used up; state
        sharded."""
        if choice == UNCUT:
            return 0.5 if site.kind != "copy" else 0.0
        group = site.classes[site.atoms.index(choice)]
        bonus = 0.05 if group in self.samples and site.kind == "op" else 0.0
        return 0.1 / self.classes[group].extent + 0.1 - bonus

    def _start(self, domains: list[list[int]]) -> list[int]:
        start = []
        for site, domain in zip(self.sites, domains, strict=True):
            sample = [
                n
                for n, choice in enumerate(domain)
                if choice != UNCUT and site.classes[site.atoms.index(choice)] in self.samples
            ]
            start.append(sample[0] if sample else 0)
        return start

    def _apply(self, choices: list[int]) -> None:
        self.chosen.append(choices)
        level = len(self.chosen) - 1
        taken = {
            site.classes[site.atoms.index(choice)]
            for site, choice in zip(self.sites, choices, strict=True)
            if choice != UNCUT
        }
        for flow in self.flows.values():
            here = flow.source_hits[choices[flow.source]]
            there = flow.target_hits[choices[flow.target]]
            rho, phi = _factors(here, there)
            flow.rho *= rho
            flow.phi *= phi
        for group in taken:
            left = self.classes[group]
            left.levels.append(level)
            if left.extent % 2 or group in self.rigid:
                left.spent = True
            else:
                left.extent //= 2

    @property
    def bytes_modelled(self) -> float:
        """Bytes of all levels so far, as the tables count them."""
        return sum(flow.rho - flow.phi for flow in self.flows.values())

    # The result

    def strategy(self) -> Strategy:
        """The strategy of all levels, on digits of the classes that were cut."""
        digits = tuple(
            (group, (2,) * (len(left.levels) - left.spent) + (left.extent,))
            for group, left in sorted(self.classes.items())
            if len(left.levels) - left.spent > 0
        )
        digits = tuple((g, fs if fs[-1] > 1 else fs[:-1]) for g, fs in digits)
        digits = tuple((g, fs) for g, fs in digits if len(fs) > 1)
        space = self.space.with_digits(digits)
        choices = tuple(self._op_choice(space, op) for op in range(len(self.graph.ops)))
        layouts = {v: self._layout(space, v, site) for v, site in self.store.items()}
        if self.shared:
            for value, site in self.copy.items():
                made = self.graph.producer[value]
                if made and space.split(made[0], choices[made[0]].parts).terms[made[1]] > 1:
                    layouts[value] = self._layout(space, value, site)
        return Strategy(choices, layouts, digits, self.space.opening)

    def _op_choice(self, space: Space, op: int) -> Choice:
        number = self.op_site[op]
        groups = [axis.group for axis in self.space.axes(op)]
        parts, devices = self._grid(number, groups)
        try:
            space.split(op, parts)
        except Refused:  # each level's cut is legal, but not their product
            return whole(space, op, range(2 ** len(self.chosen)))
        return Choice(parts, devices)

    def _layout(self, space: Space, value: int, number: int) -> Layout:
        parts, devices = self._grid(number, list(self.space.atoms.value_classes[value]))
        return Layout(parts, devices)

    def _grid(self, number: int, groups: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parts per (divided) atom of a site, and the device of each part, by the bits of all
        levels."""
        parts: list[int] = []
        level_of: list[int] = []  # for each divided atom that is cut, in order, its level
        for position, group in enumerate(groups):
            for level in self._digit_levels(group):
                cut = level is not None and self.chosen[level][number] == position
                parts.append(2 if cut else 1)
                if cut and level is not None:
                    level_of.append(level)
        return tuple(parts), self._devices(level_of)

    def _digit_levels(self, group: int) -> Iterator[int | None]:
        """For each divided atom of a class the level that took it; None for what is left."""
        left = self.classes[group]
        digits = left.levels[: len(left.levels) - left.spent]
        yield from digits
        if left.spent:
            yield left.levels[-1]
        elif left.extent > 1 or not digits:
            yield None

    def _devices(self, level_of: list[int]) -> tuple[int, ...]:
        depth = len(self.chosen)
        whole = [level for level in range(depth) if level not in level_of]
        found = []
        for replica in range(2 ** len(whole)):
            for part in range(2 ** len(level_of)):
                bits = dict(zip(level_of, _bits(part, len(level_of)), strict=True))
                bits |= dict(zip(whole, _bits(replica, len(whole)), strict=True))
                found.append(sum(bits[level] << (depth - 1 - level) for level in range(depth)))
        return tuple(found)


def _bits(number: int, count: int) -> list[int]:
    return [(number >> (count - 1 - k)) & 1 for k in range(count)]


def _hit(split: Split, whole: Split, side: str, position: int) -> int:
    """How a split in two hits one input or output."""
    first, second = split.parts
    if side == "out":
        if split.terms[position] > 1:
            return PARTIAL
        a, b, full = (
            first.outputs[position],
            second.outputs[position],
            whole.parts[0].outputs[position],
        )
    else:
        if position in second.zeros:
            return FIRST
        a, b, full = (
            first.inputs[position],
            second.inputs[position],
            whole.parts[0].inputs[position],
        )
    cut = [k for k, (x, y) in enumerate(zip(a, full, strict=True)) if x != y]
    cut += [k for k, (x, y) in enumerate(zip(b, full, strict=True)) if x != y and k not in cut]
    return cut[0] if len(cut) == 1 else WHOLE


def _factors(source: int, target: int) -> tuple[float, float]:
    """What a level does to rho and phi, by the table at the head of tofu.py."""
    rho, phi = 1.0, 1.0
    if target == WHOLE:
        rho = 2.0
        phi = 1.0 if source >= 0 else 2.0
    elif target == FIRST:
        phi = 0.5 if source >= 0 else 1.0
    elif source >= 0 and source != target:
        phi = 0.5
    if source == PARTIAL:
        rho *= 2.0
    return rho, phi


def _table(flow: Flow, sources: list[int], targets: list[int]) -> Table:
    table = np.empty((len(sources), len(targets)))
    for a, source in enumerate(sources):
        for b, target in enumerate(targets):
            rho, phi = _factors(flow.source_hits[source], flow.target_hits[target])
            table[a, b] = flow.rho * rho - flow.phi * phi
    return table
