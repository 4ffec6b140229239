"""Optimizer updates as templates, with their settings left open.

The part of capture/ that turns an optimizer into the Bodies of update Ops. The real optimizer
class steps once on fake tensors, its settings replaced by floats that remember how they were
computed (`_SymbolicFloat`). Constants of the trace that equal a remembered number become
`Setting` expressions, read from the live groups at every step. Tracing twice with different numbers
must give the same Body: nothing was baked in.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apportion import graph as g
from apportion.capture.normalise import NormalisedTrace, normalise
from apportion.capture.record import record
from apportion.capture.torch_private import FakeTensorMode
from apportion.capture.trace import CaptureError

SUPPORTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

# Settings that choose a branch where they are zero; the others may become zero and back.
_BRANCHING = ("weight_decay", "momentum", "dampening")
# Settings of how torch runs the update, which do not change what it computes.
_IMPLEMENTATION_FLAGS = {
    "foreach": False,
    "fused": False,
    "capturable": False,
    "differentiable": False,
}
_OPERATORS: dict[str, Callable[..., float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "neg": operator.neg,
}

FixedSetting = tuple[int, str, Any]
"""A group, a key and its value: a setting that decides which operators the update has."""


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raises CaptureError unless the optimizer is one that can be captured."""
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(cls.__name__ for cls in SUPPORTED)
        raise CaptureError(f"{type(optimizer).__name__} cannot be captured; supported are {names}")
    for index, group in enumerate(optimizer.param_groups):
        fresh = any(_momentum(optimizer, p) is None for p in group["params"])
        if group.get("momentum") and group["dampening"] and fresh:
            raise CaptureError(
                f"group {index} has momentum with dampening {group['dampening']} and no momentum "
                "buffer yet; torch does not dampen the first step, so take one step first or set "
                "dampening=0"
            )


