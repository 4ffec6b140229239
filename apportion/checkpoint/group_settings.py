"""The settings of optimizers' groups in a checkpoint: learning rates and the like.

Part of the room checkpoint. Groups come in and plain data goes out; on the way back each setting
must be of the kind that the group has, and all of them make the update that was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from apportion.capture import Program, check_settings
from apportion.checked import LARGEST_NUMBER
from apportion.checkpoint.plain_data import from_plain, to_plain


def plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of optimizers' groups, as far as they are plain data."""
    found: list[dict[str, Any]] = []
    for group in groups:
        entry = {}
        for key, value in group.items():
            if key != "params":
                try:
                    entry[key] = to_plain(value, key)
                except ValueError:
                    continue  # a function: the program makes it again
        found.append(entry)
    return found


def put_groups(program: Program, stored: Sequence[Mapping[str, Any]], where: str) -> None:
    """Gives the optimizers of a step the settings of a checkpoint. Raises ValueError, and changes
    nothing, if they would make another update."""
    put_all_settings(program.live.param_groups, stored, where, lambda: check_settings(program))


def put_all_settings(
    groups: Sequence[dict[str, Any]],
    stored: Sequence[Mapping[str, Any]],
    where: str,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Gives groups the settings of a checkpoint, as torch's load_state_dict does. Raises ValueError
    and changes nothing, if they are of another optimizer or do not pass the `check`."""
    if len(stored) != len(groups):
        raise ValueError(
            f"{where} is of another optimizer: it has {len(stored)} groups of parameters, this one "
            f"{len(groups)}"
        )
    for group, settings in zip(groups, stored, strict=True):
        _check_kind(group, settings, where)
    before = [dict(group) for group in groups]
    numbers = [_tensor_settings(group) for group in groups]
    try:
        for group, settings in zip(groups, stored, strict=True):
            _put_settings(group, settings, where)
        check()
    except ValueError:
        for group, old, held in zip(groups, before, numbers, strict=True):
            group.update(old)
            for key, value in held.items():
                group[key].fill_(value)
        raise


_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Settings that torch's schedulers put into groups, and that may come later."""
_NEVER_NEGATIVE = (*_SCHEDULERS, "lr", "eps", "weight_decay", "momentum")
_OF_THE_MACHINE = ("capturable", "foreach", "fused", "differentiable")
"""How an update is computed where it is: this program's own choice stays."""


def _check_kind(group: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if a number that the optimizer has is not stored: it is of another kind."""
    lacking = [
        key
        for key, value in group.items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
        if key not in settings and key not in _SCHEDULERS
    ]
    if lacking:
        raise ValueError(
            f"{where} is of another optimizer: it has no setting {', '.join(sorted(lacking))}"
        )


def _tensor_settings(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in group.items()
        if isinstance(value, torch.Tensor) and value.numel() == 1
    }


def _put_settings(group: dict[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """Gives one group the settings of another, as far as it has such."""
    for key, plain in settings.items():
        if key not in group or key in ("params", *_OF_THE_MACHINE):
            continue
        value, now = from_plain(plain), group[key]
        if isinstance(now, torch.Tensor):
            if not isinstance(value, torch.Tensor | float | int) or now.numel() != 1:
                raise ValueError(f"{where}: the setting {key} is none")
            number = float(value)
            if not _alike(0.0, number) or (key in _NEVER_NEGATIVE and _negative(number)):
                raise ValueError(f"{where}: the setting {key} is none")
            now.fill_(number)
            continue
        if not _alike(now, value) or (key in _NEVER_NEGATIVE and _negative(value)):
            raise ValueError(f"{where}: the setting {key} is none of this optimizer")
        group[key] = value


def _negative(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0


def _alike(now: Any, value: Any) -> bool:
    """Whether a setting may have that value: a finite number where there is one, and so on."""
    if isinstance(value, int | float) and not abs(value) <= LARGEST_NUMBER:
        return False  # nor is what no number is
    if now is None or value is None:
        return True
    if isinstance(now, bool) or isinstance(value, bool):
        return isinstance(now, bool) and isinstance(value, bool)
    if isinstance(now, int | float):
        return isinstance(value, int | float)
    if isinstance(now, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(now)
            and all(map(_alike, now, value))
        )
    return isinstance(value, type(now))
