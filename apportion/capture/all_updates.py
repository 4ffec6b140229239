"""The updates of several optimizers as those of one, their groups numbered one after the other.

Part of capture/. optimizer.py knows one optimizer; here its templates, settings and state are those
of all that a step has: the k-th group of the second optimizer has the number of the first one's
groups plus k, in `Setting` expressions, recipes and fixed settings alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture import optimizer as updates
from apportion.capture.live_state import LiveState
from apportion.capture.torch_private import FakeTensorMode


class AllUpdateTemplates:
    """The Bodies of all optimizers' updates; asked as UpdateTemplates are, but with the numbers
    of groups over all optimizers."""

    def __init__(self, live: LiveState, mode: FakeTensorMode) -> None:
        self._live, self._mode = live, mode
        self._templates: dict[int, updates.UpdateTemplates] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self.bodies: list[g.Body] = []

    def state(self, group: int, parameter: torch.Tensor) -> list[tuple[str, Any]]:
        """Name and (shape, dtype) of each state tensor of a parameter."""
        _, first, templates = self._of(group)
        return templates.state(group - first, parameter)

    def body(self, group: int, parameter: torch.Tensor) -> int:
        """Index of the Body that updates the parameter."""
        number, first, templates = self._of(group)
        own = templates.body(group - first, parameter)
        if (number, own) not in self._numbers:
            self._numbers[number, own] = len(self.bodies)
            self.bodies.append(_renumbered(templates.bodies[own], first))
        return self._numbers[number, own]

    def _of(self, group: int) -> tuple[int, int, updates.UpdateTemplates]:
        """The number of the group's optimizer, that of its first group, and its templates."""
        number, first = _place(self._live, group)
        if number not in self._templates:
            optimizer = self._live.optimizers[number]
            updates.check_supported(optimizer)
            self._templates[number] = updates.UpdateTemplates(optimizer, self._mode)
        return number, first, self._templates[number]


def all_fixed_settings(live: LiveState) -> tuple[updates.FixedSetting, ...]:
    """(group, key, value) of all settings that decide which operators the updates have."""
    return tuple(
        (live.first_group(optimizer) + group, key, value)
        for optimizer in live.optimizers
        for group, key, value in updates.fixed_settings(optimizer)
    )


def check_all_fixed(live: LiveState, fixed: tuple[updates.FixedSetting, ...]) -> None:
    """Raises ValueError if a setting that shaped a captured update has changed."""
    for optimizer in live.optimizers:
        first, count = live.first_group(optimizer), len(optimizer.param_groups)
        own = tuple((k - first, key, value) for k, key, value in fixed if 0 <= k - first < count)
        updates.check_fixed(optimizer, own)


def _place(live: LiveState, group: int) -> tuple[int, int]:
    first = 0
    for number, optimizer in enumerate(live.optimizers):
        if group < first + len(optimizer.param_groups):
            return number, first
        first += len(optimizer.param_groups)
    raise ValueError(f"there is no group {group}; the optimizers have {first}")


def _renumbered(body: g.Body, first: int) -> g.Body:
    """The Body with `first` added to the number of its group, wherever it has it."""
    if not first:
        return body
    ops = tuple(replace(op, args=tuple(_shifted(arg, first) for arg in op.args)) for op in body.ops)
    recipe = None if body.recipe is None else replace(body.recipe, group=body.recipe.group + first)
    return replace(body, ops=ops, recipe=recipe)


def _shifted(arg: Any, first: int) -> Any:
    if isinstance(arg, g.Setting):
        return g.Setting(_shifted_expression(arg.expression, first))
    if isinstance(arg, tuple):
        return tuple(_shifted(each, first) for each in arg)
    return arg


def _shifted_expression(expression: Any, first: int) -> Any:
    if not isinstance(expression, tuple):
        return expression
    if expression[0] == "get":
        return ("get", expression[1] + first, *expression[2:])
    return (expression[0], *(_shifted_expression(each, first) for each in expression[1:]))
