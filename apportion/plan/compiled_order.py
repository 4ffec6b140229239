"""The order in which torch's compiler computes what it compiles, to hold less.

Part of the room plan. Tasks whose calls are known come in with the kernels that they become
(simulate/fusion.py) and the pieces that are compiled as one; the kernels in their new order go out.

The compiler (its `reorder_for_peak_memory`) takes the order that it was given, or a greedy one if
that holds less: of the kernels that could come next, one whose results fit under what was already
held at once, and of these the one after which least is held; if none fits, the smallest. So the
gradient of a large weight, which nobody reads before the updates, is computed last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from apportion.columns import Ints
from apportion.lower import TaskGraph
from apportion.simulate import FusedGroups

LEAST_GAIN = 1 / 12
"""What the greedy order has to save by this model to be believed: 9% were taken (vgg16), 8% were
not (alexnet), and too much is better predicted than too little."""


@dataclass
class CompiledKernel:
    """A kernel: its tasks, and the slots that it reads of others of its piece and makes."""

    tasks: list[int]
    reads: set[int] = field(default_factory=set)
    makes: list[int] = field(default_factory=list)


def compiled_order(
    tasks: TaskGraph, groups: FusedGroups, size: Ints, pieces: Sequence[Sequence[int]]
) -> Iterator[CompiledKernel]:
    """The kernels of all tasks, those of a piece in the order that the compiler gives them; `size`:
    bytes of slots, 0 for those that are never in memory. Tasks of no piece stay where they are."""
    piece_of = {task: number for number, piece in enumerate(pieces) for task in piece}
    kept = _kept(tasks, groups, piece_of)
    done: set[int] = set()
    for task in range(len(tasks)):
        number = piece_of.get(task)
        if number is None:
            yield CompiledKernel([task], set(read_slots(tasks, groups, task)), _made(tasks, task))
        elif number not in done:
            done.add(number)
            yield from _least_memory(PieceKernels(tasks, groups, size, pieces[number], kept))


def read_slots(tasks: TaskGraph, groups: FusedGroups, task: int) -> Iterator[int]:
    """The slots that have the bytes which a task reads."""
    for slot in tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist():
        if slot >= 0:
            yield int(groups.root[slot])


def _made(tasks: TaskGraph, task: int) -> list[int]:
    made: list[int] = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]].tolist()
    return made


def _kept(tasks: TaskGraph, groups: FusedGroups, piece_of: dict[int, int]) -> set[int]:
    """The slots that are read outside of the piece that makes them, or after the step."""
    count = len(tasks)
    found = set(np.flatnonzero(tasks.slot_last >= count).tolist())
    maker = {slot: task for task in range(count) for slot in _made(tasks, task)}
    for task in range(count):
        for slot in read_slots(tasks, groups, task):
            if slot in maker and piece_of.get(maker[slot]) != piece_of.get(task, -1):
                found.add(slot)
    return found


def _least_memory(piece: PieceKernels) -> list[CompiledKernel]:
    """The kernels of a piece, as they come or in the greedy order."""
    given, greedy = piece.given(), piece.greedy()
    gains = piece.most_held(greedy) < (1 - LEAST_GAIN) * piece.most_held(given)
    chosen = greedy if gains else given
    return [piece.kernels[number] for number in chosen]


class PieceKernels:
    """The kernels of a piece, who needs whom, and the bytes that each makes."""

    def __init__(
        self,
        tasks: TaskGraph,
        groups: FusedGroups,
        size: Ints,
        piece: Sequence[int],
        kept: set[int],
    ) -> None:
        numbers: dict[int, int] = {}
        self.kernels: list[CompiledKernel] = []
        kernel_of: dict[int, int] = {}
        for task in sorted(piece):
            name = int(groups.group[task]) if groups.fused[task] else task
            if name not in numbers:
                numbers[name] = len(self.kernels)
                self.kernels.append(CompiledKernel([]))
            kernel_of[task] = numbers[name]
            self.kernels[numbers[name]].tasks.append(task)
        maker: dict[int, int] = {}
        for task, number in kernel_of.items():
            own = [slot for slot in _made(tasks, task) if groups.root[slot] == slot]
            self.kernels[number].makes += own
            maker |= dict.fromkeys(own, number)
        self.readers: dict[int, set[int]] = {slot: set() for slot in maker}
        for task, number in kernel_of.items():
            for slot in read_slots(tasks, groups, task):
                if maker.get(slot, number) != number:
                    self.kernels[number].reads.add(slot)
                    self.readers[slot].add(number)
        self.size = {slot: int(size[slot]) for slot in maker}
        self.kept = kept.intersection(maker)
        self.needs = [{maker[slot] for slot in kernel.reads} for kernel in self.kernels]

    def given(self) -> list[int]:
        """The kernels in the order of their first tasks, each after those that it needs."""
        found: list[int] = []
        state = [0] * len(self.kernels)  # 1: begun, 2: found
        for number in range(len(self.kernels)):
            stack = [number]
            while stack:
                top = stack[-1]
                state[top] = max(state[top], 1)
                missing = [need for need in sorted(self.needs[top]) if state[need] == 0]
                if missing:
                    stack.append(missing[0])
                    continue
                stack.pop()
                if state[top] != 2:
                    state[top] = 2
                    found.append(top)
        return found

    def greedy(self) -> list[int]:
        """The order of the head of this file."""
        order = self.given()
        rank = {number: place for place, number in enumerate(order)}
        makes = [sum(self.size[slot] for slot in kernel.makes) for kernel in self.kernels]
        left = {slot: len(who) + (slot in self.kept) for slot, who in self.readers.items()}
        frees = [0] * len(self.kernels)
        for number, kernel in enumerate(self.kernels):
            frees[number] += sum(self.size[slot] for slot in kernel.reads if left[slot] == 1)
            frees[number] += sum(self.size[slot] for slot in kernel.makes if left[slot] == 0)
        missing = [len(needs) for needs in self.needs]
        ready = {number for number in order if not missing[number]}
        live, most = 0, sum(self.size[slot] for slot in self.kept)
        found: list[int] = []
        while ready:
            gap = most - live
            number = min(
                ready,
                key=lambda k: (
                    makes[k] if makes[k] > gap else 0,
                    makes[k] - frees[k],
                    rank[k],
                ),
            )
            ready.remove(number)
            found.append(number)
            most = max(most, live + makes[number])
            live += makes[number] - frees[number]
            kernel = self.kernels[number]
            for reader in {k for slot in kernel.makes for k in self.readers[slot]}:
                missing[reader] -= 1
                if not missing[reader]:
                    ready.add(reader)
            for slot in kernel.reads:
                left[slot] -= 1
                if left[slot] == 1:
                    for reader in self.readers[slot]:
                        frees[reader] += self.size[slot]
        return found

    def most_held(self, order: Sequence[int]) -> int:
        """The most bytes that are held at once in an order."""
        left = {slot: len(who) + (slot in self.kept) for slot, who in self.readers.items()}
        live = most = 0
        for number in order:
            kernel = self.kernels[number]
            live += sum(self.size[slot] for slot in kernel.makes)
            most = max(most, live)
            for slot in kernel.reads:
                left[slot] -= 1
            gone = [slot for slot in (*kernel.reads, *kernel.makes) if not left[slot]]
            live -= sum(self.size[slot] for slot in gone)
        return most
