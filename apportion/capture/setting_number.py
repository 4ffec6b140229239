"""Numbers of an optimizer's settings that remember how they were computed.

Part of capture/. While an update is traced, every setting of a parameter group that may change is a
SettingNumber: a float with an expression. Constants of the trace that equal a remembered number
become `Setting` arguments, whose expressions `setting_value` evaluates on the live groups at every
step. A comparison decides which operators the update has; it is remembered as a *guard*, an
expression with the outcome that it must keep.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

OPERATORS: dict[str, Callable[..., float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Guard = tuple[Any, bool]
"""A comparison of settings, and how it came out."""
GroupKey = tuple[int, str]
"""A setting: the number of its group among the groups of all optimizers, and its key."""


def parameter_groups(optimizers: Optimizers) -> list[dict[str, Any]]:
    """The groups of one optimizer, or of several, one after the other."""
    if isinstance(optimizers, list | tuple):
        return [group for each in optimizers for group in each.param_groups]
    return list(optimizers.param_groups)  # type: ignore[union-attr]


def setting_value(optimizers: Optimizers, expression: Any) -> float:
    """The number that a Setting's expression has now, from the optimizers' groups."""
    return expression_value(parameter_groups(optimizers), expression)


def expression_value(groups: Any, expression: Any) -> float:
    """The number that an expression has for these groups, which are told by their numbers."""
    if not isinstance(expression, tuple):
        return float(expression)
    head, *rest = expression
    if head == "get":
        group, key, *position = rest
        value = groups[group][key]
        return float(value[position[0]] if position else value)
    return float(OPERATORS[head](*(expression_value(groups, part) for part in rest)))


@dataclass
class NumberLog:
    """What is remembered while an update is traced.

    table   the expression of every number that was computed
    guards  how comparisons came out, by their expressions
    """

    table: dict[float, Any] = field(default_factory=dict)
    guards: dict[Any, bool] = field(default_factory=dict)


class SettingNumber(float):
    """A float that remembers the expression it was computed by."""

    expression: Any
    log: NumberLog

    def __new__(cls, value: float, expression: Any, log: NumberLog) -> SettingNumber:
        self = super().__new__(cls, value)
        self.expression, self.log = expression, log
        log.table[float(value)] = expression
        return self

    def apply(self, symbol: str, *parts: Any) -> Any:
        """The operator applied to these numbers, of which this one is one."""
        if not all(isinstance(part, int | float) for part in parts):
            return NotImplemented
        value = OPERATORS[symbol](*map(float, parts))
        return SettingNumber(value, (symbol, *map(_expression, parts)), self.log)

    def _compare(self, symbol: str, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        outcome = bool(OPERATORS[symbol](float(self), float(other)))
        self.log.guards[symbol, self.expression, _expression(other)] = outcome
        return outcome

    __hash__ = float.__hash__

    def __neg__(self) -> Any:
        return self.apply("neg", self)

    def __abs__(self) -> Any:
        return self.apply("abs", self)

    def __add__(self, other: Any) -> Any:
        return self.apply("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self.apply("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self.apply("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.apply("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self.apply("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self.apply("*", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.apply("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.apply("/", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self.apply("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.apply("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return self.apply("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.apply("%", other, self)

    def __pow__(self, other: Any, modulus: None = None) -> Any:
        return self.apply("**", self, other)

    def __rpow__(self, other: Any, modulus: None = None) -> Any:
        return self.apply("**", other, self)

    def __bool__(self) -> bool:
        return bool(self._compare("!=", 0))

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", other)

    def __eq__(self, other: Any) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: Any) -> Any:
        return self._compare("!=", other)


# settings of a group

# Settings of how torch runs the update, which do not change what it computes.
IMPLEMENTATION_FLAGS = {
    "foreach": False,
    "fused": False,
    "capturable": False,
    "differentiable": False,
}
# Settings that choose a branch where they are zero; the others may become zero and back.
_BRANCHING = ("weight_decay", "momentum", "dampening")
# Settings that are numbers even where they are written as 1; other whole numbers count something.
NUMBERS = ("lr", "betas", "eps", "alpha", "lambd", "rho", *_BRANCHING)


def is_fixed(key: str, value: Any) -> bool:
    """Whether a setting decides which operators an update has, by its name and value alone."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return True
    if key in _BRANCHING and isinstance(value, int | float) and value == 0:
        return True
    return isinstance(value, int) and key not in NUMBERS


def fixed_keys(group: Mapping[str, Any]) -> frozenset[str]:
    """The settings of a group that are fixed by their names and values alone."""
    return frozenset(
        key
        for key, value in group.items()
        if key != "params" and key not in IMPLEMENTATION_FLAGS and is_fixed(key, value)
    )


def numbered_settings(
    group: Mapping[str, Any],
    index: int,
    log: NumberLog,
    salt: Callable[[str], float],
    fixed: frozenset[str],
    torchs: bool = True,
) -> dict[str, Any]:
    """The settings of a group, every number that may change replaced by a SettingNumber.

    Each is near the true number and nothing else in a trace can be it; the salt of a key moves it.
    Where the update is torch's own, its flags are those of the plainest way to compute it.
    """
    count = 97 * index  # so that equal settings of two groups are two numbers

    def symbolic(key: str, value: Any, *position: int) -> Any:
        nonlocal count
        if is_fixed(key, value) or not _is_number(value):
            return value
        count += 1
        near = (float(value) or 1e-3) * (1.0 - 1e-3 * (count * 0.6180339887 % 1.0) - salt(key))
        return SettingNumber(near, ("get", index, key, *position), log)

    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params" or key in fixed:
            continue
        if type(value) in (list, tuple):
            settings[key] = tuple(symbolic(key, x, k) for k, x in enumerate(value))
        else:
            settings[key] = symbolic(key, value)
    settings |= {key: group[key] for key in fixed if key in group}
    return settings | {k: v for k, v in IMPLEMENTATION_FLAGS.items() if k in group and torchs}


def _is_number(value: Any) -> bool:
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return one or isinstance(value, int | float)


def settings_of(expression: Any) -> set[GroupKey]:
    """The settings that an expression reads."""
    if not isinstance(expression, tuple):
        return set()
    head, *rest = expression
    return {(rest[0], rest[1])} if head == "get" else set().union(*map(settings_of, rest))


def _expression(part: Any) -> Any:
    return part.expression if isinstance(part, SettingNumber) else part


def plain(value: Any) -> Any:
    """A value with plain floats in the place of SettingNumbers."""
    if isinstance(value, SettingNumber):
        return float(value)
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    return value
