"""The private interfaces of torch that this package uses, each under a plain name.

capture/ and verify/ look at what torch does one operator at a time, and for some of that torch has
no public interface. Whatever they use of that kind is here, so that a new version of torch is met
in one place; tests/test_private_torch.py lists the few other files that have a reason of their own.
Other rooms may import this module from the face of capture.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,
)
from torch._subclasses.fake_tensor import (
    UnsupportedFakeTensorException as UnsupportedFakeTensorException,
)
from torch._subclasses.fake_tensor import (
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from apportion.capture.trace import CaptureError

__all__ = ["BatchNorm", "pytree"]


def schema(operator: Any) -> Any:
    """The schema of an operator overload: its arguments, its results and what it writes to."""
    return operator._schema


def overload_of_custom_op(operator: Any) -> Any:
    """The overload behind a function made by `torch.library.custom_op`; anything else as it is."""
    return operator._opoverload if isinstance(operator, CustomOpDef) else operator


def all_operator_names() -> Sequence[str]:
    """The names of all operators that are registered now: `aten::add.Tensor`."""
    names: Sequence[str] = torch._C._dispatch_get_all_op_names()
    return names


@cache
def is_composite(operator: Any) -> bool:
    """Whether an operator is nothing but calls of others: it decomposes and has no CPU kernel. Some
    that have a kernel could be both."""
    own = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")
    return not own and bool(operator._can_decompose())


def native_functions(operator: Any) -> list[Any]:
    """Functions of torch, written in C++, that are named as an ATen operator and may call it."""
    namespace, name, _ = str(operator).split(".")
    if namespace != "aten":
        return []
    places = (torch, torch._C.TensorBase, torch._C._nn)
    names = {"_to_copy": ("to",)}.get(name, (name,))
    found = [getattr(place, each, None) for each in names for place in places]
    return [f for f in found if type(f) in _NATIVE]


_NATIVE = (type(torch.mm), type(torch._C._nn.gelu), type(torch.Tensor.view))


def equal_function(operator: Any) -> Any:
    """A function of torch, written in C++, that computes the same as an operator by another one, or
    None: a number instead of a tensor without dimensions, or a view that autograd may not know."""
    return _EQUAL.get(str(operator))


_EQUAL = {
    "aten._unsafe_view.default": torch._C.TensorBase.view,
    "aten.mul.Scalar": torch.mul,
    "aten.div.Scalar": torch.div,
}


def below_autograd() -> AbstractContextManager[None]:
    """A context in which operators go to their kernels without asking whether autograd wants to
    know."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share exactly if they share their memory."""
    return int(tensor.untyped_storage()._cdata)


def newest_autograd_node() -> int:
    """The sequence number of the autograd node that was made last."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def running_autograd_node() -> int | None:
    """The sequence number of the autograd node whose backward runs now, if one does."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what is called."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def with_versions_kept(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """A context after which torch's counts of writes to these tensors are what they were."""
    keep = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    context: AbstractContextManager[None] = keep(tuple(tensors))
    return context


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets torch's count of writes to a tensor."""
    if tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """A context in which torch does not choose kernels that only some CPUs have."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def with_parameters(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """A context in which the model has other parameters and buffers, wherever they are: tied ones
    and those of a module that has several names, too. Buffers that are made in it, or
    made anew with another shape or dtype, stay."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise CaptureError(
            "the model has a module that torch.jit has compiled, whose parameters cannot be "
            "replaced; use the plain module it was made from"
        )
    live: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    other = {id(live[name]): tensor for name, tensor in tensors.items()}
    tables = [t for module in model.modules() for t in (module._parameters, module._buffers)]
    before: list[tuple[Any, dict[str, Any]]] = [(table, dict(table)) for table in tables]
    try:
        for table, kept in before:
            table.update({key: other.get(id(tensor), tensor) for key, tensor in kept.items()})
        yield
    finally:
        buffers = {id(module._buffers) for module in model.modules()}
        for table, kept in before:
            now = dict(table) if id(table) in buffers else {}
            table.clear()
            table.update(kept)
            table.update({k: x for k, x in now.items() if _is_of_new_type(x, kept.get(k))})


def _is_of_new_type(tensor: Any, before: Any) -> bool:
    if tensor is None or before is None:
        return tensor is not None
    return bool((tensor.shape, tensor.dtype) != (before.shape, before.dtype))


