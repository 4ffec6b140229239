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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from apportion.interval import Box, Factors

Ints = npt.NDArray[np.int64]

MADE, LAID, READ = 0, 1, 2  # stages; the first reader's is READ, the next one's READ + 1, ...

REGION, TERM, ANY = -1, -2, -3  # what is wanted: a region; the term there; a region anywhere


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """Regions asked for together, in columns. `how` is REGION, TERM or ANY."""

    box: Ints  # w x atoms x 2
    device: Ints  # w
    how: Ints  # w


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Pieces that are there at first."""

    box: Ints  # p x atoms x 2
    device: Ints  # p
    term: Ints  # p
    terms: int


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Lengths: pieces p, sources s, wants w. The sources of piece i are source_start[i:i + 2]."""

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
    moved: int  # bytes that come from other devices
    laid_out: bool

    def made_at(self, stage: int) -> tuple[int, int]:
        """The range of the pieces that a stage made."""
        low, high = np.searchsorted(self.stage, (stage, stage + 1))
        return int(low), int(high)

    def answers(self, stage: int) -> Ints:
        """What the wants of a stage got."""
        return self.answer[self.answer_start[stage] : self.answer_start[stage + 1]]


def boxes(regions: Sequence[Box], atoms: int) -> Ints:
    """Boxes in columns."""
    return np.array(regions, np.int64).reshape(len(regions), atoms, 2)


def no_wants(atoms: int) -> Wants:
    """Nothing asked for."""
    none = np.zeros(0, np.int64)
    return Wants(np.zeros((0, atoms, 2), np.int64), none, none)


