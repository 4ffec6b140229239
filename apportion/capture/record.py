"""Recorder: what torch runs, call by call, on fake tensors, made functional.

A Recorder is a dispatch mode below autograd. Every tensor it meets gets a *slot*; every operator
becomes a Call whose tensors are `Ref(slot)`. An in-place operator on a tensor that shares its
memory with nobody becomes its functional twin and the tensor's slot is renamed; if views are
mutated, the whole trace is replayed once under torch's functionalization. Random operators follow
random.py. Private torch interfaces are confined to this file, optimizer.py and capture.py.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from apportion import graph as g
from apportion.capture.counter_random import RULES, Numbering
from apportion.without_dynamo import leave_unloaded

leave_unloaded()

aten = torch.ops.aten

RANDOM_UNIFORM = "apportion.random_uniform"

# Tagged as random because of their dropout, which torch never gives them on a CPU.
HARMLESS = frozenset([aten._scaled_dot_product_flash_attention_for_cpu.default])
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = str(Path(os.__file__).parent) + os.sep


Type = tuple[tuple[int, ...], torch.dtype]


class CaptureError(ValueError):
    """The step cannot be captured; the message says what, where, and a way out."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a Call comes from: phase, user line, module path, and autograd's number of its node."""

    phase: str = g.FORWARD
    line: str = ""
    module: str = ""
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call as recorded: `target` is an overload, or our own kind's name."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    site: Site


