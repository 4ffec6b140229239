"""What the user's step function is, its loss, and how it runs with one dtype for another.

capture.py runs the step once on fake tensors and reference.py runs it eagerly; both do it by the
functions of this file, so that the two take the same step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apportion.capture.trace import CaptureError

DtypeReplacement = tuple[torch.dtype, torch.dtype]
"""A dtype, and the one that a step gets wherever it names the first."""


StepFunction = Callable[..., Any]
"""The user's function, in one of two forms: `step(model, batch)`, which returns a scalar loss or
something with a `loss`, and `step(model, optimizer, batch)`, the body of the user's own loop."""


def takes_optimizer(step: StepFunction) -> bool:
    """Whether a step wants the optimizer between the model and the batch: whether it has three
    positional parameters without a default. Raises CaptureError for a number that fits neither
    form."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in places if p.default is p.empty]
    anything = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    if len(required) == 3:
        return True
    if len(required) > 3 or (len(places) < 2 and not anything):
        raise CaptureError(
            f"{_name(step)} takes {len(required)} arguments; a step is step(model, batch) and "
            "returns the loss, or step(model, optimizer, batch) and calls backward and "
            "optimizer.step itself"
        )
    return False


def loss_name(
    scalars: Mapping[str, torch.Tensor],
    left_out: Sequence[str],
    step: StepFunction,
    required: bool = True,
) -> str:
    """Which of the returned scalars is the loss: the one named so, else the first; "" if none is
    returned and none is required."""
    if "loss" in scalars:
        return "loss"
    floating = [name for name, scalar in scalars.items() if scalar.is_floating_point()]
    if floating or scalars:
        return (floating or list(scalars))[0]
    if required:
        what = "only tensors that are no scalars" if left_out else "no tensor"
        raise CaptureError(
            f"{_name(step)} returns {what}; it must return a scalar loss, so reduce it with mean() "
            "or sum(), or return an object, tuple or dict with one"
        )
    return ""


def check_loss(loss: torch.Tensor, step: StepFunction, depends: bool = True) -> None:
    """Raises CaptureError unless the loss is a floating scalar that depends on parameters."""
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"{_name(step)} returns a loss of shape {tuple(loss.shape)} and dtype {loss.dtype}; it "
            "must be a floating scalar, so reduce it with mean() or sum()"
        )
    if depends and not loss.requires_grad:
        raise CaptureError(
            f"the loss that {_name(step)} returns depends on no trainable parameter; it must not "
            "be detached or computed under torch.no_grad()"
        )


def _name(step: StepFunction) -> str:
    return getattr(step, "__name__", "the step")


_CASTS = {  # methods of a tensor that name a dtype by themselves
    torch.float64: torch.Tensor.double,
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}


_Operator = type(torch.ops.aten.add.Tensor)


class _DtypeReplacementMode(TorchFunctionMode):
    """Runs Python code with one dtype replaced by another wherever a call of torch names it.

    Not where an operator itself is called: that is what autograd makes of a cast in its backward,
    seen by a mode of ours that hands it on, and it names the dtype that the tensor had.
    """

    def __init__(self, replacement: DtypeReplacement) -> None:
        super().__init__()
        self._old, self._new = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, _Operator):
            return func(*args, **(kwargs or {}))
        named = {key: self._replaced(value) for key, value in (kwargs or {}).items()}
        if func is _CASTS.get(self._old):
            func = _CASTS.get(self._new, func)
        return func(*map(self._replaced, args), **named)

    def _replaced(self, value: Any) -> Any:
        return self._new if value is self._old else value


@contextmanager
def with_dtype_replaced(replacement: DtypeReplacement | None) -> Iterator[None]:
    """A context in which one dtype is replaced wherever it is named, and as the default; for None
    nothing is."""
    if replacement is None:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(replacement[1] if before == replacement[0] else before)
    try:
        with _DtypeReplacementMode(replacement):
            yield
    finally:
        torch.set_default_dtype(before)
