"""late_tasks: the work of a step that the next step may do, each piece before it is needed.

A part of lower/. In: the plain tasks of a step, and which Ops update parameters. Out: which tasks
are late. Updates are, and the sums of gradients that only updates read, and messages of what these
make, such as new parameters that their owner sends round. Messages that bring gradients are not:
they are posted in their own step, and waited for in the next one.

A step's results are never late: what the user's step returns, the loss among it, and all that
these depend on, such as a gradient's norm that is returned. What needs all gradients, such as
clipping by their norm, is late and has to be done before the first parameter is read: there the
next step waits.

`dues` says of the late tasks of an ordered TaskGraph before which task of the next step each one
has to be done: the first one that reads state which the task, or one that comes after it, makes;
and never later than the first message of the next step whose end is late too, so that buffers are
free.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Bools, Ints, compiled
from apportion.lower.post_order import TaskDependencies
from apportion.lower.task_graph import TaskGraph


def late_tasks(tasks: TaskGraph, given: TaskDependencies, updates: Bools) -> tuple[Bools, Bools]:
    """Which of the plain tasks are late, and which have to be done in their own step; messages that
    are neither are posted in the one and waited for in the other. `updates`: by Op."""
    keeps, shows = _state_made(tasks)
    of_op = np.append(updates, np.zeros(2, np.bool_))[: len(tasks.op_start)]
    computes = ~given.message & ~given.assembles
    may, must = of_op[tasks.op] & computes, shows
    while True:
        must, late = _closure(given, may, keeps, must)
        late_units, must_units = _some(given, late), _some(given, must)
        last = int(tasks.op[computes & ~late].max(initial=-1))
        more = late & computes & (tasks.op <= last)  # what is not late comes first
        more |= (late_units & must_units) & ~must  # a unit is posted as one
        if not more.any():
            return late | late_units, must
        must |= more


def _some(given: TaskDependencies, which: Bools) -> Bools:
    """The messages of units that have one of these messages."""
    sent, units = given.message, int(given.unit.max(initial=-1)) + 1
    some = np.zeros(len(sent), np.bool_)
    if units:
        some[sent] = (np.bincount(given.unit[sent], which[sent], units) > 0)[given.unit[sent]]
    return some


def _state_made(tasks: TaskGraph) -> tuple[Bools, Bools]:
    """Which tasks make state that the next step reads, and which make state that nobody does."""
    read = np.zeros(len(tasks.slot_device), np.bool_)
    read[tasks.in_slot[tasks.in_slot >= 0]] = True
    keeps, shows = np.zeros((2, len(tasks)), np.bool_)
    for end, begin in tasks.carry.tolist():
        maker = tasks.slot_first[end]
        if maker >= 0:
            (keeps if read[begin] else shows)[maker] = True
    return keeps, shows


@compiled
def _closure(
    given: TaskDependencies, may: Bools, keeps: Bools, asked: Bools
) -> tuple[Bools, Bools]:
    """What has to be done in its own step, and what of the rest is late."""
    n = len(may)
    must, led = asked.copy(), np.zeros(n, np.bool_)  # led: something depends on it
    for t in range(n - 1, -1, -1):
        work = not given.message[t] and not given.assembles[t]
        if (work and not may[t]) or not (led[t] or keeps[t]):
            must[t] = True
        for at in range(given.dep_start[t], given.dep_start[t + 1]):
            before = given.dep[at]
            led[before] = True
            must[before] = must[before] or must[t]
    feeds = np.zeros(n, np.bool_)  # a message
    for t in range(n):
        for at in range(given.dep_start[t], given.dep_start[t + 1]):
            feeds[given.dep[at]] = feeds[given.dep[at]] or given.message[t]
    late = np.zeros(n, np.bool_)
    for t in range(n):
        after = not given.message[t] and (may[t] or not feeds[t])
        for at in range(given.dep_start[t], given.dep_start[t + 1]):
            before = given.dep[at]
            after = after or late[before] or (given.message[before] and not given.message[t])
        late[t] = after and not must[t]
    return must, late


def dues(tasks: TaskGraph, late_start: int) -> Ints:
    """For each task from `late_start` on the task of the next step that it has to precede."""
    n, m = len(tasks), late_start
    reader = np.repeat(np.arange(n), np.diff(tasks.in_start))
    real = (tasks.in_slot >= 0) & (reader < m)
    first = np.full(len(tasks.slot_device), m)
    np.minimum.at(first, tasks.in_slot[real], reader[real])
    due = np.full(n, m)
    end, begin = tasks.carry[:, 0], tasks.carry[:, 1]
    maker = tasks.slot_first[end]
    made = maker >= m
    np.minimum.at(due, maker[made], first[begin[made]])
    crossing = np.flatnonzero(crosses(tasks, late_start)[:m])
    due = np.minimum(due, crossing[0] if len(crossing) else m)
    begun = np.append(np.searchsorted(tasks.position, tasks.position), n)  # exchanges are one
    late = np.where(np.append(tasks.is_message, False)[due], begun[due], due)[m:]
    found: Ints = np.minimum.accumulate(late[::-1])[::-1]  # they keep their order
    return found


def crosses(tasks: TaskGraph, late_start: int) -> Bools:
    """Which messages are late, or are read by a late task."""
    n = len(tasks)
    found = tasks.is_message & (np.arange(n) >= late_start)
    if late_start < n:
        read = tasks.dep[tasks.dep_start[late_start] :]
        found[read[tasks.is_message[read]]] = True
    return found
