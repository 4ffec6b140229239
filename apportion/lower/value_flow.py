"""Flow: where the pieces of one Value are during a step, and how each reader gets its own.

A **piece** is a region of the Value on one device: a whole one, or one term of a partial Value, to
be combined with the other terms. Stage 0 makes pieces (or finds them when the step begins), stage 1
moves them to a layout, where there is one, and then every reader in turn asks for the regions that
it reads. To serve a region on a device:

    held there already      nothing to do
    inside one local piece  a view of it
    otherwise               an assembly of disjoint boxes: local pieces first, then the nearest
                            device that has them; for a partial Value one cover per term, combined
                            in rising order, so that all devices that assemble the region get the
                            same bits

What was fetched stays for later readers on that device. A Flow knows no names: Values of equal
shape whose makers and readers are cut alike have one Flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import compiled
from apportion.describe import Box, Factors

Ints = npt.NDArray[np.int64]

MADE, LAID, READ = (
    0,
    1,
    2,
)  # stages; the first reader's is READ, the next one's READ + 1, ...

REGION, TERM, ANY = (
    -1,
    -2,
    -3,
)  # what is wanted: a region; the term there; a region anywhere


Asked = tuple[int, int]  # where in Rows there are rows, and the devices of the parts they are of


class Rows:
    """Pieces and wants of which Flows are made, in one array that grows: rows (part, term, box) or
    (part, REGION or TERM or ANY, box), and apart from these the devices that parts are on."""

    def __init__(self, devices: int) -> None:
        self.flat = np.empty(1024, np.int64)
        self.used, self.devices = 0, devices
        self.everywhere = self.add_devices(range(devices))
        self.none: Asked = self.add_placed(np.empty((0, 2), np.int64))

    def add(self, rows: Ints, parts: int) -> int:
        """Adds rows of so many parts; where they are."""
        at = self._room(2 + rows.size)
        self.flat[at], self.flat[at + 1] = len(rows), parts
        self.flat[at + 2 : self.used] = rows.reshape(-1)
        return at

    def add_placed(self, rows: Ints) -> Asked:
        """Adds rows that have devices instead of parts."""
        return self.add(rows, self.devices), self.everywhere

    def add_devices(self, devices: Sequence[int]) -> int:
        """Adds the devices of all parts, then those of their replicas; where they are."""
        at = self._room(1 + len(devices))
        self.flat[at], self.flat[at + 1 : self.used] = len(devices), devices
        return at

    def add_dims(self, dims: Sequence[Factors]) -> int:
        """Adds for every atom the dimension that it is of; where that is."""
        found = [number for number, atoms in enumerate(dims) for _ in atoms]
        at = self._room(len(found))
        self.flat[at : self.used] = found
        return at

    def _room(self, count: int) -> int:
        at = self.used
        self.used += count
        if self.used > len(self.flat):
            larger = np.empty(2 * self.used, np.int64)
            larger[:at] = self.flat[:at]
            self.flat = larger
        return at

    def placed(self, asked: Sequence[int], atoms: int) -> Ints:
        """The rows of one or more Asked, with devices instead of parts."""
        found: Ints = _placed(self.flat, np.array(asked, np.int64), 2 + 2 * atoms)
        return found


class Flow:
    """Lengths: pieces p, sources s, wants w. The sources of piece i are source_start[i:i + 2].

    The columns are there once one of them is looked at; delta simulation rarely does.
    """

    box: Ints  # p x atoms x 2
    device: Ints  # p
    nbytes: Ints  # p
    stage: Ints  # p: rising
    base: Ints  # p: the piece that this one is a view of, or -1
    answer_start: Ints  # by stage
    answer: Ints  # w: the piece that each want got
    source_start: Ints  # p + 1
    source: Ints  # s: piece
    source_box: Ints  # s x atoms x 2, in the coordinates of the Value
    source_term: Ints  # s
    source_nbytes: Ints  # s
    made_start: tuple[int, ...]  # by stage: pieces

    def __init__(self, flat: Ints, head: Sequence[int], laid_out: bool) -> None:
        self.flat = flat
        self.core = flat[: head[0]]  # all that a Block follows from; HEAD says what is where
        self.moved = head[5]  # bytes that come from other devices
        self.laid_out = laid_out

    def __getattr__(self, name: str) -> Any:
        if name not in Flow.__annotations__:
            raise AttributeError(f"a Flow has no {name!r}")
        self.__dict__ |= _columns(self.flat)
        return self.__dict__[name]

    def made_at(self, stage: int) -> tuple[int, int]:
        """The range of the pieces that a stage made."""
        return self.made_start[stage], self.made_start[stage + 1]

    def answers(self, stage: int) -> Ints:
        """What the wants of a stage got."""
        return self.answer[self.answer_start[stage] : self.answer_start[stage + 1]]


# A core begins with its length and the numbers of pieces, sources, wants and stages, the bytes that
# move and the number of atoms. Then come made_start, answer_start, device, nbytes, base,
# source_start, answer, source, source_nbytes, source_term, and a number per source that is equal
# for equal boxes.
HEAD = 7
TOLD = 6  # numbers that compiled code is told of a Flow before what is asked for


def table(first: Sequence[int] | Ints, second: int | Ints, box: Ints) -> Ints:
    """Rows (first, second, box)."""
    rows = np.empty((len(box), 2 + box.shape[1]), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2:] = first, second, box
    return rows


def boxes(regions: Sequence[Box], atoms: int) -> Ints:
    """Boxes in columns."""
    flat = [*chain.from_iterable(chain.from_iterable(regions))]
    return np.array(flat, np.int64).reshape(len(regions), 2 * atoms)


class Told(NamedTuple):
    """How a Value gets from its pieces to its readers."""

    dims: int  # where they are in Rows
    atoms: int
    itemsize: int
    terms: int
    made: Asked
    layout: Asked | tuple[()]
    wants: list[int]  # Asked by Asked: of every reader, then of the end of the step


def flows(rows: Rows, told: Sequence[Told]) -> list[Flow]:
    """The Flows of several Values."""
    flat: list[int] = []
    for it in told:
        asked = [*it.made, *it.layout, *it.wants]
        flat += (it.dims, it.atoms, it.itemsize, it.terms, len(it.layout) // 2, len(asked), *asked)
    served = _serve(rows.flat, np.array(flat, np.int64), rows.devices)
    found, at = [], 0
    for it in told:
        head = served[at : at + HEAD].tolist()
        end = at + head[0] + head[1] + 2 * it.atoms * (head[1] + head[2])
        found.append(Flow(served[at:end], head, bool(it.layout)))
        at = end
    return found


def _columns(flat: Ints) -> dict[str, Any]:
    """What compiled code made, column by column."""
    _, p, s, w, stages, _, atoms = flat[:HEAD].tolist()
    sizes = {
        "made_start": stages + 1, "answer_start": stages + 1, "device": p, "nbytes": p, "base": p,
        "source_start": p + 1, "answer": w, "source": s, "source_nbytes": s, "source_term": s,
        "": s, "stage": p, "box": 2 * atoms * p, "source_box": 2 * atoms * s,
    }  # fmt: skip
    found: dict[str, Any] = {}
    at = HEAD
    for name, size in sizes.items():
        found[name] = flat[at : at + size]
        at += size
    found["made_start"] = tuple(found["made_start"].tolist())
    found["box"] = found["box"].reshape(p, atoms, 2)
    found["source_box"] = found["source_box"].reshape(s, atoms, 2)
    return found


@compiled
def _serve(rows, told, devices):  # type: ignore[no-untyped-def]
    """For every Flow a core, then the stage and the box of every piece, and the box of every
    source."""
    found, used, at = np.empty(1024, np.int64), 0, 0
    while at < len(told):
        end = at + TOLD + told[at + 5]
        atoms, asked = told[at + 1], told[at + TOLD : end]
        given = _placed(rows, asked, 2 + 2 * atoms)
        dims = rows[told[at] : told[at] + atoms]
        counts = _counts(rows, asked, told[at + 4])
        room, flat = 4 * len(given) + 64, found[:0]
        while not len(flat):
            flat = _try_to_serve(devices, told[at:end], counts, dims, given, room)
            room *= 4
        if used + len(flat) > len(found):
            larger = np.empty(2 * (used + len(flat)), np.int64)
            larger[:used] = found[:used]
            found = larger
        found[used : used + len(flat)] = flat
        used += len(flat)
        at = end
    return found[:used].copy()


@compiled
def _counts(rows, asked, laid):  # type: ignore[no-untyped-def]
    """By stage: pieces, those that are laid out, wants of readers."""
    counts = np.zeros(len(asked) // 2 + 1 - laid, np.int64)
    for k in range(0, len(asked), 2):
        where = asked[k]
        stage = k // 2 + (k > 0 and not laid)
        counts[stage] = rows[where] * (rows[asked[k + 1]] // rows[where + 1])
    return counts


@compiled
def _placed(rows, asked, wide):  # type: ignore[no-untyped-def]
    """All rows that are asked for, on the devices of their parts, replica by replica."""
    counts = _counts(rows, asked, 1)
    given, row = np.empty((counts.sum(), wide), np.int64), 0
    for k in range(0, len(asked), 2):
        at, devices = asked[k], asked[k + 1] + 1
        for first in range(0, rows[devices - 1], rows[at + 1]):
            for there in range(at + 2, at + 2 + wide * rows[at], wide):
                given[row, 0] = rows[devices + first + rows[there]]
                for column in range(1, wide):
                    given[row, column] = rows[there + column]
                row += 1
    return given


@compiled
def _try_to_serve(devices, told, counts, dims, given, room):  # type: ignore[no-untyped-def]
    """Nothing if there is no room for so many sources."""
    itemsize, terms, has_layout, made = told[2], told[3], told[4] == 1, counts[0]
    wide, most, stages = given.shape[1] - 2, len(given), len(counts)
    box, device = np.empty((most + 1, wide), np.int64), np.empty(most, np.int64)
    base, after = np.empty(most, np.int64), np.empty(most, np.int64)
    head, tail = np.full(devices, -1), np.full(devices, -1)
    answer, first = np.empty(most - made, np.int64), np.zeros(most + 1, np.int64)
    made_start, answer_start = np.zeros(stages + 1, np.int64), np.zeros(stages + 1, np.int64)
    source, term = np.empty(room, np.int64), np.empty(room, np.int64)
    source_box = np.empty((room, wide), np.int64)
    rest, spare = np.empty((room, wide), np.int64), np.empty((room, wide), np.int64)
    pieces, sources = made, 0
    near, near_term = np.empty(most, np.int64), np.zeros(most, np.int64)
    for row in range(most):
        base[row], after[row] = -1, -1
    for piece in range(made):
        device[piece], near_term[piece], near[piece] = given[piece, 0], given[piece, 1], piece
        _copy(box, piece, given, piece, 2)
        if terms == 1:
            _hold(piece, device, head, tail, after)
    near = _by_term_and_device(near[:made], near_term, device, terms, devices)
    made_start[1], low = made, 0
    for s in range(1, stages):
        high = low + counts[s]
        for w in range(low, high):
            where, how = given[made + w, 0], given[made + w, 1]
            if how == TERM:
                answer[w] = _term_on(near, device, where)
                continue
            found, region = -1, pieces
            _copy(box, region, given, made + w, 2)
            if how == ANY:
                for d in range(devices):
                    if found < 0:
                        found = _same(box, region, head[d], after)
                if found >= 0:
                    answer[w] = found
                    continue
                where = device[0]
            found = _same(box, region, head[where], after)
            if found < 0:
                found, device[region] = region, where
                around = _around(box, region, head[where], after, dims)
                if around >= 0:
                    base[found] = around
                    count = 1
                    if sources >= room:
                        count = -1
                    else:
                        source[sources], term[sources] = around, 0
                        _copy(source_box, sources, box, region, 0)
                else:
                    count = _cover(
                        region, where, box, device, head, after, near, near_term, terms,
                        source, source_box, term, sources, rest, spare,
                    )  # fmt: skip
                if count < 0:
                    return np.empty(0, np.int64)
                sources += count
                pieces += 1
                first[pieces] = sources
                _hold(found, device, head, tail, after)
            answer[w] = found
        if s == 1 and has_layout:
            terms = 1
            for d in range(devices):
                head[d], tail[d] = -1, -1
            for piece in range(most):
                after[piece], near_term[piece] = -1, 0
            near = _by_term_and_device(answer[low:high], near_term, device, terms, devices)
            for piece in answer[low:high]:
                if after[piece] < 0 and tail[device[piece]] != piece:
                    _hold(piece, device, head, tail, after)
        low = high
        made_start[s + 1], answer_start[s + 1] = pieces, high
    return _written(
        itemsize, pieces, sources, made_start, answer_start, device, base, first, answer, source,
        term, box, source_box,
    )  # fmt: skip


@compiled
def _copy(to, row, given, other, skipped):  # type: ignore[no-untyped-def]
    for k in range(to.shape[1]):
        to[row, k] = given[other, skipped + k]


@compiled
def _written(  # type: ignore[no-untyped-def]
    itemsize, p, s, made_start, answer_start, device, base, first, answer, source, term, box,
    source_box,
):  # fmt: skip
    """Everything in one row."""
    stages, w, wide = len(made_start) - 1, len(answer), box.shape[1]
    length = HEAD + 2 * (stages + 1) + 4 * p + 1 + w + 4 * s
    flat = np.empty(length + p + wide * (p + s), np.int64)
    flat[0], flat[1], flat[2], flat[3], flat[4], flat[6] = length, p, s, w, stages, wide // 2
    at = _append(flat, HEAD, made_start, stages + 1)
    at = _append(flat, at, answer_start, stages + 1)
    at = _append(flat, at, device, p)
    for piece in range(p):
        flat[at + piece] = _volume(box, piece) * itemsize
    at = _append(flat, at + p, base, p)
    at = _append(flat, at, first, p + 1)
    at = _append(flat, at, answer, w)
    at = _append(flat, at, source, s)
    moved, piece, boxes = 0, 0, length + p
    for k in range(s):
        nbytes, mark = _volume(source_box, k) * itemsize, 0
        for bound in range(wide):
            mark = mark * 1_000_003 + source_box[k, bound]
            flat[boxes + wide * (p + k) + bound] = source_box[k, bound]
        flat[at + k], flat[at + s + k], flat[at + 2 * s + k] = nbytes, term[k], mark
        while k >= first[piece + 1]:
            piece += 1
        if device[source[k]] != device[piece]:
            moved += nbytes
    flat[5] = moved
    for stage in range(stages):
        for piece in range(made_start[stage], made_start[stage + 1]):
            flat[length + piece] = stage
            for bound in range(wide):
                flat[boxes + wide * piece + bound] = box[piece, bound]
    return flat


@compiled
def _append(flat, at, column, count):  # type: ignore[no-untyped-def]
    for k in range(count):
        flat[at + k] = column[k]
    return at + count


@compiled
def _volume(box, row):  # type: ignore[no-untyped-def]
    found = 1
    for a in range(0, box.shape[1], 2):
        found *= box[row, a + 1] - box[row, a]
    return found


@compiled
def first_rows(rows, devices):  # type: ignore[no-untyped-def]
    """The distinct rows (device, ...), in the order in which they come first."""
    head, after = np.full(devices, -1), np.full(len(rows), -1)
    found, count = np.empty_like(rows), 0
    for k in range(len(rows)):
        _copy(found, count, rows, k, 0)
        where = rows[k, 0]
        if _same(found, count, head[where], after) < 0:
            after[count], head[where] = head[where], count
            count += 1
    return found[:count]


@compiled
def _by_term_and_device(pieces, term, device, terms, devices):  # type: ignore[no-untyped-def]
    """Pieces by term, then by device, then as they come."""
    start, found = np.zeros(terms * devices + 1, np.int64), np.empty(len(pieces), np.int64)
    for piece in pieces:
        start[term[piece] * devices + device[piece] + 1] += 1
    for key in range(terms * devices):
        start[key + 1] += start[key]
    for piece in pieces:
        key = term[piece] * devices + device[piece]
        found[start[key]] = piece
        start[key] += 1
    return found


@compiled
def _hold(piece, device, head, tail, after):  # type: ignore[no-untyped-def]
    """Adds a piece to what its device has."""
    where = device[piece]
    if head[where] < 0:
        head[where] = piece
    else:
        after[tail[where]] = piece
    tail[where] = piece


@compiled
def _term_on(near, device, where):  # type: ignore[no-untyped-def]
    """The first term that is on a device."""
    for piece in near:
        if device[piece] == where:
            return piece
    return -1


@compiled
def _same(box, region, piece, after):  # type: ignore[no-untyped-def]
    """Of the rows from `piece` on the one that is equal to the row `region`, or -1."""
    while piece >= 0:
        same = True
        for k in range(box.shape[1]):
            same = same and box[piece, k] == box[region, k]
        if same:
            return piece
        piece = after[piece]
    return -1


@compiled
def _around(box, region, piece, after, dims):  # type: ignore[no-untyped-def]
    """Of the pieces from `piece` on one of which the region can be a view, or -1."""
    while piece >= 0:
        if _inside(box, region, piece) and _sliceable(box, region, piece, dims):
            return piece
        piece = after[piece]
    return -1


@compiled
def _inside(box, region, outer):  # type: ignore[no-untyped-def]
    for a in range(0, box.shape[1], 2):
        if box[region, a] < box[outer, a] or box[region, a + 1] > box[outer, a + 1]:
            return False
        if box[region, a] >= box[region, a + 1]:
            return False
    return True


@compiled
def _sliceable(box, region, piece, dims):  # type: ignore[no-untyped-def]
    """Whether a slice of the piece's tensor can be a view: no dimension is cut inside a merged
    product."""
    atoms, a = len(dims), 0
    while a < atoms:
        dim, wide, cut = dims[a], 0, False
        while a < atoms and dims[a] == dim:
            size = box[piece, 2 * a + 1] - box[piece, 2 * a]
            wide += size > 1
            cut = cut or box[region, 2 * a + 1] - box[region, 2 * a] != size
            a += 1
        if cut and wide > 1:
            return False
    return True


@compiled
def _cover(  # type: ignore[no-untyped-def]
    region, where, box, device, head, after, near, near_term, terms,
    source, source_box, term, begin, rest, spare,
):  # fmt: skip
    """Writes disjoint boxes that make up the region, once per term; how many, or -1: no room."""
    left, count = 1, begin
    _copy(rest, 0, box, region, 0)
    piece = head[where]
    while piece >= 0 and left > 0:
        left, count = _take(piece, 0, box, rest, left, spare, source, source_box, term, count)
        if count < 0:
            return -1
        piece = after[piece]
    if left == 0:
        return count - begin
    missing, most = np.empty((left, rest.shape[1]), np.int64), left
    for row in range(most):
        _copy(missing, row, rest, row, 0)
    low = 0
    for t in range(terms):
        high = low
        while high < len(near) and near_term[near[high]] == t:
            high += 1
        turn = low
        while turn < high and device[near[turn]] < where:
            turn += 1
        left = most
        for row in range(most):
            _copy(rest, row, missing, row, 0)
        for k in range(high - low):
            if left == 0:
                break
            piece = near[low + (turn - low + k) % (high - low)]
            left, count = _take(piece, t, box, rest, left, spare, source, source_box, term, count)
            if count < 0:
                return -1
        assert left == 0, "a region is nowhere"
        low = high
    return count - begin


@compiled
def _take(piece, t, box, rest, left, spare, source, source_box, term, count):  # type: ignore[no-untyped-def]
    """Takes what a piece has of the boxes `rest`; how many are left, and the number of sources."""
    wide, kept = rest.shape[1], 0
    for b in range(left):
        if not _meet(rest, b, box, piece):
            if kept >= len(spare):
                return 0, -1
            _copy(spare, kept, rest, b, 0)
            kept += 1
            continue
        if count >= len(source) or kept + wide > len(spare):
            return 0, -1
        source[count], term[count] = piece, t
        _copy(source_box, count, rest, b, 0)
        for a in range(0, wide, 2):
            low = max(rest[b, a], box[piece, a])
            high = min(rest[b, a + 1], box[piece, a + 1])
            if rest[b, a] < low:
                _copy(spare, kept, source_box, count, 0)
                spare[kept, a + 1] = low
                kept += 1
            if high < rest[b, a + 1]:
                _copy(spare, kept, source_box, count, 0)
                spare[kept, a] = high
                kept += 1
            source_box[count, a], source_box[count, a + 1] = low, high
        count += 1
    for row in range(kept):
        _copy(rest, row, spare, row, 0)
    return kept, count


@compiled
def _meet(rest, b, box, piece):  # type: ignore[no-untyped-def]
    meet = True
    for a in range(0, rest.shape[1], 2):
        low, high = max(rest[b, a], box[piece, a]), min(rest[b, a + 1], box[piece, a + 1])
        meet = meet and low < high
    return meet