def flow(
    dims: Sequence[Factors],
    itemsize: int,
    devices: int,
    made: Made,
    layout: Wants | None,
    readers: Sequence[Wants],
) -> Flow:
    """How a Value with these atoms per dimension gets from its pieces to its readers."""
    atoms = sum(map(len, dims))
    dim_of = np.repeat(np.arange(len(dims)), [len(d) for d in dims]).astype(np.int64)
    stages = [no_wants(atoms), layout or no_wants(atoms), *readers]
    start = np.zeros(len(stages) + 1, np.int64)
    np.cumsum([len(s.device) for s in stages], out=start[1:])
    want_box = np.concatenate([s.box for s in stages])
    want_device = np.concatenate([s.device for s in stages])
    how = np.concatenate([s.how for s in stages])
    room = 4 * (len(want_device) + len(made.device)) + 64
    while True:
        served = _serve(
            devices, dim_of, made.box, made.device, made.term, made.terms,
            layout is not None, start, want_box, want_device, how, room,
        )  # fmt: skip
        ok, p, s, box, device, stage, base, answer, first, source, source_box, term = served
        if ok:
            break
        room *= 4
    box, source_box, source = box[:p].copy(), source_box[:s].copy(), source[:s].copy()
    nbytes = np.prod(box[:, :, 1] - box[:, :, 0], axis=1) * itemsize
    source_nbytes = np.prod(source_box[:, :, 1] - source_box[:, :, 0], axis=1) * itemsize
    device, first = device[:p].copy(), first[: p + 1].copy()
    target = np.repeat(np.arange(p), np.diff(first))
    moved = int(source_nbytes[device[source] != device[target]].sum())
    return Flow(
        box, device, nbytes, stage[:p].copy(), base[:p].copy(), start, answer, first, source,
        source_box, term[:s].copy(), source_nbytes, moved, layout is not None,
    )  # fmt: skip


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _serve(  # type: ignore[no-untyped-def]
    devices, dim_of, made_box, made_device, made_term, terms, has_layout,
    stage_start, want_box, want_device, how, room,
):  # fmt: skip
    atoms, made = made_box.shape[1], len(made_device)
    box = np.zeros((made + len(want_device), atoms, 2), np.int64)
    device, stage = np.zeros(len(box), np.int64), np.zeros(len(box), np.int64)
    base, after = np.full(len(box), -1), np.full(len(box), -1)
    head, tail = np.full(devices, -1), np.full(devices, -1)
    answer = np.full(len(want_device), -1)
    first = np.zeros(len(box) + 1, np.int64)
    source, term = np.zeros(room, np.int64), np.zeros(room, np.int64)
    source_box = np.zeros((room, atoms, 2), np.int64)
    rest, spare = np.zeros((room, atoms, 2), np.int64), np.zeros((room, atoms, 2), np.int64)
    pieces, sources = made, 0
    box[:made], device[:made] = made_box, made_device
    near = _by_term_and_device(made_term, made_device, devices)
    near_term = made_term
    if terms == 1:
        for piece in range(made):
            _hold(piece, device, head, tail, after)
    for s in range(len(stage_start) - 1):
        for w in range(stage_start[s], stage_start[s + 1]):
            region, where = want_box[w], want_device[w]
            if how[w] == TERM:
                answer[w] = _term_on(near, device, where)
                continue
            if how[w] == ANY:
                found = -1
                for d in range(devices):
                    if found < 0:
                        found = _same(region, box, head[d], after)
                if found >= 0:
                    answer[w] = found
                    continue
                where = device[0]
            found = _same(region, box, head[where], after)
            if found < 0:
                found = pieces
                around = _around(region, box, head[where], after, dim_of)
                box[found], device[found], stage[found] = region, where, s
                if around >= 0:
                    base[found] = around
                    count = 1
                    if sources >= room:
                        count = -1
                    else:
                        source[sources], source_box[sources] = around, region
                else:
                    count = _cover(
                        region, where, box, device, head, after, near, near_term, terms,
                        source, source_box, term, sources, rest, spare,
                    )  # fmt: skip
                if count < 0:
                    return (False, pieces, sources, box, device, stage, base, answer, first,
                            source, source_box, term)  # fmt: skip
                sources += count
                pieces += 1
                first[pieces] = sources
                _hold(found, device, head, tail, after)
            answer[w] = found
        if s == 1 and has_layout:
            low, high = stage_start[1], stage_start[2]
            terms = 1
            head[:], tail[:], after[:] = -1, -1, -1
            kept = answer[low:high].copy()
            near = kept[_by_term_and_device(np.zeros(len(kept), np.int64), device[kept], devices)]
            near_term = np.zeros(len(box), np.int64)
            for piece in kept:
                if after[piece] < 0 and tail[device[piece]] != piece:
                    _hold(piece, device, head, tail, after)
    return (True, pieces, sources, box, device, stage, base, answer, first, source, source_box,
            term)  # fmt: skip


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _by_term_and_device(term, device, devices):  # type: ignore[no-untyped-def]
    """Pieces by term, then by device, then as they come."""
    return np.argsort(term * devices + device, kind="mergesort")


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _hold(piece, device, head, tail, after):  # type: ignore[no-untyped-def]
    """Adds a piece to what its device has."""
    where = device[piece]
    if head[where] < 0:
        head[where] = piece
    else:
        after[tail[where]] = piece
    tail[where] = piece


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _term_on(near, device, where):  # type: ignore[no-untyped-def]
    """The first term that is on a device."""
    for piece in near:
        if device[piece] == where:
            return piece
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _same(region, box, piece, after):  # type: ignore[no-untyped-def]
    """Of the pieces from `piece` on the one that is the region, or -1."""
    while piece >= 0:
        if np.array_equal(box[piece], region):
            return piece
        piece = after[piece]
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _around(region, box, piece, after, dim_of):  # type: ignore[no-untyped-def]
    """Of the pieces from `piece` on one of which the region can be a view, or -1."""
    while piece >= 0:
        if _inside(region, box[piece]) and _sliceable(region, box[piece], dim_of):
            return piece
        piece = after[piece]
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _inside(region, outer):  # type: ignore[no-untyped-def]
    for a in range(len(region)):
        if region[a, 0] < outer[a, 0] or region[a, 1] > outer[a, 1]:
            return False
        if region[a, 0] >= region[a, 1]:
            return False
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _sliceable(region, piece, dim_of):  # type: ignore[no-untyped-def]
    """Whether a slice of the piece's tensor can be a view: no dimension is cut inside a merged
    product."""
    atoms, a = len(dim_of), 0
    while a < atoms:
        dim, wide, cut = dim_of[a], 0, False
        while a < atoms and dim_of[a] == dim:
            size = piece[a, 1] - piece[a, 0]
            wide += size > 1
            cut = cut or region[a, 1] - region[a, 0] != size
            a += 1
        if cut and wide > 1:
            return False
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _cover(  # type: ignore[no-untyped-def]
    region, where, box, device, head, after, near, near_term, terms,
    source, source_box, term, begin, rest, spare,
):  # fmt: skip
    """Writes disjoint boxes that make up the region, once per term; how many, or -1: no room."""
    rest[0], left, count = region, 1, begin
    piece = head[where]
    while piece >= 0 and left > 0:
        left, count = _take(piece, 0, box, rest, left, spare, source, source_box, term, count)
        if count < 0:
            return -1
        piece = after[piece]
    if left == 0:
        return count - begin
    missing, most = rest[:left].copy(), left
    low = 0
    for t in range(terms):
        high = low
        while high < len(near) and near_term[near[high]] == t:
            high += 1
        turn = low
        while turn < high and device[near[turn]] < where:
            turn += 1
        rest[:most], left = missing, most
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


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _take(piece, t, box, rest, left, spare, source, source_box, term, count):  # type: ignore[no-untyped-def]
    """Takes what a piece has of the boxes `rest`; how many are left, and the number of sources."""
    atoms, kept = rest.shape[1], 0
    for b in range(left):
        if not _meet(rest[b], box[piece]):
            if kept >= len(spare):
                return 0, -1
            spare[kept] = rest[b]
            kept += 1
            continue
        if count >= len(source) or kept + 2 * atoms > len(spare):
            return 0, -1
        source[count], term[count] = piece, t
        source_box[count] = rest[b]
        for a in range(atoms):
            low = max(rest[b, a, 0], box[piece, a, 0])
            high = min(rest[b, a, 1], box[piece, a, 1])
            if rest[b, a, 0] < low:
                spare[kept] = rest[b]
                spare[kept, :a] = source_box[count, :a]
                spare[kept, a, 1] = low
                kept += 1
            if high < rest[b, a, 1]:
                spare[kept] = rest[b]
                spare[kept, :a] = source_box[count, :a]
                spare[kept, a, 0] = high
                kept += 1
            source_box[count, a, 0], source_box[count, a, 1] = low, high
        count += 1
    rest[:kept] = spare[:kept]
    return kept, count


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _meet(a, b):  # type: ignore[no-untyped-def]
    apart = False
    for k in range(len(a)):
        apart = apart or max(a[k, 0], b[k, 0]) >= min(a[k, 1], b[k, 1])
    return not apart
