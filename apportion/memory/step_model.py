"""step_model: what a step with recomputed Ops holds and takes, without lowering it.

Part of the room memory. The tasks of a step, their Timeline and a device come in, a StepModel goes
out; asked about a set of recomputed Ops, it says the peak of the device and the time of a step. One
walk over the Graph's order does that, with the copies where recompute.py puts them:

    memory  a Value lies there from the Op that makes it, or first reads it if it is gathered, to
            the last that reads it; one that shares memory keeps that of the other. What else is
            there before an Op, and while it runs, is taken from the Timeline, and of a copy from
            the Op that it repeats.
    time    Ops run one after another, none before the host has issued it.

On one device that runs one task for each Op this is what simulation gives, to the byte and the
nanosecond; else it is near. A walk takes less than a thousandth of what lowering does, so that a
planner can look at thousands of sets before it simulates one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, compiled, compiled_part, offsets
from apportion.graph import BACKWARD, FORWARD, Graph
from apportion.lower import COMMUNICATION, TaskGraph
from apportion.machine import Cluster, CostModel
from apportion.memory.recompute_costs import RecomputeCosts, recompute_costs
from apportion.simulate import Timeline, issue_nanoseconds
from apportion.split import Space

NO_LIMIT = 1 << 62
FEW_COPIES = 16  # a call that sorts takes longer than to put so many in order
OTHER_PHASE, FORWARD_PHASE, BACKWARD_PHASE = range(3)


class StepColumns(NamedTuple):  # numba takes no dataclass
    """Columns of Ops o and Values v, in nanoseconds and bytes.

    phase                     o: FORWARD_PHASE, BACKWARD_PHASE or OTHER_PHASE
    read_start, read          o + 1, and the Values that each Op reads
    made_start, made          o + 1, and those that it makes
    maker                     v: the Op, -1 if it is there when the step begins
    shares                    v: the Value whose memory it shares, or itself
    nbytes                    v: 0 if it is there when the step begins, or shares memory
    stays                     v: whether it is there when the step ends
    before                    o: held when an Op begins, beside the Values here
    during                    o: held while an Op runs, beside what it makes
    duration, issue           o: on the device, and on its host
    """

    phase: Ints
    read_start: Ints
    read: Ints
    made_start: Ints
    made: Ints
    maker: Ints
    shares: Ints
    nbytes: Ints
    stays: Bools
    before: Ints
    during: Ints
    duration: Ints
    issue: Ints


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """What a step holds at its peak and takes, the Op at which that is (of a copy, the backward Op
    that it stands before), and the bytes over a limit, summed over all Ops."""

    peak: int
    nanoseconds: int
    op: int
    excess: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """Less is better: what fits, the quickest first; then what is over by least."""
        return self.excess, self.nanoseconds, self.peak


@dataclass(frozen=True, eq=False)
class StepModel:
    """A step of a Graph on one device, which may recompute Ops. `levels` are the bytes that are
    held at most while each Op runs if nothing is recomputed."""

    graph: Graph
    costs: RecomputeCosts
    columns: StepColumns
    levels: Ints

    def of(self, ops: Iterable[int], limit: int = NO_LIMIT) -> ModelledStep:
        """The step that recomputes these Ops."""
        return self.of_mask(self.mask(ops), limit)

    def mask(self, ops: Iterable[int]) -> Bools:
        """For each Op whether it is among these."""
        found = np.zeros(len(self.graph.ops), np.bool_)
        found[list(ops)] = True
        return found

    def of_mask(self, chosen: Bools, limit: int = NO_LIMIT) -> ModelledStep:
        """As `of`, for a mask."""
        found = walk(self.columns, self._begun, chosen, limit, -1, _NOTHING)
        return ModelledStep(*map(int, found))

    def held_at(self, chosen: Bools, op: int) -> Ints:
        """The Values whose first memory is held when an Op that is no copy runs."""
        alive = np.zeros(2 * len(self.graph.values), np.bool_)
        walk(self.columns, self._begun, chosen, NO_LIMIT, op, alive)
        return np.flatnonzero(alive[: len(self.graph.values)])

    @cached_property
    def _begun(self) -> _Begun:
        backward = np.flatnonzero(self.columns.phase == BACKWARD_PHASE)
        rows = int(backward[0]) if len(backward) else len(self.columns.phase)
        return _Begun(rows, _lives_before(self.columns, rows))

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The forward Ops that make something, each with those whose results share its memory: to
        recompute one without the others would keep what it makes."""
        graph, columns = self.graph, self.columns
        found: dict[int, list[int]] = {}
        for op, meant in enumerate(graph.ops):
            if meant.phase == FORWARD and any(columns.nbytes[v] for v in meant.outputs):
                found[op] = [op]
        for op, meant in enumerate(graph.ops):
            if meant.phase == FORWARD and op not in found:
                makers = {int(columns.maker[columns.shares[v]]) for v in meant.outputs}
                for maker in makers & found.keys():
                    found[maker].append(op)
        return tuple(map(tuple, found.values()))


