"""alternatives: what else an Op could have been given than its Choice.

An **axis** here is one of the Graph as captured: the digits into which a strategy divides it count
as one. Its kind is FlexFlow's, and one more:

    sample     the batch
    parameter  cuts a parameter, or what becomes one
    attribute  any other that indexes an output
    reduction  leaves partial values

Alternatives are each there once, and legal: first cut as a neighbour is; then in turn one cut moved
to another axis or given up for replicas, the Op whole on one device or on many, and all ways to cut
one, two and three axes, on the devices of the Op and of its neighbours.

The members of a Group (split/groups.py) follow one Op: they are cut along the axes that are the
same, and are there several times along those that they do not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from apportion.describe import IllegalCut
from apportion.graph import PARAMETER, UPDATE
from apportion.search import sample_classes
from apportion.split import (
    MOST_AXES,
    AxisEffect,
    AxisEffects,
    Choice,
    Groups,
    Space,
    divisors,
    one_cut,
    part_grids,
    unsplit_choice,
    verify_choice,
)

SAMPLE, ATTRIBUTE, REDUCTION = "sample", "attribute", "reduction"
MOST_ALONE = 8  # devices that an Op is tried whole on
MOST_NEAR = 8  # neighbours that an Op is cut like


@dataclass(frozen=True, slots=True)
class OpAxis:
    """An axis of an Op of the captured Graph, with its place in a Choice of the divided one.

    refused  why it cannot be cut; "" if it can
    partial  whether a cut leaves partial values
    dims     the dims that a cut divides: `weight[0]`
    """

    name: str
    extent: int
    positions: tuple[int, ...]
    kind: str
    partial: bool
    dims: tuple[str, ...]
    refused: str = ""


class OpAlternatives:
    """A Space with what is known of the axes of its Ops."""

    def __init__(self, space: Space, devices: int) -> None:
        self.space, self.devices = space, devices
        self.plain = space.with_digits(())
        self.effects, self.plain_effects = AxisEffects(space), AxisEffects(self.plain)
        self.samples = sample_classes(self.plain)
        self.groups = Groups(space.graph)

    # Axes

    def axes(self, op: int) -> tuple[OpAxis, ...]:
        """The axes of an Op."""
        extents = [axis.extent for axis in self.space.axes(op)]
        found, at = [], 0
        for position, axis in enumerate(self.plain.axes(op)):
            places = [at]
            while math.prod(extents[k] for k in places) < axis.extent:
                places.append(places[-1] + 1)
            at = places[-1] + 1
            effect = self.plain_effects.of(op, position)
            refused = "" if effect is not None else self._reason(op, position)
            found.append(
                OpAxis(
                    axis.name,
                    axis.extent,
                    tuple(places),
                    self._kind(op, axis.group, effect),
                    effect is not None and effect.is_partial,
                    () if effect is None else self._dims(op, effect),
                    refused,
                )
            )
        return tuple(found)

    def _kind(self, op: int, group: int, effect: AxisEffect | None) -> str:
        if group in self.samples:
            return SAMPLE
        if effect is None:
            return ATTRIBUTE
        meant = self.space.graph.ops[op]
        if effect.is_partial and meant.phase != UPDATE:
            return REDUCTION
        read = (meant.inputs[place] for place, _ in (*effect.aligned, *effect.windows))
        left = (meant.outputs[place] for place, _ in effect.written)
        state = self.groups.from_parameters
        if any(v in state for v in read) or any(self._becomes_parameter(v) for v in left):
            return PARAMETER
        return ATTRIBUTE

    def _becomes_parameter(self, value: int) -> bool:
        """Whether a Value is the gradient of a parameter, or its next value."""
        graph = self.space.graph
        readers = [graph.ops[reader] for reader in graph.consumers[value]]
        made = graph.producer[value]
        updated = made is not None and graph.ops[made[0]].phase == UPDATE
        return updated or any(op.phase == UPDATE for op in readers)

    def _dims(self, op: int, effect: AxisEffect) -> tuple[str, ...]:
        found = []
        for value, atom in effect.atoms_cut(self.space.graph.ops[op]):
            owners = [k for k, row in enumerate(self.plain.atoms.dims[value]) for _ in row]
            found.append(f"{self.space.graph.values[value].name}[{owners[atom]}]")
        return tuple(dict.fromkeys(found))

    def _reason(self, op: int, position: int) -> str:
        axes = self.plain.axes(op)
        if axes[position].extent < 2:
            return "there is only one of it"
        try:
            self.plain.split(op, one_cut(len(axes), position))
        except IllegalCut as refusal:
            return " ".join(str(refusal).split())
        return ""

    # Alternatives

    def choices(self, op: int, now: Sequence[Choice]) -> list[Choice]:
        """All alternatives to the Choice of an Op under the Choices that there are."""
        found: dict[Choice, None] = {}
        for choice in self._several(op, now):
            if choice not in found and choice != now[op] and self.is_legal(op, choice):
                found[choice] = None
        return list(found)

    def is_legal(self, op: int, choice: Choice) -> bool:
        """Whether an Op can be given this Choice."""
        try:
            verify_choice(self.space, op, choice, self.devices)
        except ValueError:
            return False
        return True

    def _several(self, op: int, now: Sequence[Choice]) -> Iterator[Choice]:
        near = self.neighbours(op)
        axes = [axis for axis in self.axes(op) if not axis.refused]
        lists = _lists([now[op], *(now[other] for other in near)], self.devices)
        for other in near[:MOST_NEAR]:
            yield self.following(other, now[other], [op])[op]
        yield from _in_turn(
            self._moves(op, now[op], axes),
            self._wholes(op, lists),
            self._single(op, axes, lists),
            self._multiple(op, axes, lists, now[op].count),
        )

    def _wholes(self, op: int, lists: Sequence[tuple[int, ...]]) -> Iterator[Choice]:
        """On one device; several times."""
        for some in lists:
            yield unsplit_choice(self.space, op, some)
        used = dict.fromkeys(device for some in lists for device in some)
        for device in list(used)[:MOST_ALONE]:
            yield unsplit_choice(self.space, op, (device,))

    def _single(
        self, op: int, axes: Sequence[OpAxis], lists: Sequence[tuple[int, ...]]
    ) -> Iterator[Choice]:
        for some in lists:
            for axis in axes:
                yield from self._grids(op, (axis,), some, divisors(len(some))[:0:-1])

    def _multiple(
        self, op: int, axes: Sequence[OpAxis], lists: Sequence[tuple[int, ...]], count: int
    ) -> Iterator[Choice]:
        """Several axes, into as many parts as there are, and into one for every device."""
        for many in range(2, MOST_AXES + 1):
            for some in dict.fromkeys((lists[0], lists[-1])):
                for several in combinations(axes, many):
                    yield from self._grids(op, several, some, dict.fromkeys((count, len(some))))

    def neighbours(self, op: int) -> list[int]:
        """Ops that make what it reads, or read what it leaves; the largest Values first."""
        graph = self.space.graph
        meant, found = graph.ops[op], []
        for value in meant.inputs:
            made = graph.producer[value]
            found += [(-graph.values[value].nbytes, made[0])] if made else []
        for value in meant.outputs:
            found += [(-graph.values[value].nbytes, reader) for reader in graph.consumers[value]]
        return list(dict.fromkeys(other for _, other in sorted(found) if other != op))

    def _moves(self, op: int, now: Choice, axes: Sequence[OpAxis]) -> Iterator[Choice]:
        """One cut axis, or the replicas, given to another axis or to the replicas."""
        grid = np.array(now.devices).reshape(now.replicas, *now.parts)
        extents = [0, *(axis.extent for axis in self.space.axes(op))]
        homes = [(k + 1, n) for n, axis in enumerate(axes) for k in axis.positions]
        home = dict(homes)
        for source in range(grid.ndim):
            count = grid.shape[source]
            if count == 1:
                continue
            targets = [0] if source else []
            for n, axis in enumerate(axes):
                rooms = [
                    k + 1 for k in axis.positions if grid.shape[k + 1] * count <= extents[k + 1]
                ]
                targets += rooms[:1] if home.get(source) != n else []
            for target in targets:
                for inner in (True, False) if grid.shape[target] > 1 else (True,):
                    moved = _merged(grid, source, target, inner)
                    yield Choice(moved.shape[1:], tuple(moved.ravel().tolist()))

    def _grids(
        self, op: int, axes: Sequence[OpAxis], devices: Sequence[int], counts: Iterable[int]
    ) -> Iterator[Choice]:
        """These axes cut, all of them, into so many parts: on the first of the devices, or several
        times on all of them."""
        extents = [axis.extent for axis in self.space.axes(op)]
        for count in counts:
            if len(devices) % count:
                continue
            for degrees in part_grids([axis.extent for axis in axes], count, fewest=2):
                parts = [1] * len(extents)
                for axis, degree in zip(axes, degrees, strict=True):
                    digits = _spread([extents[k] for k in axis.positions], degree)
                    for position, digit in zip(axis.positions, digits, strict=True):
                        parts[position] = digit
                if math.prod(parts) != count:
                    continue
                yield Choice(tuple(parts), tuple(devices[:count]))
                if count < len(devices):
                    yield Choice(tuple(parts), tuple(devices))
                if len(axes) == 2:
                    turned = np.array(devices[:count]).reshape(degrees[::-1]).T
                    yield Choice(tuple(parts), tuple(turned.ravel().tolist()))

    # Groups

    def group(self, op: int) -> tuple[int, ...]:
        """The Group of an Op, its forward Op first; only the Op if it has none."""
        return self.groups.of(op)

    def following(self, leader: int, choice: Choice, members: Iterable[int]) -> dict[int, Choice]:
        """The Choices of Ops that are cut as the leader is, along axes that are the same."""
        grid = np.array(choice.devices).reshape(choice.replicas, *choice.parts)
        cuts = [k for k, parts in enumerate(choice.parts) if parts > 1]
        marks: dict[tuple[int, int], int] = {}
        self._mark(leader, {k: k for k in cuts}, marks)
        groups = self.space.groups(leader)
        found = {leader: choice}
        for member in members:
            if member != leader:
                own = {cut: self._same(member, groups[cut], cut, marks) for cut in cuts}
                found[member] = self._follow(member, own, choice, grid, marks)
        return found

    def _follow(
        self,
        op: int,
        own: dict[int, list[int]],
        choice: Choice,
        grid: np.typing.NDArray[np.int64],
        marks: dict[tuple[int, int], int],
    ) -> Choice:
        """`own` has for every cut of the leader the axes that it may be, the best first."""
        parts = [1] * len(self.space.axes(op))
        taken: dict[int, int] = {}
        for cut in sorted(own, key=lambda k: -choice.parts[k]):
            for position in own[cut]:
                if position in taken.values():
                    continue
                tried = [*parts]
                tried[position] = choice.parts[cut]
                if self.space.allows(op, tried):
                    parts, taken[cut] = tried, position
                    break
        self._mark(op, taken, marks)
        mapped = sorted(taken, key=taken.__getitem__)
        rest = [0, *(k + 1 for k in range(len(choice.parts)) if k not in taken)]
        turned = grid.transpose([*rest, *(k + 1 for k in mapped)])
        return Choice(tuple(parts), _replicated(turned.reshape(-1, math.prod(parts))))

    def _same(self, op: int, group: int, cut: int, marks: dict[tuple[int, int], int]) -> list[int]:
        """Axes of an Op of one class; first those that cut what the same cut divides already."""
        able = [
            k for k, other in enumerate(self.space.groups(op))
            if other == group and self.effects.of(op, k) is not None
        ]  # fmt: skip
        if len(able) < 2:
            return able
        scores = {}
        for k in able:
            seen = [marks[end] for end in self._touched(op, k) if end in marks]
            scores[k] = sum(1 if mark == cut else -1 for mark in seen)
        return sorted(able, key=lambda k: (-scores[k], k))

    def _touched(self, op: int, position: int) -> list[tuple[int, int]]:
        effect = self.effects.of(op, position)
        return [] if effect is None else effect.atoms_cut(self.space.graph.ops[op])

    def _mark(self, op: int, taken: dict[int, int], marks: dict[tuple[int, int], int]) -> None:
        for cut, position in taken.items():
            for end in self._touched(op, position):
                marks.setdefault(end, cut)


def _in_turn(*several: Iterator[Choice]) -> Iterator[Choice]:
    """One of each in turn, so that whoever stops early has seen some of all."""
    left = list(several)
    while left:
        for each in [*left]:
            item = next(each, None)
            if item is None:
                left.remove(each)
            else:
                yield item


def _lists(choices: Sequence[Choice], devices: int) -> list[tuple[int, ...]]:
    """The distinct devices of Choices in their order, each list once; last all devices."""
    found = dict.fromkeys(tuple(dict.fromkeys(choice.devices)) for choice in choices)
    everything = tuple(range(devices))
    return [*(some for some in found if some != everything), everything]


def _merged(
    grid: np.typing.NDArray[np.int64], source: int, target: int, inner: bool
) -> np.typing.NDArray[np.int64]:
    """The grid with one of its dimensions merged into another, as the faster or the slower one."""
    count, shape = grid.shape[source], list(grid.shape)
    rest = [k for k in range(grid.ndim) if k != source]
    at = rest.index(target) + (1 if inner else 0)
    turned = grid.transpose([*rest[:at], source, *rest[at:]])
    shape[target] *= count
    shape[source] = 1
    return turned.reshape(shape)


def _replicated(rows: np.typing.NDArray[np.int64]) -> tuple[int, ...]:
    """Devices of replicas by parts; a replica is left out if one of its parts is there already."""
    kept: list[list[int]] = []
    for row in rows.tolist():
        if all(device not in column for device, *column in zip(row, *kept, strict=True)):
            kept.append(row)
    return tuple(device for row in kept for device in row)


def _spread(digits: Sequence[int], parts: int) -> list[int]:
    """An axis cut into parts, digit by digit from the slowest on; into fewer if that cannot be."""
    found = []
    for extent in digits:
        here = parts if parts <= extent else extent if parts % extent == 0 else 1
        found.append(here)
        parts //= here
    return found
