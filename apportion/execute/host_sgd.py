"""SGD on the host: one compiled loop over parameter, gradient and momentum, in place.

Part of the room execute. Dense tensors in the host's memory come in; out go functions that update
slices of them, which several threads may call at once (host_jobs.py). The formula is that of
torch's fused SGD; a momentum buffer is zero before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from apportion.execute.host_blocks import (
    BLOCK,
    NUMBER_BYTES,
    calls_on_slices,
    is_for_torch,
    round_loop,
    widen_loop,
)


class SgdSettings(NamedTuple):
    """The numbers of an update."""

    rate: float
    momentum: float
    dampening: float
    decay: float
    nesterov: bool
    maximize: bool


def sgd_parts(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    buffer: torch.Tensor | None,
    shadow: torch.Tensor | None,
    settings: SgdSettings,
) -> list[Callable[[], None]]:
    """What updates the parameter and its momentum in place, in parts that may run at the same time;
    the shadow is the new parameter, rounded."""
    if is_for_torch(parameter.numel(), None if shadow is None else shadow.dtype):
        return [partial(_by_torch, parameter, gradient, buffer, shadow, settings)]
    loop = _loop(
        str(parameter.dtype).removeprefix("torch."), gradient.dtype == torch.bfloat16,
        buffer is not None, shadow is not None,
    )  # fmt: skip
    moved = parameter if buffer is None else buffer
    numbers = (*map(float, settings[:4]), settings.nesterov, settings.maximize)
    return calls_on_slices(loop, (parameter, gradient, moved, shadow), numbers)


def sgd_workspace(count: int, dtype: torch.dtype, shadow: torch.dtype | None) -> int:
    """Bytes that torch's allocator gives for the update of so many numbers, at most."""
    if not is_for_torch(count, shadow):
        return NUMBER_BYTES
    return 2 * count * dtype.itemsize + NUMBER_BYTES


def _by_torch(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    buffer: torch.Tensor | None,
    shadow: torch.Tensor | None,
    at: SgdSettings,
) -> None:
    """The same by operators of torch."""
    grad = gradient.to(parameter.dtype)
    grad = -grad if at.maximize else grad
    grad = grad.add(parameter, alpha=at.decay)
    if buffer is not None:
        buffer.mul_(at.momentum).add_(grad, alpha=1 - at.dampening)
        grad = grad.add_(buffer, alpha=at.momentum) if at.nesterov else buffer
    parameter.add_(grad, alpha=-at.rate)
    if shadow is not None:
        shadow.copy_(parameter)


@functools.cache
def _loop(dtype: str, narrow: bool, moves: bool, rounds: bool) -> Any:
    """The compiled loop for parameters of a dtype, with a gradient in bfloat16 if `narrow`, with
    momentum if it `moves` and a shadow in bfloat16 if it `rounds`."""
    import numba

    kind = np.float32 if dtype == "float32" else np.float64
    widen, round_to = widen_loop(narrow), round_loop()

    @numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")
    def run(  # type: ignore[no-untyped-def]
        p, g, b, low, rate, momentum, dampening, decay, nesterov, maximize
    ):
        size, pull, old, new = kind(rate), kind(decay), kind(momentum), kind(1 - dampening)
        sign = kind(-1) if maximize else kind(1)
        wide, bits = np.empty(BLOCK, kind), np.empty(BLOCK, np.uint32)
        halves, single = bits.view(np.float32), np.empty(BLOCK, np.float32)
        rounded = single.view(np.uint32)
        for start in range(0, len(p), BLOCK):
            count = min(BLOCK, len(p) - start)
            x = p[start : start + count]
            widen(g[start : start + count], sign, wide, bits, halves)
            for i in range(count):
                wide[i] += pull * x[i]
            if moves:
                a = b[start : start + count]
                for i in range(count):
                    a[i] = a[i] * old + wide[i] * new
                if nesterov:
                    for i in range(count):
                        wide[i] += old * a[i]
                else:
                    for i in range(count):
                        wide[i] = a[i]
            for i in range(count):
                x[i] -= size * wide[i]
            if rounds:
                round_to(x, low[start : start + count], single, rounded)

    return run
