"""A Segment cut into pieces that are compiled one by one: equal layers once.

Part of the room execute. An Executable and a Segment come in, SegmentPieces go out, in an order
that does what the segment does.

    TRACED   tasks that become one compiled artefact
    UPDATES  the optimizer's updates, which fused kernels do together. They are put off until
             somebody reads what they make, or is the last to use what they read, or to the end
             of their layer or of the segment: a plan in which they come early has no room for the
             gradients of many layers
    CALLED   tasks that the interpreter runs: those that no compiler can trace, or whose arguments
             are settings of the optimizer

Among several devices, sums of partial values are pieces of their own (`labels_of`): a compiler that
joined one to what computes its own term would not round that term, which the other devices get
rounded, and copies of a value would differ.

Compilation takes as long as the distinct pieces take. Where layers repeat, a piece is the tasks of
one (phase, layer), so that a deep model takes no longer than a shallow one; where cutting would not
save at least half of the work, everything that can be traced is one piece, which inductor
makes the most of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from apportion.execute.executable import Executable
from apportion.execute.kernels.base import UNTRACEABLE
from apportion.execute.rank_steps import Segment, rank_steps, segment, slots_made, slots_read
from apportion.execute.segment_function import CannotCompile
from apportion.execute.segment_graph import has_setting, segment_key
from apportion.lower import COMPUTE

TRACED, UPDATES, CALLED = "traced", "updates", "called"

Labels = Mapping[int, int]
"""Tasks that are compiled only with others of the same number; all without one go together."""

SUM, REPLICA = 1, 2


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """Tasks of a segment that are treated alike."""

    kind: str
    segment: Segment


def cut(
    executable: Executable, whole: Segment, place: str, labels: Labels | None = None
) -> list[SegmentPiece]:
    """The pieces of a segment. Tasks with different `labels` are in different pieces."""
    runs = list(_runs(executable, whole, labels or {}))
    by_layer = _regional(executable, runs)
    pieces = _pieces(executable, runs)
    if len(by_layer) > len(pieces):
        cost = sum(len(p.segment.tasks) for p in pieces if p.kind == TRACED)
        if 2 * _distinct(executable, by_layer, place) <= cost:
            return by_layer
    return pieces


def compiled_pieces(executable: Executable, place: str = "cuda") -> tuple[tuple[int, ...], ...]:
    """The tasks of each piece that is compiled, where all run on one device; else none."""
    if executable.tasks.devices > 1:
        return ()
    steps = rank_steps(executable, 0)
    pieces = [
        piece for own in steps if isinstance(own, Segment) for piece in cut(executable, own, place)
    ]
    return tuple(piece.segment.tasks for piece in pieces if piece.kind == TRACED)


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


def _runs(executable: Executable, whole: Segment, labels: Labels) -> Iterator[Run]:
    """Tasks of one kind after the other, updates as late as possible."""
    late: list[int] = []
    made: set[int] = set()  # by updates that were put off
    read: set[int] = set()  # by the same
    run: list[int] = []
    label, place, layer = 0, _places(executable), ("", -1)
    for task in whole.tasks:
        if _is_update(executable, task):
            late.append(task)
            made.update(slots_made(executable, task))
            read.update(slots_read(executable, task))
            continue
        here = place(task)
        ends = not read.isdisjoint(executable.frees[task]) or (here[1] >= 0 and here != layer)
        layer = here if here[1] >= 0 else layer
        if late and (ends or not made.isdisjoint(slots_read(executable, task))):
            yield TRACED, tuple(run)
            yield UPDATES, tuple(late)
            run, late, made, read = [], [], set(), set()
        if _has_setting(executable, task) or _looks_at_data(executable, task):
            yield TRACED, tuple(run)
            yield CALLED, (task,)
            run = []
            continue
        if labels.get(task, 0) != label:
            yield TRACED, tuple(run)
            run, label = [], labels.get(task, 0)
        run.append(task)
    yield TRACED, tuple(run)
    yield UPDATES, tuple(late)


def is_sum(executable: Executable, task: int) -> bool:
    """Whether a task adds terms of a partial value."""
    return any(copy.term > 0 for copy in executable.copies.get(task, ()))


def _is_update(executable: Executable, task: int) -> bool:
    call = executable.computes.get(task)
    return call is not None and call.op.body is not None


def _has_setting(executable: Executable, task: int) -> bool:
    if executable.kind[task] != COMPUTE:
        return False
    return any(has_setting(arg) for _, arg in executable.computes[task].args.others)


def _looks_at_data(executable: Executable, task: int) -> bool:
    call = executable.computes.get(task)
    return call is not None and call.op.kind in UNTRACEABLE


def _pieces(executable: Executable, runs: Sequence[Run]) -> list[SegmentPiece]:
    return [SegmentPiece(kind, segment(executable, tasks)) for kind, tasks in runs if tasks]


def _regional(executable: Executable, runs: Sequence[Run]) -> list[SegmentPiece]:
    """The pieces with one for each (phase, layer), and for what lies between layers. A task without
    a layer between two of the same layer stays with them."""
    place = _places(executable)
    found: list[Run] = []
    for kind, tasks in runs:
        if kind != TRACED:
            found.append((kind, tasks))
            continue
        found += [(TRACED, group) for group in _groups(tasks, place)]
    return _pieces(executable, found)


def _places(executable: Executable) -> Callable[[int], tuple[str, int]]:
    """What says of a task its phase and layer, -1 for none."""
    layers, ops = executable.layers, executable.graph.ops

    def place(task: int) -> tuple[str, int]:
        op = int(executable.tasks.op[task])  # that of an assembly may be no Op: a layout's
        known = 0 <= op < len(ops) and layers[op] >= 0
        return (ops[op].phase, layers[op]) if known else ("", -1)

    return place


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


def labels_of(executable: Executable, place: str) -> Labels:
    """What to keep apart so that copies of a value are rounded alike on all devices; raises
    CannotCompile if nothing helps.

    Sums are always kept apart. Where devices that hold copies of the same state compile different
    pieces, so is whatever several of them compute, and that at least has to be the same.
    """
    if executable.tasks.devices == 1:
        return {}
    tasks = range(len(executable.tasks))
    found = {task: SUM for task in tasks if is_sum(executable, task)}
    if len({_code_of(executable, d, place, found) for d in _with_copies(executable)}) <= 1:
        return found
    computed: dict[tuple[int, int], list[int]] = {}
    for task, call in executable.computes.items():
        op = int(executable.tasks.op[task])
        part = call.number % executable.strategy.choices[op].count
        computed.setdefault((op, part), []).append(task)
    replicas = [t for group in computed.values() if len(group) > 1 for t in group]
    found |= {task: REPLICA for task in replicas if not _is_update(executable, task)}
    devices = {executable.device[task] for task, label in found.items() if label == REPLICA}
    if len({_code_of(executable, d, place, found, REPLICA) for d in devices}) > 1:
        raise CannotCompile(
            "devices that hold copies of the same state would run different code, whose rounding "
            "could make the copies differ"
        )
    return found


def _with_copies(executable: Executable) -> set[int]:
    """The devices that hold state that another one holds as well."""
    held: dict[Any, set[int]] = {}
    for end, _ in executable.carry:
        spec = executable.slots[end]
        held.setdefault((spec.value, spec.region), set()).add(executable.slot_device[end])
    return {device for devices in held.values() if len(devices) > 1 for device in devices}


def _code_of(
    executable: Executable, device: int, place: str, labels: Labels, label: int = 0
) -> tuple[Any, ...]:
    """What decides how a device's compiled pieces of a label round: which operators of which shapes
    read which values. Not which part of a tensor it is, nor where an assembly's parts come from."""
    segments = [s for s in rank_steps(executable, device) if isinstance(s, Segment)]
    return tuple(
        tuple(_rounding_of(executable, task) for task in piece.segment.tasks)
        for whole in segments
        for piece in cut(executable, whole, place, labels)
        if piece.kind == TRACED and labels.get(piece.segment.tasks[0], 0) == label
    )


def _rounding_of(executable: Executable, task: int) -> tuple[Any, ...]:
    slots = executable.slots
    made = tuple((slots[s].shape, slots[s].dtype) for s in slots_made(executable, task))
    call = executable.computes.get(task)
    if call is None:
        return made
    read = tuple((slots[s].shape, slots[s].dtype) if s >= 0 else None for s in call.ins)
    return call.op.kind, call.op.inputs, call.part.scales, read, made


def _distinct(executable: Executable, pieces: Sequence[SegmentPiece], place: str) -> int:
    """How many tasks the distinct pieces have."""
    sizes = {
        segment_key(executable, p.segment, None, place): len(p.segment.tasks)
        for p in pieces
        if p.kind == TRACED
    }
    return sum(sizes.values())
