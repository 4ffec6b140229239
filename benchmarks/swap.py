"""Swapping: one device trains a step that is larger than its memory, by way of the host's.

Blocks are what slots are stored in. Tasks run in their order; what a task reads must be on the
device, what it makes needs room. For room the block whose next use is farthest away goes to the
host, which is the best that any rule without knowledge of sizes does, and writes only what the host
does not have: a tensor that is only read is written once. Transfers stand in one queue, reads and
writes share the bandwidth. They begin as early as memory allows: a read when there has been room
for it ever since, a write after the last use of the block. So prefetching is perfect, and time is
lost only where the link is too slow.

State begins a step where the last one left it, so that the last of some steps is the one that
counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from apportion.columns import Ints
from apportion.lower.task_graph import TaskGraph

STEPS = 3  # of which the last is measured


@dataclass(frozen=True)
class Swapped:
    """A step with swapping: seconds, and bytes that were read from the host and written to it."""

    step_seconds: float
    compute_seconds: float
    read_bytes: int
    written_bytes: int


@dataclass
class Blocks:
    """The storage of a step.

    nbytes   of each block
    uses     the tasks that use a block, rising
    reads    per task the blocks that must be there; `changes` are those of them that it changes,
             `begins` those that it makes
    kept     blocks at the end of a step, and what they are at the beginning of the next
    given    blocks that come to every step from outside, such as its batch
    """

    nbytes: dict[int, int] = field(default_factory=dict)
    uses: dict[int, list[int]] = field(default_factory=dict)
    reads: list[list[int]] = field(default_factory=list)
    changes: list[set[int]] = field(default_factory=list)
    begins: list[list[int]] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)


def swap(
    tasks: TaskGraph, nanoseconds: Ints, memory_bytes: int, bandwidth: float
) -> Swapped | None:
    """The step on one device with so much memory, and so much bandwidth to the host; None if some
    task alone needs more."""
    return run(blocks_of(tasks), nanoseconds, memory_bytes, bandwidth)


def run(
    blocks: Blocks, nanoseconds: Ints, memory_bytes: int, bandwidth: float, steps: int = STEPS
) -> Swapped | None:
    """The last of some steps."""
    state = State(blocks, memory_bytes, bandwidth)
    began, before = 0.0, (0, 0)
    for _ in range(steps):
        began, before = state.now, (state.read, state.written)
        if not state.step(nanoseconds):
            return None
    read, written = state.read - before[0], state.written - before[1]
    return Swapped(state.now - began, float(nanoseconds.sum()) / 1e9, read, written)


def blocks_of(tasks: TaskGraph) -> Blocks:
    """The blocks of the slots of one device."""
    assert tasks.devices == 1
    found = Blocks()
    root = _roots(tasks.slot_base)
    for task in range(len(tasks)):
        made = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]].tolist()
        read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist()
        outs = dict.fromkeys(root[s] for s in made)
        ins = dict.fromkeys(root[s] for s in read if s >= 0)
        new = [b for b in outs if b not in ins and b not in found.uses]
        old = [b for b in {**ins, **outs} if b not in new]
        for block in (*new, *old):
            found.uses.setdefault(block, []).append(task)
            found.nbytes[block] = int(tasks.slot_nbytes[block])
        found.reads.append(old)
        found.changes.append({b for b in outs if b in ins and tasks.nbytes[task]})
        found.begins.append(new)
    found.workspace = tasks.workspace.tolist() or [0] * len(tasks)
    found.kept = {root[end]: root[begin] for end, begin in tasks.carry.tolist()}
    there = {b for b in found.uses if tasks.slot_first[b] < 0}
    found.given = there - set(found.kept.values())
    return found


def _roots(base: Ints) -> list[int]:
    roots: list[int] = []
    for slot, under in enumerate(base.tolist()):
        roots.append(slot if under < 0 else roots[under])
    return roots


class State:
    """Where everything is, and what time it is, while steps run.

    here     blocks on the device; `held` bytes in all
    on_host  blocks of which the host has a copy
    room     bytes that are free while each task runs, as far as it has been planned
    link     when the last transfer ends
    log      when memory was taken (bytes above 0) and given back
    """

    def __init__(self, blocks: Blocks, memory_bytes: int, bandwidth: float) -> None:
        self.blocks, self.memory, self.bandwidth = blocks, memory_bytes, bandwidth
        self.count = len(blocks.reads)
        self.here: set[int] = set()
        self.on_host = blocks.given | set(blocks.kept.values())
        self.held = self.read = self.written = 0
        self.now = self.link = 0.0
        self.log: list[tuple[float, int]] = []

    def step(self, nanoseconds: Ints) -> bool:
        """One step; False if it cannot be done."""
        blocks = self.blocks
        self.ends = np.zeros(self.count + 1)
        self.ends[-1] = self.now  # the moment before the first task, for index -1
        self.room = np.full(self.count + 1, float(self.memory - self.held))
        self.at = dict.fromkeys(blocks.uses, 0)
        self.last = dict.fromkeys(self.here, -1)
        self.queue: list[tuple[int, int]] = []
        for block in self.here:
            self._enqueue(block)
        for task in range(self.count):
            if not self._prepare(task):
                return False
            start = max(self.now, self.arrived)
            self.log.append((start, self.born))
            self.now = self.ends[task] = start + nanoseconds[task] / 1e9
            self._finish(task)
        self._carry()
        return True

    def _prepare(self, task: int) -> bool:
        """Makes room for a task and fetches what it reads."""
        blocks, self.arrived = self.blocks, 0.0
        missing = [b for b in blocks.reads[task] if b not in self.here]
        born = [b for b in missing if b in blocks.given and not self.at[b]]
        needed = sum(blocks.nbytes[b] for b in (*missing, *blocks.begins[task]))
        needed += blocks.workspace[task]
        while self.held + needed > self.memory:
            victim = self._victim(task)
            if victim is None:
                return False
            self._evict(victim, task)
        for block in missing:
            if block not in born:
                self._fetch(block, task)
        for block in (*missing, *blocks.begins[task]):
            self.here.add(block)
            self.held += blocks.nbytes[block]
        self.born = sum(blocks.nbytes[b] for b in (*born, *blocks.begins[task]))
        self.born += blocks.workspace[task]
        self.room[task] -= self.born
        return True

    def _victim(self, task: int) -> int | None:
        """The block that is used last of those that the task does not use."""
        using = set(self.blocks.reads[task])
        spared = []
        found = None
        while self.queue and found is None:
            entry = heappop(self.queue)
            block = entry[1]
            if block not in self.here or -entry[0] != self._next(block):
                continue
            if block in using:
                spared.append(entry)
            else:
                found = block
        for entry in spared:
            heappush(self.queue, entry)
        return found

    def _next(self, block: int) -> int:
        """The next task that uses a block; in the next step they are counted on."""
        uses, at = self.blocks.uses[block], self.at[block]
        if at < len(uses):
            return uses[at]
        successor = self.blocks.kept.get(block)
        return self.count * 2 if successor is None else self.count + self.blocks.uses[successor][0]

    def _enqueue(self, block: int) -> None:
        heappush(self.queue, (-self._next(block), block))

    def _evict(self, block: int, task: int) -> None:
        size = self.blocks.nbytes[block]
        last = self.last.get(block, -1)
        gone = float(self.ends[last])
        if block not in self.on_host:
            self.on_host.add(block)
            self.link = gone = max(self.link, gone) + size / self.bandwidth
            self.arrived = max(self.arrived, self.link)
            self.written += size
        self.log.append((gone, -size))
        self.here.remove(block)
        self.held -= size
        self.room[last + 1 : task + 1] += size

    def _fetch(self, block: int, task: int) -> None:
        """A read that begins as soon as there has been room for it ever since."""
        size = self.blocks.nbytes[block]
        tight = np.flatnonzero(self.room[: task + 1] < size)
        since = int(tight[-1]) if len(tight) else -1
        begins = max(self.link, float(self.ends[since]))
        self.log.append((begins, size))
        self.link = begins + size / self.bandwidth
        self.arrived = max(self.arrived, self.link)
        self.room[since + 1 : task + 1] -= size
        self.read += size

    def _finish(self, task: int) -> None:
        blocks = self.blocks
        given_back = blocks.workspace[task]
        for block in (*blocks.reads[task], *blocks.begins[task]):
            self.at[block] += 1
            self.last[block] = task
            if block in blocks.changes[task]:
                self.on_host.discard(block)
            if self.at[block] == len(blocks.uses[block]) and block not in blocks.kept:
                self.here.remove(block)
                self.on_host.discard(block)
                self.held -= blocks.nbytes[block]
                given_back += blocks.nbytes[block]
            else:
                self._enqueue(block)
        self.log.append((self.now, -given_back))
        self.room[task + 1] = self.memory - self.held

    def _carry(self) -> None:
        """The end of a step is the beginning of the next."""
        kept = self.blocks.kept
        self.on_host = {kept[b] for b in self.on_host if b in kept} | self.blocks.given
        self.here = {kept[b] for b in self.here if b in kept}
        self.held = sum(self.blocks.nbytes[b] for b in self.here)
