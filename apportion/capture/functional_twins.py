"""Functional twins of in-place operators: `add` for `add_`, `zeros_like` for `zero_`.

capture/record.py runs the twin instead, so that a Graph writes nothing twice; verify/ samples the
twins of in-place operators that it meets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from apportion.capture.torch_private import schema

aten = torch.ops.aten


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    value = source.clone() if source.dtype == target.dtype else source.to(target.dtype)
    return value if value.shape == target.shape else value.expand(target.shape)


def _filled(target: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.full_like(target, value)


_TWINS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.copy_.default: _copied,
    aten.zero_.default: torch.zeros_like,
    aten.fill_.Scalar: _filled,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
}


@cache
def functional_twin(operator: Any) -> Callable[..., torch.Tensor] | None:
    """The operator without the trailing underscore, if this one writes to its first argument
    only."""
    if operator in _TWINS:
        return _TWINS[operator]
    own = schema(operator)
    written = [i for i, a in enumerate(own.arguments) if a.alias_info and a.alias_info.is_write]
    namespace, name = own.name.split("::")
    if written != [0] or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    twin = getattr(packet, own.overload_name or "default", None)
    return twin if twin is not None and _take_the_same(own, schema(twin)) else None


def _take_the_same(schema: Any, other: Any) -> bool:
    """Whether two operators take the same arguments: some of equal names do not."""
    return [str(a.type) for a in schema.arguments] == [str(a.type) for a in other.arguments]
