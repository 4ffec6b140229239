"""What a step holds on a GPU if torch's compiler fuses its kernels and a graph replays them.

Part of the room plan. The TaskGraph of a step in generated code comes in with its Storage, the
Storage of the same step with fusion goes out.

    results    that only the kernel reads that makes them take no room (simulate/fusion.py)
    places     of maxima that pooling has found, for its gradient, are kept in a byte each
    products   in half precision with an odd side are padded: the two that have that side, the
               largest of what they read and make, are there twice
    logits     in another precision than their logarithmic softmax stand for it: nobody writes it
    images     are in order NHWC: weights, and a batch, are copied for forward convolutions
    order      is the compiler's (compiled_order.py): some results come to be later than planned
    segments   of the allocator: the state and the batch have theirs, and what the graph replays
               its own, which holds all room that was ever needed at once and the gaps in it
               (simulate/segments.py), with a workspace of libraries of its own
    the rest   pages that are not full, and MARGIN, as was measured on an H200; GAP_MARGIN where
               copies from the host take room between the graphs, or something is computed again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from apportion.columns import Ints, distinct
from apportion.lower import COMPUTE, Storage, TaskGraph, uses_host, with_storage
from apportion.machine import Cluster, CostModel, cost_fit, elementwise, kind_of_signature
from apportion.plan.compiled_order import CompiledKernel, compiled_order, read_slots
from apportion.simulate import (
    SEGMENT_PAGES,
    FusedGroups,
    fused_groups,
    segment_bytes,
    simulate,
    unwritten_slots,
)

MARGIN, GAP_MARGIN = 0.002, 0.018
CAST = "aten._to_copy.default"
LOG_SOFTMAX, PICKING = "aten._log_softmax.default", "aten.nll_loss_forward.default"
POOLING, INDEX_BYTES = "apportion.max_pool", 8
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
CONVOLUTION, GRADIENT = "aten.convolution.default", "apportion.conv_backward"


def fused_storage(
    tasks: TaskGraph,
    storage: Storage,
    cluster: Cluster,
    cost: CostModel,
    pieces: Sequence[Sequence[int]] = (),
    again: bool = False,
) -> Storage:
    """The Storage of a step that is compiled with fusion; `tasks` are without any, `pieces` the
    tasks that are compiled as one, where that is known. `again`: something is recomputed."""
    step = _FusedMemory.of(with_storage(tasks, storage), pieces)
    slots = {slot: (base, nbytes) for slot, base, nbytes in storage.slots}
    other = (step.size != step.tasks.slot_nbytes) & ~step.tasks.slot_on_host
    for slot in np.flatnonzero(other).tolist():
        slots[slot] = (int(step.tasks.slot_base[slot]), int(step.size[slot]))
    rows = tuple((slot, *row) for slot, row in sorted(slots.items()))
    needed, plain = step.workspace.copy(), _plain(tasks)
    late, kept = step.moved()
    found = replace(
        storage, slots=rows, workspace=_rows(needed, plain),
        kept=tuple({**dict(storage.kept), **{s: int(plain[t]) for s, t in kept}}.items()),
        late=tuple((s, int(plain[t])) for s, t in late),
    )  # fmt: skip
    peaks = np.array(simulate(with_storage(tasks, found), cluster, cost).peak_bytes)
    margin = GAP_MARGIN if again or uses_host(tasks) else MARGIN
    for device, place in enumerate(cluster.devices[: tasks.devices]):
        table = cost.tables.get(place.kind)
        held = step.held(device, 0 if table is None else table.resident)
        mine = (step.tasks.kind == COMPUTE) & (step.tasks.device == device)
        more = held + int(margin * held) + sum(SEGMENT_PAGES) - int(peaks[device])
        needed[mine] = np.maximum(needed[mine] + more, 0)
    return replace(found, workspace=_rows(needed, plain))


@dataclass(frozen=True)
class _FusedMemory:
    """A step with fusion: bytes of slots, the workspace that tasks need on every device beside each
    other (`always`) and in all, and the kernels in their order."""

    tasks: TaskGraph
    groups: FusedGroups
    size: Ints
    workspace: Ints
    always: Ints
    kernels: tuple[CompiledKernel, ...]

    @classmethod
    def of(cls, known: TaskGraph, pieces: Sequence[Sequence[int]]) -> _FusedMemory:
        """The step of tasks whose calls are known."""
        groups, size = fused_groups(known, pieces), known.slot_nbytes.copy()
        size[unwritten_slots(known, pieces)] = 0
        size[known.slot_on_host] = 0  # it takes none of a device
        groups = _with_logits_for(known, groups, size, pieces)
        for task in _tasks_of(known, POOLING):
            places = known.out_slot[known.out_start[task] + 1 : known.out_start[task + 1]]
            size[places] //= INDEX_BYTES
        computes, needed = known.kind == COMPUTE, known.workspace + _padded(known)
        always = np.zeros(known.devices, np.int64)
        for device in range(known.devices):  # libraries' own workspace, not that of fused calls
            mine = computes & (known.device == device)
            some = known.workspace[mine & (known.workspace > 0)]
            always[device] = some.min() if len(some) else 0
            needed[groups.fused & mine] = always[device]
        kernels = tuple(compiled_order(known, groups, size, pieces))
        return cls(known, groups, size, needed, always, kernels)

    def moved(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The slots that come to be later than planned, and those that are needed longer, each with
        the task by which that is, in the order that was planned."""
        late: dict[int, int] = {}
        until: dict[int, int] = {}
        planned = sorted(min(kernel.tasks) for kernel in self.kernels)  # the one in its place
        for kernel, now in zip(self.kernels, planned, strict=True):
            for task in kernel.tasks:
                for slot in read_slots(self.tasks, self.groups, task):
                    until[slot] = max(until.get(slot, 0), now)
                made = (s for s in self._made(task) if self.groups.root[s] == s and self.size[s])
                late |= dict.fromkeys(made, now) if now > task else {}
        last, end = self.tasks.slot_last, len(self.tasks) - 1
        kept = [(slot, task) for slot, task in until.items() if last[slot] < task]
        for slot, over in self.reused.items():  # its room is counted once
            late[slot] = max(late.get(slot, 0), min(until[over], end - 1) + 1, int(last[over]) + 1)
        return [(slot, min(task, end)) for slot, task in late.items()], kept

    def held(self, device: int, resident: int) -> int:
        """Bytes of both segments of a device; `resident`: what libraries keep of each."""
        tasks, root = self.tasks, self.groups.root
        begin = [
            slot
            for slot in np.flatnonzero((tasks.slot_first < 0) & (tasks.slot_device == device))
            if root[slot] == slot and self.size[slot]
        ]
        given = np.append(self.size[begin], self.always[device])
        state = segment_bytes(np.arange(len(given)), given)
        rows = list(self._requests(device, resident))
        thing, nbytes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        return state + segment_bytes(thing, nbytes)

    def _requests(self, device: int, resident: int) -> Iterator[tuple[int, int]]:
        """What a graph's kernels ask for and give back while it is recorded: things and bytes, 0
        for what is given back."""
        tasks, count = self.tasks, len(self.size)
        room, taken = np.arange(count).tolist(), set(self.reused.values())  # whose room a slot has
        yield count, 0
        for place, kernel in enumerate(self.kernels):
            if tasks.device[kernel.tasks[0]] != device:
                continue
            made = [slot for task in kernel.tasks for slot in self._made(task)]
            made = [slot for slot in made if self.groups.root[slot] == slot and self.size[slot]]
            gone = self.ends.get(place, [])
            if resident and any(self._call(task).startswith(PRODUCTS) for task in kernel.tasks):
                yield count, resident
                resident = 0
            copies = [nbytes for task in kernel.tasks for nbytes in self._copies(task)]
            yield from ((count + 9 + k, nbytes) for k, nbytes in enumerate(copies))
            for slot in self.reused.keys() & set(made):
                room[slot] = room[self.reused[slot]]
            yield from ((slot, int(self.size[slot])) for slot in made if slot not in self.reused)
            for task in kernel.tasks:
                blocks = self._blocks(task, int(self.always[device]))
                yield from ((count + 1 + k, nbytes) for k, nbytes in enumerate(blocks))
                yield from ((count + 1 + k, 0) for k in range(len(blocks)))
            yield from ((count + 9 + k, 0) for k in range(len(copies)))
            yield from ((room[slot], 0) for slot in gone if slot not in taken)

    def _made(self, task: int) -> list[int]:
        row = slice(self.tasks.out_start[task], self.tasks.out_start[task + 1])
        made: list[int] = self.tasks.out_slot[row].tolist()
        return made

    def _call(self, task: int) -> str:
        work = int(self.tasks.work[task])
        return kind_of_signature(self.tasks.works[work]) if work >= 0 else ""

    @cached_property
    def ends(self) -> dict[int, list[int]]:
        """The slots that are given back after each kernel, by its place."""
        tasks, place_of = self.tasks, np.zeros(len(self.tasks), np.int64)
        last: dict[int, int] = {}
        for place, kernel in enumerate(self.kernels):
            place_of[kernel.tasks] = place
            for task in kernel.tasks:
                last |= dict.fromkeys(read_slots(tasks, self.groups, task), place)
                last |= dict.fromkeys(self._made(task), place)
        found: dict[int, list[int]] = {}
        for slot, place in last.items():
            until = int(tasks.slot_last[slot])
            if (
                self.groups.root[slot] == slot
                and until < len(tasks)
                and tasks.slot_first[slot] >= 0
            ):
                found.setdefault(max(place, int(place_of[until])), []).append(slot)
        return found

    @cached_property
    def reused(self) -> dict[int, int]:
        """The results that element-wise kernels write over what nobody needs after them."""
        found: dict[int, int] = {}
        for place, kernel in enumerate(self.kernels):
            called = [self._call(task) for task in kernel.tasks if not self.groups.free[task]]
            if not called or not all(map(elementwise, called)):
                continue
            ready = [slot for slot in self.ends.get(place, []) if slot in kernel.reads]
            for slot in (slot for task in kernel.tasks for slot in self._made(task)):
                over = next((k for k in ready if self.size[k] == self.size[slot] > 0), None)
                if over is not None and self.groups.root[slot] == slot:
                    ready.remove(over)
                    found[slot] = over
        return found

    def _copies(self, task: int) -> list[int]:
        """What is copied in another memory order for a convolution of images: its weight, and an
        image that is the batch itself."""
        if self._call(task) != CONVOLUTION:
            return []
        image, weight = self.tasks.in_slot[self.tasks.in_start[task] :][:2].tolist()
        begins = image >= 0 and self.tasks.slot_first[image] < 0
        copied = [image, weight] if begins else [weight]
        return [int(self.tasks.slot_nbytes[slot]) for slot in copied if slot >= 0]

    def _blocks(self, task: int, always: int) -> list[int]:
        """The workspace of a task beyond what is always there: that of a convolution's gradient is
        first a copy of the gradient in another order."""
        more = int(self.workspace[task]) - always
        if more <= 0 or self.tasks.kind[task] != COMPUTE:
            return []
        first = int(self.tasks.in_slot[self.tasks.in_start[task]])
        size = int(self.tasks.slot_nbytes[first]) if first >= 0 else 0
        whole = self._call(task).startswith(GRADIENT) and 0 < size < more
        return [size, more - size] if whole else [more]


