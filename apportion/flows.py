"""Flows: many Flows in flat arrays by number; what Blocks are drafted from in compiled code.

Flows are only ever added at the end; what was added last can be taken back by its counters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.flow import HEAD, READ
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


def with_room(held: Flows, cores: Ints) -> Flows:
    """A larger copy, with room for Flows with these cores."""
    new = flows(2 * (held.used + _needed(cores)))
    for name in Flows._fields:
        old, copy = getattr(held, name), getattr(new, name)
        many = min(len(old), len(copy))
        copy[:many] = old[:many]
    return new


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _needed(cores: Ints) -> Ints:
    """How much room Flows with these cores need: FLOWS, STAGES, ..."""
    needed, at = np.zeros(5, np.int64), 0
    while at < len(cores):
        needed[FLOWS] += 1
        needed[STAGES] += cores[at + 4] + 1
        needed[PIECES] += cores[at + 1]
        needed[ANSWERS] += cores[at + 3]
        needed[SOURCES] += cores[at + 2]
        at += cores[at]
    return needed


def add(held: Flows, cores: Ints, itemsizes: Ints, span: int) -> int:
    """Adds Flows; the most pieces of a stage of any, or -1 if there is no room for them."""
    longest: int = _add_all(held, cores, itemsizes, span)
    return longest


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _add_all(held: Flows, cores: Ints, itemsizes: Ints, span: int) -> int:
    after = held.used + _needed(cores)
    room = (len(held.first), len(held.answer_start), len(held.device), len(held.answer))
    if (
        after[FLOWS] >= room[0]
        or after[STAGES] >= room[1]
        or after[PIECES] >= room[2]
        or after[ANSWERS] >= room[3]
        or after[SOURCES] >= len(held.source)
    ):
        return -1
    at, longest = 0, 0
    for itemsize in itemsizes:
        core = cores[at : at + cores[at]]
        longest = max(longest, _add(held, core, itemsize, span))
        at += len(core)
    return longest


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _add(held: Flows, core: Ints, itemsize: int, span: int) -> int:
    """Adds a Flow; the most pieces of a stage."""
    used, p, s, w, stages = held.used, core[1], core[2], core[3], core[4]
    f, at, first = used[FLOWS], used[STAGES], used[PIECES]
    answers, sources = used[ANSWERS], used[SOURCES]
    held.stage_start[f], held.first[f], held.itemsize[f] = at, first, itemsize
    made, answered = HEAD, HEAD + stages + 1
    for stage in range(stages + 1):
        held.piece_start[at + stage] = first + core[made + stage]
        held.answer_start[at + stage] = answers + core[answered + stage]
    longest = 0
    for stage in range(stages):
        longest = max(longest, core[made + stage + 1] - core[made + stage])
        for piece in range(core[made + stage], core[made + stage + 1]):
            held.place[first + piece] = stage * span + piece - core[made + stage]
    device = answered + stages + 1
    nbytes, base, source_start = device + p, device + 2 * p, device + 3 * p
    for k in range(p):
        held.device[first + k], held.nbytes[first + k] = core[device + k], core[nbytes + k]
        held.viewed[first + k] = core[base + k] >= 0
        held.source_start[first + k] = sources + core[source_start + k]
    held.source_start[first + p] = sources + s
    answer = source_start + p + 1
    for k in range(w):
        held.answer[answers + k] = first + core[answer + k] if core[answer + k] >= 0 else -1
    source = answer + w
    for k in range(s):
        held.source[sources + k] = first + core[source + k]
        held.source_nbytes[sources + k] = core[source + s + k]
        held.source_term[sources + k] = core[source + 2 * s + k]
        held.source_box[sources + k] = core[source + 3 * s + k]
    used[FLOWS], used[STAGES], used[PIECES] = f + 1, at + stages + 1, first + p
    used[ANSWERS], used[SOURCES] = answers + w, sources + s
    held.stage_start[f + 1] = used[STAGES]
    return longest


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
