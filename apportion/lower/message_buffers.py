"""message_buffers: where the bytes of messages are, at both ends.

A part of lower/. In: a TaskGraph. Out: MessageBuffers: for every end of a message a buffer of its
device. Buffers are there for the whole step, and for the next one; messages take turns in them.

On a device an exchange lasts from where it is posted to where it is waited for: before the first
task that reads what it brings, and if it brings nothing, before the second exchange after it. What
was sent may be written over then; what was received, once the last task has read it.
execute/rank_steps.py waits by the same rule.

Where steps overlap (late_tasks.py), messages that end in the next step have buffers of their own,
in which they take turns by the same rule: all of them have ended before the next one is posted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, compiled, plain
from apportion.lower.late_tasks import crosses
from apportion.lower.task_graph import Ends, TaskGraph

LATER = 2  # exchanges of a device after which one that brings nothing is waited for


class MessageBuffers(NamedTuple):  # numba takes no dataclass
    """Buffers of messages. Lengths: ends e, as in Ends; buffers b."""

    sent: Ints  # e: the buffer that bytes are sent from, or -1
    received: Ints  # e: the buffer that bytes arrive in, or -1
    device: Ints  # b
    nbytes: Ints  # b
    task: Ints  # b: the largest message that it holds


def message_buffers(tasks: TaskGraph) -> MessageBuffers:
    """A buffer for every end of a message; in a fixed order, so that all ranks agree."""
    ends, message = Ends(*map(plain, tasks.ends)), tasks.is_message
    first = first_of_exchange(message, plain(tasks.position))
    release = _releases(
        ends, message, first, plain(tasks.dep_start), plain(tasks.dep), plain(tasks.device),
        tasks.devices,
    )  # fmt: skip
    apart = np.zeros(len(tasks), np.bool_)
    if tasks.late_start >= 0:
        apart = crosses(tasks, tasks.late_start)
        apart[np.isin(first, first[apart])] = True  # an exchange is waited for as one
    found: MessageBuffers = _assign(ends, first, release, apart & message, tasks.devices)
    return found


@compiled
def first_of_exchange(message: Bools, position: Ints) -> Ints:
    """For every message the first one of its exchange; -1 for other tasks."""
    first, low = np.full(len(position), -1), -1
    for t in range(len(position)):
        if message[t]:
            if low < 0 or position[t] != position[low]:
                low = t
            first[t] = low
    return first


@compiled
def _releases(
    ends: Ends,
    message: Bools,
    first: Ints,
    dep_start: Ints,
    dep: Ints,
    device: Ints,
    devices: int,
) -> Ints:
    """For every end the first task from which on another message may be posted in the buffer that
    it was sent from."""
    n, rows = len(message), len(ends.task)
    party, start = np.empty(rows, np.int64), np.zeros(n + 1, np.int64)
    posted, wait = np.empty(rows, np.int64), np.full(rows, n)
    brings = np.zeros(rows, np.bool_)
    last, count = np.full(devices, -1), 0
    before = np.full(rows, -1)  # of an exchange on its device: the one before
    for row in range(rows):
        task, where = ends.task[row], ends.device[row]
        start[task + 1] = row + 1
        if last[where] < 0 or posted[last[where]] != first[task]:
            posted[count], before[count], last[where] = first[task], last[where], count
            count += 1
        party[row] = last[where]
        brings[party[row]] = brings[party[row]] or ends.received[row] > 0
    for t in range(n):
        start[t + 1] = max(start[t], start[t + 1])
    for t in range(n):
        for at in range(dep_start[t], dep_start[t + 1]):
            if message[dep[at]]:
                for row in range(start[dep[at]], start[dep[at] + 1]):
                    if ends.device[row] == device[t]:
                        wait[party[row]] = min(wait[party[row]], t + 1)
    for k in range(count):
        earlier = k
        for _ in range(LATER):
            earlier = before[earlier] if earlier >= 0 else -1
        if earlier >= 0 and not brings[earlier]:
            wait[earlier] = posted[k]
    return wait[party]


@compiled
def _assign(ends: Ends, first: Ints, release: Ints, apart: Bools, devices: int) -> MessageBuffers:
    rows = len(ends.task)
    of_apart = np.zeros(2 * rows, np.bool_)  # buffers
    sent, received = np.full(rows, -1), np.full(rows, -1)
    device, nbytes, task, free = np.empty((4, 2 * rows), np.int64)  # of buffers
    head, after, count = np.full(devices, -1), np.empty(2 * rows, np.int64), 0
    for row in range(rows):
        where, now = ends.device[row], first[ends.task[row]]
        for out in range(2):
            size = ends.sent[row] if out else ends.received[row]
            if size == 0:
                continue
            best, buffer = -1, head[where]
            while buffer >= 0:  # the smallest one that is large enough, else the largest
                if free[buffer] <= now and of_apart[buffer] == apart[ends.task[row]]:
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
                after[best], head[where] = head[where], best
                of_apart[best] = apart[ends.task[row]]
                count += 1
            if size > nbytes[best]:
                nbytes[best], task[best] = size, ends.task[row]
            if out:
                sent[row], free[best] = best, release[row]
            else:
                received[row], free[best] = best, ends.taker[row] + 1
    return MessageBuffers(
        sent, received, device[:count].copy(), nbytes[:count].copy(), task[:count].copy()
    )
