"""StageNames: names of pieces, and hashes of stages, that do not depend on what other stages of a
Flow do. A part of simulate/delta/.

In: a FlowStore. Out: for every piece its place, and for every stage a hash of what it makes and
gives. A change gives a Value another Flow; by these columns delta simulation sees which of its
readers are given something else, and only their tasks are lowered again.

The place of a piece is stage * span + its number within the stage. No stage has more pieces than
the span.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part, mixed
from apportion.lower import FLOWS, PIECES, READ, STAGES, FlowStore


class StageNames(NamedTuple):  # numba takes no dataclass
    """Columns beside those of a FlowStore, for its first Flows."""

    named: Ints  # 2: how many Flows have names; the most pieces of a stage of any
    place: Ints  # by piece
    hash: Ints  # by stage: equal for those that make and give the same, as far as times go


NAMED, LONGEST = range(2)


def with_room(store: FlowStore, names: StageNames | None) -> StageNames:
    """The names that there are, with room for those of all Flows in a store."""
    pieces, stages = (int(store.used[k]) for k in (PIECES, STAGES))
    if names is None:
        names = StageNames(*(np.zeros(n, np.int64) for n in (2, 2 * pieces, 2 * stages)))
    elif pieces > len(names.place) or stages > len(names.hash):
        names = StageNames(names.named, _longer(names.place, pieces), _longer(names.hash, stages))
    return names


def _longer(column: Ints, needed: int) -> Ints:
    larger = np.zeros(2 * max(needed, len(column)), np.int64)
    larger[: len(column)] = column
    return larger


@compiled
def name_stages(store: FlowStore, names: StageNames, span: int) -> None:
    """Names the pieces and stages of the Flows that have no names yet."""
    for flow in range(names.named[NAMED], store.used[FLOWS]):
        first, last = store.stage_start[flow], store.stage_start[flow + 1] - 1
        for stage in range(first, last):
            low, high = store.piece_start[stage], store.piece_start[stage + 1]
            names.named[LONGEST] = max(names.named[LONGEST], high - low)
            for piece in range(low, high):
                names.place[piece] = (stage - first) * span + piece - low
        for stage in range(first, last):
            names.hash[stage] = _stage_hash(store, names.place, stage)
    names.named[NAMED] = store.used[FLOWS]


@compiled_part
def _stage_hash(store: FlowStore, place: Ints, stage: int) -> int:
    """A hash of what a stage makes and gives, as far as tasks and their times go."""
    low, high = store.piece_start[stage], store.piece_start[stage + 1]
    found = mixed(np.int64(0), high - low)
    for piece in range(low, high):
        found = _mixed_piece(found, store, place, piece)
        found = mixed(found, np.int64(store.base[piece] >= 0))
        begin, end = store.source_start[piece], store.source_start[piece + 1]
        found = mixed(found, end - begin)
        for q in range(begin, end):
            found = _mixed_piece(found, store, place, store.source[q])
            found = mixed(found, store.source_nbytes[q])
            found = mixed(mixed(found, store.source_term[q]), store.source_hash[q])
    for k in range(store.answer_start[stage], store.answer_start[stage + 1]):
        if store.answer[k] >= 0:
            found = _mixed_piece(found, store, place, store.answer[k])
        else:
            found = mixed(found, np.int64(-1))
    return int(found)


@compiled_part
def _mixed_piece(found: int, store: FlowStore, place: Ints, piece: int) -> int:
    found = mixed(mixed(found, place[piece]), store.device[piece])
    return mixed(found, store.nbytes[piece])  # type: ignore[no-any-return, unused-ignore]


@compiled
def differing_ops(
    store: FlowStore,
    names: StageNames,
    span: int,
    changed: Ints,
    maker: Ints,
    first: Ints,
    reader: Ints,
    ops: Ints,
) -> Ints:
    """Ops whose tasks are others because Values have other Flows: who makes a Value, if what it
    leaves differs; who reads it, if what it is given does; and the given `ops`.

    Flows without names get them first. Rows of `changed` are (Value, its old Flow, its new one).
    For all Values there is the Op that makes it or -1, and where its readers are.
    """
    name_stages(store, names, span)
    stage_start, hashes = store.stage_start, names.hash
    count, most = len(ops), len(ops) + len(changed)
    for row in range(len(changed)):
        most += first[changed[row, 0] + 1] - first[changed[row, 0]]
    found = np.empty(most, np.int64)
    found[:count] = ops
    for row in range(len(changed)):
        value = changed[row, 0]
        a, b = stage_start[changed[row, 1]], stage_start[changed[row, 2]]
        if maker[value] >= 0 and (hashes[a] != hashes[b] or hashes[a + 1] != hashes[b + 1]):
            found[count] = maker[value]
            count += 1
        for k in range(first[value + 1] - first[value]):
            if hashes[a + READ + k] != hashes[b + READ + k]:
                found[count] = reader[first[value] + k]
                count += 1
    return np.unique(found[:count])
