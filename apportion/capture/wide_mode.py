"""WideMode: Python code that computes in float64, whatever precisions it names.

Part of capture/. A step that was written for float32, for bfloat16 or for a mix of them runs under
this mode as plain PyTorch in float64: every floating dtype that a call of torch names becomes
float64, and every narrower tensor that it is given (a constant that the step found somewhere) is
widened first. Autocast needs nothing more, because it leaves float64 alone.

A step may ask for a tensor's dtype and compute otherwise in another one (`eps = 1e-5 if x.dtype ==
torch.float32 else 1e-3`, `torch.finfo(x.dtype).max`). Where a program has one floating dtype only,
code that asks is told that one, and so is torch's own where it takes an epsilon from the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apportion.capture.counter_random import computing_dtype
from apportion.capture.loss_scale import plain_scaling
from apportion.capture.torch_private import OpOverload

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_EPSILON_OF_DTYPE, _EPSILON = (torch.nn.functional.rms_norm, torch.rms_norm), 3  # its place
_DTYPE_OF = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype with the digits of float64 that stands for a floating one; others as they are."""
    return _WIDE.get(dtype, dtype)


class WideMode(TorchFunctionMode):
    """Runs Python code in float64, which it is told is `shown`, if that is given.

    Not where an operator itself is called: that is what autograd makes of a cast in its backward,
    seen by a mode of ours that hands it on, and it names the dtype that the tensor had.
    """

    def __init__(self, shown: torch.dtype | None = None) -> None:
        super().__init__()
        self.shown = shown

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:  # activation checkpointing runs the step's code in there
            with self:
                return _backward(*args, **kwargs)
        if self.shown is not None and func == _DTYPE_OF:
            dtype = func(*args)
            return self.shown if dtype == torch.float64 else dtype
        if self.shown is not None and func in _EPSILON_OF_DTYPE:
            kwargs = _with_epsilon(args, kwargs, torch.finfo(computing_dtype(self.shown)).eps)
            args = args[:_EPSILON]
        if func in _CASTS:
            func = torch.Tensor.double
        # what a call writes to stays the tensor that it is
        written = 1 if _writes(getattr(func, "__name__", "")) else 0
        given = (*args[:written], *(_widened(x) for x in args[written:]))
        named = {key: x if key == "out" else _widened(x) for key, x in kwargs.items()}
        return func(*given, **named)


def _with_epsilon(args: Any, kwargs: dict[str, Any], usual: float) -> dict[str, Any]:
    given = args[_EPSILON] if len(args) > _EPSILON else kwargs.get("eps")
    return {**kwargs, "eps": usual if given is None else given}


def _backward(
    tensor: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _writes(name: str) -> bool:
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    if isinstance(value, torch.dtype):
        return wide_dtype(value)
    if type(value) in (list, tuple):
        return type(value)(map(_widened, value))
    return value


@contextmanager
def computing_wide(shown: torch.dtype | None = None) -> Iterator[None]:
    """A context in which Python code computes in float64, by default too; code that asks for a
    dtype is told `shown`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with plain_scaling(), WideMode(shown):
            yield
    finally:
        torch.set_default_dtype(before)
