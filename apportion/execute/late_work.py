"""What a rank leaves to its next training step, in pieces that may be done as soon as they can be.

Part of the room execute. An Executable whose steps overlap and one device's RankSteps come in; out
goes a LateSchedule: the steps that are not late, in their order, and the late ones as LateNodes,
with what each has to wait for.

    OPENS  there are buffers for what is received at one position, and the senders may know it
    SENDS  what is sent at one position is packed and handed to the transport
    WORKS  a Segment, or a HostStep

A node is done when all that it waits for is there: at the latest before the first step of the next
training step that is due after it, and if it can be, already in its own (`after` says from where
on). Before the first exchange of the next step that is of this kind, all of them are done and all
that they sent has left, so that buffers may be used again.

Why nobody waits forever: the one global order in which each node stands where it is due is a valid
one (rank_steps.py). A rank is blocked only by what it does at its place in that order, when it has
done all that stands before; what it does sooner it does only if it need not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from apportion.columns import Ints
from apportion.execute.executable import Executable
from apportion.execute.rank_steps import (
    Exchange,
    HostStep,
    Post,
    RankStep,
    Segment,
    crossing_positions,
    first_tasks,
    segment,
    slots_made,
)

OPENS, SENDS, WORKS = "opens", "sends", "works"


@dataclass(frozen=True, slots=True)
class LateNode:
    """A piece of late work.

    waits  exchanges whose bytes it reads
    needs  nodes, by number, that come before it
    after  how many of the steps that are not late come before it, in its own training step
    leads  whether other ranks wait for it
    slots  what it reads, makes and frees, each once
    made   what is there after it
    """

    does: str
    segment: Segment | HostStep | None
    exchange: Exchange | None
    waits: tuple[Exchange, ...]
    needs: tuple[int, ...]
    after: int
    leads: bool
    slots: tuple[int, ...]
    made: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LateSchedule:
    """What a rank does in a training step.

    main    its steps that are not late
    nodes   the late ones
    due     for each of `main` how many nodes of the step before have to be done then
    clears  the first of `main` that needs the buffers of late messages, or the end: all that the
            step before has sent has left then
    """

    main: tuple[RankStep, ...]
    nodes: tuple[LateNode, ...]
    due: tuple[int, ...]
    clears: int


class _TouchedSlots:
    """Slots that steps read and change, by the slot whose storage each has; and messages, as
    negative numbers: the last who reads one drops it."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        base: Ints = executable.tasks.slot_base
        self.base: list[int] = base.tolist()

    def root(self, slot: int) -> int:
        while self.base[slot] >= 0:
            slot = self.base[slot]
        return slot

    def of_segment(self, segment: Segment) -> tuple[set[int], set[int]]:
        """What it reads or changes, and what of that it changes."""
        changed = {self.root(slot) for slot in (*segment.outs, *segment.frees)}
        changed |= {~message for message in segment.messages}
        return changed | {self.root(slot) for slot in segment.ins}, changed

    def of_sends(self, exchange: Exchange) -> tuple[set[int], set[int]]:
        executable = self.executable
        read = {
            self.root(copy.source)
            for number, _ in exchange.sends
            for copy in executable.packed[number]
        }
        tasks = {executable.messages[number].task for number, _ in exchange.sends}
        return read, {self.root(slot) for task in tasks for slot in executable.frees[task]}

    def of_host(self, step: HostStep) -> tuple[set[int], set[int]]:
        """New state on the host takes the memory of the old."""
        read, changed = self.of_segment(segment(self.executable, step.tasks))
        made = (slot for task in step.tasks for slot in slots_made(self.executable, task))
        homes = {self.executable.host_homes.get(slot, slot) for slot in made}
        written = {self.root(slot) for slot in homes}
        return read | written, changed | written

    def of_work(self, step: Segment | HostStep) -> tuple[set[int], set[int]]:
        return self.of_segment(step) if isinstance(step, Segment) else self.of_host(step)

    def of_step(self, step: RankStep) -> tuple[set[int], set[int]]:
        if isinstance(step, Segment | HostStep):
            return self.of_work(step)
        return self.of_sends(step.exchange)  # until it has ended


