"""The updates of SGD, Adam and AdamW, which fused kernels know.

Part of capture/, beside any_update.py, which traces every other optimizer. The class itself steps
once on fake tensors, as if it were compiled: then it keeps its count of steps a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apportion import graph as g
from apportion.capture.normalise import NormalisedTrace, normalise
from apportion.capture.optimizer_step import own_step
from apportion.capture.record import record
from apportion.capture.setting_number import NumberLog, fixed_keys, numbered_settings
from apportion.capture.torch_private import FakeTensorMode
from apportion.capture.trace import CaptureError

_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def is_known(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether all parameters of a group have one of these updates. With dampening the first step is
    another one."""
    dampened = bool(group.get("momentum")) and bool(group.get("dampening"))
    return type(optimizer) in _KNOWN and not (
        dampened and any(not optimizer.state.get(p) for p in group["params"])
    )


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


def known_body(
    optimizer: torch.optim.Optimizer,
    number: int,
    group: dict[str, Any],
    parameter: torch.Tensor,
    mode: FakeTensorMode,
) -> g.Body:
    """The update of one parameter of a group, which has this number among all groups.

    Inputs: the parameter, its gradient, its state sorted by name. Outputs: new parameter and state.
    """
    how = (optimizer, number, group, parameter, mode)
    first = _traced_body(*how, salt=1.1e-4)
    if _traced_body(*how, salt=2.3e-4) != first:
        raise CaptureError(
            f"the update of {type(optimizer).__name__} computes with its settings in a way that "
            "cannot be followed; this version of torch needs a change in "
            "apportion/capture/known_update.py"
        )
    return replace(first, recipe=update_recipe(optimizer, number, group))


def update_recipe(
    optimizer: torch.optim.Optimizer, number: int, group: dict[str, Any]
) -> g.UpdateRecipe:
    """Which update the parameters of a group have."""
    kind = "sgd"
    if "betas" in group:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        kind = "adamw" if decoupled else "adam"
    flags = tuple(f for f in ("amsgrad", "maximize", "nesterov") if group.get(f))
    return g.UpdateRecipe(kind, number, state_names(group), flags)


def _traced_body(
    optimizer: torch.optim.Optimizer,
    number: int,
    group: dict[str, Any],
    parameter: torch.Tensor,
    mode: FakeTensorMode,
    salt: float,
) -> g.Body:
    log = NumberLog()
    settings = numbered_settings(group, number, log, lambda key: salt, fixed_keys(group))
    names = state_names(group)
    own = (tuple(parameter.shape), parameter.dtype)
    kinds = [own, own, *(state_type(optimizer, parameter, name) for name in names)]
    with mode:
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]

    def update(_: Any, fake: torch.Tensor, grad: torch.Tensor, *state: torch.Tensor) -> Any:
        return _step_once(
            type(optimizer), settings, fake, grad, dict(zip(names, state, strict=True))
        )

    trace = record(update, inputs, mode)
    return _body(normalise(trace), trace.inputs, log.table)


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
        own_step(cls)(optimizer)
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
