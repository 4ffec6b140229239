"""What the host's updates share: slices of dense tensors, and blocks of numbers in two precisions.

Part of the room execute. Tensors in the host's memory come in; out go functions that update slices
of them, which several threads may call at once (host_jobs.py). A host's update is bound by its
memory, so that each number is read and written once: a loop works on blocks that stay in the cache,
widens a bfloat16 gradient as it comes and rounds the new parameter into its shadow as it goes.

bfloat16 is the upper half of float32: a number is widened by shifting it, and rounded to the
nearest one, to even if two are as near, by adding half of the last digit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

BLOCK = 2048  # numbers that are worked on at a time, so that they stay in the cache
SLICE = 1 << 20  # numbers that a thread updates at a time
NUMBER_BYTES = (
    16  # a number of Python is a tensor of 8 bytes to torch, then one of the other's dtype
)
SMALL = 1 << 14  # numbers below which torch's own kernels do it: a loop is not worth compiling


def calls_on_slices(
    loop: Callable[..., None],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float | bool],
) -> list[Callable[[], None]]:
    """Calls of a compiled loop on slices of dense tensors; what is None has no numbers."""
    columns = [np.zeros(0, np.uint16) if x is None else _flat(x) for x in tensors]
    return [
        partial(loop, *(column[start : start + SLICE] for column in columns), *numbers)
        for start in range(0, len(columns[0]), SLICE)
    ]


def is_for_torch(count: int, shadow: torch.dtype | None) -> bool:
    """Whether torch's operators do the update of so many numbers."""
    return count < SMALL or (shadow is not None and shadow != torch.bfloat16)


def _flat(tensor: torch.Tensor) -> Any:
    """The numbers of a dense tensor; of bfloat16 their bits."""
    plain = tensor.view(-1)
    return plain.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else plain.numpy()


@functools.cache
def widen_loop(narrow: bool) -> Any:
    """A compiled function that puts the numbers of a block, times a sign, where they are wide: from
    bfloat16 if `narrow`. `bits` has room for them, `halves` is the same as float32."""
    import numba

    @numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")
    def run(here, sign, wide, bits, halves):  # type: ignore[no-untyped-def]
        if narrow:
            for i in range(len(here)):
                bits[i] = np.uint32(here[i]) << np.uint32(16)
            for i in range(len(here)):
                wide[i] = sign * halves[i]
        else:
            for i in range(len(here)):
                wide[i] = sign * here[i]

    return run


@functools.cache
def round_loop() -> Any:
    """A compiled function that rounds the numbers of a block to bfloat16. `single` has room for
    them, `rounded` is the same as bits."""
    import numba

    @numba.njit(nogil=True, error_model="numpy")
    def run(x, out, single, rounded):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            single[i] = x[i]
        for i in range(len(x)):
            even = (rounded[i] >> np.uint32(16)) & np.uint32(1)
            up = (rounded[i] + np.uint32(0x7FFF) + even) >> np.uint32(16)
            number = rounded[i] & np.uint32(0x7FFFFFFF)
            none = number > np.uint32(0x7F800000)  # not a number stays none
            out[i] = np.uint16(0x7FC0) if none else np.uint16(up)

    return run