def late_schedule(executable: Executable, steps: Sequence[RankStep]) -> LateSchedule:
    """The schedule of one device, whose RankSteps are given."""
    tasks = executable.tasks
    first = first_tasks(executable, steps)
    count = sum(task < tasks.late_start for task in first)
    main, late = tuple(steps[:count]), steps[count:]
    kept = crossing_positions(executable)
    clears = next(
        (k for k, s in enumerate(main) if isinstance(s, Post) and s.exchange.position in kept),
        count,
    )
    brings = {
        number: step.exchange
        for step in steps
        if isinstance(step, Post)
        for number, _ in step.exchange.receives
    }
    nodes, dues = _nodes(
        executable, main, list(zip(late, first[count:], strict=True)), brings, clears
    )
    due = tuple(sum(each <= at for each in dues) for at in first[:count])
    return LateSchedule(main, tuple(nodes), due, clears)


def _nodes(
    executable: Executable,
    main: Sequence[RankStep],
    late: Iterable[tuple[RankStep, int]],
    brings: dict[int, Exchange],
    clears: int,
) -> tuple[list[LateNode], list[int]]:
    """The nodes in the order of the list, and the task of the next step that each is due before."""
    touched = _TouchedSlots(executable)
    before = [touched.of_step(step) for step in main]
    known: list[tuple[set[int], set[int]]] = []
    nodes: list[LateNode] = []
    dues: list[int] = []
    tasks = executable.tasks

    def add(does: str, step: RankStep, own: tuple[set[int], set[int]], due: int) -> None:
        needs = tuple(k for k, other in enumerate(known) if _conflict(own, other))
        last = max((k for k, other in enumerate(before) if _conflict(own, other)), default=-1)
        work = step if isinstance(step, Segment | HostStep) else None
        exchange = None if isinstance(step, Segment | HostStep) else step.exchange
        whole = segment(executable, work.tasks) if isinstance(work, HostStep) else work
        read = whole.messages if whole is not None else ()
        waits = tuple(dict.fromkeys(brings[message] for message in read))
        used = (*whole.ins, *whole.outs, *whole.frees) if whole is not None else ()
        slots = tuple(dict.fromkeys(used))
        if does == SENDS and exchange is not None:
            slots = tuple(
                dict.fromkeys(
                    c.source for number, _ in exchange.sends for c in executable.packed[number]
                )
            )
        made = whole.outs if whole is not None else ()
        nodes.append(
            LateNode(does, work, exchange, waits, needs, max(last, clears) + 1, False, slots, made)
        )
        known.append(own)
        dues.append(due)

    for step, task in late:
        due = int(tasks.due[task - tasks.late_start])
        if isinstance(step, Segment | HostStep):
            add(WORKS, step, touched.of_work(step), due)
        elif isinstance(step, Post):
            if step.exchange.receives:
                add(OPENS, step, (set(), set()), due)
            if step.exchange.sends:
                add(SENDS, step, touched.of_sends(step.exchange), due)
    return _leading(nodes), dues


def _conflict(one: tuple[set[int], set[int]], other: tuple[set[int], set[int]]) -> bool:
    """Whether one changes what the other reads or changes."""
    return not one[1].isdisjoint(other[0]) or not other[1].isdisjoint(one[0])


def _leading(nodes: Sequence[LateNode]) -> list[LateNode]:
    """The nodes, of which those are marked that others wait for."""
    leads = [node.does != WORKS for node in nodes]
    for k in range(len(nodes) - 1, -1, -1):
        if leads[k]:
            for before in nodes[k].needs:
                leads[before] = True
    return [replace(node, leads=lead) for node, lead in zip(nodes, leads, strict=True)]
