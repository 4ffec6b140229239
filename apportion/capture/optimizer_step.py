"""One step of an optimizer class on tensors of our own, beside the live optimizer.

Part of capture/. The class itself computes; it gets a copy of the live object, whose groups and
state are given. Whatever else it keeps from step to step is refused by name, because a Graph knows
parameters, gradients and the state of parameters only.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apportion.capture.trace import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_OWN = ("param_groups", "state", "defaults")
_HOOKS = "_optimizer_"
# What torch itself notes on an optimizer, which is no part of an update.
_NOTED = (
    "_opt_called",
    "_step_count",
    "_warned_capturable_if_run_uncaptured",
    "_zero_grad_profile_name",
)


IN_GROUP = "group."
"""How the names of state begin that an optimizer keeps as a number in a parameter's group."""


class StateRecord(dict[str, Any]):
    """The state of one parameter; tells `seen` of every entry when it is first set."""

    def __init__(self, seen: Callable[[str, Any], None], *given: Any) -> None:
        super().__init__(*given)
        self._seen = seen

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            self._seen(name, value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def check_takes_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises CaptureError if the optimizer's step wants a function that computes the loss again."""
    name = type(optimizer).__name__
    step = own_step(type(optimizer))
    required = [
        p
        for p in list(inspect.signature(step).parameters.values())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise CaptureError(
            f"{name} cannot be captured: its step wants {required[0].name}, a function that "
            "computes the loss again, as often as it likes; use an optimizer whose update is "
            "computed from parameter, gradient and state, such as AdamW"
        )
    replaced = vars(optimizer).get("step")
    ours = isinstance(replaced, partial)  # which capture puts there while it records
    if replaced is not None and not ours and not getattr(replaced, "_wrapped_by_lr_sched", False):
        raise CaptureError(
            f"the step of this {name} was replaced by another function, which cannot be captured; "
            "write a subclass with a step of its own"
        )


def own_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step as its class wrote it, without what torch wraps around it."""
    step: Any = cls.step
    while hasattr(step, "__wrapped__") and step.__code__.co_filename.startswith(_TORCH):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


@dataclass(frozen=True)
class StepEnd:
    """What a step leaves.

    state   the state of each parameter
    groups  for each group the numbers in it that the step has changed or made, by key
    """

    state: dict[Any, Any]
    groups: tuple[dict[str, Any], ...]

    def of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter in the first group, the group's own included."""
        own = {IN_GROUP + key: value for key, value in self.groups[0].items()}
        return {**self.state.get(parameter, {}), **own}


def take_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    state: dict[Any, Any],
    seen: Callable[[str, Any], None] = lambda name, value: None,
) -> StepEnd:
    """Lets the class of `optimizer` take one step on the parameters of `groups`. `seen` is told of
    each entry of a state when the step makes it.

    Raises CaptureError if the step keeps anything elsewhere, or cannot run.
    """
    cls = type(optimizer)
    before = {k: _copied(v) for k, v in vars(optimizer).items() if k not in _OWN and k != "step"}
    before = {k: {} if k.startswith(_HOOKS) else v for k, v in before.items()}
    twin = object.__new__(cls)
    twin.__dict__.update({k: _copied(v) for k, v in before.items()})
    twin.defaults = dict(optimizer.defaults)
    twin.param_groups = [{k: _copied(v) for k, v in group.items()} for group in groups]
    table: dict[Any, Any] = defaultdict(lambda: StateRecord(seen))
    table.update({p: StateRecord(seen, own) for p, own in state.items()})
    twin.state = table  # type: ignore[assignment]
    try:
        with torch.no_grad():
            own_step(cls)(twin)
    except CaptureError:
        raise
    except Exception as error:  # whatever a foreign class raises
        said = " ".join(str(error).split()) or type(error).__name__
        raise CaptureError(
            f"{cls.__name__} cannot take a step on a dense gradient: {said[:300]}; use an "
            "optimizer that takes such parameters, or leave them out of its groups"
        ) from error
    changed = tuple(map(_changed, groups, twin.param_groups))
    _check_kept(cls.__name__, twin, before, groups, changed)
    return StepEnd(table, changed)


def _changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The entries of a group that are others now."""
    return {k: v for k, v in new.items() if k != "params" and not _same(old.get(k), v)}


def _check_kept(
    name: str,
    twin: Any,
    before: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    changed: Sequence[dict[str, Any]],
) -> None:
    """Raises CaptureError if the step left something outside of the parameters' state, other than
    numbers in their groups."""
    parameters = {id(p) for group in groups for p in group["params"]}
    found = [
        f"self.{key}"
        for key, value in vars(twin).items()
        if key not in _OWN and key not in _NOTED and not _same(before.get(key), value)
    ]
    found += [f"state[{key!r}]" for key in twin.state if id(key) not in parameters]
    found += [
        f"{key} of a group"
        for group in changed
        for key, value in group.items()
        if not _is_number(value)
    ]
    if found:
        raise CaptureError(
            f"{name} keeps {', '.join(found[:3])} from step to step, which is no state of a "
            "parameter and cannot be captured; keep it in self.state[parameter]"
        )


def _is_number(value: Any) -> bool:
    scalar = isinstance(value, torch.Tensor) and not value.dim()
    return scalar or (isinstance(value, int | float) and not isinstance(value, bool))


def _copied(value: Any) -> Any:
    """Containers anew, whatever is in them as it is."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is set:
        return set(value)
    return value


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) in (list, tuple) and type(new) is type(old):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[k], new[k]) for k in old)
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    if isinstance(old, float) and isinstance(new, float):
        return float(old) == float(new)  # without a guard, where they are settings
    try:
        return bool(old == new)
    except Exception:  # a foreign class may not compare
        return False
