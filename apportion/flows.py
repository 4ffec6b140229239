"""Flows: many Flows in flat arrays by number; what Blocks are drafted from in compiled code.

Flows are only ever added at the end; what was added last can be taken back by its counters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.flow import READ, Flow
from apportion.tasks import Ints

FLOWS, STAGES, PIECES, ANSWERS, SOURCES = range(5)


class Flows(NamedTuple):  # numba takes no dataclass
    """Flows f, stages s, pieces p, sources q. Pieces and sources are numbered through all Flows."""

    used: Ints  # how many there are: FLOWS, STAGES, ...
    stage_start: Ints  # f + 1
    first: Ints  # f: the first piece
    itemsize: Ints  # f
    piece_start: Ints  # s + 1, by stage
    answer_start: Ints  # s + 1, by stage
    device: Ints  # p
    nbytes: Ints  # p
    viewed: Ints  # p: whether it is a view of another
    place: Ints  # p: stage * span + number within the stage
    source_start: Ints  # p + 1
    answer: Ints  # pieces
    source: Ints  # q: piece
    source_nbytes: Ints  # q
    source_term: Ints  # q
    source_box: Ints  # q: equal for equal boxes of one Value


COLUMNS = {
    "stage_start": FLOWS, "first": FLOWS, "itemsize": FLOWS, "piece_start": STAGES,
    "answer_start": STAGES, "device": PIECES, "nbytes": PIECES, "viewed": PIECES, "place": PIECES,
    "source_start": PIECES, "answer": ANSWERS, "source": SOURCES, "source_nbytes": SOURCES,
    "source_term": SOURCES, "source_box": SOURCES,
}  # fmt: skip


def flows(room: Ints) -> Flows:
    """An empty one with so much room."""
    columns = {name: np.zeros(int(room[of]) + 1, np.int64) for name, of in COLUMNS.items()}
    return Flows(np.zeros(5, np.int64), **columns)


def sizes(flow: Flow) -> Ints:
    """How much room a Flow takes."""
    many = (1, len(flow.answer_start), len(flow.device), len(flow.answer), len(flow.source))
    return np.array(many, np.int64)


def with_room(held: Flows, more: Ints) -> Flows:
    """The same, or a larger copy, so that there is so much room left."""
    room = np.array([len(getattr(held, name)) for name in ("first", "answer_start", "device",
                     "answer", "source")]) - 1  # fmt: skip
    if (held.used + more <= room).all():
        return held
    new = flows(2 * (held.used + more))
    for name in Flows._fields:
        old, copy = getattr(held, name), getattr(new, name)
        many = min(len(old), len(copy))
        copy[:many] = old[:many]
    return new


def add(held: Flows, flow: Flow, itemsize: int, span: int) -> int:
    """Adds a Flow, for which there must be room; its number."""
    number: int = _add(
        held, flow.device, flow.nbytes, flow.stage, flow.base, flow.answer_start, flow.answer,
        flow.source_start, flow.source, flow.source_nbytes, flow.source_term, flow.source_box,
        itemsize, span,
    )  # fmt: skip
    return number


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _add(  # type: ignore[no-untyped-def]
    held, device, nbytes, stage, base, answer_start, answer, source_start, source, source_nbytes,
    source_term, source_box, itemsize, span,
):  # fmt: skip
    used = held.used
    f, at, first = used[FLOWS], used[STAGES], used[PIECES]
    answers, sources = used[ANSWERS], used[SOURCES]
    held.stage_start[f], held.first[f], held.itemsize[f] = at, first, itemsize
    stages, piece = len(answer_start) - 1, 0
    for s in range(stages):
        low = piece
        held.piece_start[at + s] = first + piece
        held.answer_start[at + s] = answers + answer_start[s]
        while piece < len(stage) and stage[piece] == s:
            held.place[first + piece] = s * span + piece - low
            piece += 1
    held.piece_start[at + stages] = first + piece
    held.answer_start[at + stages] = answers + answer_start[stages]
    for p in range(len(device)):
        held.device[first + p], held.nbytes[first + p] = device[p], nbytes[p]
        held.viewed[first + p] = base[p] >= 0
        held.source_start[first + p] = sources + source_start[p]
    held.source_start[first + len(device)] = sources + len(source)
    for k in range(len(answer)):
        held.answer[answers + k] = first + answer[k] if answer[k] >= 0 else -1
    for k in range(len(source)):
        held.source[sources + k] = first + source[k]
        held.source_nbytes[sources + k], held.source_term[sources + k] = (
            source_nbytes[k], source_term[k],
        )  # fmt: skip
        mixed = 0
        for a in range(source_box.shape[1]):
            mixed = mixed * 1_000_003 + source_box[k, a, 0]
            mixed = mixed * 1_000_003 + source_box[k, a, 1]
        held.source_box[sources + k] = mixed
    used[FLOWS], used[STAGES], used[PIECES] = f + 1, at + stages + 1, first + len(device)
    used[ANSWERS], used[SOURCES] = answers + len(answer), sources + len(source)
    held.stage_start[f + 1] = used[STAGES]
    return f


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def longest(held: Flows, flow: int) -> int:
    """The most pieces that a stage of a Flow makes."""
    most = 0
    for s in range(held.stage_start[flow], held.stage_start[flow + 1] - 1):
        most = max(most, held.piece_start[s + 1] - held.piece_start[s])
    return most


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def differing(
    held: Flows, old: Ints, new: Ints, producer: Ints, reader_start: Ints, reader: Ints, hit: Ints
) -> Ints:
    """Ops whose tasks are others because Values have the Flows `new` instead of `old`: who makes a
    Value, if what it leaves differs; who reads it, if what it is given does; and those in `hit`.

    For each of these Values its producer or -1, and where its readers are.
    """
    found, many = np.empty(len(hit) + len(old) + len(reader), np.int64), len(hit)
    found[:many] = hit
    for k in range(len(old)):
        a, b = held.stage_start[old[k]], held.stage_start[new[k]]
        if producer[k] >= 0 and not (_same(held, a, b) and _same(held, a + 1, b + 1)):
            found[many] = producer[k]
            many += 1
        for r in range(reader_start[k], reader_start[k + 1]):
            stage = READ + r - reader_start[k]
            if not _same(held, a + stage, b + stage):
                found[many] = reader[r]
                many += 1
    return np.unique(found[:many])


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _same(held: Flows, a: int, b: int) -> bool:
    """Whether two stages make and give the same, as far as tasks and their costs go."""
    p, q = held.piece_start[a], held.piece_start[b]
    many = held.piece_start[a + 1] - p
    answers = held.answer_start[a + 1] - held.answer_start[a]
    if held.piece_start[b + 1] - q != many:
        return False
    if held.answer_start[b + 1] - held.answer_start[b] != answers:
        return False
    for k in range(many):
        if held.device[p + k] != held.device[q + k] or held.nbytes[p + k] != held.nbytes[q + k]:
            return False
        if held.viewed[p + k] != held.viewed[q + k]:
            return False
        x, y = held.source_start[p + k], held.source_start[q + k]
        if held.source_start[p + k + 1] - x != held.source_start[q + k + 1] - y:
            return False
        for s in range(held.source_start[p + k + 1] - x):
            if (
                not _same_piece(held, held.source[x + s], held.source[y + s])
                or held.source_nbytes[x + s] != held.source_nbytes[y + s]
                or held.source_term[x + s] != held.source_term[y + s]
                or held.source_box[x + s] != held.source_box[y + s]
            ):
                return False
    for k in range(answers):
        x, y = held.answer[held.answer_start[a] + k], held.answer[held.answer_start[b] + k]
        if (x < 0) != (y < 0) or (x >= 0 and not _same_piece(held, x, y)):
            return False
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _same_piece(held: Flows, p: int, q: int) -> bool:
    return bool(
        held.place[p] == held.place[q]
        and held.device[p] == held.device[q]
        and held.nbytes[p] == held.nbytes[q]
    )
