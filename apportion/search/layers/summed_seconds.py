"""summed_seconds: the summed seconds of a step, t_O, as tables over the grids of layers.

In: a Problem. Out: an Energy with a table per layer and one per pair of layers that exchange
Values, and the Strategy of any choice of grids.

For every layer (layers.py) its grids; for every Op of it, every Value that it touches and every
grid the region that each device has of that Value. A grid cuts an Op along several axes at once;
regions are put together from those of one axis each, which are found by Splits (hits of two parts;
of as many as needed where windows overlap). Equal Ops in equal grids share everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from apportion.columns import (
    Bools,
    Floats,
    Ints,
)
from apportion.describe import find_description, part_range
from apportion.graph import BACKWARD, FORWARD, UPDATE
from apportion.machine import compute_seconds
from apportion.search.layers.exchange_seconds import ExchangeSeconds, HeldRegions, ReadRegions
from apportion.search.layers.layers import UNMAPPED, find_layers
from apportion.search.problem import Problem
from apportion.search.tables.eliminate import Energy, Table
from apportion.split import (
    PARTIAL,
    Choice,
    Grid,
    Strategy,
    axes_cut,
    divisors,
    one_cut,
    part_grids,
)

RegionKey = tuple[int, tuple[int, ...], int]  # an Op's call, its positions, its layer's grids

MOST_GRIDS, LEAST_GRIDS = 96, 12  # of a layer, on 64 devices or fewer and on very many


def most_grids(devices: int) -> int:
    """How many grids of a layer are tried: exchanges are worked out for all pairs of grids and of
    devices."""
    return max(LEAST_GRIDS, min(MOST_GRIDS, 64 * MOST_GRIDS // devices))


@dataclass(frozen=True, eq=False)
class LayerGrids:
    """The grids that a layer may be cut by, a row each.

    degrees  rows x labels: parts
    index    rows x devices x labels: which of them a device has
    used     rows x devices
    """

    degrees: Ints
    index: Ints
    used: Bools
    left_out: int

    @property
    def rows(self) -> int:
        return len(self.degrees)


def layer_grids(extents: Sequence[int], devices: int, replicated: bool = True) -> LayerGrids:
    """All grids over axes of these extents; the last is whole on all devices, if `replicated`.

    Of too many those on the most devices with the fewest cut axes are kept.
    """
    whole = (1,) * len(extents)
    cut = [
        grid
        for count in divisors(devices)[:0:-1]
        for grid in sorted(part_grids(extents, count), key=axes_cut)
    ]
    kept = cut[: most_grids(devices) - 2]
    rows = [whole, *kept]
    if replicated and devices > 1:
        rows.append(whole)
    degrees = np.array(rows, np.int64).reshape(len(rows), len(extents))
    used = np.arange(devices) < degrees.prod(axis=1)[:, None]
    if replicated and devices > 1:
        used[-1] = True
    index = np.zeros((len(rows), devices, len(extents)), np.int64)
    rest = np.tile(np.arange(devices), (len(rows), 1))
    for label in range(len(extents) - 1, -1, -1):
        index[:, :, label] = rest % degrees[:, None, label]
        rest = rest // degrees[:, None, label]
    return LayerGrids(degrees, index, used, len(cut) - len(kept))


class SummedSeconds:
    """The layers of a step, their grids, and t_O as an Energy with a variable for each layer."""

    def __init__(self, problem: Problem, paper: bool = False) -> None:
        self.problem = problem
        self.space = problem.space
        self.graph = problem.space.graph
        self.after = dict(self.graph.state)
        counts = divisors(problem.devices)
        self.slots: Ints = np.zeros(problem.devices + 1, np.int64)  # of numbers of parts, in tables
        self.slots[counts] = np.arange(len(counts))
        self.layers, self.effects = find_layers(self.space)
        self.exchanges = ExchangeSeconds(problem.cluster, summed=paper)
        self.grids: list[LayerGrids] = []
        self._grids: dict[tuple[int, ...], int] = {}
        self._numbers: list[int] = []
        kinds: list[LayerGrids] = []
        for layer in self.layers:
            extents = tuple(label.extent for label in layer.labels)
            number = self._grids.setdefault(extents, len(kinds))
            if number == len(kinds):
                kinds.append(layer_grids(extents, problem.devices, replicated=not paper))
            self._numbers.append(number)
            self.grids.append(kinds[number])
        self.at = {
            op: (number, positions)
            for number, layer in enumerate(self.layers)
            for op, positions in zip(layer.ops, layer.positions, strict=True)
        }
        self._ranges: dict[tuple[int, int, int, int], Ints] = {}
        self._degrees: dict[tuple[int, int], list[int]] = {}
        self._tables: dict[int, Ints] = {}
        self._picks: dict[tuple[int, int], Ints] = {}
        self._ables: dict[tuple[int, int, int, int], Ints] = {}
        self._boxes: dict[tuple[RegionKey, int], Ints] = {}
        self._choices: dict[tuple[RegionKey, int], Choice] = {}
        self._held_regions: dict[tuple[RegionKey, int], HeldRegions] = {}
        self.energy = Energy()
        self._fill()

    # What each device has of a Value, in every grid

    def key(self, op: int) -> RegionKey:
        """What the regions of an Op follow from."""
        layer, positions = self.at[op]
        return self.space.call_ids[op], positions, self._numbers[layer]

    def degrees(self, op: int, position: int) -> list[int]:
        """Into how many parts an axis can be cut, of the numbers that divide the devices."""
        key = (self.space.call_ids[op], position)
        if key not in self._degrees:
            extent, devices = self.space.axes(op)[position].extent, self.problem.devices
            some = [d for d in divisors(devices) if 1 < d <= extent]
            effect = self.effects.of(op, position)
            if effect is None:
                some = []
            elif effect.windows:
                some = [d for d in some if self.space.allows(op, self._parts(op, position, d))]
            self._degrees[key] = some
        return self._degrees[key]

    def _parts(self, op: int, position: int, degree: int) -> Grid:
        return one_cut(len(self.space.axes(op)), position, degree)

    def _aligned(self, extent: int) -> Ints:
        """Ranges by number of parts and part."""
        found = self._tables.get(extent)
        if found is None:
            found = self._tables[extent] = self._uncut(extent)
            for degree in divisors(self.problem.devices):
                if degree <= extent:
                    ranges = [part_range(extent, degree, k) for k in range(degree)]
                    found[self.slots[degree], :degree] = ranges
        return found

    def _uncut(self, extent: int) -> Ints:
        devices = self.problem.devices
        rows = len(divisors(devices))
        return np.tile(np.array([0, extent], np.int64), (rows, devices, 1))

    def _picked(self, op: int, position: int, label: int, place: int, atom: int) -> Ints:
        """The ranges of an atom on all devices in all grids."""
        table = self.ranges(op, position, place, atom)
        return self._pick(op, position, label, table)

    def _pick(self, op: int, position: int, label: int, table: Ints) -> Ints:
        layer = self.at[op][0]
        grids = self.grids[layer]
        able = self._able(op, position, grids, label)
        key = (id(table), id(able))  # both are kept
        found = self._picks.get(key)
        if found is None:
            index = grids.index[:, :, label] % able[:, None]
            found = self._picks[key] = table[self.slots[able][:, None], index]
        return found

    def ranges(self, op: int, position: int, place: int, atom: int) -> Ints:
        """The ranges of an atom of input `place` (of output -1 - `place`) that the parts of an axis
        have, by number of parts and part."""
        key = (self.space.call_ids[op], position, place, atom)
        found = self._ranges.get(key)
        if found is not None:
            return found
        effect = self.effects.of(op, position)
        assert effect is not None
        ends = self.graph.ops[op]
        value = ends.inputs[place] if place >= 0 else ends.outputs[-1 - place]
        extent = self.space.factors(value)[atom]
        if (place, atom) not in effect.windows:
            table = self._aligned(extent)
        else:
            table = self._uncut(extent)
            for degree in self.degrees(op, position):
                split = self.space.split(op, self._parts(op, position, degree))
                ranges = [part.inputs[place][atom] for part in split.parts]
                table[self.slots[degree], :degree] = ranges
        self._ranges[key] = table
        return table

    def boxes(self, op: int, place: int) -> Ints:
        """The regions of an input, or of output -1 - `place`, on all devices in all grids."""
        key = (self.key(op), place)
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = self._make_boxes(op, place)
        return found

    def _make_boxes(self, op: int, place: int) -> Ints:
        layer, positions = self.at[op]
        grids, ends = self.grids[layer], self.graph.ops[op]
        value = ends.inputs[place] if place >= 0 else ends.outputs[-1 - place]
        factors = self.space.factors(value)
        box = np.zeros((*grids.used.shape, len(factors), 2), np.int64)
        box[..., 1] = factors
        cut: set[int] = set()
        if place >= 0 and factors and self._is_partly_read(op, positions):
            whole = self.space.split(op, [1] * len(self.space.axes(op)))
            box[...] = whole.parts[0].inputs[place]
            cut = set(range(len(factors)))
        for label, position in enumerate(positions):
            effect = None if position == UNMAPPED else self.effects.of(op, position)
            if effect is None:
                continue
            cuts = (*effect.aligned, *effect.windows) if place >= 0 else effect.written
            for where, atom in cuts:
                if where == (place if place >= 0 else -1 - place):
                    mine = self._picked(op, position, label, place, atom)
                    if atom in cut:
                        np.maximum(box[:, :, atom, 0], mine[..., 0], out=box[:, :, atom, 0])
                        np.minimum(box[:, :, atom, 1], mine[..., 1], out=box[:, :, atom, 1])
                    else:
                        box[:, :, atom] = mine
                        cut.add(atom)
        box[~grids.used] = 0
        return box

    def _is_partly_read(self, op: int, positions: Sequence[int]) -> bool:
        """Whether the whole Op may read less than the whole of its inputs, as a slice does."""
        effects = [self.effects.of(op, position) for position in positions if position != UNMAPPED]
        return not effects or any(e is not None and (e.windows or e.reads_slice) for e in effects)

    def _able(self, op: int, position: int, grids: LayerGrids, label: int) -> Ints:
        """Parts of an axis in every grid: 1 where it cannot be cut into as many."""
        key = (self.space.call_ids[op], position, self._numbers[self.at[op][0]], label)
        found = self._ables.get(key)
        if found is None:
            parts = np.ones(self.problem.devices + 1, np.int64)
            able = self.degrees(op, position)
            parts[able] = able
            found = self._ables[key] = parts[grids.degrees[:, label]]
        return found

    def held_regions(self, op: int, place: int) -> HeldRegions:
        """What the parts of an Op leave of output `place`."""
        key = (self.key(op), place)
        found = self._held_regions.get(key)
        if found is not None:
            return found
        layer, positions = self.at[op]
        grids = self.grids[layer]
        term, terms = np.zeros(grids.used.shape, np.int64), np.ones(grids.rows, np.int64)
        for label, position in enumerate(positions):
            effect = None if position == UNMAPPED else self.effects.of(op, position)
            if effect is not None and effect.outputs[place] == PARTIAL:
                able = self._able(op, position, grids, label)
                term = term * able[:, None] + grids.index[:, :, label] % able[:, None]
                terms = terms * able
        term[~grids.used] = -1
        made = self._held_regions[key] = HeldRegions(self.boxes(op, -1 - place), term, terms)
        return made

    def read_regions(self, reads: Iterable[tuple[int, int]]) -> ReadRegions:
        """What the Ops of one layer read of one Value, (op, place) each: the hull of all."""
        several = [(self.boxes(op, place), op) for op, place in reads]
        box, op = several[0]
        for more, _ in several[1:]:
            box = np.stack(
                [np.minimum(box[..., 0], more[..., 0]), np.maximum(box[..., 1], more[..., 1])], -1
            )
        return ReadRegions(box, self.grids[self.at[op][0]].used)

    # The tables

    def _fill(self) -> None:
        for costs in self._compute():
            self.energy.variable(costs)
        known: dict[tuple[object, ...], Table] = {}
        for value in range(len(self.graph.values)):
            source = self.source(value)
            if source is None or not self.graph.values[value].nbytes:
                continue
            here = self.at[source[0]][0]
            held = self.held_regions(*source)
            for layer, reads in self.reads(value).items():
                same = layer == here
                ends = tuple(sorted({(self.key(op), place) for op, place in reads}))
                size = self.graph.values[value].itemsize
                key = (self.key(source[0]), source[1], ends, size, same)
                if key not in known:
                    several = {(self.key(op), place): (op, place) for op, place in reads}
                    wanted = self.read_regions(several.values())
                    between = self.exchanges.inside if same else self.exchanges.between
                    known[key] = between(held, wanted, self.space.factors(value), size)
                if same:
                    self.energy.unary[here] = self.energy.unary[here] + known[key]
                elif known[key].any():
                    self.energy.pair(here, layer, known[key])

    def source(self, value: int) -> tuple[int, int] | None:
        """The Op and output that leave a Value where its readers find it; None if it lies wherever
        it is read."""
        made = self.graph.producer[value]
        if made is None:
            after = self.after.get(value)
            made = None if after is None else self.graph.producer[after]
        return made

    def reads(self, value: int) -> dict[int, list[tuple[int, int]]]:
        """Who reads a Value: by layer, (op, place) each."""
        found: dict[int, list[tuple[int, int]]] = {}
        for op in self.graph.consumers[value]:
            places = [k for k, v in enumerate(self.graph.ops[op].inputs) if v == value]
            found.setdefault(self.at[op][0], []).extend((op, place) for place in places)
        return found

    def _compute(self) -> list[Floats]:
        """For every layer and grid the sum over its Ops of what the slowest part takes."""
        numbers: dict[tuple[RegionKey, int], int] = {}
        works: list[tuple[int, Floats, Floats, Bools]] = []
        of_op: list[int] = []
        for op in range(len(self.graph.ops)):
            outputs = self.graph.ops[op].outputs
            size = self.graph.values[outputs[0]].itemsize if outputs else 4
            number = numbers.setdefault((self.key(op), size), len(works))
            if number == len(works):
                works.append((op, *self._work(op), self.grids[self.at[op][0]].used))
            of_op.append(number)
        kinds = [self.graph.ops[op].kind for op, *_ in works]
        counts = [int(used.sum()) for *_, used in works]
        which = np.repeat(np.arange(len(works)), counts)
        sizes = [self.graph.values[self.graph.ops[op].outputs[0]].itemsize for op, *_ in works]
        seconds, _ = compute_seconds(
            self.problem.cost, self.problem.cluster, kinds, which,
            np.concatenate([np.nonzero(used)[1] for *_, used in works]),
            np.concatenate([flops[used] for _, flops, _, used in works]),
            np.concatenate([nbytes[used] for _, _, nbytes, used in works]).astype(np.int64),
            np.array(sizes, np.int64)[which],
        )  # fmt: skip
        slowest: list[Floats] = []
        for (*_, used), mine in zip(works, np.split(seconds, np.cumsum(counts)[:-1]), strict=True):
            each = np.zeros(used.shape)
            each[used] = mine
            slowest.append(each.max(axis=1))
        return [np.sum([slowest[of_op[op]] for op in layer.ops], axis=0) for layer in self.layers]

    def _work(self, op: int) -> tuple[Floats, Floats]:
        """Operations and bytes of every part, in every grid."""
        layer, positions = self.at[op]
        grids, ends = self.grids[layer], self.graph.ops[op]
        nothing = np.zeros(grids.used.shape)
        description = find_description(ends.kind)
        if description is not None and description.alias:
            return nothing, nothing
        flops = np.full(grids.used.shape, self.effects.flops(op))
        for label, position in enumerate(positions):
            effect = None if position == UNMAPPED else self.effects.of(op, position)
            if effect is not None and effect.divides_work:
                extent = self.space.axes(op)[position].extent
                mine = self._pick(op, position, label, self._aligned(extent))
                flops *= (mine[..., 1] - mine[..., 0]) / extent
        nbytes = nothing
        places = {v: k for k, v in enumerate(ends.inputs)}
        places |= {v: -1 - k for k, v in enumerate(ends.outputs)}
        for value, place in places.items():
            nbytes = nbytes + _volume(self.boxes(op, place)) * self.graph.values[value].itemsize
        return flops, nbytes

    # What is kept in memory

    def bytes_kept(self) -> list[Floats]:
        """For every layer and grid the bytes of its state, of the gradients of that and of what its
        backward Ops read, on the device that has the most."""
        found = []
        for layer, grids in zip(self.layers, self.grids, strict=True):
            total = np.zeros(grids.used.shape)
            for op in layer.ops:
                for place, value in enumerate(self.graph.ops[op].outputs):
                    if self._is_kept(op, value):
                        total += (
                            _volume(self.boxes(op, -1 - place)) * self.graph.values[value].itemsize
                        )
            found.append(total.max(axis=1))
        return found

    def _is_kept(self, op: int, value: int) -> bool:
        readers = (self.graph.ops[r] for r in self.graph.consumers[value])
        if self.graph.ops[op].phase == FORWARD:
            return any(reader.phase == BACKWARD for reader in readers)
        return self.graph.ops[op].phase == UPDATE or any(r.phase == UPDATE for r in readers)

    # Strategies

    def choice(self, op: int, row: int) -> Choice:
        """The Choice of an Op where its layer is cut by the grid of that row."""
        key = (self.key(op), row)
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = self._make_choice(op, row)
        return found

    def _make_choice(self, op: int, row: int) -> Choice:
        layer, positions = self.at[op]
        grids = self.grids[layer]
        parts = [1] * len(self.space.axes(op))
        number = np.zeros(self.problem.devices, np.int64)
        for position, label in sorted((p, k) for k, p in enumerate(positions) if p != UNMAPPED):
            parts[position] = able = int(self._able(op, position, grids, label)[row])
            if able > 1:
                number = number * able + grids.index[row, :, label]
        replicas: dict[int, list[int]] = {}
        for device in np.flatnonzero(grids.used[row]).tolist():
            replicas.setdefault(int(number[device]), []).append(device)
        rounds = zip(*(replicas[n] for n in range(len(replicas))), strict=True)
        return Choice(tuple(parts), tuple(device for each in rounds for device in each))

    def strategy(self, rows: Sequence[int]) -> Strategy:
        """The Strategy of a grid for every layer."""
        choices = [self.choice(op, rows[self.at[op][0]]) for op in range(len(self.graph.ops))]
        return Strategy(tuple(choices), digits=self.space.digits, opening=self.space.opening)

    def illegal(self, rows: Sequence[int]) -> set[int]:
        """The layers some Op of which cannot be cut as their grid says."""
        legal: dict[tuple[RegionKey, int], bool] = {}
        found = set()
        for op in range(len(self.graph.ops)):
            layer = self.at[op][0]
            key = (self.key(op), rows[layer])
            if key not in legal:
                legal[key] = self.space.allows(op, self.choice(op, rows[layer]).parts)
            if not legal[key]:
                found.add(layer)
        return found


def _volume(box: Ints) -> Floats:
    """Elements of boxes; none where a device is not used (its box is all zeros)."""
    if box.shape[2] == 0:
        return np.ones(box.shape[:2])
    volume: Floats = (box[..., 1] - box[..., 0]).prod(axis=2).astype(np.float64)
    return volume
