"""late_tasks: the work of a step that the next step may do, each piece before it is needed.

A part of lower/. In: the plain tasks of a step, and which Ops update parameters. Out: which tasks
are late. Updates are, and the sums of gradients that only updates read, and messages of what these
make, such as new parameters that their owner sends round. Messages that bring gradients are not:
they are posted in their own step, and waited for in the next one.

A step's results are never late: what the user's step returns, the loss among it, and all that
these depend on. Nor is what comes between the backward pass and the updates, such as clipping by
the norm of all gradients: then every gradient is awaited in its own step, and nothing overlaps.

`needs` says of the tasks of an ordered TaskGraph when what they make is first read: a message's
priority, and the order of late tasks. `dues` says of late ones before which task of the next step
each has to be done: the first one that reads state which the task, or one that comes after it,
makes; and never later than the first message of the next step whose end is late too, so that
buffers are free. What the messages of one exchange bring is there at once, so that the late work
on all of it is done at once, when the first of it is due (`done_together`): in one call where it
is many small parameters.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Bools, Ints, compiled, plain
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


def needs(tasks: TaskGraph, late_start: int, first: Ints) -> Ints:
    """For each task the first that reads what it makes, or what comes of it: a task of this step,
    or n further on one of the next step. `first`: by slot that a step begins with, the first task
    that reads it."""
    n, m = len(tasks), late_start
    own = np.full(n, 2 * n)
    end, begin = tasks.carry[:, 0], tasks.carry[:, 1]
    maker = tasks.slot_first[end]
    made = maker >= m
    np.minimum.at(own, maker[made], n + first[begin[made]])
    found: Ints = _needs(
        own, plain(tasks.dep_start), plain(tasks.dep), tasks.is_message, plain(tasks.position), m
    )
    return found


@compiled
def _needs(
    own: Ints, dep_start: Ints, dep: Ints, message: Bools, position: Ints, late_start: int
) -> Ints:
    n, need = len(own), own.copy()
    high = n
    while high > 0:
        low = high - 1
        while (
            message[high - 1]
            and low > 0
            and message[low - 1]
            and (position[low - 1] == position[high - 1])
        ):
            low -= 1
        least = need[low:high].min()  # an exchange is one
        for t in range(low, high):
            need[t] = least if message[t] else need[t]
            reads = need[t] if message[t] or t >= late_start else t
            for at in range(dep_start[t], dep_start[t + 1]):
                need[dep[at]] = min(need[dep[at]], reads)
        high = low
    return need


def first_reads(tasks: TaskGraph, end: int) -> Ints:
    """For each slot the first task before `end` that reads it; `end` if there is none."""
    reader = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
    real = (tasks.in_slot >= 0) & (reader < end)
    first = np.full(len(tasks.slot_device), end)
    np.minimum.at(first, tasks.in_slot[real], reader[real])
    return first


def done_together(tasks: TaskGraph, late_start: int, each: Ints) -> Ints:
    """For each task from `late_start` on the least of `each` over the work that waits for the same
    exchange, and over what comes of it; its own where that leads to late messages or comes of
    them."""
    exchange = _awaited(
        plain(tasks.dep_start), plain(tasks.dep), tasks.is_message, plain(tasks.position),
        late_start,
    )  # fmt: skip
    some = exchange >= 0
    least = np.full(int(exchange.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, exchange[some], each[some])
    found = np.where(some, least[exchange * some], each) if some.any() else each.copy()
    early: Ints = _before_readers(plain(tasks.dep_start), plain(tasks.dep), late_start, found)
    return early


@compiled
def _before_readers(dep_start: Ints, dep: Ints, late_start: int, found: Ints) -> Ints:
    """None is more than that of a task which depends on it."""
    for t in range(late_start + len(found) - 1, late_start - 1, -1):
        for at in range(dep_start[t], dep_start[t + 1]):
            before = dep[at] - late_start
            if before >= 0:
                found[before] = min(found[before], found[t - late_start])
    return found


@compiled
def _awaited(dep_start: Ints, dep: Ints, message: Bools, position: Ints, late_start: int) -> Ints:
    """For each late task the last position of an exchange that it waits for; -1 where a late
    message is before or after it."""
    n, m = len(message), late_start
    comes, leads = message.copy(), message.copy()
    found = np.full(n - m, -1)
    for t in range(m, n):
        for at in range(dep_start[t], dep_start[t + 1]):
            before = dep[at]
            if before >= m:
                comes[t] = comes[t] or comes[before]
                found[t - m] = max(found[t - m], found[before - m])
            elif message[before]:
                found[t - m] = max(found[t - m], position[before])
    for t in range(n - 1, m - 1, -1):
        for at in range(dep_start[t], dep_start[t + 1]):
            leads[dep[at]] = leads[dep[at]] or leads[t]
        if comes[t] or leads[t]:
            found[t - m] = -1
    return found


def dues(tasks: TaskGraph, late_start: int) -> Ints:
    """For each task from `late_start` on the task of the next step that it has to precede."""
    n, m = len(tasks), late_start
    first, due = first_reads(tasks, m), np.full(n, m)
    end, begin = tasks.carry[:, 0], tasks.carry[:, 1]
    maker = tasks.slot_first[end]
    made = maker >= m
    np.minimum.at(due, maker[made], first[begin[made]])
    crossing = np.flatnonzero(crosses(tasks, late_start)[:m])
    due = np.minimum(due, crossing[0] if len(crossing) else m)
    begun = np.append(np.searchsorted(tasks.position, tasks.position), n)  # exchanges are one
    late = np.where(np.append(tasks.is_message, False)[due], begun[due], due)[m:]
    late = done_together(tasks, m, late)
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
