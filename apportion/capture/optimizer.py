"""Optimizer updates as templates, with their settings left open.

The part of capture/ that turns optimizers into updates of a Graph. The real optimizer class steps
on fake tensors (known_update.py, any_update.py). An update that is elementwise becomes the Body of
update Ops; another one a list of operators that is put into the Graph (inline_update.py). Settings
are read from the live groups at every step (setting_number.py); those that decided which operators
there are must keep their values. An optimizer that updates parameters by each other's gradients has
one update for all parameters of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.any_update import (
    IS_FIRST,
    ParameterState,
    TracedParameter,
    TracedUpdate,
    UpdateTracer,
)
from apportion.capture.known_update import is_known, known_body, state_names, state_type
from apportion.capture.optimizer_step import (
    IN_GROUP,
    IN_OPTIMIZER,
    IN_STATE,
    check_takes_no_closure,
    is_shared,
)
from apportion.capture.setting_number import (
    Optimizers,
    expression_value,
    fixed_keys,
    parameter_groups,
    settings_of,
)
from apportion.capture.setting_number import setting_value as setting_value
from apportion.capture.state_tree import NUMBERED, flat_state
from apportion.capture.torch_private import FakeTensorMode
from apportion.capture.trace import TensorType
from apportion.capture.update_nodes import UpdateNodes, body_of, is_elementwise

FixedSetting = tuple[int, Any, Any]
"""A group, a key and its value: a setting that decides which operators the update has. The key may
be a comparison of settings, the value then is its outcome."""


def _several(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return optimizers if isinstance(optimizers, list | tuple) else (optimizers,)


# the live state


@dataclass(frozen=True, slots=True)
class StateBegin:
    """What a state of a parameter is before the optimizer makes it: one number everywhere.

    number  `int` or `float` where the optimizer keeps it as a Python number; None: as a tensor
    made    of the state that says whether a parameter has made no step yet: the shared state that
            its first step makes, where it makes none of its own
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float = 0.0
    number: str | None = None
    made: str | None = None


def state_value(
    optimizers: Optimizers, parameter: torch.Tensor, name: str, begin: StateBegin | None = None
) -> torch.Tensor:
    """The live state of a parameter as a tensor, or what it begins with."""
    if begin is None:
        usual = tuple(parameter.shape), parameter.dtype
        begin = StateBegin(*(((), torch.float32) if name == "step" else usual))
    made = begin.value
    for optimizer in _several(optimizers):
        own = flat_state(optimizer.state.get(parameter) or {})
        if name == IS_FIRST and (own or _has(optimizer, parameter, begin.made)):
            made = 0.0
        found = own.get(name)
        if is_shared(name):
            found = _shared_value(optimizer, parameter, name)
        if isinstance(found, torch.Tensor) and found.shape == begin.shape:
            return found.to(begin.dtype) if is_shared(name) else found
        if isinstance(found, int | float) and not isinstance(found, bool):
            made = found
    return torch.full(begin.shape, made, dtype=begin.dtype, device=parameter.device)


def _has(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str | None) -> bool:
    return name is not None and _shared_value(optimizer, parameter, name) is not None


