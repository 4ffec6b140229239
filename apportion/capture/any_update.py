"""The update of any optimizer that is a function of parameter, gradient and state.

Part of capture/. The optimizer's class steps on fake tensors, its settings numbers that remember
how they were computed (setting_number.py), its counts and norms tensors (number_rules.py), once for
every path (update_nodes.py). Which state it keeps, first_state.py says.

The step is traced twice with different numbers. A setting whose number is found in the operators
otherwise than by itself is *fixed*: it has its true value in the trace and must keep it. So is one
that decided a branch which its true value decides otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture.first_state import NUMBER, FirstState, first_state, group_numbers
from apportion.capture.number_rules import NumbersAsTensors, number_functions
from apportion.capture.optimizer_step import IN_GROUP, own_step, take_step
from apportion.capture.setting_number import (
    Guard,
    NumberLog,
    expression_value,
    fixed_keys,
    keys_of,
    numbered_settings,
    plain,
)
from apportion.capture.torch_private import FakeTensorMode
from apportion.capture.trace import CaptureError, TensorType
from apportion.capture.update_nodes import UpdateMerger, UpdateNodes, paths

IS_FIRST = "is_first_step"
"""The name of the state that says whether a parameter has made no step yet, where it matters."""


@dataclass(frozen=True)
class ParameterState:
    """The state that an optimizer keeps of a parameter.

    types    name -> shape and dtype of each entry, as it is in a Graph; sorted by name
    values   name -> the number that it begins with, where the optimizer has not made it yet
    numbers  name -> the type of those that the optimizer keeps as Python numbers
    kept     entries that never change
    fresh    whether the first step, which is still to come, computes otherwise than later ones
    """

    types: dict[str, TensorType]
    values: dict[str, float]
    numbers: dict[str, type]
    kept: dict[str, Any]
    fresh: bool = False

    @property
    def shared(self) -> list[str]:
        """The settings of the group that are state."""
        return [n.removeprefix(IN_GROUP) for n in self.types if n.startswith(IN_GROUP)]


@dataclass(frozen=True)
class TracedUpdate:
    """The update of one parameter: inputs are the parameter, its gradient and its state; outputs
    the new parameter and the new state.

    fixed   settings that must keep their values
    guards  comparisons of settings that must keep their outcomes
    """

    update: UpdateNodes
    fixed: frozenset[str]
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class UpdateTracer:
    """Traces the updates of one parameter group.

    number  of the group among the groups of all optimizers
    """

    optimizer: torch.optim.Optimizer
    number: int
    group: Mapping[str, Any]
    mode: FakeTensorMode

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    def _settings(
        self, log: NumberLog, fixed: frozenset[str], salt: Callable[[str], float]
    ) -> dict[str, Any]:
        torchs = own_step(type(self.optimizer)).__module__.startswith("torch.")
        return numbered_settings(self.group, self.number, log, salt, fixed, torchs)

    def _plain_settings(self, salt: float) -> dict[str, Any]:
        return dict(plain(self._settings(NumberLog(), self._fixed, lambda key: salt)))

    @property
    def _fixed(self) -> frozenset[str]:
        """Settings that are fixed before anything is traced. One that is zero is not used, other
        than a rate at the begin of a schedule."""
        zeros = {k for k, v in self.group.items() if type(v) in (int, float) and v == 0}
        return fixed_keys(self.group) | (zeros - {"lr"})

    # state

    def state(self, parameter: torch.Tensor) -> ParameterState:
        """The state of a parameter, made or not."""
        made = self.optimizer.state.get(parameter) or {}
        shapes = {tuple(x.shape) for x in made.values() if isinstance(x, torch.Tensor)}
        like = made if shapes <= {tuple(parameter.shape), ()} else {}
        one, other = (self._plain_settings(salt) for salt in (0.0, 0.05))
        shared = group_numbers(self.optimizer, one, parameter, like)
        true = {key: self.group[key] for key in shared if key in self.group}
        if made:
            return self._made_state(made, shared)
        first = first_state(self.optimizer, one | true, other | true, parameter)
        return self._first_types(parameter, first)

    def _made_state(self, made: Mapping[str, Any], shared: Mapping[str, type]) -> ParameterState:
        types: dict[str, TensorType] = {}
        values: dict[str, float] = {}
        numbers: dict[str, type] = {}
        kept = {}
        held = {IN_GROUP + key: self.group.get(key, kind(0)) for key, kind in shared.items()}
        for name, value in sorted({**made, **held}.items()):
            if isinstance(value, torch.Tensor):
                types[name] = (tuple(value.shape), value.dtype)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                types[name], numbers[name] = ((), NUMBER), type(value)
                values[name] = float(value)
            elif value is None or isinstance(value, str | bool):
                kept[name] = value
            else:
                raise CaptureError(
                    f"{self._name} keeps {name} as a {type(value).__name__}, which cannot be "
                    "captured; state must be tensors and numbers"
                )
        return ParameterState(types, dict.fromkeys(types, 0.0) | values, numbers, kept)

    def _first_types(self, parameter: torch.Tensor, first: FirstState) -> ParameterState:
        """Shapes and dtypes, which only a parameter of the true size and dtype tells."""
        found: dict[str, TensorType] = {}
        log = NumberLog()
        settings = self._settings(log, self._fixed, lambda key: 0.0)

        def step(decide: Any, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            state = self._stepped(decide, settings, fakes[:2], {}, {})
            for name in first.values:
                value = state.get(name)
                if isinstance(value, torch.Tensor) and name not in first.numbers:
                    found[name] = _type(value)
                else:
                    found[name] = ((), NUMBER)
            return [fakes[0]]

        paths(step, [_type(parameter)] * 2, self.mode, self._name)
        types = {name: found[name] for name in sorted(found)}
        values = dict(first.values)
        if first.fresh:
            types[IS_FIRST], values[IS_FIRST] = ((), torch.float32), 1.0
            types = {name: types[name] for name in sorted(types)}
        return ParameterState(types, values, first.numbers, first.kept, first.fresh)

    # the update

    def trace(self, parameter: torch.Tensor, state: ParameterState) -> TracedUpdate:
        """The update of a parameter; raises CaptureError if it has none."""
        fixed = self._fixed
        for _ in range(len(self.group) + 1):
            update, guards = self._once(parameter, state, fixed, lambda key: 1.1e-4)
            broken = {
                key
                for expression, outcome in guards.items()
                if bool(expression_value({self.number: self.group}, expression)) != outcome
                for key in keys_of(expression)
            }
            again, _ = self._once(parameter, state, fixed | broken, lambda key: 2.3e-4)
            if not broken and again == update:
                return TracedUpdate(update, fixed, tuple(guards.items()))
            more = broken or self._baked(parameter, state, fixed, update)
            if not more - fixed:
                break
            fixed |= more
        raise CaptureError(
            f"the update of {self._name} computes with its settings in a way that cannot be "
            "followed; let it use them in arithmetic only"
        )

    def _baked(
        self,
        parameter: torch.Tensor,
        state: ParameterState,
        fixed: frozenset[str],
        update: UpdateNodes,
    ) -> frozenset[str]:
        """The settings whose numbers are found in the operators otherwise than by themselves."""
        found = set()
        for key in self.group:
            if key == "params" or key in fixed:
                continue
            moved, _ = self._once(parameter, state, fixed, _salt_of(key))
            if moved != update:
                found.add(key)
        return frozenset(found)

    def _once(
        self,
        parameter: torch.Tensor,
        state: ParameterState,
        fixed: frozenset[str],
        salt: Callable[[str], float],
    ) -> tuple[UpdateNodes, dict[Any, bool]]:
        log = NumberLog()
        settings = self._settings(log, fixed, salt)
        settings |= {key: self.group[key] for key in state.shared if key in self.group}
        names = [name for name in state.types if name != IS_FIRST]
        own = _type(parameter)
        kinds = [own, own, *state.types.values()]
        merger = UpdateMerger(len(kinds), kinds, log.table, self._name)
        places = [0, 1, *(2 + k for k, n in enumerate(state.types) if n != IS_FIRST)]

        def later(decide: Any, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            given = dict(zip(names, fakes[2:], strict=True))
            return self._ends(decide, settings, fakes, given, state)

        def first(decide: Any, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return self._ends(decide, settings, fakes, None, state)

        found = paths(later, [kinds[k] for k in places], self.mode, self._name)
        ends = merger.merged(found, places)
        if state.fresh:
            begun = merger.merged(paths(first, [own, own], self.mode, self._name), (0, 1))
            flag = 2 + list(state.types).index(IS_FIRST)
            condition = merger.add("aten.ne.Scalar", (flag,), ((), torch.bool), 0)
            ends = merger.chosen(condition, begun, ends)
            off = merger.add("aten.zeros_like.default", (flag,), kinds[flag], None)
            ends.insert(flag - 1, off)
        return merger.update(ends), log.guards

    def _ends(
        self,
        decide: Any,
        settings: Mapping[str, Any],
        fakes: Sequence[torch.Tensor],
        given: dict[str, torch.Tensor] | None,
        state: ParameterState,
    ) -> list[torch.Tensor]:
        """The new parameter and the new state."""
        kept = {} if given is None else state.kept
        after = self._stepped(decide, settings, fakes[:2], given or {}, kept)
        names = [name for name in state.types if name != IS_FIRST]
        extra = set(after) - {*names, *state.kept}
        changed = [n for n, v in kept.items() if after.get(n) != v]
        if extra or changed:
            raise CaptureError(
                f"{self._name} makes or changes {', '.join(sorted(extra) + changed)} in its state "
                "on a later step; take a few steps before capture"
            )
        ends = [fakes[0]]
        for name in names:
            shape, dtype = state.types[name]
            value = after[name]
            if not isinstance(value, torch.Tensor):
                value = torch.full((), float(value), dtype=dtype)
            if tuple(value.shape) != shape:
                raise CaptureError(
                    f"{self._name} changes the shape of its state {name} from step to step, which "
                    "cannot be captured"
                )
            ends.append(value.to(dtype))
        return ends

    def _stepped(
        self,
        decide: Any,
        settings: Mapping[str, Any],
        fakes: Sequence[torch.Tensor],
        given: Mapping[str, torch.Tensor],
        kept: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The state after the class has taken its step on fakes, which are written to."""
        parameter, grad = fakes
        parameter.requires_grad_()
        parameter.grad = grad
        own = {n: v for n, v in {**given, **kept}.items() if not n.startswith(IN_GROUP)}
        shared = {n.removeprefix(IN_GROUP): v for n, v in given.items() if n.startswith(IN_GROUP)}
        state = {parameter: own} if own else {}
        with number_functions(type(self.optimizer)), NumbersAsTensors(decide, self._name):
            groups = [dict(settings) | shared | {"params": [parameter]}]
            end = take_step(self.optimizer, groups, state)
        parameter.grad = None
        parameter.requires_grad_(False)
        unchanged = {IN_GROUP + key: value for key, value in shared.items()}
        return unchanged | end.of(parameter)


def _type(parameter: torch.Tensor) -> TensorType:
    return tuple(parameter.shape), parameter.dtype


def _salt_of(moved: str) -> Callable[[str], float]:
    """The usual salt, another one for one key."""
    return lambda key: 2.3e-4 if key == moved else 1.1e-4
