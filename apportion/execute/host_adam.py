"""Adam on the host: one compiled loop over parameter, gradient and state, in place.

Part of the room execute. Dense tensors in the host's memory come in; out go functions that update
slices of them, which several threads may call at once (host_jobs.py). The formula is that of
torch's fused Adam.
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


class AdamSettings(NamedTuple):
    """The numbers of an update; `first` and `second` are the corrections of both moments."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float
    first: float
    second: float
    decoupled: bool
    maximize: bool


def host_adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    shadow: torch.Tensor | None,
    settings: AdamSettings,
) -> None:
    """Updates the parameter and both moments in place; the shadow is the new parameter, rounded."""
    for part in adam_parts(parameter, gradient, first, second, shadow, settings):
        part()


def adam_parts(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    shadow: torch.Tensor | None,
    settings: AdamSettings,
) -> list[Callable[[], None]]:
    """What `host_adam` does, in parts that may run at the same time."""
    tensors = (parameter, gradient, first, second)
    if is_for_torch(parameter.numel(), None if shadow is None else shadow.dtype):
        return [partial(_by_torch, *tensors, shadow, settings)]
    narrow, rounds = gradient.dtype == torch.bfloat16, shadow is not None
    loop = _loop(str(parameter.dtype).removeprefix("torch."), narrow, rounds)
    numbers = (*map(float, settings[:7]), settings.decoupled, settings.maximize)
    return calls_on_slices(loop, (*tensors, shadow), numbers)


def adam_workspace(
    count: int,
    dtype: torch.dtype,
    gradient: torch.dtype,
    shadow: torch.dtype | None,
    decoupled: bool,
    maximize: bool,
) -> int:
    """Bytes that torch's allocator gives for the update of so many numbers, at most: for numbers of
    Python, and where torch's operators do it, for a gradient in another form and for the scale."""
    if not is_for_torch(count, shadow):
        return NUMBER_BYTES
    copies = 3 if gradient != dtype or maximize or not decoupled else 2
    return copies * count * dtype.itemsize + NUMBER_BYTES


def _by_torch(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    shadow: torch.Tensor | None,
    at: AdamSettings,
) -> None:
    """The same by operators of torch."""
    grad = gradient.to(parameter.dtype)
    grad = -grad if at.maximize else grad
    if at.decoupled:
        parameter.mul_(1 - at.rate * at.decay)
    else:
        grad = grad + at.decay * parameter
    first.lerp_(grad, 1 - at.beta1)
    second.mul_(at.beta2).addcmul_(grad, grad, value=1 - at.beta2)
    scale = (second.sqrt() / at.second).add_(at.epsilon)
    parameter.addcdiv_(first, scale, value=-at.rate / at.first)
    if shadow is not None:
        shadow.copy_(parameter)


@functools.cache
def _loop(dtype: str, narrow: bool, rounds: bool) -> Any:
    """The compiled loop for parameters of a dtype, with a gradient in bfloat16 if `narrow` and a
    shadow in it if it `rounds`."""
    import numba

    kind = np.float32 if dtype == "float32" else np.float64
    widen, round_to = widen_loop(narrow), round_loop()

    @numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")
    def run(  # type: ignore[no-untyped-def]
        p, g, m, v, low, rate, beta1, beta2, epsilon, decay, first, second, decoupled, maximize
    ):
        keep, size = kind(1 - rate * decay), kind(rate / first)
        new1, old2, new2 = kind(1 - beta1), kind(beta2), kind(1 - beta2)
        root, least, pull = kind(second), kind(epsilon), kind(decay)
        sign = kind(-1) if maximize else kind(1)
        wide, bits = np.empty(BLOCK, kind), np.empty(BLOCK, np.uint32)
        halves, single = bits.view(np.float32), np.empty(BLOCK, np.float32)
        rounded = single.view(np.uint32)
        for start in range(0, len(p), BLOCK):
            count = min(BLOCK, len(p) - start)
            widen(g[start : start + count], sign, wide, bits, halves)
            x, a = p[start : start + count], m[start : start + count]
            b = v[start : start + count]
            if decoupled:
                for i in range(count):
                    x[i] *= keep
            else:
                for i in range(count):
                    wide[i] += pull * x[i]
            for i in range(count):
                a[i] += (wide[i] - a[i]) * new1
                b[i] = b[i] * old2 + wide[i] * wide[i] * new2
                x[i] -= size * a[i] / (np.sqrt(b[i]) / root + least)
            if rounds:
                round_to(x, low[start : start + count], single, rounded)

    return run