@dataclass(frozen=True)
class Trace:
    """A functional list of Calls. `types` and `constants` give a slot's type and found data."""

    calls: tuple[Call, ...]
    types: tuple[Type, ...]
    constants: dict[int, torch.Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have no data; real tensors may meet them and become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def record(
    function: Callable[..., Sequence[torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    model: torch.nn.Module | None = None,
) -> Trace:
    """Runs `function(recorder, *inputs)` on fake inputs and returns its functional trace.

    Raises CaptureError where the result depends on data, which fake tensors do not have.
    """
    recorder = Recorder(mode)
    slots = tuple(recorder.slot(x) for x in inputs)
    with mode, torch.random.fork_rng(devices=[]), _quiet_kernels(), _module_paths(recorder, model):
        recorder.numbering = Numbering()
        with recorder, _no_numpy():
            outputs = function(recorder, *inputs)
    trace = recorder.trace(slots, outputs)
    return _functionalized(trace, mode) if recorder.mutates else trace


class Recorder(TorchDispatchMode):
    """Records every operator that reaches the dispatcher below autograd."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.calls: list[Call] = []
        self.tensors: list[torch.Tensor] = []  # keeps ids unique while recording
        self.types: list[Type] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.slots: dict[int, int] = {}
        self.sharers: dict[int, int] = {}
        self.phase = g.FORWARD
        self.modules: list[str] = []
        self.mutates = False
        self.replayed: Site | None = None
        self.sequence = _newest_node()
        self.numbering: Numbering | None = None

    def slot(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor, new if it was never seen."""
        known = self.slots.get(id(tensor))
        if known is not None:
            return known
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"the step makes a tensor of layout {tensor.layout}{_at(user_line())}; only dense "
                "tensors are supported, so use sparse=False or to_dense()"
            )
        index = len(self.tensors)
        self.tensors.append(tensor)
        self.types.append((tuple(tensor.shape), tensor.dtype))
        self.slots[id(tensor)] = index
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                self.constants[index] = tensor.detach()
        self.sharers[_storage(tensor)] = self.sharers.get(_storage(tensor), 0) + 1
        return index

    def _alone(self, tensor: torch.Tensor) -> bool:
        return self.sharers.get(_storage(tensor), 0) <= 1

    def trace(self, inputs: tuple[int, ...], outputs: Sequence[torch.Tensor | None]) -> Trace:
        """What was recorded, ending in the given results."""
        ends = tuple(None if x is None else self.slot(x) for x in outputs)
        return Trace(tuple(self.calls), tuple(self.types), self.constants, inputs, ends)

    # the interface of a random.Source

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor and a recorded random Call."""
        assert self.numbering is not None
        with _disable_current_modes():
            key = self.numbering.next()
            with self.mode:
                value = torch.empty(tuple(size), dtype=dtype, device="cpu")
        args = (tuple(size), key, g.Dtype(dtype_name(dtype)))
        self.calls.append(Call(RANDOM_UNIFORM, args, {}, (self.slot(value),), self._site()))
        return value

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Overwrites `target` with a fresh `value`, by renaming if nobody else sees its memory."""
        if not self._alone(target):
            return target.copy_(value)
        self.slots[id(target)] = self.slot(value)
        return target

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func in RULES:
            with self:
                return RULES[func](self, *args, **kwargs)
        self._refuse(func, args)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.native_batch_norm.default and args[5] and args[3] is not None:
            return self._batch_norm(args)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        result = self._run(func, args, kwargs)
        self._append(func, args, kwargs, result)
        return result

    def _append(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        held_args, held_kwargs = (
            self._hold(tuple(args)),
            {k: self._hold(v) for k, v in kwargs.items()},
        )
        outputs = tuple(
            self.slot(x) if isinstance(x, torch.Tensor) else None for x in flat_results(result)
        )
        if any(x is not None for x in outputs) or func._schema.is_mutable:
            self.calls.append(Call(func, held_args, held_kwargs, outputs, self._site()))

    def _hold(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return g.Ref(self.slot(value))
        if isinstance(value, list | tuple):
            return tuple(self._hold(x) for x in value)
        return value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return _FAKES.get(func, func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise CaptureError(
                f"{func} gives a result whose value or shape depends on data{_at(user_line())}; a "
                "captured step must do the same for every batch, so use a fixed shape or "
                "torch.where"
            ) from None
        except (UnsupportedOperatorException, UnsupportedFakeTensorException):
            raise CaptureError(
                f"{func} has no fake kernel{_at(user_line())}; register one with "
                "torch.library.register_fake"
            ) from None

    def _refuse(self, func: Any, args: Any) -> None:
        if func is aten._local_scalar_dense.default and _unknown(args[0]):
            raise CaptureError(
                f"the step reads a tensor's value as a Python number{_at(user_line())}; a captured "
                "step must not depend on data, so keep it a tensor (torch.where instead of if) or "
                "move it out of the step"
            )
        if torch.Tag.nondeterministic_seeded in func.tags and func not in HARMLESS:
            raise CaptureError(
                f"the random operator {func}{_at(user_line())} is not supported; use dropout, "
                "rand, randn, randint, randperm, bernoulli, multinomial or another one that draws "
                "each element by itself, or draw it outside and pass it in the batch"
            )

        if func in _FACTORED_BY_STRIDES and not args[0].is_contiguous():
            raise CaptureError(
                f"{func} of a matrix that is not contiguous{_at(user_line())} keeps other factors "
                "than of one that is; give it matrix.contiguous()"
            )

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An in-place operator: its twin if its tensor is alone in memory, else for the replay."""
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        twin = functional_twin(func)
        if target is not None and not isinstance(target, FakeTensor):
            raise CaptureError(
                f"the step changes a tensor that is no parameter and no buffer{_at(user_line())}; "
                "register it with register_buffer"
            )
        if target is None or twin is None or not self._alone(target):
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
        with self:
            *results, mean, variance = aten._native_batch_norm_legit_functional.default(*args)
            self.assign(args[3], mean)
            self.assign(args[4], variance)
        return tuple(results)

    def _site(self) -> Site:
        if self.replayed is not None:
            return self.replayed
        module = self.modules[-1] if self.modules else ""
        node = torch._C._current_autograd_node()
        if node is not None:
            return Site(self.phase, user_line(), module, node._sequence_nr())
        if self.phase != g.FORWARD:
            return Site(self.phase)
        # the node of this operator, if it has one, was made just before the call came here
        before, self.sequence = self.sequence, _newest_node()
        own = self.sequence if self.sequence > before else None
        return Site(self.phase, user_line(), module, own)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _newest_node() -> int:
    """Number of the autograd node made last."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


@cache
def is_composite(func: Any) -> bool:
    """Whether the operator is nothing but calls of others; some that have kernels could be both."""
    own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
    return not own and func._can_decompose()


def _unknown(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def flat_results(result: Any) -> Iterator[Any]:
    """The items of nested lists and tuples, in order."""
    if isinstance(result, list | tuple):
        for item in result:
            yield from flat_results(item)
    else:
        yield result


_FACTORED_BY_STRIDES = (
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
)
"""Operators that factor the transpose of a contiguous matrix, as their backward knows; a part may
have other strides than the tensor that was captured, so that our kernels make it contiguous."""


# fake kernels for operators whose shapes torch does not give, though the call has them in numbers


def _fake_ctc(
    scores: torch.Tensor, targets: torch.Tensor, frames: Any, letters: Any, *_: Any
) -> Any:
    steps, batch = scores.shape[:2]
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * max(letters) + 1)


def _fake_ctc_backward(grad: torch.Tensor, scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(scores)


_FAKES: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _fake_ctc,
    aten._ctc_loss_backward.default: _fake_ctc_backward,
}


# functional twins of in-place operators


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    value = source.clone() if source.dtype == target.dtype else source.to(target.dtype)
    return value if value.shape == target.shape else value.expand(target.shape)


def _filled(target: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.full_like(target, value)


_TWINS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.copy_.default: _copied,
    aten.zero_.default: torch.zeros_like,
    aten.fill_.Scalar: _filled,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
}


@cache
def functional_twin(func: Any) -> Callable[..., torch.Tensor] | None:
    """The operator without the trailing underscore, if `func` writes to its first argument only."""
    if func in _TWINS:
        return _TWINS[func]
    schema = func._schema
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    namespace, name = schema.name.split("::")
    if written != [0] or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    twin = getattr(packet, schema.overload_name or "default", None)
    return twin if twin is not None and _alike(schema, twin._schema) else None


def _alike(schema: Any, other: Any) -> bool:
    """Whether two operators take the same arguments: some of equal names do not."""
    return [str(a.type) for a in schema.arguments] == [str(a.type) for a in other.arguments]


# replay under torch's functionalization, for mutated views


def _functionalized(trace: Trace, mode: FakeTensorMode) -> Trace:
    """The trace with its remaining mutations removed."""
    leaves = [*trace.inputs, *trace.constants, *_drawn_slots(trace)]
    with _disable_current_modes(), mode:
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
            recorder.replayed = call.site
            if call.target == RANDOM_UNIFORM:
                assert call.outputs[0] is not None
                drawn = positions[call.outputs[0]]
                recorder.calls.append(Call(call.target, call.args, {}, (drawn,), call.site))
                continue
            _replay_call(call, table)
        return [None if s is None else table[s] for s in trace.outputs]

    # autograd is over: only kernels are left, on tensors that need no gradient
    with mode, torch.no_grad(), _quiet_kernels(), recorder:
        outputs = torch.func.functionalize(replay, remove="mutations")(*tensors)
    return recorder.trace(tuple(slots[: len(trace.inputs)]), outputs)


def _drawn_slots(trace: Trace) -> list[int]:
    drawn = [call.outputs[0] for call in trace.calls if call.target == RANDOM_UNIFORM]
    return [slot for slot in drawn if slot is not None]


def _replay_call(call: Call, table: dict[int, Any]) -> None:
    args = g.substitute(call.args, table)
    kwargs = {k: g.substitute(v, table) for k, v in call.kwargs.items()}
    for slot, value in zip(call.outputs, flat_results(call.target(*args, **kwargs)), strict=True):
        if slot is not None:
            table[slot] = value


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _no_numpy() -> Iterator[None]:
    """NumPy does not come by the dispatcher, so torch's own refusal is put into our words."""
    try:
        yield
    except RuntimeError as error:
        if ".numpy()" not in str(error):
            raise
        lines = [_shown_line(f, n) for f, n in traceback.walk_tb(error.__traceback__)]
        line = next((x for x in reversed(lines) if x), "")
        raise CaptureError(
            f"the step converts a tensor to NumPy{_at(line)}; NumPy cannot be captured, so use "
            "torch's functions or move it out of the step"
        ) from None


# where a call comes from


@cache
def _shown(filename: str) -> str | None:
    """The file as shown to the user; None if it is not his."""
    if filename.startswith(_PACKAGE):
        if not filename.startswith(_PACKAGE + "zoo" + os.sep):
            return None
    elif filename.startswith((_TORCH, "<frozen", "<string", "<eval_with_key")) or (
        filename.startswith(_STDLIB) and "site-packages" not in filename
    ):
        return None
    here = os.getcwd() + os.sep
    return filename.removeprefix(here)


def _shown_line(frame: FrameType, number: int) -> str:
    shown = _shown(frame.f_code.co_filename)
    return "" if shown is None else f"{shown}:{number}"


def user_line() -> str:
    """`file.py:12` of the innermost frame that is the user's, inside the step; else ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not record.__code__:
        line = _shown_line(frame, frame.f_lineno)
        if line:
            return line
        frame = frame.f_back
    return ""


def _at(line: str) -> str:
    return f" at {line}" if line else ""


@contextmanager
def _quiet_kernels() -> Iterator[None]:
    """Kernels that only some CPUs have would tie the Graph to them."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _module_paths(recorder: Recorder, model: torch.nn.Module | None) -> Iterator[None]:
    """Keeps `recorder.modules` at the path of the module that runs."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}

    def enter(module: torch.nn.Module, _: Any) -> None:
        outer = recorder.modules[-1] if recorder.modules else ""
        recorder.modules.append(names.get(id(module), outer))

    def leave(*_: Any) -> None:
        recorder.modules.pop()

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
