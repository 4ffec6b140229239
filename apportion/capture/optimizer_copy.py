"""A copy of a model and its optimizer, with everything that the optimizer knows.

Part of capture/. torch copies an optimizer's groups and state only, so that a class with attributes
of its own would not work on the copy.
"""

from __future__ import annotations

import copy
from typing import Any


def copied_with(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """The model and the optimizer, or several of either, copied together."""
    memo: dict[int, Any] = {}
    return copy.deepcopy(model, memo), _copied(optimizer, memo)


def _copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    if isinstance(optimizer, dict):
        return {key: _copied(each, memo) for key, each in optimizer.items()}
    if isinstance(optimizer, list | tuple):
        return type(optimizer)(_copied(each, memo) for each in optimizer)
    twin = object.__new__(type(optimizer))
    # a schedule puts a `step` of its own onto the object, which calls the original's
    vars(twin).update(
        {k: copy.deepcopy(v, memo) for k, v in vars(optimizer).items() if k != "step"}
    )
    return twin