_NOTHING: Bools = np.zeros(0, np.bool_)


def step_model(
    space: Space,
    tasks: TaskGraph,
    timeline: Timeline,
    device: int,
    cluster: Cluster,
    cost: CostModel,
) -> StepModel:
    """The model of `space.source` on a device, from its tasks and their Timeline."""
    graph, costs = space.source, recompute_costs(space, tasks, timeline, device)
    origins = np.array([*space.origins, len(graph.ops)])
    mine = np.flatnonzero(tasks.device == device)
    took = (timeline.end_ns - timeline.start_ns)[mine]
    ops = len(graph.ops)
    work = tasks.is_work[mine]
    issue = issue_nanoseconds(tasks, cluster, cost)[mine]
    of = origins[tasks.op[mine]]
    columns = StepColumns(
        np.array([_phase(op.phase) for op in graph.ops], np.int64),
        *_rows([tuple(dict.fromkeys(op.inputs)) for op in graph.ops]),
        *_rows([op.outputs for op in graph.ops]),
        np.array([-1 if made is None else made[0] for made in graph.producer], np.int64),
        np.array(costs.shares, np.int64),
        *_value_bytes(graph, tasks, timeline, device, origins),
        np.zeros(ops, np.int64),
        np.zeros(ops, np.int64),
        np.bincount(of[work], took[work], ops + 1)[:ops].astype(np.int64),
        np.bincount(of, issue, ops + 1)[:ops].astype(np.int64),
    )
    held, most = _held(graph, tasks, timeline, device, origins)
    before, during = np.zeros(ops, np.int64), np.zeros(ops, np.int64)
    _put_rest(columns, held, most, before, during)
    return StepModel(graph, costs, columns._replace(before=before, during=during), most)


