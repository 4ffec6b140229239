"""What the tasks of a TaskGraph really allocate, by running their kernels on tensors without data.

Part of the room execute. An Executable comes in, the Storage of its tasks goes out. Lowering says
which slots there are; whether a view of a part needs a copy, and how a result lies in memory, only
the kernel knows. Here every distinct call (kind, arguments, shapes and strides of its
inputs) runs once on torch's `meta` device, and strides are passed on from task to task.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from apportion.capture import RANDOM_UNIFORM
from apportion.columns import Ints
from apportion.describe import HOST_UPDATE_KIND, lengths
from apportion.execute.allocations import AllocationTracker
from apportion.execute.copied_operands import copied_operands, thin_convolutions
from apportion.execute.executable import Executable, joined_part, local_shape
from apportion.execute.host_update import host_workspace
from apportion.execute.kernels.base import (
    Context,
    dtype,
)
from apportion.execute.run_part import run_part, same_storage
from apportion.execute.update_memory import update_memory
from apportion.graph import INPUT, Body, Op
from apportion.lower import (
    ASSEMBLE,
    CALLING,
    COMPUTE,
    AssembledBox,
    Storage,
)
from apportion.machine import INDUCTOR, CostTable, KernelMeasurement, kind_of_signature
from apportion.split import Part

Stride = tuple[int, ...]
Form = tuple[tuple[int, ...], Stride, torch.dtype]
Bools = npt.NDArray[np.bool_]
ASSEMBLY = "apportion.assemble"
MOST_TASKS = 50_000  # above, updates are taken to run their bodies, which need more
WORKSPACE_QUANTILE, FEWEST_ALIKE, ALIKE = 0.75, 4, 3


@dataclass(frozen=True, slots=True)
class _OutputStorage:
    """One output of a call: the input whose storage it shares, or -1; strides; bytes of its
    storage."""

    alias: int
    stride: Stride
    nbytes: int


@dataclass(frozen=True, slots=True)
class _CallStorage:
    """What a call allocates, its number among the distinct works, and the forms of its results."""

    results: tuple[_OutputStorage, ...]
    workspace: int
    work: int = -1
    forms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _RunStorage:
    """The calls of consecutive tasks in columns. Lengths: tasks n, results of each k."""

    work: Ints  # n
    workspace: Ints  # n
    form: Ints  # n x k
    alias: Ints  # n x k: the argument whose storage it shares, or -1
    nbytes: Ints  # n x k: of its storage, -1 for those of its region
    decided: Bools  # n x k: whether a kernel decides where its bytes are
    plain: bool  # it decides nothing


@dataclass(frozen=True)
class DeviceMemoryFacts:
    """What is known of memory on a CUDA device, from measurements there.

    workspaces  bytes by signature
    shares      by kind, (bytes read and written, workspace for each of them) of the listed calls.
                A kind that is not there is taken to need what it leaves to the allocator on tensors
                without data
    resident    bytes that libraries take at their first call and keep, such as cuBLAS
    thin        convolutions of few channels in order NHWC: what they need is copies of operands
    """

    workspaces: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    resident: int = 0
    thin: Mapping[str, KernelMeasurement] = field(default_factory=dict)

    def usual(self, kind: str, nbytes: int, text: str = "", flops: float = 0.0) -> int:
        """Workspace of a call that is not listed: as much as most calls of about its size need."""
        copies = copied_operands(self.thin, text, flops, nbytes) if text else None
        if copies is not None:
            return copies
        found = self.shares.get(kind, ())
        if not found or not nbytes:
            return 0
        near = [share for size, share in found if nbytes <= ALIKE * size and size <= ALIKE * nbytes]
        some = near if len(near) >= FEWEST_ALIKE else [share for _, share in found]
        return int(np.quantile(some, WORKSPACE_QUANTILE) * nbytes)


def device_memory_facts(table: CostTable | None) -> DeviceMemoryFacts:
    """What a table of measurements says of memory."""
    if table is None:
        return DeviceMemoryFacts()
    shares: dict[str, list[tuple[int, float]]] = {}
    for text, work in table.works.items():
        if work.nbytes:
            share = (work.nbytes, work.workspace / work.nbytes)
            shares.setdefault(kind_of_signature(text), []).append(share)
    known = {text: work.workspace for text, work in table.works.items()}
    thin = thin_convolutions(table.works) if table.condition.mode == INDUCTOR else {}
    return DeviceMemoryFacts(known, shares, table.resident, thin)


def measure_storage(
    executable: Executable,
    threads: int | None,
    memory_facts: DeviceMemoryFacts | None = None,
    fused: bool = True,
) -> Storage:
    """The real storage of every slot and the workspace of every task, where not as planned.

    `threads` is how many threads a kernel uses, some need workspace for each; None if it does not
    run on this machine's CPU: then workspace is known only as far as `memory_facts` says. `fused`:
    updates are done together and in place, as compiled ranks do them, not as the interpreter does.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        found = _DryRun(executable, threads, memory_facts).run(fused)
    finally:
        torch.set_num_threads(before)
    more = tuple(converted_terms(executable)) if executable.strategy.wire else ()
    return replace(found, workspace=(*found.workspace, *more))


