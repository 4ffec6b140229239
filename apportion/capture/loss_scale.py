"""LossScale: an enabled GradScaler of the user's loop, its scale and count of good steps as state.

Part of capture/. A GradScaler multiplies the loss, divides the gradients by the same number, skips
the optimizer's step where one of them is not finite, and grows or shrinks the number by what it has
seen. It is found like a module that the step refers to (discover.py), and is one here: with two
buffers, which are the scaler's own tensors, or what it would begin with where it has made none yet.

`plain_scaling` is a context in which a scaler computes by ordinary operators, in any precision; the
decision to skip a step, a number that PyTorch reads, is a torch.where there (own_loop.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from apportion.capture import torch_private

_NAMES = {"scale": "_scale", "growth_tracker": "_growth_tracker"}
"""The names here, and the scaler's own."""


class LossScale(torch.nn.Module):
    """A scaler's two tensors as the buffers of a module."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.scaler = scaler
        self._begin = torch_private.first_scale(scaler)
        self._begins = _tensors(*self._begin)
        for name, tensor in self._begins.items():
            self.register_buffer(name, tensor)

    def _follow(self) -> None:
        """Takes over what the scaler has now."""
        begin = torch_private.first_scale(self.scaler)
        if begin != self._begin:
            self._begin, self._begins = begin, _tensors(*begin)
        for name, own in _NAMES.items():
            now = vars(self.scaler)[own]
            self._buffers[name] = self._begins[name] if now is None else now

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self._follow()
        return super().named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            self._follow()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _NAMES:
            setattr(self.scaler, _NAMES[name], value)

    @contextmanager
    def lent(self, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """A context in which the scaler has other tensors."""
        before = {own: vars(self.scaler)[own] for own in _NAMES.values()}
        try:
            for name, tensor in tensors.items():
                setattr(self.scaler, _NAMES[name], tensor)
            yield
        finally:
            for own, tensor in before.items():
                setattr(self.scaler, own, tensor)


@contextmanager
def other_scale(modules: Iterable[torch.nn.Module], factor: float, least: float) -> Iterator[int]:
    """A context in which the scale of every LossScale among the modules is another: by that factor,
    and at least `least`. Gives how many there are."""
    found = [module for module in modules if isinstance(module, LossScale)]
    with ExitStack() as stack:
        for each in found:
            scale = torch.clamp(each.scale.detach() * factor, min=least)
            stack.enter_context(each.lent({"scale": scale}))
        yield len(found)


def _tensors(scale: float, count: int) -> dict[str, torch.Tensor]:
    return {
        "scale": torch.tensor(scale, dtype=torch.float32),
        "growth_tracker": torch.tensor(count, dtype=torch.int32),
    }


def plain_scaling() -> AbstractContextManager[None]:
    """A context in which scalers use ordinary operators in the place of kernels of their own, which
    know float32 scales only."""
    return torch_private.with_scaling(_unscale, _update)


def _unscale(gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Scales gradients in place and puts 1 into `found` if one of them is not finite.

    Zero times an element is zero, or not a number if the element is not finite; and parts of a sum
    can be added.
    """
    sums = torch.stack([torch.sum(gradient * 0.0).to(found.dtype) for gradient in gradients])
    bad = torch.isnan(torch.sum(sums)).to(found.dtype)
    found.copy_(torch.maximum(found, bad))
    for gradient in gradients:
        gradient.mul_(inverse.to(gradient.dtype))


def _update(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found: torch.Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> torch.Tensor:
    """The scale and the count of good steps after a step."""
    bad = found != 0
    count = tracker + 1
    grows = count == interval
    larger = scale * growth
    larger = torch.where(torch.isfinite(larger), larger, scale)
    new = torch.where(bad, scale * backoff, torch.where(grows, larger, scale))
    none = torch.zeros_like(count)
    tracker.copy_(torch.where(torch.logical_or(bad, grows), none, count))
    return scale.copy_(new)