def _phase(phase: str) -> int:
    return {FORWARD: FORWARD_PHASE, BACKWARD: BACKWARD_PHASE}.get(phase, OTHER_PHASE)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Rows of different lengths as offsets and numbers."""
    flat = [number for row in rows for number in row]
    return offsets(np.array([len(row) for row in rows], np.int64)), np.array(flat, np.int64)


def _value_bytes(
    graph: Graph, tasks: TaskGraph, timeline: Timeline, device: int, origins: Ints
) -> tuple[Ints, Bools]:
    """For each Value what it is given when it is made on a device, and whether it stays. What is
    gathered of it for the forward, and again for the backward, is no part of what is kept between
    them, and recomputation does not save it."""
    curve, count = timeline.curves[device], len(graph.values)
    slots = len(tasks.slot_device)
    born = (curve.thing < slots) & (curve.change > 0)
    slot, size = curve.thing[born], curve.change[born]
    made = (tasks.slot_first[slot] >= 0) & (tasks.slot_value[slot] < count)
    slot, size = slot[made], size[made]
    value = tasks.slot_value[slot]
    stays = np.zeros(count, np.bool_)
    stays[value[tasks.slot_last[slot] >= len(tasks)]] = True
    turn = _first_backward(graph, tasks, origins)
    across = (tasks.slot_first[slot] < turn) & (tasks.slot_last[slot] >= turn)
    is_kept = np.array([_both_passes(graph, v) for v in range(count)])
    is_kept[value[across]] = True
    counted = across | ~is_kept[value]
    nbytes = np.bincount(value[counted], size[counted], count).astype(np.int64)
    return nbytes, stays


def _both_passes(graph: Graph, value: int) -> bool:
    """Whether the forward makes a Value that the backward reads."""
    made = graph.producer[value]
    if made is None or graph.ops[made[0]].phase != FORWARD:
        return False
    return any(graph.ops[op].phase == BACKWARD for op in graph.consumers[value])


def _first_backward(graph: Graph, tasks: TaskGraph, origins: Ints) -> int:
    """The first task of the backward, in the order of all."""
    phase = np.array([*(_phase(op.phase) for op in graph.ops), OTHER_PHASE])
    of_tasks = phase[origins[tasks.op]] == BACKWARD_PHASE
    return int(np.argmax(of_tasks)) if of_tasks.any() else len(tasks)


def _held(
    graph: Graph, tasks: TaskGraph, timeline: Timeline, device: int, origins: Ints
) -> tuple[Ints, Ints]:
    """What a device holds before each Op, and at most while it runs."""
    curve, slots, ops = timeline.curves[device], len(tasks.slot_device), len(graph.ops)
    slot = np.minimum(curve.thing, slots - 1)
    of_slot = np.where(curve.change > 0, tasks.slot_first[slot], tasks.slot_last[slot])
    task = np.where(curve.thing < slots, of_slot, curve.thing - slots)
    task[curve.category == COMMUNICATION] = -1  # buffers are there for the whole step
    op = np.where(task < 0, -1, origins[tasks.op[np.minimum(task, len(tasks) - 1)]])
    op = np.maximum.accumulate(op)
    first = np.searchsorted(op, np.arange(ops))
    levels = np.append(0, curve.nbytes)
    held = levels[first]
    most = held.copy()
    inside = (op >= 0) & (op < ops)
    np.maximum.at(most, op[inside], curve.nbytes[inside])
    return held, most


class _Lives(NamedTuple):
    """The first and the last row that reads or makes each memory, -1 if none does: memories of
    Values, then of their copies."""

    first: Ints
    last: Ints


class _Begun(NamedTuple):
    """The Ops before the first of the backward, which run alike whatever is recomputed: how many
    there are, and what they touch."""

    rows: int
    lives: _Lives


class _Order(NamedTuple):
    """The Ops as they run; `follower` of a copy is the Op that needs it, of others itself."""

    op: Ints
    follower: Ints


@compiled
def _put_rest(columns: StepColumns, held: Ints, most: Ints, before: Ints, during: Ints) -> None:
    """Writes what is held beside the Values, before each Op and while it runs, where nothing is
    recomputed."""
    order = _order(columns, np.zeros(len(columns.phase), np.bool_))
    born, died = _born_and_died(columns, _lives_before(columns, len(order.op)), len(order.op))
    now = 0
    for k in range(len(order.op)):
        op = order.op[k]
        before[op] = held[op] - now
        during[op] = most[op] - held[op] - born[k]
        now += born[k] - died[k]


@compiled
def walk(
    columns: StepColumns, begun: _Begun, chosen: Bools, limit: int, at_op: int, held: Bools
) -> tuple[int, int, int, int]:
    """With these Ops recomputed: the peak in bytes, the step in nanoseconds, the Op of the peak,
    and the bytes over the limit, summed over all rows.

    If `at_op` is an Op, `held` is told which memories are held while it runs: of Values, then of
    their copies."""
    order = _order(columns, chosen)
    lives = _Lives(begun.lives.first.copy(), begun.lives.last.copy())
    own, again = columns.shares.copy(), np.full(len(columns.shares), -1)
    _live(columns, order, begun.rows, lives, own, again)
    born, died = _born_and_died(columns, lives, len(order.op))
    now, host, free, peak, where, excess = 0, 0, 0, -1, -1, 0
    for k in range(len(order.op)):
        op = order.op[k]
        now += born[k]
        level = now + columns.before[order.follower[k]] + columns.during[op]
        excess += max(level - limit, 0)
        if level > peak:
            peak, where = level, order.follower[k]
        if op == at_op and order.follower[k] == op:
            _tell_held(columns, lives, k, held)
        now -= died[k]
        host += columns.issue[op]
        free = max(free, host) + columns.duration[op]
    return peak, free, where, excess


@compiled
def _order(columns: StepColumns, chosen: Bools) -> _Order:
    """The Ops with the copies of these, each before the first Op of the backward that needs it."""
    ops = len(columns.phase)
    op, follower = np.empty(2 * ops, np.int64), np.empty(2 * ops, np.int64)
    waiting, found, made = np.empty(ops, np.int64), np.empty(ops, np.int64), np.zeros(ops, np.bool_)
    rows = 0
    for reader in range(ops):
        count, height = 0, 0
        if columns.phase[reader] == BACKWARD_PHASE:
            height, waiting[0] = 1, reader
        while height:
            height -= 1
            one = waiting[height]
            for at in range(columns.read_start[one], columns.read_start[one + 1]):
                maker = columns.maker[columns.read[at]]
                if maker >= 0 and chosen[maker] and not made[maker]:
                    made[maker] = True
                    found[count], waiting[height] = maker, maker
                    count, height = count + 1, height + 1
        if count > FEW_COPIES:
            found[:count].sort()
        else:
            _sort_few(found, count)
        for k in range(count):
            op[rows], follower[rows] = found[k], reader
            rows += 1
        op[rows], follower[rows] = reader, reader
        rows += 1
    return _Order(op[:rows], follower[:rows])


@compiled_part
def _sort_few(numbers: Ints, count: int) -> None:
    for k in range(1, count):
        number, at = numbers[k], k
        while at and numbers[at - 1] > number:
            numbers[at] = numbers[at - 1]
            at -= 1
        numbers[at] = number


@compiled
def _lives_before(columns: StepColumns, rows: int) -> _Lives:
    """What the first Ops touch, so many of them, where nothing is recomputed."""
    lives = _Lives(np.full(2 * len(columns.maker), -1), np.full(2 * len(columns.maker), -1))
    own, again = columns.shares.copy(), np.full(len(columns.shares), -1)
    _live(columns, _Order(np.arange(rows), np.arange(rows)), 0, lives, own, again)
    return lives


@compiled_part
def _live(
    columns: StepColumns, order: _Order, begin: int, lives: _Lives, own: Ints, again: Ints
) -> None:
    """Notes which memories the rows of an order touch, from one of them on. A copy of Value v has
    the number of Values + v; `own` is the memory of each Value by then, `again` that of its copy,
    -1 without one."""
    values = len(columns.maker)
    for k in range(begin, len(order.op)):
        op, copy = order.op[k], order.follower[k] != order.op[k]
        later = copy or columns.phase[op] == BACKWARD_PHASE
        low, high = columns.read_start[op], columns.read_start[op + 1]
        for at in range(low, high):
            v = columns.read[at]
            _touch(lives, again[v] if later and again[v] >= 0 else own[v], k)
        for at in range(columns.made_start[op], columns.made_start[op + 1]):
            v = columns.made[at]
            mine, root = values + v if copy else own[v], columns.shares[v]
            for j in range(low, high if later and root != v else low):
                read = columns.read[j]
                memory = again[read] if again[read] >= 0 else own[read]
                if memory == root or memory == values + root:
                    mine = memory  # it shares what was read
            if copy:
                again[v] = mine
            else:
                own[v] = mine
            _touch(lives, mine, k)


@compiled_part
def _touch(lives: _Lives, memory: int, row: int) -> None:
    if lives.first[memory] < 0:
        lives.first[memory] = row
    lives.last[memory] = row


@compiled
def _born_and_died(columns: StepColumns, lives: _Lives, rows: int) -> tuple[Ints, Ints]:
    """By row: the bytes that begin to be held, and those that are held no more after it."""
    values = len(columns.maker)
    born, died = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for memory in range(2 * values):
        first = lives.first[memory]
        if first >= 0:
            nbytes = columns.nbytes[memory if memory < values else memory - values]
            born[first] += nbytes
            if memory >= values or not columns.stays[memory]:
                died[lives.last[memory]] += nbytes
    return born, died


@compiled_part
def _tell_held(columns: StepColumns, lives: _Lives, row: int, held: Bools) -> None:
    """Says of each memory whether it is held while a row runs."""
    values = len(columns.maker)
    for memory in range(len(held)):
        stays = memory < values and columns.stays[memory]
        begun = 0 <= lives.first[memory] <= row
        held[memory] = begun and (stays or lives.last[memory] >= row)
