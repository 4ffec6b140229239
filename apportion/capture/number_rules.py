"""Python numbers that depend on data, while an update is traced.

Part of capture/. Optimizers keep counts and norms as Python numbers: `state["step"] += 1`,
`norm.item()`, `math.sqrt(1 - beta2 ** step)`, `if rho > 5`. On fake tensors such a number stays a
tensor without dimensions, in float64 as Python's are. `NumbersAsTensors` lets torch take it where
it wants a number; `number_functions` does the same for `math`, `min`, `max`, `int` and `float`; a
branch asks the function `decide`, which remembers the condition.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apportion.capture.setting_number import SettingNumber, plain
from apportion.capture.trace import CaptureError

Decide = Callable[[torch.Tensor], bool]

_READS = (torch.Tensor.item,)
_BRANCHES = (torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
_CONVERSIONS = {
    torch.Tensor.__float__: "float",
    torch.Tensor.__int__: "int",
    torch.Tensor.__index__: "int",
}
_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_SCALED = frozenset(["add", "sub", "subtract", "rsub", "_foreach_add", "_foreach_sub"])
_PRODUCTS = frozenset(["addcmul", "addcdiv"])
_LIST_PRODUCTS = frozenset(f"_foreach_{name}" for name in _PRODUCTS)


class NumbersAsTensors(TorchFunctionMode):
    """Calls of torch in which a tensor without dimensions may stand for a number."""

    def __init__(self, decide: Decide, cls: type) -> None:
        super().__init__()
        self._decide, self._name = decide, cls.__name__
        self._catches = catches_zero_division(cls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = plain(tuple(args)), {k: plain(v) for k, v in (kwargs or {}).items()}
        if func in _READS:
            return _number(args[0])
        if func in _BRANCHES:
            return self._decide(args[0])
        if func in _CONVERSIONS:
            raise CaptureError(
                f"the update of {self._name} converts a tensor by {_CONVERSIONS[func]}(), which "
                "cannot be followed; let it use .item() or keep it a tensor"
            )
        if self._catches and getattr(func, "__name__", "") in _DIVISIONS:
            self._divide(func, args)
        if func in _MAKERS and isinstance(args[0], int | float):
            return _made(args, kwargs)
        if func is torch.Tensor.__setitem__ and _is_mask_of(args[1], args[0]):
            return args[0].masked_fill_(args[1], args[2])
        if func is torch.full_like and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return _filled_like(*args, **kwargs)
        return func(*_of_one_dtype(_rewritten(func, list(args), kwargs)), **kwargs)

    def _divide(self, func: Any, args: tuple[Any, ...]) -> None:
        """Raises ZeroDivisionError on the path on which a number is divided by zero."""
        dividend, divisor = args[:2] if "__r" not in func.__name__ else args[1::-1]
        numbers = all(
            isinstance(x, int | float) or (x.dtype == torch.float64 and not x.dim())
            for x in (dividend, divisor)
        )
        if numbers and isinstance(divisor, torch.Tensor) and self._decide(divisor == 0):
            raise ZeroDivisionError


_DIVISIONS = ("__truediv__", "__rtruediv__", "__div__", "__rdiv__", "div", "true_divide")


def catches_zero_division(cls: type) -> bool:
    """Whether a class handles divisions by zero, which Python's numbers refuse."""
    return any(
        "ZeroDivisionError" in function.__code__.co_names
        for each in cls.__mro__
        for function in map(_innermost, vars(each).values())
        if function is not None
    )


def _is_mask_of(mask: Any, tensor: torch.Tensor) -> bool:
    return (
        isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == tensor.shape
    )


def _of_one_dtype(args: list[Any]) -> list[Any]:
    """A number beside a tensor without dimensions takes its dtype, as a Python number would."""
    if len(args) != 2 or not all(isinstance(x, torch.Tensor) and not x.dim() for x in args):
        return args
    for number, other in (args, args[::-1]):
        if number.dtype == torch.float64 and other.is_floating_point():
            return [x.to(other.dtype) for x in args]
    return args


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """What `.item()` reads, as a tensor."""
    scalar = tensor.reshape(())
    return scalar if scalar.dtype == torch.bool else scalar.to(torch.float64)


