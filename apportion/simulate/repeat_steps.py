"""repeat_steps: several steps that overlap, as the tasks of one.

A part of simulate/. In: a TaskGraph with late tasks (lower/late_tasks.py), or one whose state lies
on the host, which is busy with one step when the next begins. Out: RepeatedSteps, a TaskGraph that
has every task once for each step, in the order in which devices do them: a step's
late tasks stand in the next one, each before what needs it. What a step begins with is what the one
before ended with. So all that predicts a step, times and memory alike, predicts several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apportion.columns import Bools, Ints, distinct, offsets
from apportion.lower import CATEGORIES, Ends, MessageBuffers, TaskGraph, message_buffers

INPUT = CATEGORIES.index("input")
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedSteps:
    """tasks   of all steps
    at      steps x tasks of one: where each is
    source  for every task the one that it is of a single step
    step    for every task the step that it is of
    slots   how many a single step has; slot s of step k is number k * slots + s
    """

    tasks: TaskGraph
    at: Ints
    source: Ints
    step: Ints
    slots: int

    def buffers(self, one: TaskGraph) -> MessageBuffers:
        """The buffers of messages, which all steps share."""
        found = message_buffers(one, temporary=NO_LIMIT)
        return found._replace(task=self.at[0][found.task])


def late_start(tasks: TaskGraph) -> int:
    """The first late task, or how many there are if none is."""
    return tasks.late_start if tasks.late_start >= 0 else len(tasks)


def repeat_steps(tasks: TaskGraph, steps: int) -> RepeatedSteps:
    """So many steps, one after the other. What tasks wait for beside the order of their lanes is in
    `dep`: what they read, state that the step before made, and no more."""
    n, m = len(tasks), late_start(tasks)
    each = np.arange(n)
    late = each >= m
    order = np.where(late, 0, 2 * each + 1)
    order[m:] = 2 * tasks.due
    period = (np.arange(steps)[:, None] + late).reshape(-1)
    task, step = np.tile(each, steps), np.repeat(np.arange(steps), n)
    by = np.lexsort((task, np.tile(order, steps), period))
    source, step, period = task[by], step[by], period[by]
    at = np.empty((steps, n), np.int64)
    at[step, source] = np.arange(len(source))
    opening = np.searchsorted(period, np.arange(steps + 1))  # the first task of every period
    columns = ("kind", "op", "part", "device", "peer", "nbytes", "flops", "itemsize", "taken")
    optional = ("workspace", "group", "pattern", "work", "call")
    given = {c: getattr(tasks, c)[source] for c in columns}
    given |= {c: getattr(tasks, c)[source] for c in optional if len(getattr(tasks, c))}
    in_start, read = _rows(tasks.in_start, source)
    out_start, made = _rows(tasks.out_start, source)
    slots = len(tasks.slot_device)
    reader_step = np.repeat(step, np.diff(in_start))
    in_slot = tasks.in_slot[read]
    dep_start, dep = _dependencies(tasks, source, step, at)
    whole = replace(
        tasks, **given, position=_positions(tasks, source, step), dep_start=dep_start, dep=dep,
        in_start=in_start, in_slot=np.where(in_slot >= 0, in_slot + reader_step * slots, -1),
        out_start=out_start,
        out_slot=tasks.out_slot[made] + np.repeat(step, np.diff(out_start)) * slots,
        ends=_ends(tasks, source, step, at), late_start=-1, due=np.zeros(0, np.int64),
        priority=tasks.priority[source] + 2 * n * step if len(tasks.priority) else tasks.priority,
        **_slots(tasks, at, opening),
    )  # fmt: skip
    return RepeatedSteps(whole, at, source, step, slots)


def _rows(start: Ints, source: Ints) -> tuple[Ints, Ints]:
    """Rows of tasks, taken for each of them anew: offsets, and where each row was."""
    count = np.diff(start)[source]
    new = offsets(count)
    return new, np.arange(new[-1]) + np.repeat(start[source] - new[:-1], count)


def _positions(tasks: TaskGraph, source: Ints, step: Ints) -> Ints:
    """Rising numbers, the same for the messages of one exchange in one step."""
    old = tasks.position[source]
    change = (np.diff(old) != 0) | (np.diff(step) != 0)
    return np.append(0, np.cumsum(change))


def _dependencies(tasks: TaskGraph, source: Ints, step: Ints, at: Ints) -> tuple[Ints, Ints]:
    """What tasks wait for: as in one step, and whoever reads state for whoever made it in the step
    before."""
    start, rows = _rows(tasks.dep_start, source)
    owner = np.repeat(np.arange(len(source)), np.diff(start))
    dep = at[step[owner], tasks.dep[rows]]
    maker = np.full(len(tasks.slot_device), -1)
    maker[tasks.carry[:, 1]] = tasks.slot_first[tasks.carry[:, 0]]
    reads, slot_rows = _rows(tasks.in_start, source)
    reader, slot = np.repeat(np.arange(len(source)), np.diff(reads)), tasks.in_slot[slot_rows]
    new = (slot >= 0) & (step[reader] > 0)
    new[new] = maker[slot[new]] >= 0
    reader, slot = reader[new], slot[new]
    owner = np.concatenate([owner, reader])
    dep = np.concatenate([dep, at[step[reader] - 1, maker[slot]]])
    key = distinct(owner * len(source) + dep)
    return offsets(np.bincount(key // len(source), minlength=len(source))), key % len(source)


def _ends(tasks: TaskGraph, source: Ints, step: Ints, at: Ints) -> Ends:
    one = tasks.ends
    start = offsets(np.bincount(one.task, minlength=len(tasks)))
    new, rows = _rows(start, source)
    owner = np.repeat(np.arange(len(source)), np.diff(new))
    taker = at[step[owner], one.taker[rows]]
    return Ends(owner, one.device[rows], one.sent[rows], one.received[rows], taker)


def _slots(tasks: TaskGraph, at: Ints, opening: Ints) -> dict[str, Any]:
    """The columns of slots. What a step begins with has the storage of what the step before ended
    with, or is a copy where that was a part of something; batches are new, and what nobody carries
    on is gone when its step ends."""
    steps, n = at.shape
    s, m = len(tasks.slot_device), late_start(tasks)
    root = _roots(tasks.slot_base)
    begins, survives = tasks.slot_first < 0, tasks.slot_last >= n
    before = np.where(begins & (tasks.slot_category != INPUT), np.arange(s), -1)
    end, begin = tasks.carry[:, 0], tasks.carry[:, 1]
    whole = tasks.slot_nbytes[end] == tasks.slot_nbytes[root[end]]  # else it is copied
    before[begin] = np.where(whole, end, -1)  # a constant is its own
    stays = np.zeros(s, np.bool_)
    stays[before[before >= 0]] = True
    ended = np.maximum(_last_uses(tasks), m - 1)
    copied = np.full(s, -1)  # when in the step before
    copied[begin[~whole]] = np.where(tasks.slot_first[end] >= m, tasks.slot_first[end], m - 1)[
        ~whole
    ]
    first, last, base = np.empty((3, steps, s), np.int64)
    for k in range(steps):
        fresh = np.full(s, opening[k] if k else -1)
        if k:
            fresh = np.where(copied >= 0, at[k - 1][np.maximum(copied, 0)], fresh)
        first[k] = np.where(begins, fresh, at[k][np.maximum(tasks.slot_first, 0)])
        over = at[k][ended]
        if k == steps - 1:
            over = np.where(stays, steps * n, over)
        last[k] = np.where(survives, over, at[k][np.clip(tasks.slot_last, 0, n - 1)])
        last[k] = np.where(tasks.slot_last < 0, opening[k] if k else tasks.slot_last, last[k])
        base[k] = k * s + root
        if k:
            old = before[root]
            base[k] = np.where(old >= 0, base[k - 1][np.maximum(old, 0)], base[k])
    last = np.maximum(last, np.where(last >= 0, first, last))
    base, last = base.reshape(-1), last.reshape(-1)
    np.maximum.at(last, base, last.copy())
    shared: Bools = base != np.arange(steps * s)
    wide = {
        name: np.tile(getattr(tasks, name), steps)
        for name in ("slot_device", "slot_value", "slot_region", "slot_nbytes", "slot_category")
    }
    return wide | {
        "slot_base": np.where(shared, base, -1), "slot_first": first.reshape(-1), "slot_last": last,
    }  # fmt: skip


def _last_uses(tasks: TaskGraph) -> Ints:
    """For every slot the last task that makes or reads it."""
    last = np.maximum(tasks.slot_first, 0)
    reader = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
    real = tasks.in_slot >= 0
    np.maximum.at(last, tasks.in_slot[real], reader[real])
    return last


def _roots(base: Ints) -> Ints:
    """For every slot the one whose storage it has, itself if that is its own."""
    root = np.where(base >= 0, base, np.arange(len(base)))
    while True:
        further = root[root]
        if (further == root).all():
            return root
        root = further
