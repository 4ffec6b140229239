"""exchange_seconds: how long it takes to bring a Value from one layer to another.

In: for every grid of two layers the regions that devices hold and read. Out: a table of seconds.

Both sides are grids: for every choice of grid (row) the box of atoms that each device has, or
wants. What a device wants and has not got it fetches from the first device after itself that has
it; a box that several devices have is one *copy*, and of a partial Value every term is wanted. The
bytes between devices a and b take

    links     max over links of (sum of bytes / bandwidth) + the largest latency of a route used
    device    where messages burn the device: max over devices of what it sends and receives, each
              message with its latency
    summed    sum over a, b of bytes / bandwidth: every transfer by itself, as OptCNN adds them

A partial Value is fetched term by term, or first reduced onto one layout of all its holders,
whichever moves fewer bytes, as lowering does; if every device wants what it has terms of, it is an
all-reduce of each group of such devices (`summed`: to a parameter server and back).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Bools,
    Floats,
    Ints,
    compiled,
    offsets,
)
from apportion.describe import Factors
from apportion.machine import Cluster, all_reduce_lines
from apportion.split import grid_boxes

LINKS, DEVICE, SUMMED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class HeldRegions:
    """Per row and device a box of a Value's atoms and the term it is of; -1: the device has
    nothing. `terms` is their number per row."""

    box: Ints  # rows x devices x atoms x 2
    term: Ints  # rows x devices
    terms: Ints  # rows


@dataclass(frozen=True, eq=False)
class ReadRegions:
    """Per row and device a box of a Value's atoms; `used` is false where nothing is wanted."""

    box: Ints
    used: Bools