def _shared_value(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> Any:
    """State that a parameter shares with others."""
    if name.startswith(IN_GROUP):
        return _group_of(optimizer, parameter).get(name.removeprefix(IN_GROUP))
    if name.startswith(IN_OPTIMIZER):
        return vars(optimizer).get(name.removeprefix(IN_OPTIMIZER))
    return optimizer.state.get(name.removeprefix(IN_STATE))  # type: ignore[call-overload]


def _group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The group that holds a parameter; empty if none does."""
    groups = optimizer.param_groups
    return next((x for x in groups if any(p is parameter for p in x["params"])), {})


# settings


def fixed_settings(optimizers: Optimizers) -> tuple[FixedSetting, ...]:
    """(group, key, value) of all settings that decide by their values which operators an update
    has; and of the numbers that optimizers hold as attributes of their own."""
    found: list[FixedSetting] = []
    index = 0
    for optimizer in _several(optimizers):
        for name, value in vars(optimizer).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | str):
                found.append((index, (_ATTRIBUTE, name), value))
        for group in optimizer.param_groups:
            fixed = fixed_keys(group)
            found += [(index, key, group[key]) for key in group if key in fixed]
            index += 1
    return tuple(found)


_ATTRIBUTE = "attribute"


def _owner(optimizers: Optimizers, index: int) -> torch.optim.Optimizer:
    """The optimizer of a group."""
    for optimizer in _several(optimizers):
        if index < len(optimizer.param_groups):
            return optimizer
        index -= len(optimizer.param_groups)
    raise ValueError("the optimizers have fewer groups than when the step was captured")


def check_fixed(optimizers: Optimizers, fixed: tuple[FixedSetting, ...]) -> None:
    """Raises ValueError if a setting that shaped the captured update has changed."""
    groups = parameter_groups(optimizers)
    for index, key, value in fixed:
        if isinstance(key, tuple) and key[0] == _ATTRIBUTE:
            now = getattr(_owner(optimizers, index), key[1], None)
            if now != value:
                raise ValueError(
                    f"{key[1]} of the optimizer was {value} when the step was captured and is "
                    f"{now} now; capture again"
                )
            continue
        if isinstance(key, tuple):
            if bool(expression_value(groups, key)) != value:
                names = " and ".join(sorted({name for _, name in settings_of(key)}))
                raise ValueError(
                    f"{names} of group {index} changed since the step was captured in a way that "
                    "makes another update; capture again"
                )
            continue
        now = groups[index][key]
        now = tuple(now) if isinstance(now, list) else now
        if now != value:
            raise ValueError(
                f"{key} of group {index} was {value} when the step was captured and is {now} now, "
                "which makes another update; capture again"
            )


# templates


class UpdateTemplates:
    """The updates of optimizers, one per kind of parameter in a group, traced when first asked for.
    Groups are numbered over all optimizers, one after the other.

    bodies  of elementwise updates
    """

    def __init__(self, optimizers: Optimizers, mode: FakeTensorMode) -> None:
        self._owners = [
            (optimizer, group) for optimizer in _several(optimizers)
            for group in optimizer.param_groups
        ]  # fmt: skip
        self._mode = mode
        self._index: dict[Any, int] = {}
        self._states: dict[Any, ParameterState] = {}
        self._inline: list[UpdateNodes] = []
        self._guards: dict[FixedSetting, None] = {}
        self._keyed: set[int] = set()  # groups with state under the numbers of their settings
        self.bodies: list[g.Body] = []

    def state(self, group: int, parameter: torch.Tensor) -> list[tuple[str, TensorType]]:
        """Name and (shape, dtype) of each state tensor of a parameter."""
        optimizer, own = self._owners[group]
        if is_known(optimizer, own):
            return [(n, state_type(optimizer, parameter, n)) for n in state_names(own)]
        return list(self._state(group, parameter).types.items())

    def begin(self, group: int, parameter: torch.Tensor, name: str) -> StateBegin:
        """What a state tensor is where the optimizer has not made it."""
        optimizer, own = self._owners[group]
        if is_known(optimizer, own):
            return StateBegin(*state_type(optimizer, parameter, name))
        state = self._state(group, parameter)
        kind = state.numbers.get(name)
        number = None if kind is None else kind.__name__
        made = state.made if name == IS_FIRST else None
        return StateBegin(*state.types[name], state.values[name], number, made)

    def body(self, group: int, parameter: torch.Tensor) -> int:
        """Index of the Body that updates the parameter. It is negative if the update is not
        elementwise; `inline` then has its operators."""
        optimizer, own = self._owners[group]
        if is_known(optimizer, own):
            dtypes = tuple(dtype for _, (_, dtype) in self.state(group, parameter))
            key: Any = (group, parameter.dtype, parameter.dim() == 0, dtypes)
            if key not in self._index:
                body = known_body(optimizer, group, own, parameter, self._mode)
                self._index[key] = len(self.bodies)
                self.bodies.append(body)
            return self._index[key]
        key = self._key(group, parameter)
        if key not in self._index:
            self._index[key] = self._traced(group, parameter)
        return self._index[key]

    def joint(self, group: int, parameter: torch.Tensor) -> torch.optim.Optimizer | None:
        """The optimizer of a parameter, if it updates its parameters by each other's gradients."""
        optimizer, own = self._owners[group]
        if is_known(optimizer, own) or not self._state(group, parameter).joint:
            return None
        return optimizer

    def joint_update(self, parameters: Sequence[tuple[int, torch.Tensor]]) -> UpdateNodes:
        """The update of parameters that an optimizer updates together, each with its group. Inputs
        and results are those of one parameter after the other."""
        groups = dict.fromkeys(group for group, _ in parameters)
        traced = [
            TracedParameter(group, (tuple(p.shape), p.dtype), self._state(group, p))
            for group, p in parameters
        ]
        return self._guarded(self._tracer(*groups).trace(traced)).update

    def inline(self, body: int) -> UpdateNodes | None:
        """The operators of an update that is not elementwise; None if it is."""
        return self._inline[-1 - body] if body < 0 else None

    @property
    def fixed(self) -> tuple[FixedSetting, ...]:
        """What the updates that were asked for need to stay as it is."""
        optimizers = list(dict.fromkeys(optimizer for optimizer, _ in self._owners))
        state = {(key[0], name) for key, own in self._states.items() for name in own.shared}
        own = {(id(self._owners[key[0]][0]), name.removeprefix(IN_OPTIMIZER))
               for key, held in self._states.items() for name in held.types
               if name.startswith(IN_OPTIMIZER)}  # fmt: skip
        usual = [
            (group, key, value)
            for group, key, value in fixed_settings(optimizers)
            if (group, key) not in state
            and not (isinstance(key, tuple) and (id(self._owners[group][0]), key[1]) in own)
        ]
        return tuple(dict.fromkeys([*map(_hashable, usual), *self._guards]))

    def _state(self, group: int, parameter: torch.Tensor) -> ParameterState:
        key = self._key(group, parameter)
        if key not in self._states:
            self._states[key] = self._found_state(group, parameter)
        return self._states[key]

    def _found_state(self, group: int, parameter: torch.Tensor) -> ParameterState:
        found = self._tracer(group).state(group, parameter)
        if group in self._keyed or not any(NUMBERED in name for name in found.types):
            return found
        self._keyed.add(group)  # in a trace settings are moved a little, and with them such names
        exact = self._tracer(group).state(group, parameter)
        if exact.types.keys() == found.types.keys():
            self._keyed.discard(group)
        return exact

    def _key(self, group: int, parameter: torch.Tensor) -> Any:
        """Equal for parameters of a group that have the same update."""
        optimizer, _ = self._owners[group]
        made = optimizer.state.get(parameter) or {}
        state = tuple(
            (n, type(v).__name__, (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else "")
            for n, v in sorted(flat_state(made).items())
        )
        return group, tuple(parameter.shape), parameter.dtype, state

    def _tracer(self, *groups: int) -> UpdateTracer:
        """Of groups of one optimizer."""
        optimizer, _ = self._owners[groups[0]]
        check_takes_no_closure(optimizer)
        own = {k: self._owners[k][1] for k in groups}
        return UpdateTracer(optimizer, own, self._mode, not self._keyed.isdisjoint(groups))

    def _guarded(self, found: TracedUpdate) -> TracedUpdate:
        """Notes what an update needs to stay as it is."""
        state = {(key[0], name) for key, own in self._states.items() for name in own.shared}
        for group, key in sorted(found.fixed - state):
            own = self._owners[group][1]
            if key not in fixed_keys(own):
                self._guards[_hashable((group, key, own[key]))] = None
        for expression, outcome in found.guards:
            group = min(settings_of(expression))[0]
            self._guards[group, expression, outcome] = None
        return found

    def _traced(self, group: int, parameter: torch.Tensor) -> int:
        own = TracedParameter(
            group, (tuple(parameter.shape), parameter.dtype), self._state(group, parameter)
        )
        found = self._guarded(self._tracer(group).trace([own]))
        if not is_elementwise(found.update):
            self._inline.append(found.update)
            return -len(self._inline)
        body = body_of(found.update)
        if body not in self.bodies:
            self.bodies.append(body)
        return self.bodies.index(body)


def _hashable(fixed: FixedSetting) -> FixedSetting:
    group, key, value = fixed
    return group, key, tuple(value) if isinstance(value, list) else value
