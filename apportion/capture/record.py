"""Recorder: what torch runs, call by call, on fake tensors, made functional.

The first station of capture/: a function goes in, a Trace (trace.py) comes out.

A Recorder is a dispatch mode below autograd. Every tensor it meets gets a *slot*; every operator
becomes a RecordedCall whose tensors are `Ref(slot)`. An in-place operator on a tensor that shares
its memory with nobody becomes its functional twin and the tensor's slot is renamed; if views are
mutated, the whole trace is replayed once under torch's functionalization. Random operators follow
random_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.call_place import call_place
from apportion.capture.ctc_calls import recorded_ctc_loss
from apportion.capture.data_shapes import (
    ShapeFromData,
    deciding,
    fixed_result,
    shape_refusal,
    with_fixed_shape,
)
from apportion.capture.fake_kernels import FAKES, READS
from apportion.capture.functional_twins import functional_twin
from apportion.capture.memory_order import MEMORY_CALLS, in_memory_order
from apportion.capture.module_paths import ModulePaths, module_paths
from apportion.capture.packed_calls import padded
from apportion.capture.random_rules import RANDOM_RULES, DrawNumbering
from apportion.capture.same_recordings import same_computation
from apportion.capture.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    fake_arithmetic,
    fake_data,
    fake_to_others,
    fake_values,
    is_composite,
    modules_moved_to_where_they_are,
    newest_autograd_node,
    padding_by,
    running_autograd_node,
    schema,
    storage_id,
    without_mkldnn,
    without_modes,
)
from apportion.capture.trace import (
    RANDOM_UNIFORM,
    CallSite,
    CaptureError,
    RecordedCall,
    TensorType,
    Trace,
    dtype_name,
    flat_results,
)
from apportion.capture.user_line import at_line, user_line, user_line_of
from apportion.capture.value_reads import ReadValues, read_extremes
from apportion.capture.written_tensors import TensorWrites, untouched_result
from apportion.without_dynamo import leave_unloaded

# Before anything is recorded, because a dispatch mode would load torch's compiler when it is first
# used; where that is loaded already, this does nothing.
leave_unloaded()

aten = torch.ops.aten

# Tagged as random because of their dropout, which torch never gives them on a CPU.
NOT_REALLY_RANDOM = frozenset([aten._scaled_dot_product_flash_attention_for_cpu.default])


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have no data; real tensors may meet them and become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def record(
    function: Callable[..., Sequence[torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    model: ModulePaths | None = None,
    reads: ReadValues | None = None,
) -> Trace:
    """Runs `function(recorder, *inputs)` on fake inputs and returns its functional trace.

    Where the function wants to know a value, which fake tensors do not have, `reads` answers;
    without it, and where a shape depends on data, CaptureError is raised.
    """
    recorder = Recorder(mode, reads)
    slots = tuple(recorder.slot(x) for x in inputs)
    with (
        mode,
        torch.random.fork_rng(devices=[]),
        without_mkldnn(),
        module_paths(recorder.modules, model),
    ):
        recorder.numbering = DrawNumbering()
        with (
            recorder, fake_data(recorder.set_data), _values_of_fakes(recorder),
            modules_moved_to_where_they_are(), _numpy_refused_in_our_words(),
        ):  # fmt: skip
            outputs = function(recorder, *inputs)
    trace = recorder.trace(slots, outputs)
    return _functionalize(trace, mode) if recorder.mutates else trace


class Recorder(TorchDispatchMode):
    """Records every operator that reaches the dispatcher below autograd.

    slots       the slot of a tensor, by its id
    sharers     how many recorded tensors lie in each memory
    phase       of what runs now
    modules     the paths of the modules that run now, the innermost last
    mutates     whether something was recorded that writes to a tensor
    fixed_site  the site of everything that is recorded, where it is not the place that runs now
    sequence    the newest autograd node when the last call was recorded
    made_leaves  slots of tensors that no call has made and that were not given either
    overwritten  of each memory that got a new value by renaming: which tensor it belongs to, and
                the first slot of the time after
    stale       whether another tensor in such a memory was read after that
    reads       who answers when the step wants to know a value
    stranger    called with each new slot of a fake tensor, which another recorder may have seen
    writes      who notes writes to tensors that are no inputs
    left_before slots of tensors that another recorder has made; the last inputs of the trace
    """

    def __init__(self, mode: FakeTensorMode, reads: ReadValues | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.calls: list[RecordedCall] = []
        self.tensors: list[torch.Tensor] = []  # keeps ids unique while recording
        self.types: list[TensorType] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.slots: dict[int, int] = {}
        self.sharers: dict[int, int] = {}
        self.phase = g.FORWARD
        self.modules: list[str] = []
        self.mutates = False
        self.fixed_site: CallSite | None = None
        self.sequence = newest_autograd_node()
        self.numbering: DrawNumbering | None = None
        self.made_leaves: list[int] = []
        self.overwritten: dict[int, tuple[int, int]] = {}
        self.stale = False
        self.reads = reads
        self.stranger: Callable[[Recorder, int], None] | None = None
        self.left_before: list[int] = []
        self.writes: TensorWrites | None = None

    def slot(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor, new if it was never seen."""
        known = self.slots.get(id(tensor))
        if known is not None:
            if self.overwritten:
                self._look_for_stale(tensor, known)
            return known
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"the step makes a tensor of layout {tensor.layout}{at_user_line()}; only dense "
                "tensors are supported, so use sparse=False or to_dense()"
            )
        index = len(self.tensors)
        self.tensors.append(tensor)
        self.types.append((tuple(tensor.shape), tensor.dtype))
        self.slots[id(tensor)] = index
        if not isinstance(tensor, FakeTensor):
            with without_modes():
                self.constants[index] = tensor.detach()
        elif self.stranger is not None:
            self.stranger(self, index)
        self.sharers[storage_id(tensor)] = self.sharers.get(storage_id(tensor), 0) + 1
        return index

    def _owns_memory(self, tensor: torch.Tensor) -> bool:
        """Whether no other recorded tensor shares its memory."""
        return self.sharers.get(storage_id(tensor), 0) <= 1

    def trace(self, inputs: tuple[int, ...], outputs: Sequence[torch.Tensor | None]) -> Trace:
        """What was recorded, ending in the given results."""
        ends = tuple(None if x is None else self.slot(x) for x in outputs)
        begins = (*inputs, *self.made_leaves, *self.left_before)
        return Trace(tuple(self.calls), tuple(self.types), self.constants, begins, ends)

    # what own_loop.py needs

    def new_leaf(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor that no call has made; one more input of the trace."""
        leaf = self._empty(shape, dtype)
        self.made_leaves.append(self.slot(leaf))
        return leaf

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with without_modes(), self.mode:
            # the operator itself, whose dtype no mode of the step replaces
            made: torch.Tensor = aten.empty.memory_format(tuple(shape), dtype=dtype, device="cpu")
            return made

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same value in a memory of its own, so that it can be changed by renaming."""
        slot, copy = self.slot(tensor), self._empty(tensor.shape, tensor.dtype)
        self.slot(copy)
        self.slots[id(copy)] = slot
        return copy

    def overwrite(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Gives `target` a new value by renaming, though others may see its memory; if one of them
        is read later, `stale` says so."""
        self.slots[id(target)] = self.slot(value)
        self.overwritten[storage_id(target)] = (id(target), len(self.tensors))
        torch.autograd.graph.increment_version(target)

    def set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """What `target.data = value` does: the name of a tensor is given to another value. Views of
        the tensor that was there keep theirs."""
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise CaptureError(
                f"the step sets .data of a tensor to one of another shape or dtype"
                f"{at_user_line()}; make a new tensor instead"
            )
        self.slot(target)
        self.slots[id(target)] = self.slot(value)
        torch.autograd.graph.increment_version(target)

    def _look_for_stale(self, tensor: torch.Tensor, known: int) -> None:
        owner, since = self.overwritten.get(storage_id(tensor), (id(tensor), 0))
        self.stale = self.stale or (id(tensor) != owner and known < since)

    def after_backward(self) -> None:
        """Forgets the autograd nodes that a backward has made."""
        self.sequence = newest_autograd_node()

    # the interface of a UniformSource (random_rules.py)

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor, and the call that draws it, which is recorded."""
        assert self.numbering is not None
        with without_modes():
            key = self.numbering.next()
            with self.mode:
                value = torch.empty(tuple(size), dtype=dtype, device="cpu")
        args = (tuple(size), key, g.Dtype(dtype_name(dtype)))
        self.calls.append(RecordedCall(RANDOM_UNIFORM, args, {}, (self.slot(value),), self._site()))
        return value

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Overwrites `target` with a fresh `value`, by renaming if nobody else sees its memory."""
        if not self._owns_memory(target):
            return target.copy_(value)
        self.slots[id(target)] = self.slot(value)
        return target

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func in RANDOM_RULES:
            with self:
                return RANDOM_RULES[func](self, *args, **kwargs)
        if func in READS and any(map(_has_no_data, args[:2])):
            return self._read(func, args, kwargs)
        self._refuse_unsupported(func, args)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.native_batch_norm.default and args[5] and args[3] is not None:
            return self._batch_norm(args)
        if func is aten.where.self and args[0].dtype == torch.uint8:
            with self:  # the mask of old programs, which torch still takes and its fakes do not
                return torch.where(args[0].bool(), *args[1:])
        if func in MEMORY_CALLS:
            order = in_memory_order(func, args, at_user_line)
            if order is not None:
                return self._in_memory_order(func, order, args, kwargs)
        if schema(func).is_mutable:
            return self._mutate(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:
            known = fixed_result(func, args, kwargs, self.fixed)
            if known is not None:
                return self._kept(known)
        try:
            result = self._run(func, args, kwargs)
        except ShapeFromData:
            with self:
                result = with_fixed_shape(func, args, self.fixed)
            if result is None:
                fixable = self.fixable(deciding(func, args))
                raise shape_refusal(func, call_place(record.__code__), fixable) from None
            packed = func is aten._pack_padded_sequence.default
            return result if packed else self._kept(result)
        self._append(func, args, kwargs, result)
        return result

    def _in_memory_order(self, func: Any, order: Sequence[int], args: Any, kwargs: Any) -> Any:
        """A call that addresses memory, on the tensor in the order of its memory."""
        with self:
            result = func(args[0].permute(order), *args[1:], **kwargs)
            if func is aten.as_strided.default:
                return result
            return result.permute([order.index(d) for d in range(len(order))])

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that is the same in every step."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if tensor.constant is not None:
            constant: torch.Tensor = tensor.constant
            return constant
        return None if self.reads is None else self.reads.fixed(tensor)

    def fixable(self, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The tensors of the batch that alone decide the values of these; none where something else
        does, too."""
        fakes = [x for x in tensors if _has_no_data(x)]
        return () if self.reads is None else self.reads.fixable(fakes)

    def _kept(self, result: Any) -> Any:
        """Tensors that were computed once and for all, as constants that the step may write to."""
        if isinstance(result, list | tuple):
            return type(result)(self._kept(each) for each in result)
        if not isinstance(result, torch.Tensor) or isinstance(result, FakeTensor):
            return result
        fake = self._empty(result.shape, result.dtype)
        self.constants[self.slot(fake)] = result
        return fake

    def _append(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = self._with_refs(tuple(args))
        named = {key: self._with_refs(value) for key, value in kwargs.items()}
        outputs = tuple(
            self.slot(x) if isinstance(x, torch.Tensor) else None for x in flat_results(result)
        )
        if any(x is not None for x in outputs) or schema(func).is_mutable:
            self.calls.append(RecordedCall(func, given, named, outputs, self._site()))

    def _with_refs(self, value: Any) -> Any:
        """An argument with the slots of its tensors in their place."""
        if isinstance(value, torch.Tensor):
            return g.Ref(self.slot(value))
        if isinstance(value, list | tuple):
            return tuple(self._with_refs(x) for x in value)
        return value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return FAKES.get(func, func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise shape_refusal(func, call_place(record.__code__)) from None
        except (UnsupportedOperatorException, UnsupportedFakeTensorException):
            raise CaptureError(
                f"{func} has no fake kernel{at_user_line()}; register one with "
                "torch.library.register_fake"
            ) from None

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A value that the step wants to know."""
        if self.reads is None:
            raise CaptureError(
                f"the step reads a tensor's value as a Python number{at_user_line()}; a captured "
                "step must not depend on data, so keep it a tensor (torch.where instead of if) or "
                "move it out of the step"
            )
        if len(args) > 1 and self._made_alike(args[0], args[1]):
            return True
        with self:
            asked = READS[func](*args, **kwargs)
        return asked if isinstance(asked, bool) else self.reads.number(asked)

    def _made_alike(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Whether two tensors are equal whatever the data is, as they are computed alike."""
        if self.mutates:
            return False
        slots = (self.slot(one), self.slot(two))
        with without_modes():  # constants are compared by their values
            return same_computation(self.trace((), ()), *slots)

    def _refuse_unsupported(self, func: Any, args: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags and func not in NOT_REALLY_RANDOM:
            raise CaptureError(
                f"the random operator {func}{at_user_line()} is not supported; use dropout, "
                "rand, randn, randint, randperm, bernoulli, multinomial or another one that draws "
                "each element by itself, or draw it outside and pass it in the batch"
            )
        if func in _FACTORED_BY_STRIDES and not args[0].is_contiguous():
            raise CaptureError(
                f"{func} of a matrix that is not contiguous{at_user_line()} keeps other factors "
                "than of one that is; give it matrix.contiguous()"
            )

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the functional twin of an in-place operator, if its tensor shares its memory with
        nobody; else records the operator as it is, and the trace will be replayed."""
        if self.writes is not None and self.writes.note_call(self, func, args, kwargs):
            return untouched_result(args, kwargs)
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        twin = functional_twin(func)
        if target is not None and not isinstance(target, FakeTensor):
            raise CaptureError(
                f"the step changes a tensor that is no parameter and no buffer{at_user_line()}; "
                "register it with register_buffer"
            )
        if target is None or twin is None or not self._owns_memory(target):
            result = self._run(func, args, kwargs)
            self._append(func, args, kwargs, result)
            self.mutates = True
            return result
        with self:
            value = twin(*args, **kwargs)
            value = value if value.dtype == target.dtype else value.to(target.dtype)
        result = self._run(func, args, kwargs)
        self.slots[id(target)] = self.slots[id(value)]
        return target

    def _batch_norm(self, args: Any) -> Any:
        """The schema of native_batch_norm hides that it updates the running statistics."""
        if self.writes is not None:
            self.writes.note(self, args[3:5])
        with self:
            *results, mean, variance = aten._native_batch_norm_legit_functional.default(*args)
            self.assign(args[3], mean)
            self.assign(args[4], variance)
        return tuple(results)

    def _site(self) -> CallSite:
        if self.fixed_site is not None:
            return self.fixed_site
        module = self.modules[-1] if self.modules else ""
        node = running_autograd_node()
        if node is not None:
            return CallSite(self.phase, _user_line(), module, node)
        if self.phase != g.FORWARD:
            return CallSite(self.phase)
        # the node of this operator, if it has one, was made just before the call came here
        before, self.sequence = self.sequence, newest_autograd_node()
        own = self.sequence if self.sequence > before else None
        return CallSite(self.phase, _user_line(), module, own)


def _user_line() -> str:
    """The user's line that runs now, inside the recorded function."""
    return user_line(record.__code__)


def at_user_line() -> str:
    """` at file.py:12`, the user's line that runs now inside the recorded function."""
    return at_line(_user_line())


def _has_no_data(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


_FACTORED_BY_STRIDES = (
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
)
"""Operators that factor the transpose of a contiguous matrix, which their backward relies on. A
part may have other strides than the captured tensor; our kernels therefore make it contiguous."""


# replay under torch's functionalization, for mutated views


def _functionalize(trace: Trace, mode: FakeTensorMode) -> Trace:
    """The trace with its remaining mutations removed."""
    leaves = [*trace.inputs, *trace.constants, *_drawn_slots(trace)]
    with without_modes(), mode:
        tensors = [
            torch.empty(trace.types[s][0], dtype=trace.types[s][1], device="cpu") for s in leaves
        ]
    recorder = Recorder(mode)
    slots = [recorder.slot(x) for x in tensors]
    for slot, leaf in zip(slots, leaves, strict=True):
        if leaf in trace.constants:
            recorder.constants[slot] = trace.constants[leaf]
    positions = {leaf: slot for slot, leaf in zip(slots, leaves, strict=True)}

    def replay(*wrapped: torch.Tensor) -> list[torch.Tensor | None]:
        table: dict[int, Any] = dict(zip(leaves, wrapped, strict=True))
        for call in trace.calls:
            recorder.fixed_site = call.site
            if call.target == RANDOM_UNIFORM:
                assert call.outputs[0] is not None
                drawn = positions[call.outputs[0]]
                recorder.calls.append(RecordedCall(call.target, call.args, {}, (drawn,), call.site))
                continue
            _replay_call(call, table)
        return [None if s is None else table[s] for s in trace.outputs]

    # autograd is over: only kernels are left, on tensors that need no gradient
    with mode, torch.no_grad(), without_mkldnn(), recorder:
        outputs = torch.func.functionalize(replay, remove="mutations")(*tensors)
    return recorder.trace(tuple(slots[: len(trace.inputs)]), outputs)


def _drawn_slots(trace: Trace) -> list[int]:
    drawn = [call.outputs[0] for call in trace.calls if call.target == RANDOM_UNIFORM]
    return [slot for slot in drawn if slot is not None]


def _replay_call(call: RecordedCall, table: dict[int, Any]) -> None:
    args = g.substitute(call.args, table)
    kwargs = {k: g.substitute(v, table) for k, v in call.kwargs.items()}
    for slot, value in zip(call.outputs, flat_results(call.target(*args, **kwargs)), strict=True):
        if slot is not None:
            table[slot] = value


@contextmanager
def _values_of_fakes(recorder: Recorder) -> Iterator[None]:
    """Lets `recorder.reads` answer what does not pass the dispatcher, or loses its type there."""
    reads = recorder.reads
    if reads is None:
        yield
        return
    reads.begin(recorder)
    values = fake_values(
        lambda tensor: reads.number(tensor, followed=True),
        reads.as_float,
        reads.array,
    )
    ctc_loss = recorded_ctc_loss(recorder, lambda: call_place(record.__code__))
    with (
        values,
        fake_to_others(reads.is_open),
        ctc_loss,
        padding_by(padded),
        fake_arithmetic(reads.operand),
        read_extremes(reads),
    ):
        yield


@contextmanager
def _numpy_refused_in_our_words() -> Iterator[None]:
    """NumPy does not pass the dispatcher, so torch's own refusal is put into our words."""
    try:
        yield
    except RuntimeError as error:
        if ".numpy()" not in str(error):
            raise
        raise CaptureError(
            f"the step converts a tensor to NumPy{at_line(user_line_of(error))}; NumPy cannot be "
            "captured, so use torch's functions or move it out of the step"
        ) from None