class ExchangeSeconds:
    """The times of exchanges on a Cluster."""

    def __init__(self, cluster: Cluster, summed: bool = False) -> None:
        self.cluster = cluster
        count = len(cluster.devices)
        routes = [cluster.routes[a][b] for a in range(count) for b in range(count)]
        self.start = offsets(np.array([len(route) for route in routes], np.int64))
        self.link = np.array([link for route in routes for link in route], np.int64)
        self.pace = np.array([1 / link.bandwidth for link in cluster.links], np.float64)
        delay = [sum(cluster.links[k].latency for k in route) for route in routes]
        self.latency = np.array(delay, np.float64).reshape(count, count)
        slow = [max((1 / cluster.links[k].bandwidth for k in r), default=0.0) for r in routes]
        self.slowness = np.array(slow, np.float64).reshape(count, count)
        self.mode = SUMMED if summed else DEVICE if cluster.communication_on_device else LINKS
        self._reduces: dict[tuple[tuple[int, ...], ...], list[tuple[float, float]]] = {}

    def between(
        self, held: HeldRegions, wanted: ReadRegions, factors: Factors, itemsize: int
    ) -> Floats:
        """Seconds for every row of one with every row of the other."""
        sources, source_of = _distinct_grids(held.box, held.term)
        targets, target_of = _distinct_grids(wanted.box, wanted.used)
        first = HeldRegions(held.box[sources], held.term[sources], held.terms[sources])
        second = ReadRegions(wanted.box[targets], wanted.used[targets])
        rows, columns = len(sources), len(targets)
        s, t = np.divmod(np.arange(rows * columns), columns)
        table = self._pairs(first, second, s, t, factors, itemsize).reshape(rows, columns)
        return table[np.ix_(source_of, target_of)]

    def inside(
        self, held: HeldRegions, wanted: ReadRegions, factors: Factors, itemsize: int
    ) -> Floats:
        """Seconds for every row of one with the same row of the other."""
        if (held.terms == 1).all() and np.array_equal(held.box, wanted.box):
            return np.zeros(len(held.box))
        each = np.arange(len(held.box))
        return self._pairs(held, wanted, each, each, factors, itemsize)

    def _pairs(
        self,
        held: HeldRegions,
        wanted: ReadRegions,
        s: Ints,
        t: Ints,
        factors: Factors,
        itemsize: int,
    ) -> Floats:
        if (held.terms == 1).all():
            return self._moved(held, wanted, s, t, itemsize)[0]
        seconds = np.zeros(len(s))
        same = (held.box[s] == wanted.box[t]).all((1, 2, 3)) & (held.terms[s] > 1)
        same &= ((held.term[s] >= 0) == wanted.used[t]).all(1)
        for k in np.flatnonzero(same).tolist():
            seconds[k] = self._all_reduce(held.box[s[k]], held.term[s[k]], itemsize)
        if not same.all():
            seconds[~same] = self._reduced(held, wanted, s[~same], t[~same], factors, itemsize)
        return seconds

    def _reduced(
        self,
        held: HeldRegions,
        wanted: ReadRegions,
        s: Ints,
        t: Ints,
        factors: Factors,
        itemsize: int,
    ) -> Floats:
        """Term by term, or by way of a layout."""
        seconds, moved = self._moved(held, wanted, s, t, itemsize)
        partial = (held.terms[s] > 1) & (moved > 0)
        if not partial.any():
            return seconds
        layout = _reduced_onto_holders(held, factors)
        rows = np.arange(len(held.box))
        first, first_bytes = self._moved(held, _as_read(layout), rows, rows, itemsize)
        second, second_bytes = self._moved(layout, wanted, s, t, itemsize)
        less = partial & (first_bytes[s] + second_bytes < moved)
        return np.where(less, first[s] + second, seconds)

    def _moved(
        self, held: HeldRegions, wanted: ReadRegions, s: Ints, t: Ints, itemsize: int
    ) -> tuple[Floats, Floats]:
        found: tuple[Floats, Floats] = _exchange_rows(
            held.box, held.term, _first_holders(held.box, held.term), wanted.box, wanted.used, s, t,
            itemsize, self.latency, self.slowness, self.start, self.link, self.pace, self.mode,
        )  # fmt: skip
        return found

    def _all_reduce(self, box: Ints, term: Ints, itemsize: int) -> float:
        """The devices that hold terms of one box reduce it among themselves, all boxes at once."""
        groups: dict[bytes, list[int]] = {}
        for device in np.flatnonzero(term >= 0).tolist():
            groups.setdefault(box[device].tobytes(), []).append(device)
        nbytes = max(
            int(np.prod(box[g[0], :, 1] - box[g[0], :, 0])) * itemsize for g in groups.values()
        )
        members = tuple(tuple(g) for g in groups.values() if len(g) > 1)
        if self.mode == SUMMED:
            return sum(2 * nbytes * float(self.slowness[d, g[0]]) for g in members for d in g[1:])
        lines = self._reduces.get(members)
        if lines is None:
            lines = self._reduces[members] = self._lines(members)
        return min(alpha + beta * nbytes for alpha, beta in lines)

    def _lines(self, groups: tuple[tuple[int, ...], ...]) -> list[tuple[float, float]]:
        """For every algorithm (latency, seconds per byte) of all groups together."""
        profiles = [all_reduce_lines(group, self.cluster) for group in groups]
        names = set.intersection(*({p.algorithm for p in each} for each in profiles))
        found = []
        for name in sorted(names):
            same = [p for each in profiles for p in each if p.algorithm == name]
            busy = np.zeros(len(self.pace))
            for p in same:
                for link, beta in p.links:
                    busy[link] += beta
            beta = max(max(p.beta for p in same), float(busy.max(initial=0.0)))
            found.append((max(p.alpha for p in same), beta))
        return found


def _distinct_grids(*columns: npt.NDArray[np.generic]) -> tuple[Ints, Ints]:
    """The rows that differ, and for every row which of them it is."""
    rows = len(columns[0])
    numbers: dict[bytes, int] = {}
    first: list[int] = []
    which = np.empty(rows, np.int64)
    for row in range(rows):
        key = b"".join(column[row].tobytes() for column in columns)
        if key not in numbers:
            numbers[key] = len(first)
            first.append(row)
        which[row] = numbers[key]
    return np.array(first, np.int64), which


