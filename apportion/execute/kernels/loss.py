"""Negative log likelihood, of all classes or of a range of them.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import OWN, Context, Kernel, resolve
from apportion.execute.kernels.index import check_all

_NOBODY = -100  # a label that no class has


def _nll(kind: str, place: int, count: int) -> Kernel:
    """A kernel whose labels are argument `place`. After its `count` own arguments may come the
    first class that it has and the number of all: labels of other classes are ignored."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        # The kernels read some inputs as if they were contiguous, whatever their strides say.
        own: list[Any] = [
            a.contiguous() if isinstance(a, torch.Tensor) else a for a in args[:count]
        ]
        if len(args) > count:
            first, classes = args[count:]
            held = own[place - 1].shape[min(1, own[place - 1].dim() - 1)]
            if not context.cuda:
                _check_labels(own[place], own[place + 3], classes)
            own[place] = _labels(own[place], own[place + 3], first, held)
            own[place + 3] = _NOBODY
        result = resolve(kind)(*own)
        return tuple(result) if isinstance(result, tuple) else (result,)

    return call


def _check_labels(target: torch.Tensor, ignore: int, classes: int) -> None:
    """Raises RuntimeError for a label of no class, as the kernel of all classes does; by an
    operator, so that it is part of what compilers see."""
    fine = (target == ignore) | ((target >= 0) & (target < classes))
    check_all(fine, f"a label of the loss lies outside of its {classes} classes")


def _labels(target: torch.Tensor, ignore: int, first: int, held: int) -> torch.Tensor:
    """The labels as numbers of the classes [first, first + held), or of nobody."""
    counts = (target != ignore) & (target >= first) & (target < first + held)
    return torch.where(counts, target - first, _NOBODY)


for _size in ("", "2d"):
    _forward, _backward = (f"aten.nll_loss{_size}_{way}.default" for way in ("forward", "backward"))
    OWN[_forward] = _nll(_forward, 1, 5)
    OWN[_backward] = _nll(_backward, 2, 7)