def _made(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """A tensor of one number, with the number as an argument that can be recognised."""
    number = args[0]
    given = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    usual = {bool: torch.bool, int: torch.int64}.get(type(number), torch.get_default_dtype())
    return torch.full((), number, dtype=given or usual)


def _rewritten(func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, without tensors where torch wants a number; changes `kwargs`."""
    name = getattr(func, "__name__", "").rstrip("_")
    if name in _SCALED and isinstance(kwargs.get("alpha"), torch.Tensor):
        factor = kwargs.pop("alpha")
        others = args[1]
        several = isinstance(others, list | tuple)
        args[1] = [x * factor for x in others] if several else others * factor
    elif name in _LIST_PRODUCTS and (len(args) > 3 or "value" in kwargs):
        factors = kwargs.pop("value", None) if len(args) < 4 else args.pop()
        each = factors if isinstance(factors, list | tuple) else [factors] * len(args[1])
        if any(isinstance(x, torch.Tensor) for x in each):
            args[1] = [x * factor for x, factor in zip(args[1], each, strict=True)]
        else:
            args.append(factors)
    elif name in _PRODUCTS and isinstance(kwargs.get("value"), torch.Tensor):
        args[1] = args[1].mul(kwargs.pop("value"))
    elif name == "_foreach_lerp":
        weight = kwargs.pop("weight", args[2] if len(args) > 2 else None)
        if isinstance(weight, torch.Tensor):
            weight = [weight.to(x.dtype) for x in args[0]]
        args = [*args[:2], weight]
    elif name == "lerp":
        weight = kwargs.pop("weight", args[2] if len(args) > 2 else None)
        wants = isinstance(weight, torch.Tensor) and weight.dim() == 0
        args = [*args[:2], weight.to(args[0].dtype) if wants else weight]
    return args


def _filled_like(like: torch.Tensor, number: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.full_like` of a number that is a tensor."""
    made = torch.zeros_like(like, **kwargs)
    return made.add_(number)


# functions of Python


def _maths(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    symbol = {"pow": "**", "fabs": "abs"}.get(name, name)
    torchs = {"fabs": torch.abs}.get(name) or getattr(torch, name)

    def function(*args: Any) -> Any:
        if any(isinstance(arg, torch.Tensor) for arg in args):
            return torchs(*(_number(x) if isinstance(x, torch.Tensor) else x for x in args))
        for arg in args:
            if isinstance(arg, SettingNumber):
                return arg.apply(symbol, *args)
        return original(*args)

    return function


def _extreme(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    between = torch.minimum if name == "min" else torch.maximum

    def pair(a: Any, b: Any) -> Any:
        for x, y in ((a, b), (b, a)):
            if isinstance(x, torch.Tensor):
                if isinstance(y, torch.Tensor):
                    return between(x, y)
                return x.clamp(max=y) if name == "min" else x.clamp(min=y)
        for x in (a, b):
            if isinstance(x, SettingNumber):
                return x.apply(name, a, b)
        return original(a, b)

    def follows(args: Any) -> bool:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        numbers = all(isinstance(x, int | float | torch.Tensor) for x in args)
        known = bool(tensors) or any(isinstance(x, SettingNumber) for x in args)
        return numbers and known and all(x.dim() == 0 for x in tensors)

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and not kwargs and follows(args):
            return reduce(pair, args)
        return original(*args, **kwargs)

    return function


class _LikeInt(type):
    """So that an `int` of whatever kind is an instance."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, int)


class _LikeFloat(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, float)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, float)


class _Int(int, metaclass=_LikeInt):
    """In the place of `int`: of a tensor it makes a tensor."""

    def __new__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return args[0].reshape(()).to(torch.float64).trunc()
        return int(*args)


class _Float(float, metaclass=_LikeFloat):
    """In the place of `float`: of a tensor it makes a tensor."""

    def __new__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return args[0].reshape(()).to(torch.float64)
        return args[0] if args and isinstance(args[0], SettingNumber) else float(*args)


_MATHS = ("sqrt", "exp", "log", "pow", "sin", "cos", "tanh", "fabs")


@contextmanager
def number_functions(cls: type) -> Iterator[None]:
    """A context in which the modules that define an optimizer class have functions of numbers that
    take tensors as well."""
    replaced = {getattr(math, name): _maths(name, getattr(math, name)) for name in _MATHS}
    instead = {name: _extreme(name, getattr(builtins, name)) for name in ("min", "max")}
    instead |= {"int": _Int, "float": _Float}
    undo: list[Callable[[], None]] = []

    def put(space: dict[str, Any], name: str, value: Any) -> None:
        if name in space:
            undo.append(lambda old=space[name]: space.__setitem__(name, old))  # type: ignore[misc]
        else:
            undo.append(lambda: space.pop(name, None))
        space[name] = value

    try:
        for original, function in replaced.items():
            put(vars(math), original.__name__, function)
        for space in _spaces(cls):
            for name, value in list(space.items()):
                if getattr(value, "__module__", None) == "math" and value in replaced:
                    put(space, name, replaced[value])
            for name, function in instead.items():
                if name not in space:
                    put(space, name, function)
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _spaces(cls: type) -> list[dict[str, Any]]:
    """The global names of the functions of a class, and of functions of its package that they may
    call."""
    own: list[dict[str, Any]] = []
    for each in cls.__mro__:
        if each.__module__ not in ("builtins", torch.optim.Optimizer.__module__):
            own += [f.__globals__ for f in map(_innermost, vars(each).values()) if f is not None]
    called = [
        value.__globals__
        for space in own
        for value in space.values()
        if isinstance(value, FunctionType) and _package(value) == _package_of(space)
    ]
    found = {id(space): space for space in (*own, *called)}
    return [s for s in found.values() if s.get("__name__") != torch.optim.Optimizer.__module__]


def _innermost(value: Any) -> FunctionType | None:
    """The function that a class holds, without what is wrapped around it."""
    while not isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
        value = getattr(value, "__wrapped__", getattr(value, "__func__", None))
        if value is None:
            return None
    return value


def _package(function: FunctionType) -> str:
    return _package_of(function.__globals__)


def _package_of(space: dict[str, Any]) -> str:
    return str(space.get("__name__", "")).partition(".")[0]
