"""FlowStore: where the pieces of Values are during a step, in columns. A part of lower/.

In: what serve_flows.py works out for each Value. Out: the Flows that op_tasks.py makes tasks from.

A **piece** is a region of a Value on one device: a whole one, or one term of a partial Value, to be
combined with the other terms. The **Flow** of a Value is all its pieces, stage by stage, with the
sources that each is put together from, and the piece that each reader was given for each region
that it reads. Stage MADE makes pieces (or finds them when the step begins), stage LAID_OUT moves
them to a layout, where there is one, and then there is one stage for every reader.

A Flow knows no names: Values of equal shape whose makers and readers are cut alike have one Flow.
Flows are numbers: the n-th that was added to the store is Flow n. They are only added at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part

MADE, LAID_OUT, READ = 0, 1, 2  # stages; the first reader's is READ, the next one's READ + 1, ...

FLOWS, STAGES, PIECES, ANSWERS, SOURCES, BOUNDS = range(6)  # what there is room for, and used


class FlowStore(NamedTuple):  # numba takes no dataclass
    """Flows f, stages s (each Flow has one more, which says where its last one ends), pieces p,
    answers a, sources q. All are numbered through all Flows."""

    used: Ints  # how many there are: FLOWS, STAGES, ...
    # by Flow
    stage_start: Ints  # f + 1: its first stage
    itemsize: Ints  # f: bytes of an element
    moved: Ints  # f: bytes that come from other devices
    laid_out: Ints  # f: whether there is a layout
    atoms: Ints  # f: of the Value's shape
    bound_start: Ints  # f: where the boxes of its pieces are, and after them those of its sources
    # by stage
    piece_start: Ints  # s
    answer_start: Ints  # s
    # by piece
    device: Ints  # p
    nbytes: Ints  # p
    base: Ints  # p: the piece that this one is a view of, or -1
    hop: Ints  # p: which of the exchanges of its stage, one after another, makes it
    source_start: Ints  # p + 1
    # by answer: the piece that a reader was given for each region
    answer: Ints  # a
    # by source
    source: Ints  # q: the piece that a box is copied from
    source_nbytes: Ints  # q
    source_term: Ints  # q: the term of a partial Value that it is of
    source_hash: Ints  # q: equal for equal boxes
    # boxes in the coordinates of the Value: low and high bound of every atom
    bounds: Ints


ROOM_OF = {
    "stage_start": FLOWS, "itemsize": FLOWS, "moved": FLOWS, "laid_out": FLOWS, "atoms": FLOWS,
    "bound_start": FLOWS, "piece_start": STAGES, "answer_start": STAGES, "device": PIECES,
    "nbytes": PIECES, "base": PIECES, "hop": PIECES, "source_start": PIECES, "answer": ANSWERS,
    "source": SOURCES, "source_nbytes": SOURCES, "source_term": SOURCES, "source_hash": SOURCES,
    "bounds": BOUNDS,
}  # fmt: skip

ROOM = 1024


def empty_store(room: Ints | None = None) -> FlowStore:
    """A store without Flows that has room for so many FLOWS, STAGES, ..."""
    rooms = [ROOM] * 6 if room is None else room.tolist()
    columns = {name: np.zeros(rooms[of] + 1, np.int64) for name, of in ROOM_OF.items()}
    return FlowStore(np.zeros(6, np.int64), **columns)


def enlarged(store: FlowStore, more: Ints) -> FlowStore:
    """A copy with room for so much more, and for as much again."""
    larger, used = empty_store(2 * (store.used + more)), store.used.tolist()
    larger.used[:] = used
    for name, of in ROOM_OF.items():
        getattr(larger, name)[: used[of] + 1] = getattr(store, name)[: used[of] + 1]
    return larger


@compiled
def has_room(store: FlowStore, more: Ints) -> bool:
    """Whether there is room for so much more."""
    used = store.used
    return bool(
        used[FLOWS] + more[FLOWS] < len(store.stage_start)
        and used[STAGES] + more[STAGES] < len(store.piece_start)
        and used[PIECES] + more[PIECES] < len(store.device)
        and used[ANSWERS] + more[ANSWERS] < len(store.answer)
        and used[SOURCES] + more[SOURCES] < len(store.source)
        and used[BOUNDS] + more[BOUNDS] < len(store.bounds)
    )


# What compiled code and Python ask of a Flow


@compiled
def stage_at(store: FlowStore, flow: int, stage: int) -> int:
    """The number of a stage of a Flow."""
    return int(store.stage_start[flow] + stage)


@compiled
def first_piece(store: FlowStore, flow: int) -> int:
    """The first piece of a Flow."""
    return int(store.piece_start[store.stage_start[flow]])


@compiled
def end_piece(store: FlowStore, flow: int) -> int:
    """Where the pieces of a Flow end."""
    return int(store.piece_start[store.stage_start[flow + 1] - 1])


def pieces_made(store: FlowStore, flow: int, stage: int) -> tuple[int, int]:
    """The range of the pieces that a stage of a Flow made."""
    at = int(store.stage_start[flow]) + stage
    return int(store.piece_start[at]), int(store.piece_start[at + 1])


def answers_at(store: FlowStore, flow: int, stage: int) -> Ints:
    """The pieces that were given at a stage of a Flow."""
    at = int(store.stage_start[flow]) + stage
    return store.answer[store.answer_start[at] : store.answer_start[at + 1]]


def sources_of(store: FlowStore, flow: int) -> slice:
    """The sources of all pieces of a Flow."""
    low, high = int(first_piece(store, flow)), int(end_piece(store, flow))
    return slice(int(store.source_start[low]), int(store.source_start[high]))


def piece_boxes(store: FlowStore, flow: int) -> Ints:
    """Pieces x atoms x 2: the boxes of the pieces of a Flow."""
    count = int(end_piece(store, flow) - first_piece(store, flow))
    return _boxes(store, flow, 0, count)


def source_boxes(store: FlowStore, flow: int) -> Ints:
    """Sources x atoms x 2: the boxes of the sources of a Flow."""
    pieces, sources = end_piece(store, flow) - first_piece(store, flow), sources_of(store, flow)
    return _boxes(store, flow, int(pieces), sources.stop - sources.start)


def _boxes(store: FlowStore, flow: int, first: int, count: int) -> Ints:
    wide = 2 * int(store.atoms[flow])
    low = int(store.bound_start[flow]) + wide * first
    return store.bounds[low : low + wide * count].reshape(count, wide // 2, 2)


def bytes_arriving(store: FlowStore, flow: int, stage: int) -> int:
    """Bytes that a stage of a Flow brings from other devices."""
    low, high = pieces_made(store, flow, stage)
    starts = store.source_start[low : high + 1]
    rows = slice(int(starts[0]), int(starts[-1]))
    target = np.repeat(np.arange(low, high), np.diff(starts))
    remote = store.device[store.source[rows]] != store.device[target]
    return int(store.source_nbytes[rows][remote].sum())


# Keeping some


def with_only(store: FlowStore, flows: Sequence[int]) -> FlowStore:
    """A store of these Flows alone, in the order in which they are given."""
    kept = np.array(flows, np.int64)
    new = empty_store(2 * _room_of(store, kept) + ROOM)
    _copy_flows(store, new, kept)
    return new


@compiled
def _room_of(store: FlowStore, flows: Ints) -> Ints:
    """How much there is of these Flows: FLOWS, STAGES, ..."""
    total = np.zeros(6, np.int64)
    for flow in flows:
        low, high = store.stage_start[flow], store.stage_start[flow + 1]
        first, last = store.piece_start[low], store.piece_start[high - 1]
        sources = store.source_start[last] - store.source_start[first]
        total[FLOWS] += 1
        total[STAGES] += high - low
        total[PIECES] += last - first
        total[ANSWERS] += store.answer_start[high - 1] - store.answer_start[low]
        total[SOURCES] += sources
        total[BOUNDS] += 2 * store.atoms[flow] * (last - first + sources)
    return total


@compiled
def _copy_flows(old: FlowStore, new: FlowStore, flows: Ints) -> None:
    for flow in flows:
        low, count = old.stage_start[flow], old.stage_start[flow + 1] - old.stage_start[flow]
        first, last = old.piece_start[low], old.piece_start[low + count - 1]
        begin, end = old.source_start[first], old.source_start[last]
        answer, answers = old.answer_start[low], old.answer_start[low + count - 1]
        used = new.used
        stages, pieces, sources = used[STAGES], used[PIECES], used[SOURCES]
        for k in range(count):
            new.piece_start[stages + k] = old.piece_start[low + k] + pieces - first
            new.answer_start[stages + k] = old.answer_start[low + k] + used[ANSWERS] - answer
        for k in range(last - first):
            new.device[pieces + k] = old.device[first + k]
            new.nbytes[pieces + k] = old.nbytes[first + k]
            new.hop[pieces + k] = old.hop[first + k]
            base = old.base[first + k]
            new.base[pieces + k] = base + pieces - first if base >= 0 else -1
            new.source_start[pieces + k + 1] = old.source_start[first + k + 1] + sources - begin
        for k in range(answers - answer):
            piece = old.answer[answer + k]
            new.answer[used[ANSWERS] + k] = piece + pieces - first if piece >= 0 else -1
        for k in range(end - begin):
            new.source[sources + k] = old.source[begin + k] + pieces - first
            new.source_nbytes[sources + k] = old.source_nbytes[begin + k]
            new.source_term[sources + k] = old.source_term[begin + k]
            new.source_hash[sources + k] = old.source_hash[begin + k]
        bounds = 2 * old.atoms[flow] * (last - first + end - begin)
        for k in range(bounds):
            new.bounds[used[BOUNDS] + k] = old.bounds[old.bound_start[flow] + k]
        close_flow(
            new, old.itemsize[flow], old.moved[flow], old.laid_out[flow], old.atoms[flow],
            np.array([1, count, last - first, answers - answer, end - begin, bounds]),
        )  # fmt: skip


@compiled_part
def close_flow(  # type: ignore[no-untyped-def]
    store, itemsize, moved, laid_out, atoms, added
):  # fmt: skip
    """Makes a Flow of what was written behind the last one; `added` says how much that is."""
    flow = store.used[FLOWS]
    store.itemsize[flow], store.moved[flow] = itemsize, moved
    store.laid_out[flow], store.atoms[flow] = laid_out, atoms
    store.bound_start[flow] = store.used[BOUNDS]
    for k in range(len(added)):
        store.used[k] += added[k]
    store.stage_start[flow + 1] = store.used[STAGES]