@contextmanager
def fake_data(assign: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """A context in which `tensor.data = other` of a fake tensor, which no dispatch mode sees, calls
    a function."""
    plain: Any = torch._C.TensorBase.data
    setattr(FakeTensor, "data", property(plain.__get__, assign))  # noqa: B010
    try:
        yield
    finally:
        delattr(FakeTensor, "data")


@contextmanager
def fake_values(
    number: Callable[[torch.Tensor], Any],
    plain_number: Callable[[torch.Tensor], float],
    array: Callable[[torch.Tensor], Any],
) -> Iterator[None]:
    """A context in which fake tensors give values, by these functions: `item()` and formatting by
    the first, `float()` by the second, `numpy()` by the third. Whatever else reads a value, and a
    tensor whose value torch knows, go the usual way. A tensor with data gives its own to NumPy,
    which under a mode of fake tensors it does not."""

    def unknown(tensor: FakeTensor) -> bool:
        return tensor.constant is None and tensor.numel() == 1

    def item(self: FakeTensor) -> Any:
        return number(self) if unknown(self) else before["item"](self)

    def as_float(self: FakeTensor) -> float:
        return plain_number(self) if unknown(self) else before["__float__"](self)

    def as_text(self: FakeTensor, form: str) -> str:
        return format(item(self) if self.dim() == 0 else object.__repr__(self), form)

    def numpy(self: FakeTensor, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return before["numpy"](self) if self.constant is not None else array(self)

    def numpy_of_data(self: torch.Tensor, *, force: bool = False) -> Any:
        with without_modes():
            return before["numpy"](self, force=force)

    changed = {"item": item, "__float__": as_float, "__format__": as_text, "numpy": numpy}
    before: dict[str, Any] = {name: getattr(FakeTensor, name) for name in changed}
    inherited = [name for name in changed if name not in vars(FakeTensor)]
    for name, function in changed.items():
        setattr(FakeTensor, name, function)
    setattr(torch.Tensor, "numpy", numpy_of_data)  # noqa: B010
    try:
        yield
    finally:
        delattr(torch.Tensor, "numpy")
        for name in changed:
            if name in inherited:
                delattr(FakeTensor, name)
            else:
                setattr(FakeTensor, name, before[name])


@contextmanager
def fake_to_others(is_told: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """A context in which another package that asks whether a fake tensor is one, by the name that
    torch gives its class, is told by this function. torch itself is told that it is."""

    class FakeTensorStandIn(type):
        def __instancecheck__(cls, each: Any) -> bool:
            if not isinstance(each, FakeTensor):
                return False
            asking = sys._getframe(1).f_globals.get("__name__", "")
            return asking.partition(".")[0] == "torch" or is_told(each)

        def __subclasscheck__(cls, each: type) -> bool:
            return issubclass(each, FakeTensor)

        def __eq__(cls, other: object) -> bool:
            return other is FakeTensor or other is cls

        def __hash__(cls) -> int:
            return hash(FakeTensor)

    module: Any = torch._subclasses
    module.FakeTensor = FakeTensorStandIn("FakeTensor", (), {})
    try:
        yield
    finally:
        module.FakeTensor = FakeTensor


@contextmanager
def modules_moved_to_where_they_are() -> Iterator[None]:
    """A context in which `module.to(...)` of a module that is there already changes nothing, as it
    does not with data; of fake parameters torch would make others."""
    plain: Any = torch.nn.Module._apply

    def apply(self: torch.nn.Module, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            tensors = (*torch.nn.Module.parameters(self), *torch.nn.Module.buffers(self))
            same = all(fn(each) is each for each in tensors)
        return self if same else plain(self, fn, *args, **kwargs)

    setattr(torch.nn.Module, "_apply", apply)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.nn.Module, "_apply", plain)  # noqa: B010


_ARITHMETIC = (
    *(f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for r in ("", "r", "i")),
    *(f"{name}{end}" for name in ("add", "sub", "mul", "div", "true_divide") for end in ("", "_")),
    "pow", "clamp", "clamp_min", "clamp_max", "fill_", "masked_fill", "masked_fill_",
)  # fmt: skip


@contextmanager
def fake_arithmetic(operand: Callable[[torch.Tensor, Any, bool], Any]) -> Iterator[None]:
    """A context in which fake tensors compute with `operand(tensor, number, written)` in the place
    of a number; `written` says whether the tensor is written to."""

    def computing(name: str) -> Callable[..., Any]:
        plain = getattr(FakeTensor, name)
        written = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))

        def compute(self: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            given = [operand(self, each, written) for each in args]
            named = {key: operand(self, each, written) for key, each in kwargs.items()}
            return plain(self, *given, **named)

        return compute

    names = [name for name in _ARITHMETIC if hasattr(FakeTensor, name)]
    changed = {name: computing(name) for name in names}
    for name, function in changed.items():
        setattr(FakeTensor, name, function)
    try:
        yield
    finally:
        for name in changed:
            delattr(FakeTensor, name)


@contextmanager
def padding_by(padded: Callable[..., Any]) -> Iterator[None]:
    """A context in which torch takes packed sequences apart by this function."""
    functions: Any = torch._VF
    functions._pad_packed_sequence = padded
    try:
        yield
    finally:
        del functions._pad_packed_sequence


def run_backward(loss: torch.Tensor, inputs: tuple[torch.Tensor, ...] = ()) -> Sequence[Any]:
    """The gradients of the inputs (None: it has none); for no inputs, all parameters get a `grad`.

    The engine is called as `loss.backward()` calls it. That function however suspends a
    TorchFunctionMode, and activation checkpointing runs the step's code again in here.
    """
    ones = (torch.ones_like(loss),)
    return _engine_run_backward(
        (loss,), ones, False, False, inputs, allow_unreachable=True, accumulate_grad=not inputs
    )


def operator_database() -> list[Any]:
    """PyTorch's database of operators with samples of their inputs; raises ImportError if a package
    that it needs is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of its modules are older than their libraries
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def samples_of(entry: Any, dtype: torch.dtype, grads: bool) -> Iterator[Any]:
    """The inputs that an entry of the database has for the CPU, as its `sample_inputs` draws them.
    That looks through Python's stack, with the source lines of every frame, for the test that it is
    called by, which takes longer than the operators."""
    from torch.testing._internal.common_utils import set_rng_seed

    samples = iter(entry.sample_inputs_func(entry, "cpu", dtype, grads))
    while True:
        set_rng_seed()
        try:
            yield next(samples)
        except StopIteration:
            return


def gradients_of(
    roots: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    keeps_graph: bool,
    makes_graph: bool,
) -> Sequence[Any]:
    """The gradients of the inputs (None: it has none), from the gradients `seeds` of the roots; for
    no inputs, all leaves get a `grad`. See run_backward for why the engine is called directly."""
    found: Sequence[Any] = _engine_run_backward(
        tuple(roots), tuple(seeds), keeps_graph, makes_graph, tuple(inputs),
        allow_unreachable=True, accumulate_grad=not inputs,
    )  # fmt: skip
    return found


def gradient_hooks(leaf: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks of a leaf: those that may change its gradient, and those that are called once it
    is accumulated."""
    before = getattr(leaf, "_backward_hooks", None) or {}
    after = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(after.values())


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that run before and after an optimizer's step, those of all optimizers first."""
    from torch.optim import optimizer as module

    before = [
        *module._global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ]
    after = [
        *optimizer._optimizer_step_post_hooks.values(),
        *module._global_optimizer_post_hooks.values(),
    ]
    return before, after


def first_scale(scaler: torch.amp.GradScaler) -> tuple[float, int]:
    """What an enabled GradScaler begins with, which makes its tensors when it first needs them: the
    scale, and how many good steps count towards its growth."""
    return float(scaler._init_scale), int(scaler._init_growth_tracker)


def note_step(optimizer: Any) -> None:
    """Notes that an optimizer has taken a step, which torch's schedulers ask for."""
    optimizer._opt_called = True


@contextmanager
def with_scaling(unscale: Callable[..., None], update: Callable[..., Any]) -> Iterator[None]:
    """A context in which every GradScaler computes by these two functions."""
    names = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
    before = [getattr(torch, name) for name in names]
    try:
        for name, function in zip(names, (unscale, update), strict=True):
            setattr(torch, name, function)
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(torch, name, function)


@contextmanager
def with_skipping(step: Callable[..., Any]) -> Iterator[None]:
    """A context in which every GradScaler calls `step(optimizer, found)` for an optimizer's step
    that it would skip if the tensor `found` is not zero."""

    def maybe(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        found = list(state["found_inf_per_device"].values())
        return step(optimizer, sum(found[1:], found[0]), *args, **kwargs)

    before = torch.amp.GradScaler._maybe_opt_step
    setattr(torch.amp.GradScaler, "_maybe_opt_step", maybe)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, "_maybe_opt_step", before)  # noqa: B010
