"""written_tensors: tensors of the user's that are in no module and that the step writes to.

Part of capture/. An average of the parameters in a plain list, a table in a dict: real tensors that
were there before the step and are changed in place, by themselves or by a view. They are state, as
buffers are. A step is recorded with TensorWrites at its recorder's side; if that finds any, the
recording ends in WrittenState, and capture records once more with these tensors as buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from apportion.capture.torch_private import FakeTensor, schema, storage_id
from apportion.capture.trace import CaptureError, RecordedCall
from apportion.capture.value_origin import Producers


class WrittenState(CaptureError):
    """The step writes to tensors that are no parameters and no buffers."""

    def __init__(self, tensors: Sequence[torch.Tensor], at: str) -> None:
        super().__init__(
            f"the step changes a tensor that is no parameter and no buffer{at}; register it with "
            "register_buffer"
        )
        self.tensors = tensors


class _SlotsSoFar(Protocol):
    """What is asked of a recorder."""

    calls: list[RecordedCall]
    tensors: list[torch.Tensor]
    slots: dict[int, int]


class TensorWrites:
    """What one recording writes to of the tensors for which `lasting` is true: those that were
    there before it."""

    def __init__(self, lasting: Callable[[torch.Tensor], bool], at: Callable[[], str]) -> None:
        self._lasting, self._at = lasting, at
        self._found: dict[int, torch.Tensor] = {}
        self._producers: Producers | None = None
        self._line = ""

    def note_call(self, recorder: _SlotsSoFar, func: Any, args: Any, kwargs: Any) -> bool:
        """Notes what an operator writes to; whether one of that has data, so that the operator must
        not run."""
        return self.note(recorder, _targets(func, args, kwargs))

    def note(self, recorder: _SlotsSoFar, targets: Iterable[torch.Tensor]) -> bool:
        """The same for tensors."""
        has_data = False
        for tensor in targets:
            own = self._owner(recorder, tensor) if isinstance(tensor, FakeTensor) else tensor
            if own is None or not self._lasting(own):
                continue
            has_data |= own is tensor
            if not self._found:
                self._line = self._at()
            self._found.setdefault(storage_id(own), own)
        return has_data

    def check(self) -> None:
        """Raises WrittenState if there was any."""
        if self._found:
            raise WrittenState(list(self._found.values()), self._line)

    def _owner(self, recorder: _SlotsSoFar, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor with data that a fake one is a view of, if it is one."""
        slot = recorder.slots.get(id(tensor))
        if slot is None:
            return None
        if self._producers is None or self._producers.calls is not recorder.calls:
            self._producers = Producers(recorder.calls)
        self._producers.update()
        own = recorder.tensors[self._producers.memory(slot)]
        return None if isinstance(own, FakeTensor) else own


def _targets(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to, by its schema."""
    for position, argument in enumerate(schema(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, torch.Tensor):
                yield each


def untouched_result(args: Any, kwargs: Any) -> Any:
    """What an operator that writes to its first argument, or to `out`, returns."""
    if "out" in kwargs:
        return kwargs["out"]
    return args[0] if args and isinstance(args[0], torch.Tensor) else None
