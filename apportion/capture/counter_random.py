"""Random numbers that can be split: a hash of (seed, step, operator) and the *global* index.

capture/ replaces torch's random operators by these (random_rules.py), because torch's own
generators cannot be sliced; kernels in execute/ draw any part of a tensor by the same function.

    word(i, j, ..) = mix(second ^ .. mix(mix(first + spread(0, i)) + spread(1, j)) ..)
    uniform        = (word >> 8) * 2**-24, in [0, 1), the same number in every dtype

`first` and `second` are hashes of the key; `mix` is the 32-bit finaliser "lowbias32" in wrapping
int32 arithmetic. Any box of a tensor is bit-equal to the slice of the whole, because no element
depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def uniform(
    key: tuple[int, int, int],
    indices: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Numbers in [0, 1) for the box whose global indices along dim d are `indices[d]` (1-D int64).

    key is (seed, step, operator). The result's shape is the lengths of the indices.
    """
    first, second = key_words(key)
    device = indices[0].device if indices else None
    word = torch.full((), first, dtype=torch.int32, device=device)
    for dim, index in enumerate(indices):
        word = _mix(word.unsqueeze(-1) + _spread(dim, index))
    word = _mix(word.bitwise_xor(second))
    return (
        word.bitwise_right_shift_(8)
        .bitwise_and_(0xFFFFFF)
        .to(computing_dtype(dtype))
        .mul_(2.0**-24)
        .to(dtype)
    )


def uniform_tensor(
    key: tuple[int, int, int], size: Sequence[int], dtype: torch.dtype, device: Any = None
) -> torch.Tensor:
    """`uniform` for the whole tensor of that size."""
    return uniform(key, [torch.arange(n, device=device) for n in size], dtype)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in for a result of that dtype: not half precision."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def _spread(dim: int, index: torch.Tensor) -> torch.Tensor:
    """A well-mixed word per index; plain multiples would make rows shifted copies of each other."""
    odd = _signed(2 * _mix_int(dim + 1) + 1)
    return _mix(index.to(torch.int32) * odd + dim)


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Mixes a fresh int32 tensor in place."""
    word = word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    word = word.mul_(_signed(_MULTIPLIERS[0]))
    word = word.bitwise_xor_((word >> 15).bitwise_and_(0x1FFFF))
    word = word.mul_(_signed(_MULTIPLIERS[1]))
    return word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))


def _mix_int(word: int) -> int:
    word &= 0xFFFFFFFF
    word = (word ^ (word >> 16)) * _MULTIPLIERS[0] & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * _MULTIPLIERS[1] & 0xFFFFFFFF
    return word ^ (word >> 16)


def key_words(key: tuple[int, int, int]) -> tuple[int, int]:
    """Two signed 32-bit words from (seed, step, operator), so that a collision of one does not
    repeat a mask: all that the numbers of an operator depend on beside their indices."""
    words = [_GOLDEN, ~_GOLDEN]
    for part in key:
        for half in (part & 0xFFFFFFFF, part >> 32 & 0xFFFFFFFF):
            words = [_mix_int(words[0] + half), _mix_int((words[1] ^ half) + _GOLDEN)]
    return _signed(words[0]), _signed(words[1])


def _signed(word: int) -> int:
    return (word + 0x80000000 & 0xFFFFFFFF) - 0x80000000
