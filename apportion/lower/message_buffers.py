"""message_buffers: where the bytes of messages are, at both ends.

A part of lower/. In: a TaskGraph. Out: MessageBuffers: for every end of a message a buffer of its
device. Buffers are there for the whole step, and for the next one; messages take turns in them. A
message of TEMPORARY bytes or more has a buffer for as long as it is under way only: to take memory
costs little beside sending as much, and such a buffer may be the largest thing on a device.

On a device an exchange lasts from where it is posted to where it is waited for: before the first
task that reads what it brings, and if it brings nothing, before the second exchange after it. What
was sent may be written over then; what was received, once the last task has read it.
execute/rank_steps.py waits by the same rule.

Where steps overlap (late_tasks.py), every message that ends in the next step has buffers of its
own: they are posted in any order, and all of them have ended before the next one is posted again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, compiled, plain
from apportion.lower.late_tasks import crosses
from apportion.lower.task_graph import Ends, TaskGraph

LATER = 2  # exchanges of a device after which one that brings nothing is waited for
TEMPORARY = 64 << 20


class MessageBuffers(NamedTuple):  # numba takes no dataclass
    """Buffers of messages. Lengths: ends e, as in Ends; buffers b."""

    sent: Ints  # e: the buffer that bytes are sent from, or -1
    received: Ints  # e: the buffer that bytes arrive in, or -1
    device: Ints  # b
    nbytes: Ints  # b
    task: Ints  # b: the largest message that it holds
    begin: Ints  # b: the task at which it is taken, -1 if it is there for the whole step
    end: Ints  # b: the last task before which it is given back; not read if it stays


def message_buffers(tasks: TaskGraph, temporary: int | None = None) -> MessageBuffers:
    """A buffer for every end of a message; in a fixed order, so that all ranks agree. `temporary`:
    instead of TEMPORARY."""
    ends, message = Ends(*map(plain, tasks.ends)), tasks.is_message
    first = first_of_exchange(message, plain(tasks.position))
    release, waits = _releases(ends, message, first, tasks.dep_start, tasks.dep, tasks.device)
    apart = np.zeros(len(tasks), np.bool_)
    if tasks.late_start >= 0:
        apart = crosses(tasks, tasks.late_start)
        apart[np.isin(first, first[apart])] = True  # an exchange is waited for as one
    least = TEMPORARY if temporary is None else temporary
    found: MessageBuffers = _assign(
        ends, first, release, waits, apart & message, tasks.devices, least
    )
    return found


def first_of_exchange(message: Bools, position: Ints) -> Ints:
    """For every message the first one of its exchange; -1 for other tasks."""
    first, messages = np.full(len(position), -1), np.flatnonzero(message)
    where = position[messages]
    begins = np.append(True, where[1:] != where[:-1])[: len(messages)]
    first[messages] = messages[begins][np.cumsum(begins) - 1]
    return first


def _releases(
    ends: Ends, message: Bools, first: Ints, dep_start: Ints, dep: Ints, device: Ints
) -> tuple[Ints, Ints]:
    """For every end the first task from which on another message may be posted in the buffer that
    it was sent from, and the task before which it is waited for."""
    n, rows = len(message), len(ends.task)
    by_device = np.argsort(ends.device, kind="stable")
    at, posted = ends.device[by_device], first[ends.task[by_device]]
    begins = np.append(True, (at[1:] != at[:-1]) | (posted[1:] != posted[:-1]))[:rows]
    party = np.empty(rows, np.int64)  # a device in an exchange; one after the other, by device
    party[by_device] = np.cumsum(begins) - 1
    at, posted = at[begins], posted[begins]
    brings = np.bincount(party, ends.received > 0, len(at)) > 0
    wait = np.full(len(at), n)
    reader = np.repeat(np.arange(n), np.diff(dep_start))
    waits = np.flatnonzero(message[dep])
    devices = int(max(ends.device.max(initial=0), device.max(initial=0))) + 1
    key, asked = ends.task * devices + ends.device, dep[waits] * devices + device[reader[waits]]
    order = np.argsort(key)
    row = order[np.minimum(np.searchsorted(key[order], asked), rows - 1)]
    own = key[row] == asked
    np.minimum.at(wait, party[row[own]], reader[waits[own]] + 1)
    later = np.flatnonzero(at[LATER:] == at[:-LATER]) + LATER
    later = later[~brings[later - LATER]]
    wait[later - LATER] = posted[later]
    before = np.where(brings, np.minimum(wait, n + 1) - 1, wait)
    before[wait == n] = n
    return wait[party], before[party]


@compiled
def _assign(
    ends: Ends, first: Ints, release: Ints, waits: Ints, apart: Bools, devices: int, least: int
) -> MessageBuffers:
    rows = len(ends.task)
    begin, end = np.full(2 * rows, -1), np.full(2 * rows, -1)
    sent, received = np.full(rows, -1), np.full(rows, -1)
    device, nbytes, task, free = np.empty((4, 2 * rows), np.int64)  # of buffers
    head, after, count = np.full(devices, -1), np.empty(2 * rows, np.int64), 0
    for row in range(rows):
        where, now = ends.device[row], first[ends.task[row]]
        for out in range(2):
            size = ends.sent[row] if out else ends.received[row]
            if size == 0:
                continue
            alone = apart[ends.task[row]]
            if size >= least and not alone:
                device[count], nbytes[count], task[count] = where, size, ends.task[row]
                begin[count], end[count] = now, waits[row] if out else ends.taker[row] + 1
                if out:
                    sent[row] = count
                else:
                    received[row] = count
                count += 1
                continue
            best, buffer = -1, -1 if alone else head[where]
            while buffer >= 0:  # the smallest one that is large enough, else the largest
                if free[buffer] <= now:
                    if best < 0:
                        best = buffer
                    elif nbytes[best] < size:
                        best = buffer if nbytes[buffer] > nbytes[best] else best
                    elif size <= nbytes[buffer] < nbytes[best]:
                        best = buffer
                buffer = after[buffer]
            if best < 0:
                best = count
                device[best], nbytes[best], task[best] = where, 0, ends.task[row]
                if not alone:
                    after[best], head[where] = head[where], best
                count += 1
            if size > nbytes[best]:
                nbytes[best], task[best] = size, ends.task[row]
            if out:
                sent[row], free[best] = best, release[row]
            else:
                received[row], free[best] = best, ends.taker[row] + 1
    return MessageBuffers(
        sent, received, device[:count].copy(), nbytes[:count].copy(), task[:count].copy(),
        begin[:count].copy(), end[:count].copy(),
    )  # fmt: skip
