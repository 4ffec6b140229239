"""The update of any optimizer that is a function of parameter, gradient and state.

Part of capture/. The optimizer's class steps on fake tensors, its settings numbers that remember
how they were computed (setting_number.py), its counts and norms tensors (number_rules.py), once for
every path (update_nodes.py). Which state it keeps, first_state.py says.

The step is traced twice with different numbers. A setting whose number is found in the operators
otherwise than by itself is *fixed*: it has its true value in the trace and must keep it. So is one
that decided a branch which its true value decides otherwise.

As a rule a parameter is traced alone. Where an optimizer updates a parameter by the gradients of
others too (Lamb's limit on the norm of all gradients, Prodigy's sums over all parameters), all
parameters of a step are traced together, and the update is that of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from apportion.capture.first_state import (
    NUMBER,
    FirstState,
    first_state,
    is_kept,
    shared_state,
)
from apportion.capture.number_rules import NumbersAsTensors, number_functions
from apportion.capture.optimizer_step import (
    IN_GROUP,
    IN_OPTIMIZER,
    IN_STATE,
    is_shared,
    own_step,
    take_step,
)
from apportion.capture.setting_number import (
    NUMBERS,
    GroupKey,
    Guard,
    NumberLog,
    expression_value,
    fixed_keys,
    numbered_settings,
    plain,
    settings_of,
)
from apportion.capture.state_tree import flat_state
from apportion.capture.torch_private import FakeTensorMode
from apportion.capture.trace import CaptureError, TensorType
from apportion.capture.update_nodes import DeadPath, UpdateMerger, UpdateNodes, paths

IS_FIRST = "is_first_step"
"""The name of the state that says whether a parameter has made no step yet, where it matters."""

Salt = Callable[[int, str], float]
"""By how much the number of a setting, told by its group and key, is moved in a trace."""


@dataclass(frozen=True)
class ParameterState:
    """The state that an optimizer keeps of a parameter.

    types    name -> shape and dtype of each entry, as it is in a Graph; sorted by name
    values   name -> the number that it begins with, where the optimizer has not made it yet
    numbers  name -> the type of those that the optimizer keeps as Python numbers
    kept     entries that never change
    fresh    whether the first step, which is still to come, computes otherwise than later ones
    joint    whether the parameter is updated by the gradients of others too
    made     shared state that the first step makes, where it is fresh and makes none of its own
    tables   names of what the optimizer notes only in order not to compute it again
    """

    types: dict[str, TensorType]
    values: dict[str, float]
    numbers: dict[str, type]
    kept: dict[str, Any]
    fresh: bool = False
    joint: bool = False
    made: str | None = None
    tables: frozenset[str] = frozenset()

    @property
    def shared(self) -> list[str]:
        """The settings of the group that are state."""
        return [n.removeprefix(IN_GROUP) for n in self.types if n.startswith(IN_GROUP)]


@dataclass(frozen=True)
class TracedParameter:
    """A parameter whose update is traced, alone or with others.

    group  its number among the groups of all optimizers
    """

    group: int
    kind: TensorType
    state: ParameterState

    @property
    def kinds(self) -> list[TensorType]:
        """The types of the parameter, its gradient and its state."""
        return [self.kind, self.kind, *self.state.types.values()]


@dataclass(frozen=True)
class TracedUpdate:
    """The update of parameters: inputs are, for each of them, the parameter, its gradient and its
    state; outputs the new parameter and the new state.

    fixed   settings that must keep their values, each with its group
    guards  comparisons of settings that must keep their outcomes
    """

    update: UpdateNodes
    fixed: frozenset[GroupKey]
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class UpdateTracer:
    """Traces updates of an optimizer.

    groups  those of the parameters that are traced, by their numbers among the groups of all
            optimizers
    keyed   whether the optimizer keeps state under numbers of its settings, which are then fixed,
            all but the rate
    """

    optimizer: torch.optim.Optimizer
    groups: Mapping[int, Mapping[str, Any]]
    mode: FakeTensorMode
    keyed: bool = False

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    def _settings(
        self, log: NumberLog, fixed: frozenset[GroupKey], salt: Salt
    ) -> dict[int, dict[str, Any]]:
        torchs = own_step(type(self.optimizer)).__module__.startswith("torch.")
        found = {}
        for number, group in self.groups.items():
            own = frozenset(key for of, key in fixed if of == number)
            moved = partial(salt, number)
            found[number] = numbered_settings(group, number, log, moved, own, torchs)
        return found

    def _plain_settings(self, number: int, salt: float) -> dict[str, Any]:
        settings = self._settings(NumberLog(), self._fixed, lambda group, key: salt)
        tensors = {
            key: value.detach().clone()
            for key, value in self.groups[number].items()
            if isinstance(value, torch.Tensor) and key not in NUMBERS
        }
        return dict(plain(settings[number])) | tensors

    @property
    def _fixed(self) -> frozenset[GroupKey]:
        """Settings that are fixed before anything is traced. One that is zero is not used, other
        than a rate at the begin of a schedule."""
        found = set()
        for number, group in self.groups.items():
            zeros = {k for k, v in group.items() if type(v) in (int, float) and v == 0}
            found |= {(number, key) for key in fixed_keys(group) | (zeros - {"lr"})}
            if self.keyed:
                found |= {(number, key) for key in group if key not in ("params", "lr")}
        return frozenset(found)

    # state

    def state(self, number: int, parameter: torch.Tensor) -> ParameterState:
        """The state of a parameter of a group, made or not."""
        made = self.optimizer.state.get(parameter) or {}
        group = self.groups[number]
        shapes = {tuple(x.shape) for x in made.values() if isinstance(x, torch.Tensor)}
        like = made if shapes <= {tuple(parameter.shape), ()} else {}
        one, other = (self._plain_settings(number, salt) for salt in (0.0, 0.05))
        found = shared_state(self.optimizer, one, parameter, like)
        shared = {name: self._shared(group, name) for name in found.numbers}
        later = {name: kind for name, kind in found.numbers.items() if shared[name] is None}
        beside: dict[str, Any] = {"joint": found.joint, "tables": found.tables}
        if made:
            shared |= {name: kind(0) for name, kind in later.items()}
            return replace(self._made_state({**flat_state(made), **shared}), **beside)
        shared = {name: value for name, value in shared.items() if value is not None}
        first = first_state(self.optimizer, one, other, parameter, shared, later, found.tables)
        made_by = None
        if first.fresh and all(map(is_shared, first.values)) and not first.kept:
            if not first.made:
                raise CaptureError(
                    f"the first step of {self._name} computes otherwise than later ones, and "
                    "nothing says that it is done; let it keep state in self.state[parameter]"
                )
            made_by = first.made[0]
        begun = self._first_types(number, parameter, first, found.tables)
        return replace(begun, **beside, made=made_by)

    def _shared(self, group: Mapping[str, Any], name: str) -> Any:
        """State that is shared with other parameters, as it is now; None if there is none."""
        if name.startswith(IN_GROUP):
            return group.get(name.removeprefix(IN_GROUP))
        if name.startswith(IN_OPTIMIZER):
            return vars(self.optimizer).get(name.removeprefix(IN_OPTIMIZER))
        return self.optimizer.state.get(name.removeprefix(IN_STATE))  # type: ignore[call-overload]

    def _made_state(self, made: Mapping[str, Any]) -> ParameterState:
        types: dict[str, TensorType] = {}
        values: dict[str, float] = {}
        numbers: dict[str, type] = {}
        kept = {}
        for name, value in sorted(made.items()):
            if isinstance(value, torch.Tensor):
                types[name] = (tuple(value.shape), value.dtype)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                types[name], numbers[name] = ((), NUMBER), type(value)
                values[name] = float(value)
            elif is_kept(value):
                kept[name] = value
            else:
                raise CaptureError(
                    f"{self._name} keeps {name} as a {type(value).__name__}, which cannot be "
                    "captured; state must be tensors and numbers"
                )
        return ParameterState(types, dict.fromkeys(types, 0.0) | values, numbers, kept)

    def _first_types(
        self, number: int, parameter: torch.Tensor, first: FirstState, tables: frozenset[str]
    ) -> ParameterState:
        """Shapes and dtypes, which only a parameter of the true size and dtype tells."""
        found: dict[str, TensorType] = {}
        settings = self._settings(NumberLog(), self._fixed, lambda group, key: 0.0)
        none = ParameterState({}, {}, {}, {}, tables=tables)
        nothing = TracedParameter(number, _type(parameter), none)

        def step(decide: Any, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            (state,) = self._stepped(decide, settings, [nothing], [fakes], [{}], [{}])
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

    def trace(self, parameters: Sequence[TracedParameter]) -> TracedUpdate:
        """The update of a parameter, or of several together; raises CaptureError if they have
        none."""
        fixed = self._fixed
        for _ in range(sum(map(len, self.groups.values())) + 1):
            update, guards = self._once(parameters, fixed, lambda group, key: 1.1e-4)
            broken = {
                read
                for expression, outcome in guards.items()
                if bool(expression_value(self.groups, expression)) != outcome
                for read in settings_of(expression)
            }
            again, _ = self._once(parameters, fixed | broken, lambda group, key: 2.3e-4)
            if not broken and again == update:
                return TracedUpdate(update, fixed, tuple(guards.items()))
            more = broken or self._baked(parameters, fixed, update)
            if not more - fixed:
                break
            fixed |= more
        raise CaptureError(
            f"the update of {self._name} computes with its settings in a way that cannot be "
            "followed; let it use them in arithmetic only"
        )

    def _baked(
        self,
        parameters: Sequence[TracedParameter],
        fixed: frozenset[GroupKey],
        update: UpdateNodes,
    ) -> frozenset[GroupKey]:
        """The settings whose numbers are found in the operators otherwise than by themselves."""
        found = set()
        for number, group in self.groups.items():
            for key in group:
                if key == "params" or (number, key) in fixed:
                    continue
                moved, _ = self._once(parameters, fixed, _salt_of(number, key))
                if moved != update:
                    found.add((number, key))
        return frozenset(found)

    def _once(
        self, parameters: Sequence[TracedParameter], fixed: frozenset[GroupKey], salt: Salt
    ) -> tuple[UpdateNodes, dict[Any, bool]]:
        log = NumberLog()
        settings = self._settings(log, fixed, salt)
        for each in parameters:
            own = self.groups[each.group]
            settings[each.group] |= {key: own[key] for key in each.state.shared if key in own}
        inputs = _Inputs(parameters)
        merger = UpdateMerger(len(inputs.kinds), inputs.kinds, log.table, self._name)

        def run(fresh: bool) -> list[int]:
            """The results of a step of parameters that have made none yet, or have."""
            places = inputs.places(fresh)

            def step(decide: Any, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                return self._ends(decide, settings, inputs, fakes, fresh)

            found = paths(step, [inputs.kinds[k] for k in places], self.mode, self._name)
            return merger.merged(found, places)

        ends = run(fresh=False)
        flags = inputs.flags
        if flags:
            begun = run(fresh=True)
            condition = merger.add("aten.ne.Scalar", (flags[0],), ((), torch.bool), 0)
            ends = merger.chosen(condition, begun, ends)
            for flag in flags:
                off = merger.add("aten.zeros_like.default", (flag,), inputs.kinds[flag], None)
                # a gradient of each parameter before it is an input and no result
                ends.insert(flag - 1 - inputs.owner(flag), off)
        return merger.update(ends), log.guards

    def _ends(
        self,
        decide: Any,
        settings: Mapping[int, Mapping[str, Any]],
        inputs: _Inputs,
        fakes: Sequence[torch.Tensor],
        fresh: bool,
    ) -> list[torch.Tensor]:
        """The new parameters and their new state."""
        pairs, given, kept = inputs.shared_out(fakes, fresh)
        after = self._stepped(decide, settings, inputs.parameters, pairs, given, kept)
        ends = []
        for parameter, pair, held, end in zip(inputs.parameters, pairs, kept, after, strict=True):
            ends += [pair[0], *self._new_state(parameter.state, held, end)]
        return ends

    def _new_state(
        self, state: ParameterState, kept: Mapping[str, Any], after: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        names = [name for name in state.types if name != IS_FIRST]
        extra = set(after) - {*names, *state.kept}
        changed = [n for n, v in kept.items() if after.get(n) != v]
        if extra or changed:
            raise CaptureError(
                f"{self._name} makes or changes {', '.join(sorted(extra) + changed)} in its state "
                "on a later step; take a few steps before capture"
            )
        ends = []
        for name in names:
            shape, dtype = state.types[name]
            value = after.get(name, state.values[name])
            if not isinstance(value, torch.Tensor):
                value = torch.full((), float(value), dtype=dtype)
            if tuple(value.shape) != shape:
                raise CaptureError(
                    f"{self._name} gives its state {name} another shape in another step or for "
                    "other values, which cannot be captured; use another optimizer"
                )
            ends.append(value.to(dtype))
        return ends

    def _stepped(
        self,
        decide: Any,
        settings: Mapping[int, Mapping[str, Any]],
        parameters: Sequence[TracedParameter],
        pairs: Sequence[Sequence[torch.Tensor]],
        given: Sequence[Mapping[str, torch.Tensor]],
        kept: Sequence[Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """The state of each parameter after the class has taken its step on fakes, which are
        written to. `pairs` are parameters and gradients."""
        groups: dict[int, dict[str, Any]] = {}
        state, common = {}, {}
        for each, (parameter, grad), own, held in zip(parameters, pairs, given, kept, strict=True):
            parameter.requires_grad_()
            parameter.grad = grad
            beside = {n: v for n, v in {**own, **held}.items() if not is_shared(n)}
            if beside:
                state[parameter] = beside
            group = groups.setdefault(each.group, dict(settings[each.group]) | {"params": []})
            group["params"].append(parameter)
            for name, value in own.items():
                if name.startswith(IN_GROUP):
                    group[name.removeprefix(IN_GROUP)] = value
                elif is_shared(name):
                    common[name] = value
        cls = type(self.optimizer)
        with number_functions(cls), NumbersAsTensors(decide, cls):
            tables = frozenset().union(*(each.state.tables for each in parameters))
            every = list(groups.values())
            try:
                end = take_step(self.optimizer, every, state, own=common, tables=tables)
            except CaptureError as error:
                if isinstance(error.__cause__, ZeroDivisionError):
                    raise DeadPath(str(error)) from error
                raise
        order = list(groups)
        found = []
        for each, (parameter, _), own in zip(parameters, pairs, given, strict=True):
            parameter.grad = None
            parameter.requires_grad_(False)
            found.append(end.of(parameter, order.index(each.group), (*own, *each.state.types)))
        return found


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a traced update, one parameter after the other."""

    parameters: Sequence[TracedParameter]

    @property
    def kinds(self) -> list[TensorType]:
        return [kind for each in self.parameters for kind in each.kinds]

    @property
    def names(self) -> list[tuple[int, str]]:
        """For each input the parameter's position, and the name of the state."""
        return [
            (k, name)
            for k, each in enumerate(self.parameters)
            for name in (_PARAMETER, _GRADIENT, *each.state.types)
        ]

    @property
    def flags(self) -> list[int]:
        """The inputs that say whether a parameter has made no step yet."""
        return [place for place, (_, name) in enumerate(self.names) if name == IS_FIRST]

    def owner(self, place: int) -> int:
        """The parameter that an input belongs to."""
        return self.names[place][0]

    def places(self, fresh: bool) -> list[int]:
        """The inputs that a step reads which is the first one of those that are to make theirs, or
        a later one."""
        return [
            place
            for place, (k, name) in enumerate(self.names)
            if name != IS_FIRST
            and (name in (_PARAMETER, _GRADIENT) or not (fresh and self.parameters[k].state.fresh))
        ]

    def shared_out(
        self, fakes: Sequence[torch.Tensor], fresh: bool
    ) -> tuple[list[list[torch.Tensor]], list[dict[str, torch.Tensor]], list[Mapping[str, Any]]]:
        """Fakes of `places`: those of parameters and gradients, those of state by name, and the
        entries of state that never change."""
        count = len(self.parameters)
        pairs: list[list[torch.Tensor]] = [[] for _ in range(count)]
        given: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for place, fake in zip(self.places(fresh), fakes, strict=True):
            k, name = self.names[place]
            if name in (_PARAMETER, _GRADIENT):
                pairs[k].append(fake)
            else:
                given[k][name] = fake
        kept: list[Mapping[str, Any]] = [
            {} if fresh and p.state.fresh else p.state.kept for p in self.parameters
        ]
        return pairs, given, kept


_PARAMETER, _GRADIENT = "", "gradient of"


def _type(parameter: torch.Tensor) -> TensorType:
    return tuple(parameter.shape), parameter.dtype


def _salt_of(number: int, moved: str) -> Salt:
    """The usual salt, another one for one key of a group."""
    return lambda group, key: 2.3e-4 if (group, key) == (number, moved) else 1.1e-4
