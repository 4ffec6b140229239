"""What one rank does in a step: segments of work, and the exchanges between them.

Part of the room execute. An Executable and the number of a device come in, that device's RankSteps
go out, in the one global order of the TaskGraph.

    Segment  tasks of work, one after the other: what an interpreter runs task by task, and a
             compiler (generate.py and others) as one function
    Post     an exchange begins: receives are posted, messages packed and handed to the transport.
             Nobody waits
    Wait     an exchange ends: what was to be received is there, what was sent may be dropped
    HostStep copies to the host and back begin or are waited for, and work is handed to the host

An exchange is waited for before the first task that reads what it brings, and if it brings nothing
to this rank, before the second exchange of this rank after it (LATER) or at the end of the step;
buffers are shared by that rule (lower/message_buffers.py). So a rank waits only for messages whose
other ends were posted at a smaller position, by ranks that waited for nothing later: nobody waits
forever.

Where steps overlap, the last of a rank's steps are late (lower/late_tasks.py): the next step does
them, each before what needs it (late_work.py). A rank waits in its own step for all that no late
task reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from apportion.execute.executable import Executable
from apportion.lower import AT_HOST, LATER, crosses


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends and receives at one position: (message, other rank)."""

    position: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Post:
    """An exchange begins."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Wait:
    """An exchange ends."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Segment:
    """Tasks of work between two exchanges.

    ins       slots that are there before it and that it reads
    outs      slots that it makes and that are there after it
    frees     slots that are there before it and not after it
    messages  received messages that its assemblies read
    """

    tasks: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    frees: tuple[int, ...]
    messages: tuple[int, ...]

    def __hash__(self) -> int:
        """By its first task, which no other one of its rank has: it is looked up at every step."""
        return hash(self.tasks[:1])


@dataclass(frozen=True, slots=True)
class HostStep:
    """Tasks at which something happens between a device and its host, one after the other."""

    tasks: tuple[int, ...]


RankStep = Segment | Post | Wait | HostStep


def rank_steps(executable: Executable, device: int) -> tuple[RankStep, ...]:
    """The steps of one device."""
    found: list[RankStep] = []
    for step in _runs(executable, device):
        if not isinstance(step, tuple):
            found.append(step)
        elif executable.labels[step[0]] == AT_HOST:
            found.append(HostStep(step))
        else:
            found.append(segment(executable, step))
    return tuple(found)


def task_runs(executable: Executable, device: int) -> list[tuple[int, ...]]:
    """The tasks of every segment of one device."""
    runs = (step for step in _runs(executable, device) if isinstance(step, tuple))
    return [tasks for tasks in runs if executable.labels[tasks[0]] != AT_HOST]


def _runs(executable: Executable, device: int) -> list[tuple[int, ...] | Post | Wait]:
    """The steps of one device, those of work as their tasks."""
    found: list[tuple[int, ...] | Post | Wait] = []
    run: list[int] = []  # tasks of the segment at hand
    waiting: list[Exchange] = []  # posted, not yet waited for
    posted: list[Exchange] = []
    exchanges = exchanges_of(executable, device)
    brings = {number: x for x in exchanges.values() for number, _ in x.receives}

    def close() -> None:
        if run:
            found.append(tuple(run))
        run.clear()

    def end(exchange: Exchange) -> None:
        close()
        found.append(Wait(exchange))
        waiting.remove(exchange)

    def end_early() -> None:
        close()
        for open_ in tuple(waiting):
            if open_.position not in kept:
                end(open_)

    cuts, late_start = _cuts(executable, device), executable.tasks.late_start
    kept = crossing_positions(executable)
    for task in _of_device(executable, device, exchanges):
        is_message = executable.is_message[task]
        if 0 <= late_start <= task:
            end_early()
            late_start = -1
        if run and cuts and bisect_right(cuts, run[-1]) != bisect_right(cuts, task):
            close()
        if is_message:
            exchange = exchanges.pop(executable.position[task], None)  # once for all of a position
            if exchange is None:
                continue
            posted.append(exchange)
            for other in posted[:-LATER]:
                if not other.receives and other in waiting:
                    end(other)
            close()
            found.append(Post(exchange))
            waiting.append(exchange)
        else:
            for message in messages_read(executable, task):
                if brings[message] in waiting:
                    end(brings[message])
            if run and executable.labels[run[0]] != executable.labels[task]:
                close()
            run.append(task)
    if late_start >= 0:
        end_early()
    close()
    for exchange in tuple(waiting):
        end(exchange)
    return found


