"""moves: random changes of a Strategy, from one Op to everything of one kind.

In: the current Choices and a kind of move. Out: new Choices for some Ops. The kinds are:

  op      one Op, cut along any of its axes, sums included
  group   a forward Op with its backward Ops and updates, cut along any axes of the former
  layer   a layer (layers.py), cut along axes that index its output
  cell    what one module does in one step of a loop
  alike   several equal cells at once: the steps of a loop, the blocks of a network; all on the same
          devices, or each on the next ones
  edge    a layer is cut as a neighbour of it is and put where that one is, perhaps the next
          neighbours along with it: what single moves need several expensive steps for
  state   updates alone: parameters and optimizer state cut over devices, or whole on all of them
  sweep   systematically, one after the other until all have been tried: stages, where loops are
          balanced over groups of devices, and every set of alike cells on all devices in every way,
          what takes longest first

What takes longer is drawn more often. Devices are mostly blocks of neighbours whose size divides
the number of devices, also as many of every host, sometimes any. Ops that change lose layouts that
the Strategy gave to what they leave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, product
from random import Random

from apportion.graph import UPDATE
from apportion.machine import Cluster
from apportion.search.walks.units import LayerChoices, MappedOp, Mesh, OpChoices
from apportion.split import Choice, Grid, axes_cut, divisors, part_grids

KINDS = {"op": 4, "group": 4, "layer": 4, "cell": 4, "alike": 1, "edge": 6, "state": 1,
         "sweep": 6}  # fmt: skip
"""Kinds of moves, and how often each is drawn; never changed."""

SPREAD = 0.35  # share of moves of alike cells that put each on the next devices
PARTIAL = 0.35  # and of those that take only a run of them
FARTHER = 0.6  # of edges, that go on to the next neighbour
WHOLE = 0.1  # of moves that leave something whole on all devices chosen


class MoveSampler:
    """Draws changes for Ops of a Space on a Cluster; `choices` are the current ones, `weights` say
    how often each Op is drawn."""

    def __init__(
        self,
        members: LayerChoices,
        cluster: Cluster,
        choices: Sequence[Choice],
        weights: Sequence[float] = (),
    ) -> None:
        self.members = members
        self.space = members.space
        self.choices = choices
        self.devices = len(cluster.devices)
        self.counts = tuple(divisors(self.devices))
        self.hosts = [tuple(host.devices) for host in cluster.hosts]
        graph = self.space.graph
        self._able: dict[int, tuple[tuple[int, ...], tuple[MappedOp, ...]]] = {}  # by Op
        labels = [layer.labels for layer in members.layers]
        self._extents = [tuple([label.extent for label in each]) for each in labels]
        self._left = [
            tuple([1 if label.reduced else label.extent for label in each]) for each in labels
        ]
        self.updates = [n for n, op in enumerate(graph.ops) if op.phase == UPDATE]
        self._number = {cell: k for k, cell in enumerate(members.cells)}
        of = list(weights) or [1.0] * len(graph.ops)
        layers = [sum(of[op] for op in layer.ops) for layer in members.layers]
        groups = [sum(of[op] for op in group) for group in members.groups]
        cells = [sum(layers[n] for n in cell) for cell in members.cells]
        self._op_at, self._layer_at, self._group_at, self._cell_at = (
            _cumulative(each) for each in (of, layers, groups, cells)
        )
        self._draws: dict[str, Callable[[Random], OpChoices]] = {
            "op": self._op, "group": self._group, "layer": self._layer, "cell": self._cell,
            "alike": self._alike, "edge": self._edge, "state": self._state,
            "sweep": self._next,
        }  # fmt: skip
        heavy = [(sum(cells[self._number[cell]] for cell in several), several)
                 for several in self._families()]  # fmt: skip
        heavy.sort(key=lambda each: -each[0])
        spent = [sum(cells[self._number[cell]] for cell in loop) for loop in members.loops]
        self._sweep = chain(self._staged(spent), self._swept([several for _, several in heavy]))
        self.swept = False

    def draw(self, kind: str, rng: Random) -> OpChoices:
        """New Choices, those that are no change left out."""
        drawn, now = self._draws[kind](rng), self.choices
        return {
            op: choice
            for op, choice in drawn.items()
            if choice is not now[op] and choice != now[op]
        }

    @property
    def parts(self) -> int:
        """Cells."""
        return len(self.members.cells)

    def scatter(self, rng: Random) -> OpChoices:
        """Every cell cut and placed at random."""
        found: OpChoices = {}
        for cell in self.members.cells:
            found |= self.draw_cell(cell, rng)
        return found

    # What is changed

    def _op(self, rng: Random) -> OpChoices:
        op = _drawn(self._op_at, rng)
        able = self._able.get(op)
        if able is None:
            cuttable = zip(self.space.axes(op), self.space.cuttable(op), strict=True)
            extents = tuple(axis.extent if yes else 1 for axis, yes in cuttable)
            able = self._able[op] = extents, ((op, tuple(range(len(extents)))),)
        return self.members.mesh_choices(able[1], self._mesh(able[0], rng))

    def _group(self, rng: Random) -> OpChoices:
        members = self.members
        group = members.groups[_drawn(self._group_at, rng)]
        mesh = self._mesh(self._extents[members.home[group[0]]], rng)
        return members.mesh_choices([(op, members.positions[op]) for op in group], mesh)

    def _layer(self, rng: Random) -> OpChoices:
        number = _drawn(self._layer_at, rng)
        return self.members.choices(number, self._mesh(self._left[number], rng))

    def _cell(self, rng: Random) -> OpChoices:
        return self.draw_cell(self.members.cells[_drawn(self._cell_at, rng)], rng)

    def draw_cell(self, cell: Sequence[int], rng: Random) -> OpChoices:
        """A cell cut and placed at random."""
        classes = self.members.classes(cell)
        mesh = self._mesh(tuple(classes.values()), rng)
        return self.members.choices_along(cell, tuple(classes), mesh)

    def _alike(self, rng: Random) -> OpChoices:
        families = self.members.alike
        if not families:
            return self._cell(rng)
        cells = list(rng.choice(families))
        if rng.random() < PARTIAL:
            first = rng.randrange(len(cells))
            cells = cells[first : first + rng.randint(1, len(cells))]
        classes = self.members.classes(cells[0])
        degrees, where = self._mesh(tuple(classes.values()), rng)
        turns = 1
        if rng.random() < SPREAD and len(where) < self.devices:
            turns = self.devices // len(where)
            where = tuple(range(len(where)))
        loops = [self.members.layers[cell[0]].loop for cell in cells]
        order = list(dict.fromkeys(loops))  # each loop on the next devices, or each step of one
        found: OpChoices = {}
        for number, (cell, loop) in enumerate(zip(cells, loops, strict=True)):
            turn = (order.index(loop) if len(order) > 1 else number) % turns
            mesh = (degrees, tuple([d + turn * len(where) for d in where]) if turn else where)
            found |= self.members.choices_along(cell, tuple(classes), mesh)
        return found

    def _families(self) -> list[tuple[tuple[int, ...], ...]]:
        """Sets of alike cells, and the cells that are like no other."""
        families = list(self.members.alike)
        known = {cell for several in families for cell in several}
        return families + [(cell,) for cell in self.members.cells if cell not in known]

    def _staged(self, spent: Sequence[float]) -> Iterator[OpChoices]:
        """Loops and single cells on groups of devices, the longest first to the group that has the
        least; those that take more than their share of a group on all devices instead."""
        loops = self.members.loops
        order = sorted(range(len(loops)), key=lambda k: -spent[k])
        samples = self._samples()
        if sum(len(loop) > 1 for loop in loops) < 2:
            return
        for many in (n for n in self.counts if 1 < n < self.devices and n <= len(loops)):
            size = self.devices // many
            blocks = [tuple(range(g * size, (g + 1) * size)) for g in range(many)]
            strided = [tuple(range(g, self.devices, many)) for g in range(many)]
            for groups, share in product((blocks, strided), (0.5, 1.0, float("inf"))):
                held, found = [0.0] * many, OpChoices()
                for k in order:
                    where = tuple(range(self.devices))
                    if len(loops[k]) > 1 or spent[k] < share * sum(spent) / many:
                        least = min(range(many), key=lambda g: held[g])
                        held[least] += spent[k]
                        where = groups[least]
                    for cell in loops[k]:
                        found |= self.members.choices_along(
                            cell, (samples,), ((len(where),), where)
                        )
                yield found

    def _samples(self) -> int:
        """The class that most cells have: samples."""
        found = Counter(
            group for cell in self.members.cells for group in self.members.classes(cell)
        )
        return found.most_common(1)[0][0] if found else -1

    def _swept(self, families: Sequence[tuple[tuple[int, ...], ...]]) -> Iterator[OpChoices]:
        where = tuple(range(self.devices))
        for cells in families:
            classes = self.members.classes(cells[0])
            extents = tuple(classes.values())
            several = [row for rows in _grids_by_axes(extents, self.devices)[:2] for row in rows]
            for degrees in (*several, (1,) * len(extents)):
                mesh = (degrees, where)
                found: OpChoices = {}
                for cell in cells:
                    found |= self.members.choices_along(cell, tuple(classes), mesh)
                yield found

    def _next(self, rng: Random) -> OpChoices:
        found = next(self._sweep, None)
        self.swept = found is None
        return found or {}

    def _edge(self, rng: Random) -> OpChoices:
        members = self.members
        here = _drawn(self._layer_at, rng)
        classes, mesh = self._current(here)
        found: OpChoices = {}
        seen = {here}
        while True:
            near = [n for n in members.neighbours[here] if n not in seen]
            if not near:
                break
            here = rng.choice(near)
            seen.add(here)
            found |= members.choices_along((here,), classes, mesh)
            if rng.random() > FARTHER:
                break
        return found

    def _current(self, layer: int) -> tuple[tuple[int, ...], Mesh]:
        """The classes along which a layer's first Op is cut now, and its mesh."""
        op = self.members.anchors[layer]
        choice = self.choices[op]
        cut = [
            (axis.group, parts)
            for axis, parts in zip(self.space.axes(op), choice.parts, strict=True)
            if parts > 1
        ]
        return tuple(g for g, _ in cut), (tuple(n for _, n in cut), choice.devices)

    def _state(self, rng: Random) -> OpChoices:
        if not self.updates:
            return {}
        op = rng.choice(self.updates)
        several = [op]
        if rng.random() < 0.5:
            alike = self.space.alike[op]
            several = [n for n in self.updates if self.space.alike[n] == alike]
        elif rng.random() < 0.2:
            several = self.updates
        whole = rng.random() < 0.4
        count = rng.choice(self.counts)
        where = self._where(count, rng)
        found: OpChoices = {}
        for update in several:
            extents = [axis.extent for axis in self.space.axes(update)]
            longest = max(range(len(extents)), key=lambda k: extents[k], default=-1)
            degrees = tuple(
                count if k == longest and not whole and count <= extents[k] else 1
                for k in range(len(extents))
            )
            positions = tuple(range(len(extents)))
            found |= self.members.mesh_choices([(update, positions)], (degrees, where))
        return found

    # How, and where

    def _mesh(self, extents: tuple[int, ...], rng: Random) -> Mesh:
        count = rng.choice(self.counts) if rng.random() < 0.85 else rng.randint(1, self.devices)
        where = self._where(count, rng)
        several = _grids_by_axes(extents, count)
        if not several or rng.random() < WHOLE:
            return (1,) * len(extents), where
        return rng.choice(rng.choice(several)), where

    def _where(self, count: int, rng: Random) -> tuple[int, ...]:
        drawn = rng.random()
        if drawn < 0.75:  # a block
            first = rng.randrange(max(self.devices // count, 1)) * count
            return tuple(range(first, first + count))
        each, rest = divmod(count, max(len(self.hosts), 1))
        if drawn < 0.9 and len(self.hosts) > 1 and not rest and each <= min(map(len, self.hosts)):
            # of every host as many
            first = rng.randrange(len(self.hosts[0]))
            return tuple(host[(first + k) % len(host)] for host in self.hosts for k in range(each))
        if drawn < 0.97:  # neighbours
            first = rng.randrange(self.devices)
            return tuple(sorted((first + k) % self.devices for k in range(count)))
        return tuple(rng.sample(range(self.devices), count))


def _cumulative(weights: Sequence[float]) -> list[float]:
    """Sums for `_drawn`: half of the draws uniform, half in proportion to the weights."""
    mean = sum(weights) / max(len(weights), 1)
    return list(accumulate(weight + mean for weight in weights))


def _drawn(sums: Sequence[float], rng: Random) -> int:
    return min(bisect_right(sums, rng.random() * sums[-1]), len(sums) - 1)


@lru_cache(maxsize=4096)  # walks ask for the same few extents over and over
def _grids_by_axes(extents: tuple[int, ...], count: int) -> tuple[tuple[Grid, ...], ...]:
    """Grids of `count` parts, those that cut the fewest axes first."""
    found: dict[int, list[Grid]] = {}
    for grid in part_grids(extents, count):
        found.setdefault(axes_cut(grid), []).append(grid)
    return tuple(tuple(found[n]) for n in sorted(found))