def converted_terms(executable: Executable) -> Iterator[tuple[int, int]]:
    """(task, bytes) of sums whose terms travel in another precision: a term is rounded, and then
    converted to be added. Tasks are those of the plain lowering."""
    became = executable.tasks.became.tolist()
    plain = {task: number for number, task in enumerate(became)}
    for task, copies in executable.copies.items():
        need = 0
        for copy in copies:
            own = executable.slots[copy.source].dtype
            if copy.dtype != own:
                count = copy.nbytes // copy.dtype.itemsize
                rounded = 0 if copy.message >= 0 else copy.nbytes
                need = max(need, rounded + (count * own.itemsize if copy.term else 0))
        if need:
            yield plain.get(task, task), need


def signature(kind: str, body: Body | None, part: Part, inputs: Sequence[Any]) -> str:
    """The text by which the cost of a call is known: `aten.mm.default(float32[8,4]) #0a1b2c3d4e`.

    Inputs are (shape, stride, dtype), or the region of a block of zeros. Strides are left out where
    they are dense; what else the cost depends on is in the digest.
    """
    args: tuple[Any, ...] = part.args
    if kind == RANDOM_UNIFORM:
        args = (args[0], args[2])  # not which numbers are drawn
    digest = hashlib.sha256(repr((body, args, part.pads, part.scales)).encode()).hexdigest()
    return f"{kind}({' '.join(map(_input, inputs))}) #{digest[:10]}"


def assembly(
    shape: tuple[int, ...],
    kind: torch.dtype,
    boxes: Sequence[AssembledBox],
    strides: Sequence[Stride],
) -> str:
    """The same for a region that is put together: from so many boxes, received (`message`), or of
    local tensors with their strides; further terms are added."""
    taken = tuple(
        (
            box.sizes,
            box.adds,
            "message" if box.source < 0 else (box.source_sizes, strides[box.source]),
        )
        for box in boxes
    )
    digest = hashlib.sha256(repr(taken).encode()).hexdigest()
    name = str(kind).removeprefix("torch.")
    return f"{ASSEMBLY}({name}[{','.join(map(str, shape))}] {len(taken)}) #{digest[:10]}"


def _input(given: Any) -> str:
    if len(given) != 3 or not isinstance(given[2], torch.dtype):
        return f"zeros{list(lengths(given))}".replace(" ", "")
    shape, stride, kind = given
    strides = "" if stride == dense_stride(shape) else f":{','.join(map(str, stride))}"
    return f"{str(kind).removeprefix('torch.')}[{','.join(map(str, shape))}{strides}]"


