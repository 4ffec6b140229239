"""Regions that are put together by adding whole tensors: what most assemblies of gradients are.

Part of the room execute. An ASSEMBLE comes in; out goes a PlainSum if every box it takes is the
whole region, dense, so that one call makes the region where copying and adding takes two, and views
of messages are made once for all steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.execute.call_trace import Form
from apportion.execute.executable import BoxCopy, Executable
from apportion.lower import ASSEMBLE

# The first two terms together, and each further one on top.
TOGETHER: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sum": (torch.add, torch.Tensor.add_),
    "prod": (torch.mul, torch.Tensor.mul_),
}


@dataclass(frozen=True, slots=True)
class MessageBox:
    """A tensor in a message."""

    message: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainSum:
    """Terms of a region, slots or boxes of messages, and how two of them become one."""

    terms: tuple[int | MessageBox, ...]
    reducer: str


def plain_sum(executable: Executable, task: int, forms: Mapping[int, Form]) -> PlainSum | None:
    """How a region is put together, if it is by adding at least two whole tensors."""
    if executable.kind[task] != ASSEMBLE:
        return None
    tasks = executable.tasks
    slot = int(tasks.out_slot[tasks.out_start[task]])
    copies = executable.copies.get(task, [])
    reducer = executable.reducers.get(executable.slots[slot].value) or "sum"
    if tasks.slot_base[slot] >= 0 or len(copies) < 2 or reducer not in TOGETHER:
        return None
    if [copy.term == 0 for copy in copies] != [True] + [False] * (len(copies) - 1):
        return None
    meant = executable.slots[slot]
    terms: list[int | MessageBox] = []
    for copy in copies:
        if not _whole(copy.target_box, copy.shape) or copy.dtype != meant.dtype:
            return None
        if copy.message >= 0:
            place = (copy.message, copy.offset, copy.nbytes)
            terms.append(MessageBox(*place, meant.dtype, meant.shape))
        elif _is_all(executable, copy, meant.shape) and _is_dense(forms[copy.source]):
            terms.append(copy.source)
        else:
            return None
    return PlainSum(tuple(terms), reducer)


def _whole(box: Sequence[slice], shape: Sequence[int]) -> bool:
    return all(side.start == 0 and side.stop == n for side, n in zip(box, shape, strict=True))


def _is_all(executable: Executable, copy: BoxCopy, shape: tuple[int, ...]) -> bool:
    source = executable.slots[copy.source]
    return source.shape == shape and _whole(copy.source_box, copy.source_shape)


def _is_dense(form: Form) -> bool:
    shape, stride, _ = form
    size = 1
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and step != size:
            return False
        size *= n
    return True


class MessageViews:
    """Tensors in a message. Those of a message that lies where it lay before are made once."""

    def __init__(self, boxes: Sequence[MessageBox]) -> None:
        self.boxes = tuple(boxes)
        self.last: Any = lambda: None  # the bytes that were seen last
        self.known: tuple[torch.Tensor, ...] = ()

    def __call__(self, raw: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors in these bytes."""
        again = self.last() is raw
        if again and self.known:
            return self.known
        made = tuple(
            raw[box.offset : box.offset + box.nbytes].view(box.dtype).view(box.shape)
            for box in self.boxes
        )
        self.last, self.known = weakref.ref(raw), made if again else ()
        return made
