"""needs: what the parts of every Op wait for under every option of its unit, in columns.

In: a Problem and Units. Out: PartNeeds.

For bounds on the step time that hold whatever is not decided yet. They must not depend on the names
of devices, so that what is pruned may stand for all its images under a renaming of devices that the
cluster does not notice. Lowering does depend on names: of several devices that hold a piece it
takes one by its number. So there is only what follows from regions:

    a part starts when each region it reads is on its device: left there, or assembled
    a region is assembled from boxes; each comes from a device that holds it, for a partial Value
    one for each term
    a box of b bytes takes at least lag + pace * b between two devices, however it travels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Floats,
    Ints,
    offsets,
)
from apportion.describe.descriptions import find_description
from apportion.describe.interval import Box
from apportion.graph import Op
from apportion.lower.task_graph import (
    NO_ENDS,
    Copies,
    TaskGraph,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COMPUTE,
)
from apportion.lower.termwise import is_linear
from apportion.machine.collective import PATTERNS, algorithm_lines
from apportion.machine.cost_model import (
    assemble_seconds,
    compute_seconds,
    times_messages,
)
from apportion.machine.topology import Cluster
from apportion.search.problem import Problem
from apportion.search.walks.units import Unit
from apportion.simulate.durations import issue_nanoseconds
from apportion.split.part import Split
from apportion.split.strategy import Choice, grid_boxes

Bytes = npt.NDArray[np.uint8]

NEVER = 1 << 30
INSIDE, EQUAL, COPIED = 1, 2, 3  # as a view of it; as it is; but no view of it
ROUNDING = 2  # nanoseconds by which messages may be rounded down, taken together
EVEN = 2.0  # members of a collective send about equally much: the most over the least


class PartNeeds(NamedTuple):  # numba takes no dataclass
    """Columns. Ops o, options k, grids g of an Op, parts p, copies m of all replicas, devices d,
    edges e: (Op, argument) pairs whose Value a step makes or changes, in the order of Ops."""

    unit: Ints  # o
    options: Ints  # units: how many
    grid: Ints  # o x k
    size: Ints  # o x k: copies
    where: Ints  # o x k x m: devices
    parts: Ints  # o x g: of one replica
    duration: Ints  # o x g x p x d
    issue: Ints  # o x d
    rest: Ints  # o: that a step takes after it at the least
    linear: Ints  # o: 1 if it may be computed term by term
    start: Ints  # o + 1: edges of an Op
    reader: Ints  # e
    maker: Ints  # e
    begins: Ints  # e: 1 if the step finds it where the maker will leave it
    lane: Ints  # e: the last unit of those that read the Value before
    before_start: Ints  # e + 1
    before: Ints  # edges of the same Value that come before
    after_start: Ints  # e + 1
    after: Ints  # those that come after
    nbytes: Ints  # e x g x g x p x p: that a part of the maker has of what one of the reader reads
    inside: Bytes  # e x g x g x p x p: whether it has all: INSIDE, EQUAL or COPIED
    box: Ints  # e x g x p: equal for equal boxes of one term
    terms: Ints  # e x g
    term: Ints  # e x g x p
    whole: Ints  # e x g: 1 if every part of the maker leaves the whole Value, or a term of it
    late_start: Ints  # o + 1
    late: Ints  # edges by the Op that makes the Value
    apart: Ints  # e x g: 1 if different boxes of a term do not meet
    region: Ints  # e x g x p: a number per region, -1 for zeros
    around: Bytes  # region x region: whether the first has all of the second
    assembly: Ints  # e x g x p x d
    first: Ints  # e: 1 if no other Op reads the Value before
    sole: Ints  # e: 1 if it is the first and the end of the step does not need the Value
    laid: Ints  # e x g x p x (m + 1) x m: bytes read of each slice, if so many devices have one
    slice: Ints  # e x (m + 1) x m: bytes of these slices
    gap: Ints  # e x k x d: time of the maker's unit on a device, from the maker to the reader
    viewing: Ints  # d: an assembly that is a mere view
    assembly_issue: Ints  # d
    lag: Floats  # d x d: nanoseconds
    pace: Floats  # d x d: nanoseconds per byte
    intake: Floats  # d: nanoseconds per byte that a device receives in messages of their own,
    share: Floats  # d: and per byte of all that a collective moves
    assembling: Floats  # d: nanoseconds per byte that an assembly reads and writes


def find_needs(problem: Problem, units: Sequence[Unit]) -> PartNeeds:
    """The columns of a Problem whose units are decided in this order."""
    return _NeedsBuilder(problem, units).needs()


class _NeedsBuilder:
    def __init__(self, problem: Problem, units: Sequence[Unit]) -> None:
        self.problem, self.units = problem, units
        self.space, self.graph = problem.space, problem.space.graph
        self.devices = problem.devices
        ops = len(self.graph.ops)
        self.home = [-1] * ops
        self.place = [0] * ops
        for number, unit in enumerate(units):
            for position, op in enumerate(unit.ops):
                if self.home[op] >= 0:
                    raise ValueError(f"operator {self.graph.ops[op].name!r} is in two units")
                self.home[op], self.place[op] = number, position
        if min(self.home, default=0) < 0:
            left = self.graph.ops[self.home.index(-1)].name
            raise ValueError(f"operator {left!r} is in no unit")
        self.grids: list[list[tuple[int, ...]]] = [
            list(dict.fromkeys(c.parts for c in self._choices(op))) for op in range(ops)
        ]
        self.splits: list[list[Split]] = [
            [self.space.split(op, parts) for parts in grids] for op, grids in enumerate(self.grids)
        ]
        self.most_grids = max(map(len, self.grids))
        self.most_parts = max(len(s.parts) for splits in self.splits for s in splits)
        self.numbers: dict[tuple[int, Box], int] = {}
        self.edges = self._edges()

    def _choices(self, op: int) -> list[Choice]:
        unit = self.units[self.home[op]]
        return [option[self.place[op]] for option in unit.options]

    def _edges(self) -> list[tuple[int, int, int, int, int, int]]:
        """(reader, argument, Value, maker, which of its outputs, whether it is there at first)."""
        after, graph = dict(self.graph.state), self.graph
        found = []
        for index, op in enumerate(graph.ops):
            order = {v: k for k, v in enumerate(dict.fromkeys(op.inputs))}
            for place in sorted(range(len(op.inputs)), key=lambda k: (order[op.inputs[k]], k)):
                value = op.inputs[place]
                made, begins = graph.producer[value], 0
                if made is None and value in after:
                    made, begins = graph.producer[after[value]], 1
                if made is not None:
                    found.append((index, place, value, *made, begins))
        return found

    def needs(self) -> PartNeeds:
        ops, most = len(self.graph.ops), max(len(unit.options) for unit in self.units)
        copies = max(len(c.devices) for op in range(ops) for c in self._choices(op))
        which, size = np.zeros((ops, most), np.int64), np.zeros((ops, most), np.int64)
        where = np.zeros((ops, most, copies), np.int64)
        for op in range(ops):
            numbers = {parts: g for g, parts in enumerate(self.grids[op])}
            for k, choice in enumerate(self._choices(op)):
                which[op, k] = numbers[choice.parts]
                devices = choice.devices
                size[op, k], where[op, k, : len(devices)] = len(devices), devices
        parts = np.zeros((ops, self.most_grids), np.int64)
        for op, splits in enumerate(self.splits):
            parts[op, : len(splits)] = [len(s.parts) for s in splits]
        columns = (which, size, where, parts, self._durations())
        issue, assembly_issue = self._issues()
        lag, pace = _lines(self.problem.cluster, self.problem)
        intake, share = _intakes(self.problem.cluster, self.problem)
        view, low, high = self._assembled(np.array([0, 10**9, 2 * 10**9], np.int64))
        return PartNeeds(
            unit=np.array(self.home, np.int64),
            options=np.array([len(unit.options) for unit in self.units], np.int64),
            grid=which, size=size, where=where, parts=parts, duration=columns[-1], issue=issue,
            rest=self._rests(columns[-1]),
            linear=np.array([self._is_linear(op) for op in self.graph.ops], np.int64),
            **self._edge_columns(), **self._orders(), **self._slices(copies),
            gap=self._gaps(*columns), viewing=view, assembly_issue=assembly_issue, lag=lag,
            pace=pace, intake=intake, share=share, assembling=(high - low) / 1e9,
        )  # fmt: skip

    def _is_linear(self, op: Op) -> bool:
        """Whether an Op can be computed term by term: all that it reads is made in the step."""
        return is_linear(op) and all(self.graph.producer[v] is not None for v in op.inputs)

    # Time

    def _durations(self) -> Ints:
        """Of every part of every grid on every device, as lowering and the CostModel have it."""
        rows: list[tuple[int, int, int, int, int]] = []
        flops: list[float] = []
        for op, splits in enumerate(self.splits):
            it = self.graph.ops[op]
            description = find_description(it.kind)
            alias = description is not None and description.alias
            size = self.graph.values[it.outputs[0]].itemsize if it.outputs else 4
            for g, split in enumerate(splits):
                for p, part in enumerate(split.parts):
                    read = {
                        (v, part.inputs[k]) for k, v in enumerate(it.inputs) if k not in part.zeros
                    }
                    total = sum(self._nbytes(v, box) for v, box in read)
                    total += sum(self._nbytes(v, part.outputs[k]) for k, v in enumerate(it.outputs))
                    rows.append((op, g, p, 0 if alias else total, size))
                    flops.append(part.flops)
        found = np.zeros(
            (len(self.splits), self.most_grids, self.most_parts, self.devices), np.int64
        )
        each, at, which, nbytes, sizes = np.array(rows, np.int64).T
        kinds = tuple(it.kind for it in self.graph.ops)
        for device in range(self.devices):
            on = np.full(len(rows), device)
            seconds, _ = compute_seconds(
                self.problem.cost, self.problem.cluster, kinds, each, on, np.array(flops), nbytes,
                sizes,
            )  # fmt: skip
            found[each, at, which, device] = np.maximum(np.rint(seconds * 1e9), 1)
        return found

    def _rests(self, duration: Ints) -> Ints:
        """The longest way from an Op to the end, each Op as short as any part of it ever is."""
        found = np.zeros(len(self.graph.ops), np.int64)
        for op in range(len(found) - 1, -1, -1):
            grids = [len(split.parts) for split in self.splits[op]]
            least = min(int(duration[op, g, :parts].min()) for g, parts in enumerate(grids))
            for value in self.graph.ops[op].inputs:
                made = self.graph.producer[value]
                if made is not None:
                    found[made[0]] = max(found[made[0]], least + found[op])
        return found

    def _issues(self) -> tuple[Ints, Ints]:
        """What the host of every device takes to issue a part of every Op, and an assembly."""
        ops, none = len(self.graph.ops), np.zeros(0, np.int64)
        rows = (ops + 1) * self.devices
        op = np.repeat(np.arange(ops + 1), self.devices)
        kind = np.where(op < ops, COMPUTE, ASSEMBLE)
        zeros, minus = np.zeros(rows, np.int64), np.full(rows, -1)
        tasks = TaskGraph(
            self.devices, kind=kind, op=op, part=minus,
            device=np.tile(np.arange(self.devices), ops + 1), peer=minus, position=op,
            nbytes=zeros, flops=np.zeros(rows), itemsize=zeros + 4, dep_start=none, dep=none,
            slot_device=none, slot_value=none, slot_region=none, slot_nbytes=none,
            slot_category=none, slot_base=none, slot_first=none, slot_last=none, in_start=none,
            in_slot=none, out_start=none, out_slot=none, op_start=np.zeros(ops + 2, np.int64),
            copies=_nothing, taken=zeros, ends=NO_ENDS,
            kinds=tuple(it.kind for it in self.graph.ops),
        )  # fmt: skip
        found = issue_nanoseconds(tasks, self.problem.cluster, self.problem.cost)
        table = found.reshape(ops + 1, self.devices)
        return table[:ops].copy(), table[ops].copy()

    def _assembled(self, nbytes: Ints) -> Ints:
        """Nanoseconds that assemblies of so many bytes take at the least, by device."""
        found = np.zeros((len(nbytes), self.devices), np.int64)
        for device in range(self.devices):
            seconds, _ = assemble_seconds(
                self.problem.cost, self.problem.cluster, np.full(len(nbytes), device),
                np.ones(len(nbytes), np.int64), nbytes,
            )  # fmt: skip
            found[:, device] = np.maximum(np.rint(seconds * 1e9), 1)
        return found

    def _nbytes(self, value: int, box: Box) -> int:
        return math.prod(high - low for low, high in box) * self.graph.values[value].itemsize

    # Regions

    def _edge_columns(self) -> dict[str, Any]:
        """What parts leave and read, and what they have of each other's."""
        edges, most, parts = self.edges, self.most_grids, self.most_parts
        count = len(edges)
        nbytes = np.zeros((count, most, most, parts, parts), np.int64)
        inside = np.zeros(nbytes.shape, np.uint8)
        box, region, term = (np.full((count, most, parts), -1) for _ in range(3))
        whole = np.zeros((count, most), np.int64)
        terms, apart = (np.ones((count, most), np.int64) for _ in range(2))
        assembly = np.zeros((count, most, parts, self.devices), np.int64)
        known: dict[tuple[object, ...], tuple[Ints, Bytes]] = {}
        for e, (reader, place, value, maker, position, _) in enumerate(edges):
            size, dims = self.graph.values[value].itemsize, self.space.atoms.dims[value]
            left = [[p.outputs[position] for p in s.parts] for s in self.splits[maker]]
            read = [[p.inputs[place] for p in s.parts] for s in self.splits[reader]]
            for g, split in enumerate(self.splits[maker]):
                held = [(p.terms[position], p.outputs[position]) for p in split.parts]
                order = {each: k for k, each in enumerate(dict.fromkeys(held))}
                box[e, g, : len(held)] = [order[each] for each in held]
                terms[e, g] = split.terms[position]
                term[e, g, : len(held)] = [each for each, _ in held]
                total = self.graph.values[value].nbytes
                whole[e, g] = all(self._nbytes(value, each) == total for _, each in held)
                apart[e, g] = _apart(list(order))
            for g, split in enumerate(self.splits[reader]):
                for p, part in enumerate(split.parts):
                    if place not in part.zeros:
                        region[e, g, p] = self._number(value, part.inputs[place])
                sizes = np.array([self._nbytes(value, b) for b in read[g]], np.int64)
                assembly[e, g, : len(sizes)] = self._assembled(2 * sizes)
            for g, there in enumerate(left):
                for h, wanted in enumerate(read):
                    key = (tuple(there), tuple(wanted), size, dims)
                    if key not in known:
                        known[key] = _overlap(there, wanted, size, dims)
                    both, all_of = known[key]
                    nbytes[e, g, h, : len(there), : len(wanted)] = both
                    inside[e, g, h, : len(there), : len(wanted)] = all_of
        return {
            "nbytes": nbytes, "inside": inside, "box": box, "terms": terms, "term": term,
            "whole": whole, "apart": apart, "region": region, "around": self._around(),
            "assembly": assembly,
        }  # fmt: skip

    def _orders(self) -> dict[str, Any]:
        """Edges by reader, by maker and by Value."""
        edges, ops = self.edges, len(self.graph.ops)
        reader, maker, begins = (np.array([e[k] for e in edges], np.int64) for k in (0, 3, 5))
        late = sorted(range(len(edges)), key=lambda e: (edges[e][3], edges[e][4], e))
        lane, before_start, before, after_start, after = self._before()
        return {
            "start": offsets(np.bincount(reader, minlength=ops)), "reader": reader,
            "maker": maker, "begins": begins, "lane": lane, "before_start": before_start,
            "before": before, "after_start": after_start, "after": after,
            "late_start": offsets(np.bincount(maker, minlength=ops)),
            "late": np.array(late, np.int64),
        }  # fmt: skip

    def _slices(self, copies: int) -> dict[str, Any]:
        """How a partial Value would be laid out over two devices or more, and how much of each
        region lies in each slice."""
        count, graph = len(self.edges), self.graph
        first, sole = (np.zeros(count, np.int64) for _ in range(2))
        laid = np.zeros((count, self.most_grids, self.most_parts, copies + 1, copies), np.int64)
        whole = np.zeros((count, copies + 1, copies), np.int64)
        ending = {after for _, after in graph.state} | {graph.loss}
        for e, (reader, place, value, *_) in enumerate(self.edges):
            readers = graph.consumers[value]
            places = sum(v == value for v in graph.ops[reader].inputs)
            first[e] = min(readers) == reader and places == 1
            sole[e] = first[e] and value not in ending
            if not sole[e]:
                continue
            factors, size = self.space.factors(value), self.graph.values[value].itemsize
            read = [[p.inputs[place] for p in s.parts] for s in self.splits[reader]]
            for owners in range(2, copies + 1):
                boxes = _slices(factors, owners)
                whole[e, owners, : len(boxes)] = [self._nbytes(value, box) for box in boxes]
                for g, wanted in enumerate(read):
                    both, _ = _overlap(boxes, wanted, size, ())
                    laid[e, g, : len(wanted), owners, : len(boxes)] = both.T
        return {"first": first, "sole": sole, "laid": laid, "slice": whole}

    def _gaps(self, which: Ints, size: Ints, where: Ints, parts: Ints, duration: Ints) -> Ints:
        ops, options, copies = where.shape
        busy = np.zeros((ops, options, self.devices), np.int64)
        each, option = np.indices((ops, options))
        for copy in range(copies):
            part = copy % np.maximum(parts[each, which], 1)
            time = duration[each, which, part, where[:, :, copy]]
            np.add.at(busy, (each, option, where[:, :, copy]), np.where(copy < size, time, 0))
        gaps = np.zeros((len(self.edges), options, self.devices), np.int64)
        for e, (reader, _, _, maker, _, _) in enumerate(self.edges):
            if self.home[reader] != self.home[maker]:
                mine = [op for op in range(maker + 1, reader) if self.home[op] == self.home[maker]]
                gaps[e] = busy[mine].sum(axis=0)
        return gaps

    def _number(self, value: int, box: Box) -> int:
        return self.numbers.setdefault((value, box), len(self.numbers))

    def _around(self) -> Bytes:
        found = np.zeros((len(self.numbers), len(self.numbers)), np.uint8)
        by_value: dict[int, list[tuple[Box, int]]] = {}
        for (value, box), number in self.numbers.items():
            by_value.setdefault(value, []).append((box, number))
        for regions in by_value.values():
            for outer, a in regions:
                for inner, b in regions:
                    found[a, b] = all(
                        low <= x and y <= high
                        for (low, high), (x, y) in zip(outer, inner, strict=True)
                    )
        return found

    def _before(self) -> tuple[Ints, ...]:
        """When an assembly is sure to be in the lane where an Op reads: once all units are decided
        that read the Value before it; and the edges of the Value before each edge."""
        lane, before, starts = [], list[int](), [0]
        edges_of: dict[int, list[int]] = {}
        for e, (reader, _, value, *_) in enumerate(self.edges):
            earlier = [r for r in self.graph.consumers[value] if r < reader]
            mine = edges_of.setdefault(value, [])
            twice = any(self.edges[k][0] == reader for k in mine)
            last = max((self.home[r] for r in earlier), default=-1)
            lane.append(NEVER if twice else last)
            before += mine
            starts.append(len(before))
            mine.append(e)
        after = [[f for f in edges_of[e[2]] if f > k] for k, e in enumerate(self.edges)]
        ends = [0, *accumulate(map(len, after))]
        columns = (lane, starts, before, ends, [f for them in after for f in them])
        return tuple(np.array(column, np.int64) for column in columns)