def _with_logits_for(
    tasks: TaskGraph, groups: FusedGroups, size: Ints, pieces: Sequence[Sequence[int]]
) -> FusedGroups:
    """The groups with logits in the place of their logarithmic softmax in another precision, which
    nobody writes: whoever needs it, in the same piece, computes it of the logits and two numbers a
    row. Its `size` is set to zero."""
    root = groups.root.copy()
    piece_of = {task: number for number, piece in enumerate(pieces) for task in piece}
    maker = {int(s): t for t in range(len(tasks)) for s in _columns(tasks, t)[1]}
    reader = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
    for task in _tasks_of(tasks, LOG_SOFTMAX):
        (out,), source = _columns(tasks, task)[1], int(root[_columns(tasks, task)[0][0]])
        readers = distinct(reader[root[tasks.in_slot] == out]).tolist()
        while source in maker and not size[source]:
            source = int(root[_columns(tasks, maker[source])[0][0]])
        narrow = 0 < size[source] < size[out]
        picks = _tasks_of(tasks, PICKING)
        fine = all(groups.fused[t] or groups.free[t] or t in picks for t in readers)
        fine &= len({piece_of.get(t, -1) for t in (task, *readers)}) == 1
        if narrow and root[out] == out and fine:
            root[root == out] = source
            size[out] = 0
    return groups._replace(root=root)


