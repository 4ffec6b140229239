"""Sample: one operator call with real tensors, which verify/ checks every split of.

Samples come from PyTorch's operator database (torch_samples.py) and from our own lists
(own_samples/), which name operators by `aten` here, so that one that this version of torch lacks is
left out instead of failing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture import flatten_arguments
from apportion.graph import substitute


@dataclass(frozen=True, eq=False)
class Sample:
    """One operator call: `Ref(k)` in the arguments is `tensors[k]`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]

    @property
    def key(self) -> str:
        """Equal for calls with equal arguments, shapes, strides and dtypes."""
        types = [(tuple(t.shape), t.stride(), str(t.dtype)) for t in self.tensors]
        return f"{self.target} {self.args} {self.kwargs} {types}"

    def call(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        """The operator on these tensors, or on the sample's own."""
        # Detached: a function may ask for gradients of its arguments.
        given = [t.detach() for t in (self.tensors if tensors is None else tensors)]
        named = {k: substitute(v, given) for k, v in self.kwargs.items()}
        return self.target(*substitute(self.args, given), **named)


def sample_of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Sample:
    """The Sample of a call with real tensors."""
    held, named, tensors = flatten_arguments(args, kwargs)
    return Sample(target, held, named, tuple(tensors))


class MissingOperator:
    """An operator that this version of torch does not have."""

    def __getattr__(self, name: str) -> MissingOperator:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError("this version of torch does not have the operator")


class _OverloadPacket:
    """torch's overloads of one operator; an overload that it lacks is a MissingOperator."""

    def __init__(self, packet: Any) -> None:
        self._packet = packet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name, MissingOperator())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._packet(*args, **kwargs)


class _AtenOperators:
    """torch.ops.aten; what it lacks is a MissingOperator."""

    def __getattr__(self, name: str) -> Any:
        packet = getattr(torch.ops.aten, name, None)
        return MissingOperator() if packet is None else _OverloadPacket(packet)


aten: Any = _AtenOperators()