def _of_device(executable: Executable, device: int, exchanges: Mapping[int, Exchange]) -> list[int]:
    """The tasks of a device, and all messages of the exchanges that it takes part in."""
    tasks = executable.tasks
    involved = np.isin(tasks.position, np.array(list(exchanges), np.int64))
    mine = np.where(tasks.is_message, involved, tasks.device == device)
    found: list[int] = np.flatnonzero(mine).tolist()
    return found


def crossing_positions(executable: Executable) -> set[int]:
    """Positions of exchanges that end in the next step."""
    tasks = executable.tasks
    if tasks.late_start < 0:
        return set()
    found: set[int] = set(tasks.position[crosses(tasks, tasks.late_start)].tolist())
    return found


def _cuts(executable: Executable, device: int) -> list[int]:
    """Tasks before which a device's segments end, because late work may be due there, and late
    tasks from which on it is due later; rising."""
    tasks = executable.tasks
    if tasks.late_start < 0:
        return []
    late = range(tasks.late_start, len(tasks))
    mine = [t for t in late if executable.is_message[t] or executable.device[t] == device]
    dues = tasks.due[[t - tasks.late_start for t in mine]].tolist() if mine else []
    later = [t for t, due, before in zip(mine[1:], dues[1:], dues, strict=False) if due != before]
    return [*dict.fromkeys(dues), *later]


def first_tasks(executable: Executable, steps: Sequence[RankStep]) -> list[int]:
    """The task at which each step stands; a Wait at that of the step after it, or at the end of
    what is not late."""
    tasks, messages = executable.tasks, executable.messages
    found: list[int] = []
    kept = crossing_positions(executable)
    after = len(tasks) - 1
    for step in reversed(steps):
        if isinstance(step, Segment | HostStep):
            after = step.tasks[0]
        elif isinstance(step, Post):
            parties = (*step.exchange.sends, *step.exchange.receives)
            after = min(messages[number].task for number, _ in parties)
        elif step.exchange.position not in kept:
            after = min(after, tasks.late_start - 1)
        found.append(after)
    return found[::-1]


def messages_read(executable: Executable, task: int) -> list[int]:
    """The received messages that a task reads."""
    copies = executable.copies.get(task, ())
    return list(dict.fromkeys(copy.message for copy in copies if copy.message >= 0))


def exchanges_of(executable: Executable, device: int) -> dict[int, Exchange]:
    """The exchanges that a device takes part in, by position."""
    sends: dict[int, list[tuple[int, int]]] = {}
    receives: dict[int, list[tuple[int, int]]] = {}
    for number in executable.messages_of[device]:
        message = executable.messages[number]
        position = executable.position[message.task]
        if message.sender == device:
            sends.setdefault(position, []).append((number, message.receiver))
        if message.receiver == device:
            receives.setdefault(position, []).append((number, message.sender))
    return {
        position: Exchange(
            position, tuple(sends.get(position, ())), tuple(receives.get(position, ()))
        )
        for position in sends.keys() | receives.keys()
    }


def segment(executable: Executable, tasks: Sequence[int]) -> Segment:
    """Tasks of one device as a Segment."""
    made: dict[int, None] = {}
    read: dict[int, None] = {}
    gone: dict[int, None] = {}
    messages: dict[int, None] = {}
    for task in tasks:
        for slot in slots_read(executable, task):
            if slot not in made:
                read[slot] = None
        made |= dict.fromkeys(slots_made(executable, task))
        gone |= dict.fromkeys(executable.frees[task])
        messages |= dict.fromkeys(messages_read(executable, task))
    return Segment(
        tuple(tasks),
        tuple(read),
        tuple(slot for slot in made if slot not in gone),
        tuple(slot for slot in gone if slot not in made),
        tuple(messages),
    )


def slots_read(executable: Executable, task: int) -> Iterator[int]:
    """The slots that a task reads."""
    tasks = executable.tasks
    read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
    return (slot for slot in read.tolist() if slot >= 0)


def slots_made(executable: Executable, task: int) -> list[int]:
    """The slots that a task makes."""
    tasks = executable.tasks
    made: list[int] = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]].tolist()
    return made