def _columns(tasks: TaskGraph, task: int) -> tuple[Ints, Ints]:
    """The slots that a task reads and makes."""
    read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
    return read, tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]]


def _tasks_of(tasks: TaskGraph, kind: str) -> list[int]:
    ours = np.array([kind_of_signature(work) == kind for work in tasks.works] + [False])
    found: list[int] = np.flatnonzero(ours[tasks.work]).tolist()
    return found


def _plain(tasks: TaskGraph) -> Ints:
    """For every task one of those that it was before some became one."""
    found = np.arange(len(tasks))
    if len(tasks.became):
        found[tasks.became] = np.arange(len(tasks.became))
    return found


def _rows(workspace: Ints, plain: Ints) -> tuple[tuple[int, int], ...]:
    used = np.flatnonzero(workspace).tolist()
    return tuple(sorted((int(plain[task]), int(workspace[task])) for task in used))


def _padded(tasks: TaskGraph) -> Ints:
    """Bytes of the two largest tensors of each product that is padded, and a page. A cast of what
    was computed is written with its padding, that of a parameter is not."""
    root = fused_groups(tasks).root
    casts = [
        t for t in _tasks_of(tasks, CAST) if tasks.slot_first[root[_columns(tasks, t)[0][0]]] >= 0
    ]
    cast = {int(slot) for task in casts for slot in _columns(tasks, task)[1]}
    odd = np.array([cost_fit.fit_kind(w).endswith(cost_fit.ODD) for w in tasks.works] + [False])
    found = np.zeros(len(tasks), np.int64)
    for task in np.flatnonzero(odd[tasks.work]).tolist():
        read, made = _columns(tasks, task)
        slots = [s for s in np.append(read[read >= 0], made).tolist() if int(root[s]) not in cast]
        found[task] = np.sort(tasks.slot_nbytes[slots])[-2:].sum() + max(SEGMENT_PAGES)
    return found
