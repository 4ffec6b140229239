"""Flows: many Flows in flat arrays by number; what Blocks are drafted from in compiled code.

Flows are only ever added at the end; what was added last can be taken back by its counters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled
from apportion.lower.value_flow import HEAD, READ

FLOWS, STAGES, PIECES, ANSWERS, SOURCES = range(5)


class Flows(NamedTuple):  # numba takes no dataclass
    """Flows f, stages s, pieces p, sources q. Pieces and sources are numbered through all Flows."""

    used: Ints  # how many there are: FLOWS, STAGES, ...
    stage_start: Ints  # f + 1
    first: Ints  # f: the first piece
    itemsize: Ints  # f
    piece_start: Ints  # s + 1, by stage
    answer_start: Ints  # s + 1, by stage
    mark: Ints  # s: equal for stages that make and give the same, as far as tasks and costs go
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
    "answer_start": STAGES, "mark": STAGES, "device": PIECES, "nbytes": PIECES, "viewed": PIECES,
    "place": PIECES, "source_start": PIECES, "answer": ANSWERS, "source": SOURCES,
    "source_nbytes": SOURCES, "source_term": SOURCES, "source_box": SOURCES,
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


@compiled
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


@compiled
def add(held: Flows, cores: Ints, itemsizes: Ints, span: int) -> int:
    """Adds Flows; the most pieces of a stage of any, or -1 if there is no room for them."""
    used = held.used + _needed(cores)
    if not (
        used[FLOWS] < len(held.first)
        and used[STAGES] < len(held.answer_start)
        and used[PIECES] < len(held.device)
        and used[ANSWERS] < len(held.answer)
        and used[SOURCES] < len(held.source)
    ):
        return -1
    at, longest = 0, 0
    for itemsize in itemsizes:
        core = cores[at : at + cores[at]]
        longest = max(longest, _add(held, core, itemsize, span))
        at += len(core)
    return longest


@compiled
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
    for stage in range(at, at + stages):
        held.mark[stage] = _mark(held, stage)
    return longest


@compiled
def _mark(held: Flows, stage: int) -> int:
    """A number of what a stage makes and gives, as far as tasks and their costs go."""
    low, high = held.piece_start[stage], held.piece_start[stage + 1]
    found = np.uint64(high - low)
    for piece in range(low, high):
        found = _mixed_piece(found, held, piece)
        found = _mixed(found, held.viewed[piece])
        begin, end = held.source_start[piece], held.source_start[piece + 1]
        found = _mixed(found, end - begin)
        for q in range(begin, end):
            found = _mixed_piece(found, held, held.source[q])
            found = _mixed(found, held.source_nbytes[q])
            found = _mixed(_mixed(found, held.source_term[q]), held.source_box[q])
    for k in range(held.answer_start[stage], held.answer_start[stage + 1]):
        if held.answer[k] >= 0:
            found = _mixed_piece(found, held, held.answer[k])
        else:
            found = _mixed(found, -1)
    return int(np.int64(found))


@compiled
def _mixed_piece(found: np.uint64, held: Flows, piece: int) -> np.uint64:
    found = _mixed(_mixed(found, held.place[piece]), held.device[piece])
    return _mixed(found, held.nbytes[piece])  # type: ignore[no-any-return, unused-ignore]


@compiled
def _mixed(found: np.uint64, number: int) -> np.uint64:
    """One number of two; others give others, but for one in 2 ** 64."""
    found = (found ^ np.uint64(number)) * np.uint64(0x9E3779B97F4A7C15)
    return found ^ (found >> np.uint64(29))


@compiled
def differing(
    stage_start: Ints, mark: Ints, changed: Ints, maker: Ints, first: Ints, reader: Ints, hit: Ints
) -> Ints:
    """Ops whose tasks are others because Values have other Flows: who makes a Value, if what it
    leaves differs; who reads it, if what it is given does; and those in `hit`.

    Rows of `changed` are (Value, number of the old Flow, of the new one). For all Values there is
    the Op that makes it or -1, and where its readers are.
    """
    many, most = len(hit), len(hit) + len(changed)
    for row in range(len(changed)):
        most += first[changed[row, 0] + 1] - first[changed[row, 0]]
    found = np.empty(most, np.int64)
    found[:many] = hit
    for row in range(len(changed)):
        value = changed[row, 0]
        a, b = stage_start[changed[row, 1]], stage_start[changed[row, 2]]
        if maker[value] >= 0 and (mark[a] != mark[b] or mark[a + 1] != mark[b + 1]):
            found[many] = maker[value]
            many += 1
        for k in range(first[value + 1] - first[value]):
            if mark[a + READ + k] != mark[b + READ + k]:
                found[many] = reader[first[value] + k]
                many += 1
    return np.unique(found[:many])
