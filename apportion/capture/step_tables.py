"""Tables that an optimizer keeps from step to step only in order not to compute something again.

Part of capture/. Older optimizers (RAdam, AdaBelief) note for the last ten steps what they computed
of the number of the step: `group["buffer"][int(step % 10)]`. Such a table is no state, if a step
computes the same where the table is blank. While an update is traced it is blank, whatever place of
it is asked for; what is noted in it is forgotten.
"""

from __future__ import annotations

from typing import Any

import torch


def is_table(value: Any) -> bool:
    """Whether it is a list, tuple or dict, of other such and of numbers and None."""
    if type(value) is dict:
        return all(map(_is_entry, value.values()))
    return isinstance(value, list | tuple) and all(map(_is_entry, value))


def _is_entry(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return value is None or number or scalar or is_table(value)


class BlankTable(list[Any]):
    """A list whose rows are blank at every place and stay so."""

    def __getitem__(self, place: Any) -> Any:
        return blank(super().__getitem__(0 if isinstance(place, torch.Tensor) else place))

    def __setitem__(self, place: Any, value: Any) -> None:
        pass


def blank(value: Any) -> Any:
    """A table in which nothing is noted."""
    if type(value) is dict:
        return {}
    if isinstance(value, list | tuple):
        nested = any(isinstance(row, list | tuple | dict) for row in value)
        rows = [blank(row) for row in list(value)]
        return BlankTable(rows) if nested else rows
    return None