def _nothing() -> Copies:
    raise AssertionError("costs need no copies")


def _overlap(
    held: Sequence[Box], wanted: Sequence[Box], size: int, dims: Sequence[Sequence[int]]
) -> tuple[Ints, Bytes]:
    """Bytes that each held box has of each wanted one, and whether that is all, or the same."""
    atoms = len(held[0])
    a = np.array(held, np.int64).reshape(len(held), 1, atoms, 2)
    b = np.array(wanted, np.int64).reshape(1, len(wanted), atoms, 2)
    low, high = np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])
    both: Ints = np.prod(np.maximum(high - low, 0), axis=2) * size
    contained = ((a[..., 0] <= b[..., 0]) & (b[..., 1] <= a[..., 1])).all(axis=2)
    same = (a == b).all(axis=(2, 3))
    found = np.where(same, EQUAL, np.where(contained, INSIDE, 0)).astype(np.uint8)
    for x, y in zip(*np.nonzero(found == INSIDE), strict=True):
        if not _viewable(wanted[y], held[x], dims):
            found[x, y] = COPIED
    return both, found


def _viewable(region: Box, piece: Box, dims: Sequence[Sequence[int]]) -> bool:
    """Whether a slice of a tensor can be a view: no dimension is cut inside a merged product."""
    at = 0
    for atoms in dims:
        mine = range(at, at + len(atoms))
        wide = sum(piece[k][1] - piece[k][0] > 1 for k in mine)
        cut = any(region[k][1] - region[k][0] != piece[k][1] - piece[k][0] for k in mine)
        if cut and wide > 1:
            return False
        at += len(atoms)
    return True


