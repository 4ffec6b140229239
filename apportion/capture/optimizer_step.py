"""One step of an optimizer class on tensors of our own, beside the live optimizer.

Part of capture/. The class itself computes; it gets a copy of the live object, whose groups and
state are given. Whatever else it keeps from step to step is refused by name, because a Graph knows
parameters, gradients and the state of parameters only.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from apportion.capture.state_tree import flat_state, nested_state
from apportion.capture.step_tables import blank, is_table
from apportion.capture.torch_private import FakeTensor
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
"""How the names of state begin that an optimizer keeps in a parameter's group."""
IN_OPTIMIZER = "self."
"""The same for an attribute of the optimizer."""
IN_STATE = "state."
"""The same for an entry of the optimizer's state that is no parameter's."""


def is_shared(name: str) -> bool:
    """Whether state of that name is one for several parameters."""
    return name.startswith((IN_GROUP, IN_OPTIMIZER, IN_STATE))


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

    state    the state of each parameter
    groups   for each group all that is in it, by name; and what is the optimizer's own
    changed  for each group the names of those that the step has changed or made
    """

    state: dict[Any, Any]
    groups: tuple[dict[str, Any], ...]
    changed: tuple[frozenset[str], ...]

    def of(self, parameter: torch.Tensor, group: int = 0, given: Iterable[str] = ()) -> Any:
        """The state of a parameter in a group by name, with what it shares with others where that
        was changed or `given`."""
        names = [n for n in given if is_shared(n) and n in self.groups[group]]
        own = {name: self.groups[group][name] for name in (*self.changed[group], *names)}
        return {**flat_state(self.state.get(parameter, {})), **own}


def take_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    state: dict[Any, Any],
    seen: Callable[[str, Any], None] = lambda name, value: None,
    own: Mapping[str, Any] | None = None,
    tables: Collection[str] = (),
) -> StepEnd:
    """Lets the class of `optimizer` take one step on the parameters of `groups`, whose `state` is
    flat; `own` is that of the optimizer itself where it is not as it is now. `seen` is told of each
    entry of a state when the step makes it. Tables of these names are blank.

    Raises CaptureError if the step keeps anything else, or cannot run.
    """
    cls = type(optimizer)
    before = {k: v for k, v in vars(optimizer).items() if k not in _OWN and k != "step"}
    before = {k: {} if k.startswith(_HOOKS) else v for k, v in before.items()}
    kept: dict[str, Any] = {
        k: v for k, v in cast(dict[Any, Any], optimizer.state).items() if isinstance(k, str)
    }
    for name, value in (own or {}).items():
        place = before if name.startswith(IN_OPTIMIZER) else kept
        place[name.removeprefix(IN_OPTIMIZER).removeprefix(IN_STATE)] = value
    fake = any(isinstance(p, FakeTensor) for group in groups for p in group["params"])
    twin = object.__new__(cls)
    twin.__dict__.update({k: _copied(v, not fake) for k, v in before.items()})
    twin.defaults = dict(optimizer.defaults)
    twin.param_groups = [{k: _copied(v, not fake) for k, v in group.items()} for group in groups]
    for name in tables:
        for each in [vars(twin)] if name.startswith(IN_OPTIMIZER) else twin.param_groups:
            key = name.removeprefix(IN_OPTIMIZER).removeprefix(IN_GROUP)
            each[key] = blank(each.get(key))
    table: dict[Any, Any] = defaultdict(lambda: StateRecord(seen))
    table.update({k: _copied(v, not fake) for k, v in kept.items()})
    table.update({p: StateRecord(seen, nested_state(held)) for p, held in state.items()})
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
    return _end(cls.__name__, twin, table, groups, before, kept, tables)


def _end(
    name: str,
    twin: Any,
    table: dict[Any, Any],
    groups: Sequence[dict[str, Any]],
    before: dict[str, Any],
    kept: dict[str, Any],
    tables: Collection[str],
) -> StepEnd:
    """What a step has left. Raises CaptureError if that is more than tensors, numbers and tables of
    such."""
    parameters = {id(p) for group in groups for p in group["params"]}
    own = {IN_STATE + str(k): v for k, v in table.items() if id(k) not in parameters}
    old = {IN_STATE + k: v for k, v in kept.items()}
    for key, value in vars(twin).items():
        if key not in _OWN and key not in _NOTED:
            own[IN_OPTIMIZER + key] = value
            old[IN_OPTIMIZER + key] = before.get(key)
    everything, changed = [], []
    for group, after in zip(groups, twin.param_groups, strict=True):
        now = own | {IN_GROUP + k: v for k, v in after.items() if k != "params"}
        then = old | {IN_GROUP + k: v for k, v in group.items()}
        others = [n for n, v in now.items() if n not in tables and not _same(then.get(n), v)]
        strange = [n for n in others if not (_is_number(now[n]) or is_table(now[n]))]
        if strange:
            raise kept_elsewhere(name, strange)
        everything.append(now)
        changed.append(frozenset(others))
    return StepEnd(table, tuple(everything), tuple(changed))


def kept_elsewhere(optimizer: str, names: Sequence[str]) -> CaptureError:
    """The error that an optimizer keeps what is no state."""
    return CaptureError(
        f"{optimizer} keeps {', '.join(map(_said, names[:3]))} from step to step, which is no "
        "state of a parameter and cannot be captured; use another optimizer, or keep "
        "it as a number or a tensor in self.state[parameter]"
    )


def _said(name: str) -> str:
    """The name of shared state as a user knows it."""
    if name.startswith(IN_GROUP):
        return f"{name.removeprefix(IN_GROUP)} of a group"
    return name if name.startswith(IN_OPTIMIZER) else f"state[{name.removeprefix(IN_STATE)!r}]"


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or isinstance(value, torch.Tensor)


def _copied(value: Any, tensors: bool) -> Any:
    """Containers anew, tensors if wanted, whatever else is in them as it is."""
    if tensors and type(value) is torch.Tensor:
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v, tensors) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(v, tensors) for v in value)
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
        return _same_tensor(old, new)
    if isinstance(old, float) and isinstance(new, float):
        return float(old) == float(new)  # without a guard, where they are settings
    try:
        return bool(old == new)
    except Exception:  # a foreign class may not compare
        return False


def _same_tensor(old: Any, new: Any) -> bool:
    if not all(type(x) is torch.Tensor for x in (old, new)):
        return False
    return (old.shape, old.dtype) == (new.shape, new.dtype) and torch.equal(old, new)