@compiled
def _first_holders(box: Ints, term: Ints) -> Ints:
    """For every row and device the first device that has the same copy; -1 where it has none."""
    rows, count = term.shape
    leaders = np.full((rows, count), -1)
    for row in range(rows):
        for device in range(count):
            if term[row, device] < 0:
                continue
            first = 0
            while (
                term[row, first] != term[row, device] or (box[row, first] != box[row, device]).any()
            ):
                first += 1
            leaders[row, device] = first
    return leaders


def _reduced_onto_holders(held: HeldRegions, factors: Factors) -> HeldRegions:
    """Each row reduced onto all its holders, along the first atom that is long enough."""
    box, term = np.zeros_like(held.box), np.full_like(held.term, -1)
    for row, terms in enumerate(held.term):
        owners = np.flatnonzero(terms >= 0)
        owners = owners[np.argsort(terms[owners], kind="stable")]
        long = [k for k, factor in enumerate(factors) if factor >= len(owners)]
        parts = [len(owners) if long and k == long[0] else 1 for k in range(len(factors))]
        owners = owners if long else owners[:1]
        box[row, owners] = np.array(grid_boxes(factors, parts), np.int64).reshape(
            len(owners), len(factors), 2
        )
        term[row, owners] = 0
    return HeldRegions(box, term, np.ones_like(held.terms))


def _as_read(held: HeldRegions) -> ReadRegions:
    return ReadRegions(held.box, held.term >= 0)


@compiled
def _exchange_rows(  # type: ignore[no-untyped-def]
    box, term, leader, want, used, s, t, itemsize, latency, slowness, start, link, pace, mode
):
    """Seconds and bytes of the exchanges from row s[k] of what is held to row t[k] of what is read.

    box, term, leader  HeldRegions, and the first holder of each copy: rows x devices (x atoms x 2)
    want, used         ReadRegions
    latency, slowness  seconds, and seconds per byte, from device to device
    start, link, pace  the links of each route, and the seconds per byte of each link
    mode               LINKS, DEVICE or SUMMED
    """
    n, count, atoms = len(s), box.shape[1], box.shape[2]
    seconds, moved = np.zeros(n), np.zeros(n)
    busy, hands = np.zeros(len(pace)), np.zeros(count)
    firsts, after = np.empty(count, np.int64), np.empty((count, count), np.int64)
    last, many = -1, 0
    for k in range(n):
        row, column = s[k], t[k]
        if row != last:
            last, many = row, _list_copies(leader[row], firsts, after)
        busy[:], hands[:] = 0.0, 0.0
        late, total = 0.0, 0.0
        for b in range(count):
            if not used[column, b]:
                continue
            for number in range(many):
                first = firsts[number]
                size = itemsize
                for atom in range(atoms):
                    low = max(box[row, first, atom, 0], want[column, b, atom, 0])
                    high = min(box[row, first, atom, 1], want[column, b, atom, 1])
                    if high <= low:
                        size = 0
                        break
                    size *= high - low
                if size == 0 or leader[row, b] == first:
                    continue
                a = after[number, b]
                moved[k] += size
                if mode == 0:
                    for hop in range(start[a * count + b], start[a * count + b + 1]):
                        busy[link[hop]] += size * pace[link[hop]]
                    late = max(late, latency[a, b])
                else:
                    each = size * slowness[a, b]
                    total += each
                    hands[a] += each + latency[a, b]
                    hands[b] += each + latency[a, b]
        if mode == 0:
            seconds[k] = busy.max() + late if len(busy) else 0.0
        else:
            seconds[k] = hands.max() if mode == 1 else total
    return seconds, moved


@compiled
def _list_copies(leader, firsts, after):  # type: ignore[no-untyped-def]
    """Writes the first holder of every copy, and for every copy and device the holder from which
    the device fetches it: itself or the next one; how many copies there are."""
    count, many = len(leader), 0
    for first in range(count):
        if leader[first] != first:
            continue
        firsts[many] = first
        near = first
        for device in range(count - 1, -1, -1):
            if leader[device] == first:
                near = device
            after[many, device] = near
        many += 1
    return many