def _slices(factors: Sequence[int], owners: int) -> list[Box]:
    """Slices along the first atom that is long enough, else the whole on the first owner."""
    for position, factor in enumerate(factors):
        if factor >= owners:
            parts = [owners if k == position else 1 for k in range(len(factors))]
            return grid_boxes(factors, parts)
    return [tuple((0, factor) for factor in factors)]


def _apart(boxes: Sequence[tuple[int, Box]]) -> int:
    """Whether no two different boxes of a term meet."""
    for k, (term, box) in enumerate(boxes):
        for other, another in boxes[:k]:
            if term == other and all(
                max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, another, strict=True)
            ):
                return 0
    return 1


def _intakes(cluster: Cluster, problem: Problem) -> tuple[Floats, Floats]:
    """For every device how long its link is busy with a byte that it receives, and with a byte that
    a collective with it moves between any two members, at the least."""
    count = len(cluster.devices)
    own, shared = np.zeros(count), np.zeros(count)
    if count < 2 or times_messages(cluster, problem.cost):
        return own, shared
    for device in range(count):
        into = {cluster.routes[a][device][-1] for a in range(count) if a != device}
        if len(into) > 1:
            continue
        (link,) = into
        own[device] = 1e9 / cluster.links[link].bandwidth
        shared[device] = np.inf
        for bits in range(1 << count):
            group = tuple(d for d in range(count) if bits >> d & 1)
            if len(group) > 2 and device in group:
                for pattern in range(len(PATTERNS)):
                    for line in algorithm_lines(pattern, group, cluster):
                        busy = 1e9 * dict(line.links).get(link, 0.0)
                        shared[device] = min(shared[device], busy)
    return own, shared


