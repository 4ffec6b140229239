"""Calls that do the work of several tasks: what join_batch_norm.py and others have in common.

Part of the room lower. A TaskGraph and a Rewiring come in, which says what some tasks call, read
and make instead; the TaskGraph with these changes goes out. Tasks stay where they are and as many
as they are: of several whose work is joined one does it, the others call nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from apportion.columns import Ints, distinct, offsets
from apportion.graph import Graph, Ref
from apportion.lower.task_graph import JoinedCall, TaskGraph
from apportion.lower.task_kinds import COMPUTE
from apportion.split import Part, Space, Strategy

NOTHING = JoinedCall("apportion.nothing", ())
NEVER = -2  # the last use of a slot that is no longer made


@dataclass(slots=True)
class Rewiring:
    """What changes: calls, and slots read and made, by task; which task does a task's work; slots
    that nobody makes any more."""

    call: dict[int, JoinedCall] = field(default_factory=dict)
    ins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    outs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    done_by: dict[int, int] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)

    def leave(self, by: int, tasks: Iterable[int]) -> None:
        """Leaves the work of tasks to one."""
        for task in tasks:
            self.call[task], self.ins[task], self.outs[task] = NOTHING, (), ()
            self.done_by[task] = by


class TaskRows:
    """The tasks of Ops, and what they read and make."""

    def __init__(self, tasks: TaskGraph, graph: Graph) -> None:
        self.tasks, self.graph = tasks, graph
        owner = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
        order = np.argsort(tasks.in_slot, kind="stable")
        self._sorted, self._reader = tasks.in_slot[order], owner[order]
        computes = np.flatnonzero(tasks.kind == COMPUTE)
        self._computes = computes[np.argsort(tasks.op[computes], kind="stable")]
        self._op = tasks.op[self._computes]

    def of(self, op: int) -> list[int]:
        """The tasks that compute the parts of an Op."""
        low, high = np.searchsorted(self._op, [op, op + 1])
        found: list[int] = self._computes[low:high].tolist()
        return found

    def ins(self, task: int) -> list[int]:
        """The slots that a task reads."""
        start = self.tasks.in_start
        found: list[int] = self.tasks.in_slot[start[task] : start[task + 1]].tolist()
        return found

    def outs(self, task: int) -> list[int]:
        """The slots that a task makes."""
        start = self.tasks.out_start
        found: list[int] = self.tasks.out_slot[start[task] : start[task + 1]].tolist()
        return found

    def arg(self, op: int, task: int, place: int) -> int:
        """The slot that is an argument of a task of an Op."""
        found = self.graph.ops[op].args[place]
        assert isinstance(found, Ref)
        return self.ins(task)[found.index]

    def readers(self, slot: int) -> list[int]:
        """The tasks that read a slot, rising."""
        low, high = np.searchsorted(self._sorted, [slot, slot + 1])
        return sorted(set(self._reader[low:high].tolist()))

    def maker(self, slot: int) -> int:
        """The task that makes a slot, -1 if none does."""
        return int(self.tasks.slot_first[slot]) if slot >= 0 else -1


def is_plain(part: Part) -> bool:
    """Whether a part's kernel gets its regions as they are, and its results are left as they
    are."""
    return not part.zeros and not part.pads and set(part.scales) == {1.0}


def computes_whole(space: Space, strategy: Strategy, op: int) -> bool:
    """Whether all parts of an Op compute a whole result by its own kernel."""
    split = space.split(op, strategy.choices[op].parts)
    return set(split.terms) == {1} and all(map(is_plain, split.parts))


def rewired(tasks: TaskGraph, done: Rewiring) -> TaskGraph:
    """The tasks with what a Rewiring says."""
    if not done.call:
        return tasks
    calls = {call: k for k, call in enumerate(dict.fromkeys((*tasks.calls, *done.call.values())))}
    call = tasks.call.copy() if len(tasks.call) else np.full(len(tasks), -1)
    call[list(done.call)] = [calls[c] for c in done.call.values()]
    in_start, in_slot = _replaced(tasks.in_start, tasks.in_slot, done.ins)
    out_start, out_slot = _replaced(tasks.out_start, tasks.out_slot, done.outs)
    first, nbytes = tasks.slot_first.copy(), tasks.slot_nbytes.copy()
    for task, outs in done.outs.items():
        first[list(outs)] = task
    nbytes[done.gone] = 0
    work, flops = tasks.nbytes.copy(), tasks.flops.copy()
    for task, by in done.done_by.items():
        work[by] += tasks.nbytes[task]
        flops[by] += tasks.flops[task]
        work[task], flops[task] = 0, 0.0
    dep_start, dep = _waits(tasks, done)
    return replace(
        tasks, call=call, calls=tuple(calls), in_start=in_start, in_slot=in_slot,
        out_start=out_start, out_slot=out_slot, slot_first=first, slot_last=_last(tasks, done),
        slot_nbytes=nbytes, nbytes=work, flops=flops, dep_start=dep_start, dep=dep,
    )  # fmt: skip


def _replaced(start: Ints, slot: Ints, new: dict[int, tuple[int, ...]]) -> tuple[Ints, Ints]:
    rows = np.split(slot, start[1:-1])
    for task, slots in new.items():
        rows[task] = np.array(slots, np.int64)
    return offsets(np.array([len(row) for row in rows])), np.concatenate(rows)


def _last(tasks: TaskGraph, done: Rewiring) -> Ints:
    """The last use of each slot: what a task no longer reads is used by the one that does its
    work."""
    last = tasks.slot_last.copy()
    for task, by in done.done_by.items():
        for slot in tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist():
            if slot >= 0 and last[slot] == task:
                last[slot] = by
    for task, ins in done.ins.items():
        for slot in ins:
            owner = int(tasks.slot_base[slot])
            last[slot] = max(last[slot], task)
            if owner >= 0:
                last[owner] = max(last[owner], task)
    last[done.gone] = NEVER
    return last


def _waits(tasks: TaskGraph, done: Rewiring) -> tuple[Ints, Ints]:
    """What tasks wait for: the joined call, if they come after it; and it for what the others
    waited for."""
    n, by = max(len(tasks), 1), np.arange(len(tasks))
    by[list(done.done_by)] = list(done.done_by.values())
    owner = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    dep = np.where(by[tasks.dep] < owner, by[tasks.dep], tasks.dep)
    more = [(after, task) for task, after in done.done_by.items() if task < after]
    pairs = np.array(more, np.int64).reshape(-1, 2)
    key = distinct(np.concatenate([owner, pairs[:, 0]]) * n + np.concatenate([dep, pairs[:, 1]]))
    return offsets(np.bincount(key // n, minlength=len(tasks))), key % n
