"""What the user's step function is, its loss, and how it runs with one dtype for another.

capture.py runs the step once on fake tensors and reference.py runs it eagerly; both do it by the
functions of this file, so that the two take the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from apportion.capture.trace import CaptureError

DtypeReplacement = tuple[torch.dtype, torch.dtype]
"""A dtype, and the one that a step gets wherever it names the first."""


class StepFunction(Protocol):
    """The user's function: it returns a scalar loss, or something with a `loss`."""

    def __call__(self, model: Any, batch: Any, /) -> Any: ...


def scalar_loss(result: Any, step: StepFunction) -> torch.Tensor:
    """The scalar that a step returned, by itself or as `.loss` or ["loss"]."""
    name = getattr(step, "__name__", "the step")
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"{name} returns {type(result).__name__}; it must return a scalar loss tensor, or "
            "an object or dict with one as loss"
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"{name} returns a loss of shape {tuple(loss.shape)} and dtype {loss.dtype}; it must "
            "be a floating scalar, so reduce it with mean() or sum()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss that {name} returns depends on no trainable parameter; it must not be "
            "detached or computed under torch.no_grad()"
        )
    return loss


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