def _lines(cluster: Cluster, problem: Problem) -> tuple[Floats, Floats]:
    """The least that b bytes take between two devices, as a line: in a message of their own, or as
    a part of a collective."""
    count = len(cluster.devices)
    lag, pace = np.zeros((count, count)), np.zeros((count, count))
    if times_messages(cluster, problem.cost):
        return lag, pace
    for a in range(count):
        for b in range(count):
            route = [cluster.links[k] for k in cluster.routes[a][b]]
            if route:
                lag[a, b] = 1e9 * sum(link.latency for link in route)
                pace[a, b] = 1e9 / route[0].bandwidth
    for bits in range(1 << count):
        group = tuple(d for d in range(count) if bits >> d & 1)
        if len(group) < 3:
            continue
        pairs = len(group) * (len(group) - 1)
        for pattern in range(len(PATTERNS)):
            for line in algorithm_lines(pattern, group, cluster):
                links = dict(line.links)
                for a in group:
                    for b in group:
                        if a != b:
                            out = links.get(cluster.routes[a][b][0], 0.0)
                            least = out * (1 + (pairs - 1) / EVEN)
                            lag[a, b] = min(lag[a, b], 1e9 * line.alpha)
                            pace[a, b] = min(pace[a, b], 1e9 * least)
    return lag, pace
