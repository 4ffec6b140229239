"""Flows whose exchanges go through relays, so that less crosses between far groups of devices.

A part of lower/. In: a FlowStore whose pieces are fetched directly (serve_flows.py), and levels:
divisions of the devices into groups, the coarsest first, between which it is farther than inside
them. Out: a FlowStore of the same Flows with more pieces.

    a sum     of terms that are on several groups: each group adds up its own first, on one of its
              devices, and sends the result
    a gather  of a box that several devices of another group read: it goes to one of them, and from
              there to the others

A device relays for those that have its own place in their group, so that the devices of a group
share the work. One level makes an exchange of two hops, as collectives between machines with
several GPUs each are done; levels that halve and halve again make trees. A piece of hop n is put
together when all pieces of the hops before it are there.

Devices that each add up the same terms get the same bits, wherever they are: the sum of a group is
in all of them a term of its own, in the place of the first that it has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part, mixed
from apportion.lower.value_flow import (
    ANSWERS,
    BOUNDS,
    FLOWS,
    PIECES,
    SOURCES,
    STAGES,
    FlowStore,
    close_flow,
    empty_store,
    enlarged,
    has_room,
)


def relay_flows(store: FlowStore, levels: Ints) -> FlowStore:
    """The same Flows through relays; `levels`: by level and device, the group that it is in."""
    new, more, flow = empty_store(2 * store.used), np.zeros(6, np.int64), 0
    places = np.stack([_places(level) for level in levels])
    while flow < int(store.used[FLOWS]):
        flow = int(_relay_from(store, new, flow, levels, places, more))
        if flow < int(store.used[FLOWS]):
            new = enlarged(new, more)
    return new


def _places(level: Ints) -> Ints:
    """For every device how many come before it in its group."""
    order = np.argsort(level, kind="stable")
    start = np.searchsorted(level[order], level[order])
    found = np.empty_like(level)
    found[order] = np.arange(len(level)) - start
    return found


PIECE_COUNT, ENTRY_COUNT = 0, 1  # counters of a draft


class _RelayDraft(NamedTuple):  # numba takes no dataclass
    """One Flow while relays are put into it: pieces p; entries e, each a box of a piece that is
    copied from another one; boxes of b bounds."""

    used: Ints
    old: Ints  # by piece of the Flow as it was: its number now
    piece_box: Ints  # p x b
    device: Ints  # p
    base: Ints  # p
    hop: Ints  # p
    first: Ints  # p: its first entry, or -1
    source: Ints  # e: piece
    term: Ints  # e
    box: Ints  # e x b
    after: Ints  # e: the next one of its piece, or -1
    made_start: Ints  # by stage


@compiled
def _relay_from(old, new, flow, levels, places, more):  # type: ignore[no-untyped-def]
    """Adds Flows from `flow` on to the new store. Where it stopped: at the end, or where there was
    no room; then `more` says how much there must be."""
    while flow < old.used[FLOWS]:
        stage, end = old.stage_start[flow], old.stage_start[flow + 1] - 1
        first, last = old.piece_start[stage], old.piece_start[end]
        sources = old.source_start[last] - old.source_start[first]
        room = last - first + 2 * sources + 1
        draft = _new_relay_draft(room, last - first, 2 * old.atoms[flow], end - stage + 1)
        for k in range(end - stage):
            low = draft.used[PIECE_COUNT]
            _copy_stage(old, flow, stage + k, draft)
            for level in range(len(levels)):
                _relay_sums(draft, low, levels[level], places[level])
                _relay_gathers(draft, low, levels[level], places[level])
            _set_hops(draft, low)
            draft.made_start[k + 1] = draft.used[PIECE_COUNT]
        pieces, count = draft.used[PIECE_COUNT], draft.used[ENTRY_COUNT]
        more[FLOWS], more[STAGES], more[PIECES] = 1, end - stage + 1, pieces
        more[ANSWERS] = old.answer_start[end] - old.answer_start[stage]
        more[SOURCES] = count
        more[BOUNDS] = 2 * old.atoms[flow] * (pieces + count)
        if not has_room(new, more):
            return flow
        _write_relayed(old, new, flow, draft, more)
        flow += 1
    return flow


@compiled
def _new_relay_draft(room, pieces, wide, stages):  # type: ignore[no-untyped-def]
    """A relay takes the place of two entries or more, so that there are fewer than these."""
    c = np.empty((7, room), np.int64)
    return _RelayDraft(
        np.zeros(2, np.int64), np.empty(pieces, np.int64), np.empty((room, wide), np.int64), c[0],
        c[1], c[2], c[3], c[4], c[5], np.empty((room, wide), np.int64), c[6],
        np.zeros(stages, np.int64),
    )  # fmt: skip


@compiled_part
def _copy_stage(old, flow, stage, draft):  # type: ignore[no-untyped-def]
    """The pieces of a stage as they are, with their sources as entries."""
    wide, begin = draft.box.shape[1], old.piece_start[old.stage_start[flow]]
    pieces = old.piece_start[old.stage_start[flow + 1] - 1] - begin
    bounds, shift = old.bound_start[flow], old.source_start[begin]
    for piece in range(old.piece_start[stage], old.piece_start[stage + 1]):
        new = _add_piece(draft, old.device[piece])
        draft.old[piece - begin] = new
        if old.base[piece] >= 0:
            draft.base[new] = draft.old[old.base[piece] - begin]
        for b in range(wide):
            draft.piece_box[new, b] = old.bounds[bounds + (piece - begin) * wide + b]
        for q in range(old.source_start[piece + 1] - 1, old.source_start[piece] - 1, -1):
            entry = _add_entry(draft, new, draft.old[old.source[q] - begin], old.source_term[q])
            row = bounds + (pieces + q - shift) * wide
            for b in range(wide):
                draft.box[entry, b] = old.bounds[row + b]


@compiled_part
def _add_piece(draft, device):  # type: ignore[no-untyped-def]
    """A piece without entries; its number."""
    piece = draft.used[PIECE_COUNT]
    draft.device[piece], draft.base[piece], draft.hop[piece] = device, -1, 0
    draft.first[piece] = -1
    draft.used[PIECE_COUNT] = piece + 1
    return piece


@compiled_part
def _add_entry(draft, piece, source, term):  # type: ignore[no-untyped-def]
    """An entry, the first of its piece from now on; its box is still to be written."""
    entry = draft.used[ENTRY_COUNT]
    draft.source[entry], draft.term[entry] = source, term
    draft.after[entry], draft.first[piece] = draft.first[piece], entry
    draft.used[ENTRY_COUNT] = entry + 1
    return entry


@compiled_part
def _relay(draft, device, entry):  # type: ignore[no-untyped-def]
    """A piece without entries that has the box of an entry; its number."""
    piece = _add_piece(draft, device)
    for b in range(draft.box.shape[1]):
        draft.piece_box[piece, b] = draft.box[entry, b]
    return piece


@compiled_part
def _same_box(draft, one, other):  # type: ignore[no-untyped-def]
    same = True
    for b in range(draft.box.shape[1]):
        same = same and draft.box[one, b] == draft.box[other, b]
    return same


# Sums


@compiled
def _relay_sums(draft, low, group, place):  # type: ignore[no-untyped-def]
    """Every group adds up its own terms of the pieces from `low` on."""
    for piece in range(low, draft.used[PIECE_COUNT]):
        count, terms, entry = 0, False, draft.first[piece]
        while entry >= 0:
            terms = terms or draft.term[entry] > 0
            count += 1
            entry = draft.after[entry]
        if not terms:
            continue
        mine, entry = np.empty(count, np.int64), draft.first[piece]
        for k in range(count):
            mine[k] = entry
            entry = draft.after[entry]
        _relay_terms(draft, piece, mine, group, place)


@compiled
def _relay_terms(draft, piece, mine, group, place):  # type: ignore[no-untyped-def]
    """The same for one piece, which has these entries; they have rising terms."""
    device, source, count = draft.device, draft.source, len(mine)
    done, kept = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    for k in range(count):
        if done[k]:
            continue
        alike, several = [k], False  # entries of one box
        for j in range(k + 1, count):
            if not done[j] and _same_box(draft, mine[k], mine[j]):
                alike.append(j)
                done[j] = True
                several = several or (
                    group[device[source[mine[j]]]] != group[device[source[mine[k]]]]
                )
        if not several:
            continue
        summed = np.zeros(len(alike), np.bool_)
        for a in range(len(alike)):
            if summed[a]:
                continue
            of = group[device[source[mine[alike[a]]]]]
            same = [x for x in alike if group[device[source[mine[x]]]] == of]
            for x in range(len(alike)):
                summed[x] = summed[x] or group[device[source[mine[alike[x]]]]] == of
            if len(same) < 2:
                continue
            here = device[piece]
            where = here
            if of != group[here]:
                where = device[source[mine[same[place[here] % len(same)]]]]
            relay = _relay(draft, where, mine[same[0]])
            taken = _add_entry(draft, piece, relay, draft.term[mine[same[0]]])
            for b in range(draft.box.shape[1]):
                draft.box[taken, b] = draft.box[mine[same[0]], b]
            for x in range(len(same) - 1, -1, -1):
                entry, kept[same[x]] = mine[same[x]], x == 0
                draft.term[entry], draft.after[entry] = x, draft.first[relay]
                draft.first[relay] = entry
            mine[same[0]] = taken
    last = -1
    for k in range(count):
        if kept[k]:
            if last < 0:
                draft.first[piece] = mine[k]
            else:
                draft.after[last] = mine[k]
            draft.after[mine[k]] = -1
            last = mine[k]


# Gathers


@compiled
def _relay_gathers(draft, low, group, place):  # type: ignore[no-untyped-def]
    """What several pieces from `low` on copy from another group comes to their group once."""
    pieces, entries = draft.used[PIECE_COUNT], draft.used[ENTRY_COUNT]
    head, following = np.full(pieces, -1), np.full(entries, -1)  # by the piece that is copied
    target = np.full(entries, -1)
    for piece in range(pieces - 1, low - 1, -1):
        terms, entry = False, draft.first[piece]
        while entry >= 0:
            terms = terms or draft.term[entry] > 0
            entry = draft.after[entry]
        entry = draft.first[piece]
        while entry >= 0 and not terms:
            source = draft.source[entry]
            if group[draft.device[source]] != group[draft.device[piece]]:
                target[entry], following[entry], head[source] = piece, head[source], entry
            entry = draft.after[entry]
    for source in range(pieces):
        entry = head[source]
        while entry >= 0:
            if target[entry] >= 0:
                _relay_box(draft, entry, target, following, group, place)
            entry = following[entry]


@compiled
def _relay_box(draft, entry, target, following, group, place):  # type: ignore[no-untyped-def]
    """One box for one group; what it is copied to by is no longer a `target` then."""
    device, source = draft.device, draft.source[entry]
    here, alike, other, several = device[target[entry]], [entry], following[entry], False
    while other >= 0:
        inside = target[other] >= 0 and group[device[target[other]]] == group[here]
        if inside and _same_box(draft, entry, other):
            alike.append(other)
            several = several or device[target[other]] != here
        other = following[other]
    if several:
        where = device[target[alike[place[device[source]] % len(alike)]]]
        relay = _relay(draft, where, entry)
        fetched = _add_entry(draft, relay, source, 0)
        for b in range(draft.box.shape[1]):
            draft.box[fetched, b] = draft.box[entry, b]
        for each in alike:
            draft.source[each] = relay
    for each in alike:
        target[each] = -1


@compiled
def _set_hops(draft, low):  # type: ignore[no-untyped-def]
    """When each of the pieces from `low` on can be put together: a hop after those that come from
    another device, or that stand behind it."""
    moved = True
    while moved:
        moved = False
        for piece in range(low, draft.used[PIECE_COUNT]):
            entry, hop = draft.first[piece], draft.hop[piece]
            while entry >= 0:
                source = draft.source[entry]
                if source >= low:
                    near = draft.device[source] == draft.device[piece] and source < piece
                    hop = max(hop, draft.hop[source] + (0 if near else 1))
                entry = draft.after[entry]
            if hop != draft.hop[piece]:
                draft.hop[piece], moved = hop, True


# Writing it down


@compiled
def _write_relayed(old, new, flow, draft, more):  # type: ignore[no-untyped-def]
    """Adds the Flow of a draft to the new store."""
    used, itemsize, wide = new.used, old.itemsize[flow], draft.box.shape[1]
    stages, pieces, answers = used[STAGES], used[PIECES], used[ANSWERS]
    stage, begin = old.stage_start[flow], old.piece_start[old.stage_start[flow]]
    first_answer = old.answer_start[stage]
    for k in range(more[STAGES]):
        new.piece_start[stages + k] = pieces + draft.made_start[k]
        new.answer_start[stages + k] = answers + old.answer_start[stage + k] - first_answer
    for k in range(more[ANSWERS]):
        piece = old.answer[first_answer + k]
        new.answer[answers + k] = pieces + draft.old[piece - begin] if piece >= 0 else -1
    at, moved, row = used[SOURCES], 0, used[BOUNDS] + wide * more[PIECES]
    for piece in range(more[PIECES]):
        new.device[pieces + piece], new.hop[pieces + piece] = draft.device[piece], draft.hop[piece]
        base = draft.base[piece]
        new.base[pieces + piece] = pieces + base if base >= 0 else -1
        volume = 1
        for b in range(wide):
            new.bounds[used[BOUNDS] + wide * piece + b] = draft.piece_box[piece, b]
            volume *= 1 if b % 2 == 0 else draft.piece_box[piece, b] - draft.piece_box[piece, b - 1]
        new.nbytes[pieces + piece] = volume * itemsize
        entry = draft.first[piece]
        while entry >= 0:
            volume, box = 1, 0
            for b in range(wide):
                volume *= 1 if b % 2 == 0 else draft.box[entry, b] - draft.box[entry, b - 1]
                box = mixed(box, draft.box[entry, b])
                new.bounds[row + b] = draft.box[entry, b]
            new.source[at], new.source_nbytes[at] = pieces + draft.source[entry], volume * itemsize
            new.source_term[at], new.source_hash[at] = draft.term[entry], box
            if draft.device[draft.source[entry]] != draft.device[piece]:
                moved += volume * itemsize
            at, row, entry = at + 1, row + wide, draft.after[entry]
        new.source_start[pieces + piece + 1] = at
    more[SOURCES] = at - used[SOURCES]
    more[BOUNDS] = wide * (more[PIECES] + more[SOURCES])
    close_flow(new, itemsize, moved, old.laid_out[flow], old.atoms[flow], more)
