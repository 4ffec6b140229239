"""Adam on the host: one compiled loop over parameter, gradient and state, in place.

Part of the room execute. Dense tensors in the host's memory come in; out go functions that update
slices of them, which several threads may call at once (host_jobs.py). A host's update is bound by
its memory, so that each number is read and written once: the loop works on blocks that stay in the
cache, widens a bfloat16 gradient as it comes and rounds the new parameter into its shadow as it
goes. The formula is that of torch's fused Adam.

bfloat16 is the upper half of float32: a number is widened by shifting it, and rounded to the
nearest one, to even if two are as near, by adding half of the last digit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

BLOCK = 2048  # numbers that are worked on at a time, so that they stay in the cache
SLICE = 1 << 20  # numbers that a thread updates at a time
NUMBER_BYTES = (
    16  # a number of Python is a tensor of 8 bytes to torch, then one of the other's dtype
)
SMALL = 1 << 14  # numbers below which torch's own kernel does it: a loop is not worth compiling


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
    if _is_for_torch(parameter.numel(), None if shadow is None else shadow.dtype):
        return [partial(_by_torch, *tensors, shadow, settings)]
    narrow, rounds = gradient.dtype == torch.bfloat16, shadow is not None
    given = [_flat(tensor) for tensor in tensors]
    given.append(_flat(shadow) if shadow is not None else np.zeros(0, np.uint16))
    loop = _loop(str(parameter.dtype).removeprefix("torch."), narrow, rounds)
    numbers = (*map(float, settings[:7]), settings.decoupled, settings.maximize)
    return [
        partial(loop, *(column[start : start + SLICE] for column in given), *numbers)
        for start in range(0, parameter.numel(), SLICE)
    ]


def _is_for_torch(count: int, shadow: torch.dtype | None) -> bool:
    """Whether torch's operators do the update of so many numbers."""
    return count < SMALL or (shadow is not None and shadow != torch.bfloat16)


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
    if not _is_for_torch(count, shadow):
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


def _flat(tensor: torch.Tensor) -> Any:
    """The numbers of a dense tensor; of bfloat16 their bits."""
    plain = tensor.view(-1)
    return plain.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else plain.numpy()


@functools.cache
def _loop(dtype: str, narrow: bool, rounds: bool) -> Any:
    """The compiled loop for parameters of a dtype, with a gradient in bfloat16 if `narrow` and a
    shadow in it if it `rounds`."""
    import numba

    kind = np.float32 if dtype == "float32" else np.float64

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
            here = g[start : start + count]
            if narrow:
                for i in range(count):
                    bits[i] = np.uint32(here[i]) << np.uint32(16)
                for i in range(count):
                    wide[i] = sign * kind(halves[i])
            else:
                for i in range(count):
                    wide[i] = sign * here[i]
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
                out = low[start : start + count]
                for i in range(count):
                    single[i] = x[i]
                for i in range(count):
                    even = (rounded[i] >> np.uint32(16)) & np.uint32(1)
                    up = (rounded[i] + np.uint32(0x7FFF) + even) >> np.uint32(16)
                    number = rounded[i] & np.uint32(0x7FFFFFFF)
                    none = number > np.uint32(0x7F800000)  # not a number stays none
                    out[i] = np.uint16(0x7FC0) if none else np.uint16(up)

    return run
