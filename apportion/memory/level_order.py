"""level_order: breadth first, as an executor with much parallelism runs a step.

Part of the room memory. An OrderModel comes in, units in another order go out: each has the level
of the deepest of those that it needs, and one more; lower levels come first. TensorFlow's executor
starts whatever is ready, which is nearly this order on one stream of a device, and holds what all
of them make. It is what TensorFlowMem calls its baseline; eager PyTorch has no such order.
"""

from __future__ import annotations

from collections.abc import Collection

from apportion.memory.order_model import OrderModel


def level_order(model: OrderModel, among: Collection[int] | None = None) -> list[int]:
    """The units by their levels, equal ones as captured; with `among` only these, by levels among
    themselves."""
    chosen = range(len(model.units)) if among is None else sorted(among)
    level: dict[int, int] = {}
    for unit in chosen:  # as captured, so that what it needs comes first
        level[unit] = 1 + max((level[one] for one in model.needs[unit] if one in level), default=-1)
    return sorted(level, key=lambda unit: (level[unit], unit))
