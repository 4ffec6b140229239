"""Flows worked out: how each reader of a Value gets the regions that it reads. A part of lower/.

In: FlowRequests (flow_requests.py). Out: Flows, added to a FlowStore (value_flow.py).

To serve a region on a device:

    held there already      nothing to do
    inside one local piece  a view of it
    otherwise               an assembly of disjoint boxes: local pieces first, then the nearest
                            device that has them; for a partial Value one cover per term, combined
                            in rising order, so that all devices that assemble the region get the
                            same bits

What was fetched stays for later readers on that device, but for a Value that is fetched again: its
readers from a stage on find what was made or laid out, and what was fetched since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part, mixed
from apportion.lower.flow_requests import (
    AGAIN,
    ANYWHERE,
    ATOMS,
    DIMS,
    HAS_LAYOUT,
    ITEMSIZE,
    LENGTH,
    REFERENCES,
    TERM,
    TERMS,
    FlowRequest,
    RegionTable,
    placed_rows,
    request_array,
    stage_counts,
)
from apportion.lower.value_flow import (
    ANSWERS,
    BOUNDS,
    FLOWS,
    PIECES,
    SOURCES,
    STAGES,
    FlowStore,
    close_flow,
    enlarged,
    has_room,
)


def add_flows(
    store: FlowStore, regions: RegionTable, requests: Sequence[FlowRequest]
) -> tuple[FlowStore, range]:
    """The store with the Flows that are asked for, maybe a larger one, and their numbers."""
    flat, at, more = request_array(requests), 0, np.zeros(6, np.int64)
    first = int(store.used[FLOWS])
    while at < len(flat):
        at = int(_serve(store, regions.flat, flat, at, regions.devices, more))
        if at < len(flat):
            store = enlarged(store, more)
    return store, range(first, first + len(requests))


COUNT, SERVED, NEAR = range(3)  # counters of a draft: pieces, sources, pieces that are near


class _FlowDraft(NamedTuple):  # numba takes no dataclass
    """One Flow while it is worked out: pieces p, sources q, boxes of b bounds."""

    used: Ints  # COUNT, SERVED, NEAR
    box: Ints  # p + 1 x b: the last row is for a region that is looked for
    device: Ints  # p
    base: Ints  # p
    after: Ints  # p: the next piece that its device has, or -1
    first: Ints  # by device: the first piece that it has, or -1
    last: Ints  # by device
    term: Ints  # p: of those that are near
    near: Ints  # the pieces that are fetched from: by term, then by device
    answer: Ints
    source_start: Ints  # p + 1
    source: Ints  # q
    source_term: Ints  # q
    source_box: Ints  # q x b
    rest: Ints  # boxes x b: what is still to be covered
    spare: Ints  # boxes x b
    made_start: Ints  # by stage
    answer_start: Ints  # by stage


@compiled
def _serve(store, regions, requests, at, devices, more):  # type: ignore[no-untyped-def]
    """Adds the Flows of requests from `at` on. Where it stopped: at their end, or where there was
    no room in the store; then `more` says how much there must be. All but the store are int64
    columns and numbers."""
    while at < len(requests):
        end = at + REFERENCES + requests[at + LENGTH]
        atoms, references = requests[at + ATOMS], requests[at + REFERENCES : end]
        given = placed_rows(regions, references, 2 + 2 * atoms)
        dims = regions[requests[at + DIMS] : requests[at + DIMS] + atoms]
        counts = stage_counts(regions, references, requests[at + HAS_LAYOUT])
        room = 4 * len(given) + 64
        draft = _new_draft(devices, given, counts, room)
        while not _serve_all(draft, requests[at:end], counts, dims, given):
            room *= 4
            draft = _new_draft(devices, given, counts, room)
        pieces, sources = draft.used[COUNT], draft.used[SERVED]
        more[FLOWS], more[STAGES], more[PIECES] = 1, len(counts) + 1, pieces
        more[ANSWERS], more[SOURCES] = len(draft.answer), sources
        more[BOUNDS] = 2 * atoms * (pieces + sources)
        if not has_room(store, more):
            return at
        _write(store, draft, requests[at:end], more)
        at = end
    return at


@compiled
def _new_draft(devices, given, counts, room):  # type: ignore[no-untyped-def]
    """A draft with the room for so many sources, for all `given` rows (device, term, box)."""
    most, wide, stages = len(given), given.shape[1] - 2, len(counts)
    return _FlowDraft(
        np.zeros(3, np.int64), np.empty((most + 1, wide), np.int64), np.empty(most, np.int64),
        np.full(most, -1), np.full(most, -1), np.full(devices, -1), np.full(devices, -1),
        np.zeros(most, np.int64), np.empty(most, np.int64),
        np.empty(most - counts[0], np.int64), np.zeros(most + 1, np.int64),
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty((room, wide), np.int64),
        np.empty((room, wide), np.int64), np.empty((room, wide), np.int64),
        np.zeros(stages + 1, np.int64), np.zeros(stages + 1, np.int64),
    )  # fmt: skip


@compiled
def _serve_all(draft, request, counts, dims, given):  # type: ignore[no-untyped-def]
    """Serves stage after stage; whether there was room for all sources."""
    terms, low = request[TERMS], counts[0]
    _begin(draft, given, low, terms)
    resting = np.arange(low)
    for stage in range(1, len(counts)):
        high = low + counts[stage]
        if stage == request[AGAIN] and terms == 1:
            _hold_only(draft, resting)
        if not _serve_stage(draft, given, low, high, terms, dims):
            return False
        if stage == 1 and request[HAS_LAYOUT] == 1:
            resting = draft.answer[low - counts[0] : high - counts[0]]
            _hold_only(draft, resting)
            terms = 1
        low = high
        draft.made_start[stage + 1] = draft.used[COUNT]
        draft.answer_start[stage + 1] = high - counts[0]
    return True


@compiled
def _begin(draft, given, made, terms):  # type: ignore[no-untyped-def]
    """The pieces that there are at first are the rows given[:made]."""
    for piece in range(made):
        draft.device[piece], draft.term[piece] = given[piece, 0], given[piece, 1]
        _copy(draft.box, piece, given, piece, 2)
        if terms == 1:
            _hold(piece, draft.device, draft.first, draft.last, draft.after)
    _set_near(draft, np.arange(made), terms)
    draft.used[COUNT] = draft.made_start[1] = made


@compiled
def _hold_only(draft, pieces):  # type: ignore[no-untyped-def]
    """From now on devices have these pieces, whole ones, and no others: the Value is laid out, or
    what was fetched of it is dropped."""
    draft.first[:], draft.last[:] = -1, -1
    draft.after[:], draft.term[:] = -1, 0
    _set_near(draft, pieces, np.int64(1))
    for piece in pieces:
        if draft.after[piece] < 0 and draft.last[draft.device[piece]] != piece:
            _hold(piece, draft.device, draft.first, draft.last, draft.after)


@compiled
def _set_near(draft, pieces, terms):  # type: ignore[no-untyped-def]
    """These pieces are fetched from: by term, then by device, then as they come."""
    devices, term, device = len(draft.first), draft.term, draft.device
    start = np.zeros(terms * devices + 1, np.int64)
    for piece in pieces:
        start[term[piece] * devices + device[piece] + 1] += 1
    for key in range(terms * devices):
        start[key + 1] += start[key]
    for piece in pieces:
        key = term[piece] * devices + device[piece]
        draft.near[start[key]] = piece
        start[key] += 1
    draft.used[NEAR] = len(pieces)


@compiled
def _serve_stage(draft, given, low, high, terms, dims):  # type: ignore[no-untyped-def]
    """Serves the rows given[low:high] of one reader; whether there was room for all sources."""
    box, device, after, first, answer = (
        draft.box, draft.device, draft.after, draft.first, draft.answer,
    )  # fmt: skip
    used, shift = draft.used, len(given) - len(answer)
    for row in range(low, high):
        where, how, region = given[row, 0], given[row, 1], used[COUNT]
        if how == TERM:
            answer[row - shift] = _term_on(draft.near[: used[NEAR]], device, where)
            continue
        _copy(box, region, given, row, 2)
        found = _same(box, region, first[where], after)
        if how == ANYWHERE:
            found, where = _same_anywhere(box, region, first, after), device[0]
        if found < 0:
            found, device[region] = region, where
            count = _sources(draft, region, where, terms, dims)
            if count < 0:
                return False
            used[SERVED] += count
            used[COUNT] += 1
            draft.source_start[used[COUNT]] = used[SERVED]
            _hold(found, device, first, draft.last, after)
        answer[row - shift] = found
    return True


@compiled
def _sources(draft, region, where, terms, dims):  # type: ignore[no-untyped-def]
    """Writes what a new piece is put together from; how many sources, or -1: there is no room."""
    begin = draft.used[SERVED]
    around = _around(draft.box, region, draft.first[where], draft.after, dims)
    if around >= 0:
        if begin >= len(draft.source):
            return -1
        draft.base[region] = around
        draft.source[begin], draft.source_term[begin] = around, 0
        _copy(draft.source_box, begin, draft.box, region, 0)
        return 1
    return _cover(
        region, where, draft.box, draft.device, draft.first, draft.after,
        draft.near[: draft.used[NEAR]], draft.term, terms, draft.source, draft.source_box,
        draft.source_term, begin, draft.rest, draft.spare,
    )  # fmt: skip


# Writing it down


@compiled_part
def _write(store, draft, request, more):  # type: ignore[no-untyped-def]
    """Adds a Flow that is worked out to the store."""
    used, itemsize = store.used, request[ITEMSIZE]
    stages, pieces, answers, sources = used[STAGES], used[PIECES], used[ANSWERS], used[SOURCES]
    for stage in range(more[STAGES]):
        store.piece_start[stages + stage] = pieces + draft.made_start[stage]
        store.answer_start[stages + stage] = answers + draft.answer_start[stage]
    for k in range(more[PIECES]):
        store.device[pieces + k] = draft.device[k]
        store.nbytes[pieces + k] = _volume(draft.box, k) * itemsize
        store.base[pieces + k] = pieces + draft.base[k] if draft.base[k] >= 0 else -1
        store.source_start[pieces + k + 1] = sources + draft.source_start[k + 1]
    for k in range(more[ANSWERS]):
        store.answer[answers + k] = pieces + draft.answer[k] if draft.answer[k] >= 0 else -1
    moved = _write_sources(store, draft, itemsize, more[PIECES])
    bounds = _write_boxes(store.bounds, used[BOUNDS], draft.box, more[PIECES])
    _write_boxes(store.bounds, bounds, draft.source_box, more[SOURCES])
    close_flow(store, itemsize, moved, request[HAS_LAYOUT], request[ATOMS], more)


@compiled_part
def _write_sources(store, draft, itemsize, pieces):  # type: ignore[no-untyped-def]
    """Adds the sources of so many pieces to the store; how many bytes come from other devices."""
    first, at, moved = store.used[PIECES], store.used[SOURCES], 0
    for piece in range(pieces):
        for k in range(draft.source_start[piece], draft.source_start[piece + 1]):
            nbytes, box = _volume(draft.source_box, k) * itemsize, 0
            for bound in range(draft.source_box.shape[1]):
                box = mixed(box, draft.source_box[k, bound])
            store.source[at + k], store.source_nbytes[at + k] = first + draft.source[k], nbytes
            store.source_term[at + k], store.source_hash[at + k] = draft.source_term[k], box
            if draft.device[draft.source[k]] != draft.device[piece]:
                moved += nbytes
    return moved


@compiled_part
def _write_boxes(bounds, at, box, count):  # type: ignore[no-untyped-def]
    """Writes the first boxes from `at` on; where they end."""
    wide = box.shape[1]
    for row in range(count):
        for bound in range(wide):
            bounds[at + wide * row + bound] = box[row, bound]
    return at + wide * count


# Boxes, in rows of bounds


@compiled
def _copy(to, row, given, other, skipped):  # type: ignore[no-untyped-def]
    for k in range(to.shape[1]):
        to[row, k] = given[other, skipped + k]


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
def _hold(piece, device, first, last, after):  # type: ignore[no-untyped-def]
    """Adds a piece to what its device has."""
    where = device[piece]
    if first[where] < 0:
        first[where] = piece
    else:
        after[last[where]] = piece
    last[where] = piece


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


@compiled_part
def _same_anywhere(box, region, first, after):  # type: ignore[no-untyped-def]
    """The piece on the first of all devices that is equal to the row `region`, or -1."""
    for piece in first:
        found = _same(box, region, piece, after)
        if found >= 0:
            return found
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
    """Whether a slice of the piece's tensor can be a view: in every dimension, which may be a
    merged product, it is one range."""
    atoms, a = len(dims), 0
    while a < atoms:
        dim, begun = dims[a], False
        while a < atoms and dims[a] == dim:
            here = box[region, 2 * a + 1] - box[region, 2 * a]
            if begun and here != box[piece, 2 * a + 1] - box[piece, 2 * a]:
                return False
            begun = begun or here > 1
            a += 1
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
        left, count = _take(
            piece, np.int64(0), box, rest, left, spare, source, source_box, term, count
        )
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
    """Whether a piece has something of a box; of one without elements, every piece has all."""
    meet = True
    for a in range(0, rest.shape[1], 2):
        low, high = max(rest[b, a], box[piece, a]), min(rest[b, a + 1], box[piece, a + 1])
        meet = meet and (low < high or rest[b, a] == rest[b, a + 1])
    return meet