class _DryRun:
    """A walk over all tasks in stretches: the parts of an Op, or the assemblies before or after
    them. A stretch that is like an earlier one, as those of equal layers are, is not looked at
    again. A slot's *form* is the number of its (shape, stride, dtype)."""

    def __init__(
        self,
        executable: Executable,
        threads: int | None,
        memory_facts: DeviceMemoryFacts | None = None,
    ) -> None:
        self.executable = executable
        self.space = executable.space
        self.graph = executable.graph
        self.strategy = executable.strategy
        self.tasks = executable.tasks
        self.assemblies = executable.tasks.assemblies
        self.threads = threads
        self.memory_facts = memory_facts or DeviceMemoryFacts()
        self.on_gpu = memory_facts is not None
        like = "cuda" if self.on_gpu else "cpu"
        self.context = Context(0, 0, lambda expression: 1.0, self.graph.bodies, "meta", like)
        self.forms: dict[Form, int] = {}
        self.formed: list[Form] = []
        self.found: dict[tuple[Any, ...], _CallStorage] = {}
        self.put_together: dict[tuple[Any, ...], _CallStorage] = {}
        self.stretches: dict[tuple[Any, ...], _RunStorage] = {}
        self.known: dict[int, Sequence[Part]] = {}  # what stretches are known by, kept alive
        self.works: dict[str, int] = {}
        slots = len(self.tasks.slot_device)
        self.dense = self._dense_forms()
        self.form = np.full(slots + 1, -1)  # the last one is for an input that is no slot
        self.shared = np.full(slots, -1)  # the slot whose storage a kernel gave back
        self.nbytes = self.tasks.slot_nbytes.copy()
        self.decided = np.zeros(slots, bool)  # by a kernel, not by lowering
        self.workspace = np.zeros(len(self.tasks), np.int64)
        self.work = np.full(len(self.tasks), -1)

    def run(self, fused: bool = True) -> Storage:
        tasks = self.tasks
        begin = np.flatnonzero(tasks.slot_first == -1)
        self.form[begin] = self.dense[begin]
        change = (np.diff(tasks.kind) != 0) | (np.diff(tasks.op) != 0)
        ends = [*(np.flatnonzero(change) + 1).tolist(), len(tasks)] if len(tasks) else []
        low = 0
        for high in ends:
            if tasks.kind[low] in DRY_RUNS:
                DRY_RUNS[int(tasks.kind[low])](self, low, high)
            low = high
        kept = self._updates() if fused and len(tasks) <= MOST_TASKS else {}
        if self.on_gpu:  # a batch is staged there beside its slots (feed.py)
            self.workspace[tasks.task_kinds.is_host_work[tasks.kind]] = 0  # it is the host's
            computes = tasks.kind == COMPUTE
            given = begin[np.array([self._is_input(slot) for slot in begin.tolist()], bool)]
            staged = np.bincount(tasks.slot_device[given], tasks.slot_nbytes[given], tasks.devices)
            self.workspace[computes] += staged.astype(np.int64)[tasks.device[computes]]
        work, needed = self.work, self.workspace
        if len(tasks.became):
            work, needed = work[tasks.became], needed[tasks.became]
        used = np.flatnonzero(needed)
        workspace = zip(used.tolist(), needed[used].tolist(), strict=True)
        return Storage(
            self._slots(), tuple(workspace), tuple(self.works), tuple(work.tolist()),
            tuple(kept.items()),
        )  # fmt: skip

    def _updates(self) -> dict[int, int]:
        """Notes what fused updates need; returns slots that they need longer, and until when."""
        dense = self.form[:-1] == self.dense
        memory = update_memory(self.executable, self._roots(), dense)
        for new, old in memory.shared.items():
            self.shared[new], self.decided[new] = old, True
        resident = self.memory_facts.resident
        self.workspace[list(memory.tasks)] = resident
        for task, nbytes in memory.workspace.items():
            self.workspace[task] = max(int(self.workspace[task]), nbytes + resident)
        became = self.tasks.became
        if not len(became):
            return memory.kept
        was = dict(zip(became.tolist(), range(len(became)), strict=True))
        return {slot: was[task] for slot, task in memory.kept.items()}

    def _roots(self) -> Ints:
        """For every slot the one whose storage it shares, itself if none."""
        root = np.where(self.shared >= 0, self.shared, np.arange(len(self.shared)))
        while (root != root[root]).any():
            root = root[root]
        return root

    def _is_input(self, slot: int) -> bool:
        return self.graph.values[int(self.tasks.slot_value[slot])].role == INPUT

    def _dense_forms(self) -> Ints:
        """The form of every slot if its tensor is dense."""
        tasks, atoms = self.tasks, self.space.atoms
        kinds: dict[Any, int] = {}
        kind = [
            kinds.setdefault((dims, value.dtype), len(kinds))
            for dims, value in zip(atoms.dims, self.graph.values, strict=True)
        ]
        regions = self.assemblies.regions
        key = np.array(kind, np.int64)[tasks.slot_value] * len(regions) + tasks.slot_region
        found, first, which = np.unique(key, return_index=True, return_inverse=True)
        forms = []
        for value, region in zip(
            tasks.slot_value[first].tolist(), (found % max(len(regions), 1)).tolist(), strict=True
        ):
            shape = local_shape(self.space, value, regions[region])
            name = self.graph.values[value].dtype or ""
            forms.append(self._form((shape, dense_stride(shape), dtype(name))))
        dense: Ints = np.array(forms, np.int64)[which]
        return dense

    def _form(self, form: Form) -> int:
        number = self.forms.setdefault(form, len(self.forms))
        if number == len(self.formed):
            self.formed.append(form)
        return number

    def _slots(self) -> tuple[tuple[int, int, int], ...]:
        """Where the bytes of slots are and how many, where that is not what was planned."""
        tasks, root = self.tasks, self._roots()
        found = np.where(self.shared >= 0, root, -1)
        planned = np.where(tasks.slot_base >= 0, root[tasks.slot_base], -1)
        other = (found < 0) & (self.nbytes != tasks.slot_nbytes)
        slots = np.flatnonzero(self.decided & ((found != planned) | other))
        rows = zip(slots.tolist(), found[slots].tolist(), self.nbytes[slots].tolist(), strict=True)
        return tuple(rows)

    def _settle(self, low: int, stretch: _RunStorage, ins: Ints, outs: Ints) -> None:
        """Notes what a stretch from task `low` on leaves; its slots by task and argument."""
        high = low + len(stretch.work)
        self.work[low:high] = stretch.work
        self.workspace[low:high] = stretch.workspace
        self.form[outs] = stretch.form
        if stretch.plain:
            return
        self.decided[outs] = stretch.decided
        self.nbytes[outs] = np.where(stretch.nbytes < 0, self.nbytes[outs], stretch.nbytes)
        if ins.shape[1]:
            source = np.take_along_axis(ins, np.maximum(stretch.alias, 0), axis=1)
            self.shared[outs] = np.where(stretch.alias < 0, -1, source)

    def assembles(self, low: int, high: int) -> None:
        """Assemblies, in runs of which none reads what another one makes."""
        starts = self.tasks.in_start
        made = self.tasks.slot_first[self.tasks.in_slot[starts[low] : starts[high]]]
        while low < high:
            inside = np.flatnonzero(made[starts[low] - starts[high] :] >= low)
            if starts[low] == starts[high] or not len(inside):
                self._assembled(low, high)
                return
            cut = int(np.searchsorted(starts, starts[low] + inside[0], side="right")) - 1
            self._assembled(low, cut)
            low = cut

    def _assembled(self, low: int, high: int) -> None:
        tasks = self.tasks
        outs = tasks.out_slot[tasks.out_start[low] : tasks.out_start[high]]
        ins = tasks.in_slot[tasks.in_start[low] : tasks.in_start[high]]
        way, meant, sources = self.assemblies.which[low:high], self.dense[outs], self.form[ins]
        view = tasks.slot_base[outs] >= 0
        key = (way.tobytes(), meant.tobytes(), sources.tobytes(), view.tobytes())
        found = self.stretches.get(key)
        start = tasks.in_start[low : high + 1] - tasks.in_start[low]
        if found is None:
            calls = [
                self._assembly(*row, tuple(sources[start[k] : start[k + 1]].tolist()))
                for k, row in enumerate(
                    zip(way.tolist(), meant.tolist(), view.tolist(), strict=True)
                )
            ]
            found = self.stretches[key] = self._stretch(calls, view[:, None])
        first = np.append(ins, -1)[np.minimum(start[:-1], len(ins))]
        self._settle(low, found, first[:, None], outs[:, None])

    def _assembly(self, way: int, meant: int, view: bool, sources: tuple[int, ...]) -> _CallStorage:
        """One region put together from slots of these forms; a view shares the first one's bytes
        if that can be."""
        key = (way, meant, view, sources)
        call = self.put_together.get(key)
        if call is None:
            shape, stride, kind = self.formed[meant]
            boxes = self.assemblies.distinct[way]
            given = tuple(self.formed[f] for f in sources)
            text = assembly(shape, kind, boxes, tuple(form[1] for form in given))
            result = _OutputStorage(-1, stride, -1)
            if view:
                source = self._meta(given[0])
                corner = tuple(slice(0, n) for n in boxes[0].sizes)
                box = source.reshape(boxes[0].source_sizes)[corner].reshape(shape)
                result = _OutputStorage(0 if same_storage(box, source) else -1, box.stride(), -1)
            number = self.works.setdefault(text, len(self.works))
            form = self._form((shape, result.stride, kind))
            call = self.put_together[key] = _CallStorage((result,), 0, number, (form,))
        return call

    def computes(self, low: int, high: int) -> None:
        """The parts of one Op."""
        tasks, index = self.tasks, int(self.tasks.op[low])
        op, choice = self.graph.ops[index], self.strategy.choices[index]
        ins = tasks.in_slot[tasks.in_start[low] : tasks.in_start[high]].reshape(high - low, -1)
        outs = tasks.out_slot[tasks.out_start[low] : tasks.out_start[high]].reshape(high - low, -1)
        parts = self.space.split(index, choice.parts).parts
        part, forms = tasks.part[low:high] % choice.count, self.form[ins]
        dense, joined = self.dense[outs], tasks.call[low:high]
        key = (
            op.kind, op.body, id(parts), part.tobytes(), forms.tobytes(), dense.tobytes(),
            joined.tobytes(),
        )  # fmt: skip
        found = self.stretches.get(key)
        if found is None:
            calls = [
                self._compute(
                    *self._called(low + k, op, parts[number]), tuple(given), tuple(meant), low + k
                )
                for k, (number, given, meant) in enumerate(
                    zip(part.tolist(), forms.tolist(), dense.tolist(), strict=True)
                )
            ]
            found = self._stretch(calls, np.ones(outs.shape, bool))
            self.stretches[key], self.known[id(parts)] = found, parts
        self._settle(low, found, ins, outs)

    def _called(self, task: int, op: Op, part: Part) -> tuple[Op, Part]:
        """The Op and the Part of which a task calls the kernel."""
        if not len(self.tasks.call) or self.tasks.call[task] < 0:
            return op, part
        return joined_part(self.tasks, op, task, self.assemblies.regions)

    def _compute(
        self, op: Op, part: Part, forms: tuple[int, ...], meant: tuple[int, ...], task: int
    ) -> _CallStorage:
        shaped = (_weighty(op.kind, part.args), part.zeros, part.pads, part.scales)
        zeros = tuple(part.inputs[k] if f < 0 else f for k, f in enumerate(forms))
        key = (op.kind, op.body, *shaped, zeros, meant)
        call = self.found.get(key)
        if call is None:
            body = None if op.body is None else self.graph.bodies[op.body]
            given = [self.formed[f] if f >= 0 else None for f in forms]
            inputs = [part.inputs[k] if x is None else x for k, x in enumerate(given)]
            text = signature(op.kind, body, part, inputs)
            number = self.works.setdefault(text, len(self.works))
            call = self._run(op, part, given)
            flops, nbytes = float(self.tasks.flops[task]), int(self.tasks.nbytes[task])
            usual = self.memory_facts.usual(op.kind, nbytes, text, flops)
            guess = max(call.workspace, usual)
            workspace = self.memory_facts.workspaces.get(text, guess) + self.memory_facts.resident
            left = tuple(
                self._form((self.formed[m][0], result.stride, self.formed[m][2]))
                for m, result in zip(meant, call.results, strict=True)
            )
            call = self.found[key] = _CallStorage(call.results, workspace, number, left)
        return call

    def _stretch(self, calls: Sequence[_CallStorage], decided: Bools) -> _RunStorage:
        """The calls of a stretch in columns."""
        results = [[(r.alias, r.nbytes) for r in call.results] for call in calls]
        made = np.array(results, np.int64).reshape(*decided.shape, 2)
        return _RunStorage(
            np.array([call.work for call in calls], np.int64),
            np.array([call.workspace for call in calls], np.int64),
            np.array([call.forms for call in calls], np.int64).reshape(decided.shape),
            made[..., 0], made[..., 1], decided, plain=not decided.any(),
        )  # fmt: skip

    def _meta(self, form: Form) -> torch.Tensor:
        shape, stride, kind = form
        return torch.empty_strided(shape, stride, dtype=kind, device="meta")

    def _run(self, op: Op, part: Part, given: Sequence[Form | None]) -> _CallStorage:
        """One call on tensors without data; where there is none, a block of zeros is meant."""
        tensors = [None if form is None else self._meta(form) for form in given]
        try:
            with AllocationTracker(self.threads) as allocations:
                outs = run_part(self.space, op, part, tensors, self.context)
        except (RuntimeError, ValueError, NotImplementedError):
            return self._unknown(op, part)  # a kernel that does not run without data
        results, held = [], 0
        for out in outs:
            alias = next(
                (k for k, x in enumerate(tensors) if x is not None and same_storage(x, out)), -1
            )
            nbytes = allocations.nbytes(out)
            held += nbytes if alias < 0 else 0
            results.append(_OutputStorage(alias, out.stride(), nbytes))
        workspace = max(allocations.peak - held, 0)
        if op.kind == HOST_UPDATE_KIND and op.body is not None:
            recipe, forms = self.graph.bodies[op.body].recipe, [x for x in given if x is not None]
            made = [(out.shape, out.dtype) for out in outs]
            workspace = host_workspace(recipe, [(x[0], x[2]) for x in forms], made, workspace)
        return _CallStorage(tuple(results), workspace)

    def _unknown(self, op: Op, part: Part) -> _CallStorage:
        space, found = self.space, []
        for value, region in zip(op.outputs, part.outputs, strict=True):
            shape = local_shape(space, value, region)
            nbytes = math.prod(shape) * dtype(space.graph.values[value].dtype or "").itemsize
            found.append(_OutputStorage(-1, dense_stride(shape), nbytes))
        return _CallStorage(tuple(found), 0)


# By kind of task: a registry, so that a kind that is added to the table is looked at by an entry
# here. Other kinds leave their slots as lowering planned them.
DRY_RUNS: dict[int, Callable[[_DryRun, int, int], None]] = {
    **dict.fromkeys(CALLING, _DryRun.computes),
    ASSEMBLE: _DryRun.assembles,
}


def _weighty(kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call that what it allocates depends on."""
    if kind != RANDOM_UNIFORM:
        return args
    places = args[3] if len(args) > 3 else ()  # (factor, low, high) of every atom
    sizes = tuple(tuple(high - low for _, low, high in atoms) for atoms in places)
    return (args[0], args[2], sizes)  # not which numbers are drawn


def dense_stride(shape: Sequence[int]) -> Stride:
    """The strides of a dense tensor."""
    stride, size = [], 1
    for n in reversed(shape):
        stride.append(size)
        size *= max(n, 1)
    return tuple(reversed(stride))
