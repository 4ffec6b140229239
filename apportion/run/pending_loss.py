"""The loss on every rank, also where the plan leaves it on few; nobody waits until it is looked at.

Part of the room run. The loss comes in where it is; out goes a tensor on every rank. Those that
have no loss get a PendingLoss: whoever uses it, by float() or any function of torch, waits first
and works with a plain tensor. These few bytes are for the caller and not part of the plan.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apportion.execute import Backends, Executable, Parcel, peer_errors

LOSS_TAG = 1  # messages of the plan have 0


class PendingLoss(torch.Tensor):
    """A tensor that is filled when somebody looks at it."""

    _plain: torch.Tensor
    _fill: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_filled(args), **_filled(kwargs or {}))


def pending_loss(room: torch.Tensor, fill: Callable[[], None]) -> torch.Tensor:
    """`room` as a tensor that calls `fill` once, before its first use."""
    found = room.as_subclass(PendingLoss)
    found._plain, found._fill = room, fill
    return found


def _filled(given: Any) -> Any:
    """Arguments of a function with plain tensors in the place of pending ones."""
    if isinstance(given, PendingLoss):
        fill, given._fill = given._fill, None
        if fill is not None:
            fill()
        return given._plain
    if isinstance(given, list):
        return [_filled(each) for each in given]
    if isinstance(given, tuple):
        return tuple(_filled(each) for each in given)
    if isinstance(given, dict):
        return {key: _filled(each) for key, each in given.items()}
    return given


class LossSharing:
    """Sends the loss, or another scalar that a step returns, from a rank that has it in one of its
    slots to those that have not.

    What is under way is waited for in the next step, or when the process ends: its buffers must
    live until then.
    """

    def __init__(
        self, executable: Executable, slots: Sequence[int], device: int, backends: Backends
    ) -> None:
        self.device, self.backends = device, backends
        holders = {executable.slot_device[slot] for slot in slots}
        self.sender = min(holders, default=0)
        self.without = [d for d in range(executable.tasks.devices) if d not in holders]
        self.slot = executable.slots[slots[0]] if holders else None
        self.under_way: list[_LossParcel] = []
        weakref.finalize(self, _finish_all, self.under_way)

    def everywhere(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The loss, on every rank."""
        if self.slot is None:
            raise ValueError("the step returns no loss")
        if not self.without:
            assert loss is not None
            return loss
        for transfer in self.under_way:
            transfer.finish()
        self.under_way.clear()
        if loss is not None:
            if self.device == self.sender:
                flat = loss.reshape(1).view(torch.uint8)
                parcels = [Parcel(flat, other) for other in self.without]
                self.under_way.append(_LossParcel(self.backends.post((), parcels, LOSS_TAG), flat))
            return loss
        room = torch.empty(self.slot.shape, dtype=self.slot.dtype, device=self.backends.place)
        flat = room.reshape(1).view(torch.uint8)
        coming = _LossParcel(self.backends.post([Parcel(flat, self.sender)], (), LOSS_TAG), flat)
        self.under_way.append(coming)
        return pending_loss(room, coming.finish)


class _LossParcel:
    """Bytes under way; finished once."""

    def __init__(self, handles: list[Any], flat: torch.Tensor) -> None:
        self.handles, self.flat = handles, flat

    def finish(self) -> None:
        """Waits for the bytes, unless that has been done."""
        handles, self.handles = self.handles, []
        with peer_errors():
            for handle in handles:
                handle.wait()


def _finish_all(transfers: list[_LossParcel]) -> None:
    with contextlib.suppress(Exception):  # the others may be gone
        for transfer in transfers:
            transfer.finish()
