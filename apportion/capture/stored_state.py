"""The live state of a step by names, out of the user's objects and into them.

Part of capture/. A LiveState comes in; out go its tensors and its optimizers' state under the names
that a Graph has for them (a parameter's state `exp_avg`, entries of lists `Q[0]`), as they are.
`put_tensor` and `put_state` go the other way: what was trained or saved elsewhere becomes that of
the live model and optimizers, in the tensors that they have where they have some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from apportion.capture.any_update import IS_FIRST
from apportion.capture.live_state import LiveState
from apportion.capture.loss_scale import LossScale
from apportion.capture.optimizer_step import IN_GROUP, IN_OPTIMIZER, IN_STATE, is_shared
from apportion.capture.state_tree import flat_state, nested_state


def live_tensors(live: LiveState) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, each once."""
    return live.parameters() | live.buffers()


def saved_names(live: LiveState) -> frozenset[str]:
    """The names of the tensors that are part of a module's `state_dict()`, and of no LossScale,
    which stands for a scaler."""
    kept: set[int] = set()
    for _, module in live.modules:
        if not isinstance(module, LossScale):
            entries = module.state_dict(keep_vars=True).values()
            kept |= {id(each) for each in entries if isinstance(each, torch.Tensor)}
    return frozenset(n for n, tensor in live_tensors(live).items() if id(tensor) in kept)


def other_names(live: LiveState) -> dict[str, str]:
    """Further names that modules' state_dicts have for a tensor, each with the name of it here:
    those of tied parameters."""
    names = {id(tensor): name for name, tensor in live_tensors(live).items()}
    found = {}
    for begin, module in live.modules:
        for key, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) in names and names[id(tensor)] != begin + key:
                found[begin + key] = names[id(tensor)]
    return found


def put_tensor(live: LiveState, name: str, tensor: torch.Tensor) -> None:
    """Gives a parameter or buffer the numbers of another tensor of its shape. Raises ValueError if
    there is none of that name, or it has no data."""
    for begin, module in live.modules:
        if isinstance(module, LossScale) and name.startswith(begin):
            own = getattr(module, name.removeprefix(begin))
            setattr(module, name.removeprefix(begin), tensor.to(own.dtype).reshape(own.shape))
            return
    for each in live.written:
        if each.name == name and each.place is not None:
            each.place.put(tensor.to(each.tensor.dtype))
            return
    target = live.tensor(name)
    if target.is_meta:
        raise ValueError(f"{name} has no data (meta device), so that nothing can be put there")
    with torch.no_grad():
        target.copy_(tensor)


def optimizer_state(live: LiveState) -> dict[str, dict[str, Any]]:
    """What the optimizers keep of each parameter that they have state of, by its name: tensors,
    numbers and what else there is. State that parameters share is left out."""
    names = {id(tensor): name for name, tensor in live.parameters().items()}
    found: dict[str, dict[str, Any]] = {}
    for optimizer in live.optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in names and state:
                found[names[id(parameter)]] = flat_state(state)
    return found


def put_state(
    live: LiveState, name: str, state: Mapping[str, Any], numbers: Mapping[str, str]
) -> None:
    """Gives the parameter of that name this optimizer state, which is flat. `numbers`: the types of
    those entries that are Python numbers. A parameter that has made no step has none."""
    parameter = live.tensor(name)
    optimizer = live.optimizer_of(parameter)
    if (first := state.get(IS_FIRST)) is not None and float(first):
        optimizer.state.pop(parameter, None)
        return
    own = flat_state(optimizer.state.get(parameter) or {})
    for key, value in state.items():
        made = _as_kept(value, numbers.get(key), own.get(key), _place(optimizer, parameter, value))
        if is_shared(key):
            _put_shared(optimizer, parameter, key, made)
        elif key != IS_FIRST:
            own[key] = made
    if own:
        optimizer.state[parameter] = nested_state(own)


def _place(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, value: Any) -> torch.device:
    """Where state of a parameter is kept: counts of steps on the host, unless the update is one
    kernel that reads them."""
    groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    beside = any(group.get(key) for group in groups for key in ("capturable", "fused"))
    scalar = isinstance(value, torch.Tensor) and not value.dim()
    return torch.device("cpu") if scalar and not beside else parameter.device


def _as_kept(value: Any, number: str | None, now: Any, place: torch.device) -> Any:
    """An entry of state in the form that an optimizer keeps it in: a number, or a tensor, the
    present one if there is one."""
    if not isinstance(value, torch.Tensor):
        return value
    if number is not None:
        return int(value) if number == "int" else float(value)
    if isinstance(now, torch.Tensor) and now.shape == value.shape:
        return now.copy_(value)
    return value.to(place, copy=True)


def _put_shared(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: Any
) -> None:
    if key.startswith(IN_GROUP):
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                group[key.removeprefix(IN_GROUP)] = value
    elif key.startswith(IN_OPTIMIZER):
        setattr(optimizer, key.removeprefix(IN_OPTIMIZER), value)
    else:
        optimizer.state[key.removeprefix(IN_STATE)] = value  # type: ignore[index]
