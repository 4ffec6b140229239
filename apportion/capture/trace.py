"""Trace: a recorded run of torch as data, which capture/ makes of a step and turns into a Graph.

record.py makes it by running a function on fake tensors; normalise.py makes Nodes of it. Every
tensor of the run has a *slot*, a number; in the arguments of calls it stands as `Ref(slot)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g

RANDOM_UNIFORM = "apportion.random_uniform"

TensorType = tuple[tuple[int, ...], torch.dtype]


class CaptureError(ValueError):
    """The step cannot be captured; the message says what, where, and a way out."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a call comes from.

    phase     forward, backward or update
    line      the user's `file.py:12`, or ""
    module    the path of the module that runs, or ""
    sequence  autograd's number of the node that a forward call makes, or whose backward the call
              belongs to; None if there is no such node, -1 if the call differentiates nothing
    """

    phase: str = g.FORWARD
    line: str = ""
    module: str = ""
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator call as recorded: `target` is an overload, or the name of a kind of our own."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    site: CallSite


@dataclass(frozen=True)
class Trace:
    """A functional list of calls.

    types      the shape and dtype of every slot
    constants  tensors with data that the function found somewhere, by slot
    inputs     the slots of the function's arguments
    outputs    the slots of its results (None: absent)
    """

    calls: tuple[RecordedCall, ...]
    types: tuple[TensorType, ...]
    constants: dict[int, torch.Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]


def flat_results(result: Any) -> Iterator[Any]:
    """The items of nested lists and tuples, in order."""
    if isinstance(result, list | tuple):
        for item in result:
            yield from flat_results(item)
    else:
        yield result


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
