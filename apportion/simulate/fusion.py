"""What torch's compiler leaves of the traffic between kernels: a model of its fusion.

Part of the room simulate. A TaskGraph whose calls are known comes in; for every task that may be
part of a fused kernel go out the bytes that it still reads from memory and writes to it, and its
share of a kernel.

    stage   how many calls of a library's kernels are on the longest way to a task, within what a
            rank does between two exchanges
    group   tasks that may be fused, of one device and one stage, which read what another one of
            them makes, or the same part of a tensor, unless that is a single number: one kernel
    traffic a group reads what it needs from outside once, and writes what is needed outside once

A reduction over other dimensions than the last (the gradient of a bias, statistics of a batch) is a
kernel of its own, since all of its input is needed before anything follows, and so is pooling; a
call that needs such statistics of what it computes on reads that again. Who moves a byte is
charged for it: the first reader in the group, the maker. Tasks of one stage are not connected by a
way through a kernel that is not in their group, so that groups can always be computed. Where it is
known which tasks are compiled as one piece, no group is of two pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, compiled_part, plain
from apportion.lower import ASSEMBLE, COMPUTE, TaskGraph
from apportion.machine import (
    fusible,
    kind_of_signature,
    reads_twice,
    reads_windows,
    reduces_rows,
)

REDUCING = 4.0  # inputs per output, for a call to be a reduction

SHARED = 10
"""Bytes that two kernels have to share to become one (inductor's score_fusion_memory_threshold)."""

Pieces = Sequence[Sequence[int]]
"""The tasks of each piece that is compiled by itself."""


class FusedTraffic(NamedTuple):
    """By task: whether it may be part of a fused kernel, its share of one, and the bytes that it
    still moves."""

    fused: Bools
    kernels: Floats
    nbytes: Ints


def fused_traffic(tasks: TaskGraph) -> FusedTraffic:
    """What is left of the traffic of the tasks that may be fused; none if calls are not known."""
    count = len(tasks)
    if not len(tasks.work):
        return FusedTraffic(np.zeros(count, bool), np.zeros(count), np.zeros(count, np.int64))
    found = fused_groups(tasks)
    fused, size, last = found.fused, plain(tasks.slot_nbytes), plain(tasks.slot_last)
    twice = np.array([reads_twice(kind_of_signature(work)) for work in tasks.works] + [False])
    again = (fused & twice[tasks.work]).astype(np.int64)
    nbytes = _moved(*found.slots, found.root, size, last, found.group, fused, found.free, again)[0]
    members = np.bincount(found.group[fused], minlength=count)
    share = np.where(fused, 1 / np.maximum(members[found.group], 1), 0.0)
    return FusedTraffic(fused, share, nbytes)


def unwritten_slots(tasks: TaskGraph, pieces: Pieces = ()) -> Bools:
    """Which slots are never in memory, because only the kernel that makes them reads them."""
    if not len(tasks.work):
        return np.zeros(len(tasks.slot_first), bool)
    found = fused_groups(tasks, pieces)
    size, last = plain(tasks.slot_nbytes), plain(tasks.slot_last)
    again = np.zeros(len(tasks), np.int64)
    columns = (found.root, size, last, found.group, found.fused, found.free, again)
    inside: Bools = _moved(*found.slots, *columns)[1][found.root]
    return inside


class FusedGroups(NamedTuple):
    """Who may be fused, who is a view, the first task of each one's group, the slot that has each
    slot's bytes, and the slots that tasks read and make."""

    fused: Bools
    free: Bools
    group: Ints
    root: Ints
    slots: tuple[Ints, ...]


def fused_groups(tasks: TaskGraph, pieces: Pieces = ()) -> FusedGroups:
    """Which tasks become one kernel; calls are known."""
    fused, alone, free = _roles(tasks)
    root = _roots(tasks.slot_base)
    columns = (tasks.in_start, tasks.in_slot, tasks.out_start, tasks.out_slot)
    slots, joins = tuple(map(plain, columns)), fused & ~alone
    key = _keys(tasks, _stages(*slots, root, joins, free), pieces)
    size = plain(tasks.slot_nbytes)
    return FusedGroups(fused, free, _groups(*slots, root, size, key, joins, free), root, slots)


def _roles(tasks: TaskGraph) -> tuple[Bools, Bools, Bools]:
    """Which tasks may be fused, which of them are kernels of their own, and which are views."""
    maker = np.repeat(np.arange(len(tasks)), np.diff(tasks.out_start))
    made = np.bincount(maker, tasks.slot_nbytes[tasks.out_slot], minlength=len(tasks))
    computes = tasks.kind == COMPUTE
    ours = np.array([fusible(kind_of_signature(work)) for work in tasks.works] + [False])
    fused = (computes & ours[tasks.work]) | (tasks.kind == ASSEMBLE)
    free = tasks.is_work & (tasks.nbytes == 0)
    ratio = np.where(made > 0, (tasks.nbytes - made) / np.maximum(made, 1), 0.0)
    alone = fused & computes & (ratio >= REDUCING)
    for task in np.flatnonzero(alone).tolist():
        alone[task] = not reduces_rows(tasks.works[tasks.work[task]], float(ratio[task]))
    windows = np.array([reads_windows(kind_of_signature(work)) for work in tasks.works] + [False])
    alone |= fused & computes & windows[tasks.work]
    return fused & ~free, alone, free


def _roots(base: Ints) -> Ints:
    """The slot that has the bytes of each slot."""
    root = np.where(base >= 0, base, np.arange(len(base)))
    while (root != root[root]).any():
        root = root[root]
    return plain(root)


def _keys(tasks: TaskGraph, stage: Ints, pieces: Pieces) -> Ints:
    """Equal for tasks of one device, one stage and one piece between the same exchanges."""
    ends = tasks.ends
    passed = np.zeros((tasks.devices, len(tasks) + 1), np.int64)
    np.add.at(passed, (ends.device, ends.task), 1)
    between = np.cumsum(passed, axis=1)[tasks.device, np.arange(len(tasks))]
    piece = np.zeros(len(tasks), np.int64)
    for number, members in enumerate(pieces, 1):
        piece[list(members)] = number
    most = int(stage.max(initial=0)) + 1
    place = (between * tasks.devices + tasks.device) * (len(pieces) + 1) + piece
    key: Ints = place * most + stage
    return plain(key)


@compiled
def _stages(
    in_start: Ints, in_slot: Ints, out_start: Ints, out_slot: Ints, root: Ints, joins: Bools,
    free: Bools,
) -> Ints:  # fmt: skip
    """The stage of every task."""
    count = len(in_start) - 1
    stage, at = np.zeros(count, np.int64), np.zeros(len(root), np.int64)
    for task in range(count):
        for k in range(in_start[task], in_start[task + 1]):
            if in_slot[k] >= 0:
                stage[task] = max(stage[task], at[root[in_slot[k]]])
        if free[task]:
            continue
        after = stage[task] + (0 if joins[task] else 1)
        for k in range(out_start[task], out_start[task + 1]):
            at[root[out_slot[k]]] = max(at[root[out_slot[k]]], after)
    return stage


@compiled_part
def _top(group, task):  # type: ignore[no-untyped-def]
    """The task that a group is known by; shortens the way to it."""
    while group[task] != task:
        group[task] = group[group[task]]
        task = group[task]
    return task


@compiled
def _groups(
    in_start: Ints, in_slot: Ints, out_start: Ints, out_slot: Ints, root: Ints, size: Ints,
    key: Ints, joins: Bools, free: Bools,
) -> Ints:  # fmt: skip
    """For every task the first one of its group."""
    count, slots = len(in_start) - 1, len(root)
    group = np.arange(count)
    maker = np.full(slots, -1)  # of the bytes of a root slot
    reader = np.full(slots, -1)  # the last one that read it, or a view of a part, and may be fused
    for task in range(count):
        if free[task]:
            continue
        for k in range(in_start[task], in_start[task + 1]):
            if in_slot[k] < 0 or not joins[task] or size[in_slot[k]] < SHARED:
                continue
            slot = root[in_slot[k]]
            seen = slot if size[in_slot[k]] == size[slot] else in_slot[k]  # all of it, or a part
            for other in (maker[slot], reader[seen]):
                if other >= 0 and key[other] == key[task]:
                    a, b = _top(group, other), _top(group, task)
                    group[max(a, b)] = min(a, b)
            reader[seen] = task
        for k in range(out_start[task], out_start[task + 1]):
            maker[root[out_slot[k]]] = task if joins[task] else -1
            reader[root[out_slot[k]]] = reader[out_slot[k]] = -1
    for task in range(count):
        group[task] = _top(group, task)
    return group


@compiled
def _moved(
    in_start: Ints, in_slot: Ints, out_start: Ints, out_slot: Ints, root: Ints, size: Ints,
    last: Ints, group: Ints, fused: Bools, free: Bools, again: Ints,
) -> tuple[Ints, Bools]:  # fmt: skip
    """The bytes that every task that may be fused still moves, and the slots that only the group
    reads that makes them."""
    count, slots = len(in_start) - 1, len(root)
    nbytes = np.zeros(count, np.int64)
    maker = np.full(slots, -1)
    read = np.full(slots, -1)  # the group that last read it
    outside = np.zeros(slots, np.bool_)  # whether somebody outside of its maker's group reads it
    for task in range(count):
        if free[task]:
            continue
        mine = group[task] if fused[task] else -1
        for k in range(in_start[task], in_start[task + 1]):
            if in_slot[k] < 0:
                continue
            slot = root[in_slot[k]]
            nbytes[task] += again[task] * size[in_slot[k]]
            if mine >= 0 and maker[slot] >= 0 and group[maker[slot]] == mine:
                continue
            outside[slot] = True
            if mine >= 0 and read[slot] != mine:
                read[slot] = mine
                nbytes[task] += size[in_slot[k]]
        for k in range(out_start[task], out_start[task + 1]):
            slot = root[out_slot[k]]
            maker[slot], read[slot], outside[slot] = task, -1, last[slot] >= count
    inside = np.zeros(slots, np.bool_)
    for slot in range(slots):
        if maker[slot] >= 0 and fused[maker[slot]]:
            inside[slot] = not outside[slot]
            nbytes[maker[slot]] += size[slot] * outside[slot]
    return nbytes, inside
