"""A Segment cut into pieces that are compiled one by one: equal layers once.

Part of the room execute. An Executable and a Segment come in, SegmentPieces go out, in an order
that does what the segment does.

    TRACED   tasks that become one compiled artefact
    UPDATES  the optimizer's updates, which fused kernels do together. They are put off until
             somebody reads what they make, or to the end of the segment
    CALLED   tasks that the interpreter runs: those that no compiler can trace, or whose arguments
             are settings of the optimizer

Compilation takes as long as the distinct pieces take. Where layers repeat, a piece is the tasks of
one (phase, layer), so that a deep model takes no longer than a shallow one; where cutting would not
save at least half of the work, everything that can be traced is one piece, which inductor
makes the most of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from apportion.execute.executable import Executable
from apportion.execute.rank_steps import Segment, segment
from apportion.execute.segment_graph import has_setting, segment_key
from apportion.lower import COMPUTE
from apportion.split import layers_of

TRACED, UPDATES, CALLED = "traced", "updates", "called"


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """Tasks of a segment that are treated alike."""

    kind: str
    segment: Segment


def cut(executable: Executable, whole: Segment, place: str) -> list[SegmentPiece]:
    """The pieces of a segment."""
    runs = list(_runs(executable, whole))
    by_layer = _regional(executable, runs)
    pieces = _pieces(executable, runs)
    if len(by_layer) > len(pieces):
        cost = sum(len(p.segment.tasks) for p in pieces if p.kind == TRACED)
        if 2 * _distinct(executable, by_layer, place) <= cost:
            return by_layer
    return pieces


def around(executable: Executable, own: Segment, task: int) -> list[SegmentPiece]:
    """A traced piece in which one task cannot be traced after all, in up to three pieces."""
    place = own.tasks.index(task)
    runs = [
        (TRACED, own.tasks[:place]),
        (CALLED, own.tasks[place : place + 1]),
        (TRACED, own.tasks[place + 1 :]),
    ]
    return _pieces(executable, runs)


Run = tuple[str, tuple[int, ...]]


def _runs(executable: Executable, whole: Segment) -> Iterator[Run]:
    """Tasks of one kind after the other, updates as late as possible."""
    late: list[int] = []
    made: set[int] = set()  # by updates that were put off
    run: list[int] = []
    tasks = executable.tasks
    for task in whole.tasks:
        low, high = tasks.out_start[task], tasks.out_start[task + 1]
        if _is_update(executable, task):
            late.append(task)
            made.update(tasks.out_slot[low:high].tolist())
            continue
        read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist()
        if late and not made.isdisjoint(read):
            yield TRACED, tuple(run)
            yield UPDATES, tuple(late)
            run, late, made = [], [], set()
        if _has_setting(executable, task):
            yield TRACED, tuple(run)
            yield CALLED, (task,)
            run = []
        else:
            run.append(task)
    yield TRACED, tuple(run)
    yield UPDATES, tuple(late)


def _is_update(executable: Executable, task: int) -> bool:
    call = executable.computes.get(task)
    return call is not None and call.op.body is not None


def _has_setting(executable: Executable, task: int) -> bool:
    if executable.kind[task] != COMPUTE:
        return False
    return any(has_setting(arg) for _, arg in executable.computes[task].args.others)


def _pieces(executable: Executable, runs: Sequence[Run]) -> list[SegmentPiece]:
    return [SegmentPiece(kind, segment(executable, tasks)) for kind, tasks in runs if tasks]


def _regional(executable: Executable, runs: Sequence[Run]) -> list[SegmentPiece]:
    """The pieces with one for each (phase, layer), and for what lies between layers. A task without
    a layer between two of the same layer stays with them."""
    layers = layers_of(executable.graph)
    ops = executable.graph.ops

    def place(task: int) -> tuple[str, int]:
        op = int(executable.tasks.op[task])
        return (ops[op].phase, layers[op]) if layers[op] >= 0 else ("", -1)

    found: list[Run] = []
    for kind, tasks in runs:
        if kind != TRACED:
            found.append((kind, tasks))
            continue
        found += [(TRACED, group) for group in _groups(tasks, place)]
    return _pieces(executable, found)


def _groups(
    tasks: Sequence[int], place: Callable[[int], tuple[str, int]]
) -> Iterator[tuple[int, ...]]:
    rows = [(key, tuple(group)) for key, group in groupby(tasks, place)]
    kept: list[tuple[tuple[str, int], tuple[int, ...]]] = []
    for number, (key, group) in enumerate(rows):
        inside = key[1] < 0 and 0 < number < len(rows) - 1
        if inside and rows[number - 1][0] == rows[number + 1][0] and kept:
            key = kept[-1][0]
        if kept and kept[-1][0] == key:
            kept[-1] = (key, kept[-1][1] + group)
        else:
            kept.append((key, group))
    return (group for _, group in kept)


def _distinct(executable: Executable, pieces: Sequence[SegmentPiece], place: str) -> int:
    """How many tasks the distinct pieces have."""
    sizes = {
        segment_key(executable, p.segment, None, place): len(p.segment.tasks)
        for p in pieces
        if p.kind == TRACED
    }
    return sum(sizes.values())