def _momentum(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Any:
    return optimizer.state.get(parameter, {}).get("momentum_buffer")


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Names of the state tensors that each parameter of the group has, sorted."""
    if "betas" in group:
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *largest, "step")
    return ("momentum_buffer",) if group["momentum"] else ()


def state_type(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of one state tensor, made or not."""
    made = optimizer.state.get(parameter, {}).get(name)
    if isinstance(made, torch.Tensor):
        return tuple(made.shape), made.dtype
    return ((), torch.float32) if name == "step" else (tuple(parameter.shape), parameter.dtype)


def state_value(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str
) -> torch.Tensor:
    """The live state tensor, or what it begins with."""
    made = optimizer.state.get(parameter, {}).get(name)
    if isinstance(made, torch.Tensor):
        return made
    shape, dtype = state_type(optimizer, parameter, name)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


# settings


def setting_value(optimizer: torch.optim.Optimizer, expression: Any) -> float:
    """The number that a Setting's expression has now, from the optimizer's groups."""
    if not isinstance(expression, tuple):
        return float(expression)
    head, *rest = expression
    if head == "get":
        group, key, *position = rest
        value = optimizer.param_groups[group][key]
        return float(value[position[0]] if position else value)
    return float(_OPERATORS[head](*(setting_value(optimizer, part) for part in rest)))


def fixed_settings(optimizer: torch.optim.Optimizer) -> tuple[FixedSetting, ...]:
    """(group, key, value) of all settings that decide which operators the update has."""
    return tuple(
        (index, key, group[key])
        for index, group in enumerate(optimizer.param_groups)
        for key in optimizer.defaults
        if key not in _IMPLEMENTATION_FLAGS and _is_fixed(key, group[key])
    )


def _is_fixed(key: str, value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    return key in _BRANCHING and value == 0


def check_fixed(optimizer: torch.optim.Optimizer, fixed: tuple[FixedSetting, ...]) -> None:
    """Raises ValueError if a setting that shaped the captured update has changed."""
    for index, key, value in fixed:
        now = optimizer.param_groups[index][key]
        if now != value:
            raise ValueError(
                f"{key} of group {index} was {value} when the step was captured and is {now} now, "
                "which makes another update; capture again"
            )


class _SymbolicFloat(float):
    """A float that remembers the expression it was computed by."""

    expression: Any
    table: dict[float, Any]

    def __new__(cls, value: float, expression: Any, table: dict[float, Any]) -> _SymbolicFloat:
        self = super().__new__(cls, value)
        self.expression, self.table = expression, table
        table[float(value)] = expression
        return self

    def _apply(self, symbol: str, left: Any, right: Any) -> Any:
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return NotImplemented
        parts = [x.expression if isinstance(x, _SymbolicFloat) else x for x in (left, right)]
        value = _OPERATORS[symbol](float(left), float(right))
        return _SymbolicFloat(value, (symbol, *parts), self.table)

    def __neg__(self) -> _SymbolicFloat:
        return _SymbolicFloat(-float(self), ("neg", self.expression), self.table)

    def __add__(self, other: Any) -> Any:
        return self._apply("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._apply("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._apply("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._apply("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._apply("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._apply("*", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._apply("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._apply("/", other, self)

    def __pow__(self, other: Any, modulus: None = None) -> Any:
        return self._apply("**", self, other)

    def __rpow__(self, other: Any, modulus: None = None) -> Any:
        return self._apply("**", other, self)


def _symbolic_settings(
    optimizer: torch.optim.Optimizer, index: int, salt: float, table: dict[float, Any]
) -> dict[str, Any]:
    """The group's settings, every number that may change replaced by a unique _SymbolicFloat."""
    group = optimizer.param_groups[index]
    count = 0

    def symbolic(key: str, value: Any, *position: int) -> Any:
        nonlocal count
        if _is_fixed(key, value) or not isinstance(value, int | float | torch.Tensor):
            return value
        count += 1
        # some number near the true one that nothing else in the trace can be
        near = (float(value) or 1e-3) * (1.0 + 1e-3 * (count * 0.6180339887 % 1.0) + salt)
        return _SymbolicFloat(near, ("get", index, key, *position), table)

    settings: dict[str, Any] = {}
    for key in optimizer.defaults:
        value = group[key]
        if isinstance(value, list | tuple):
            settings[key] = tuple(symbolic(key, x, k) for k, x in enumerate(value))
        else:
            settings[key] = symbolic(key, value)
    return settings | {k: v for k, v in _IMPLEMENTATION_FLAGS.items() if k in group}


# the update itself


def update_body(
    optimizer: torch.optim.Optimizer, index: int, parameter: torch.Tensor, mode: FakeTensorMode
) -> g.Body:
    """The update of one parameter of group `index` as a Body.

    Inputs: the parameter, its gradient, its state sorted by name. Outputs: new parameter and state.
    """
    first = _traced_body(optimizer, index, parameter, mode, salt=1.1e-4)
    if _traced_body(optimizer, index, parameter, mode, salt=2.3e-4) != first:
        raise CaptureError(
            f"the update of {type(optimizer).__name__} computes with its settings in a way that "
            "cannot be followed; this version of torch needs a change in "
            "apportion/capture/optimizer.py"
        )
    return replace(first, recipe=update_recipe(optimizer, index))


def update_recipe(optimizer: torch.optim.Optimizer, index: int) -> g.UpdateRecipe:
    """Which update the parameters of group `index` have."""
    group = optimizer.param_groups[index]
    kind = "sgd"
    if "betas" in group:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        kind = "adamw" if decoupled else "adam"
    flags = tuple(f for f in ("amsgrad", "maximize", "nesterov") if group.get(f))
    return g.UpdateRecipe(kind, index, state_names(group), flags)


def _traced_body(
    optimizer: torch.optim.Optimizer,
    index: int,
    parameter: torch.Tensor,
    mode: FakeTensorMode,
    salt: float,
) -> g.Body:
    table: dict[float, Any] = {}
    settings = _symbolic_settings(optimizer, index, salt, table)
    names = state_names(optimizer.param_groups[index])
    own = (tuple(parameter.shape), parameter.dtype)
    kinds = [own, own, *(state_type(optimizer, parameter, name) for name in names)]
    with mode:
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]

    def update(_: Any, fake: torch.Tensor, grad: torch.Tensor, *state: torch.Tensor) -> Any:
        return _step_once(
            type(optimizer), settings, fake, grad, dict(zip(names, state, strict=True))
        )

    trace = record(update, inputs, mode)
    return _body(normalise(trace), trace.inputs, table)


def _step_once(
    cls: Any,
    settings: dict[str, Any],
    parameter: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Lets the optimizer class take its step; returns the new parameter and state."""
    used = dict(state)
    if "step" in state:
        # in float32, 1 - beta2 ** step would lose the digits that the eager optimizer has
        used["step"] = state["step"].to(torch.float64)
    optimizer = cls([parameter], lr=1e-3)
    optimizer.param_groups[0].update(settings)
    optimizer.state[parameter] = used
    parameter.grad = grad
    with torch.no_grad(), _as_if_compiling(), _TensorFactor():
        inspect.unwrap(cls.step)(optimizer)
    parameter.grad = None
    return [parameter, *(used[name].to(state[name].dtype) for name in state)]


class _TensorFactor(TorchFunctionMode):
    """Lets `addcdiv_(.., value=tensor)` mean what it says; Adam's step size is a tensor in a trace.

    Adam's own formula for tensors (`capturable`) divides by the learning rate, which may be zero.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factor = (kwargs or {}).get("value")
        if func is torch.Tensor.addcdiv_ and isinstance(factor, torch.Tensor):
            target, numerator, denominator = args
            return target.addcdiv_(numerator.mul(factor), denominator)
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_if_compiling() -> Iterator[None]:
    """Optimizers then keep their step counts as tensors."""
    before = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = before


def _body(trace: NormalisedTrace, inputs: tuple[int, ...], table: dict[float, Any]) -> g.Body:
    places = {slot: k for k, slot in enumerate(inputs)}
    ops = []
    for node in trace.nodes:
        ops.append(g.BodyOp(node.kind, _body_arg(node.args, places, table)))
        (slot,) = node.outputs
        assert slot is not None
        places[slot] = len(inputs) + len(ops) - 1
    outputs = tuple(places[slot] for slot in trace.outputs if slot is not None)
    return g.Body(len(inputs), tuple(ops), outputs)


def _body_arg(arg: Any, places: dict[int, int], table: dict[float, Any]) -> Any:
    if isinstance(arg, g.Ref):
        return g.Ref(places[arg.index])
    if isinstance(arg, tuple):
        return tuple(_body_arg(x, places, table) for x in arg)
    if isinstance(arg, float) and arg in table:
        return g.Setting(table[arg])
    return arg


class UpdateTemplates:
    """The Bodies of an optimizer's updates, one per kind of parameter in a group, traced when first
    asked for."""

    def __init__(self, optimizer: torch.optim.Optimizer, mode: FakeTensorMode) -> None:
        self._optimizer, self._mode = optimizer, mode
        self._index: dict[Any, int] = {}
        self.bodies: list[g.Body] = []

    def state(self, group: int, parameter: torch.Tensor) -> list[tuple[str, Any]]:
        """Name and (shape, dtype) of each state tensor of a parameter."""
        names = state_names(self._optimizer.param_groups[group])
        return [(n, state_type(self._optimizer, parameter, n)) for n in names]

    def body(self, group: int, parameter: torch.Tensor) -> int:
        """Index of the Body that updates the parameter."""
        dtypes = tuple(dtype for _, (_, dtype) in self.state(group, parameter))
        key = (group, parameter.dtype, parameter.dim() == 0, dtypes)
        if key not in self._index:
            self._index[key] = len(self.bodies)
            body = update_body(self._optimizer, group, parameter, self._mode)
            self.bodies.append(body)
        return self._index[key]
