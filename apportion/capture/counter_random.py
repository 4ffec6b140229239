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

import numpy as np
import numpy.typing as npt
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
    return uniform_of_words(word, second, indices, dtype)


def uniform_of_words(
    first: torch.Tensor,
    second: torch.Tensor | int,
    indices: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`uniform` from the two words of its key (int32, without dimensions), so that compiled code
    can read them at every step."""
    word = first
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


def word_table(seed: int, step: int, operators: Sequence[int]) -> npt.NDArray[np.int32]:
    """The two words of each key (seed, step, operator), a row per operator."""
    words = _words((seed, step))
    keys = np.array(operators, np.int64)
    first, second = np.full(len(keys), words[0]), np.full(len(keys), words[1])
    for half in (keys & 0xFFFFFFFF, keys >> 32 & 0xFFFFFFFF):
        first, second = _mix_ints(first + half), _mix_ints((second ^ half) + _GOLDEN)
    return np.stack([first, second], 1).astype(np.uint32).view(np.int32)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in for a result of that dtype: not half precision."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def _spread(dim: int, index: torch.Tensor) -> torch.Tensor:
    """A well-mixed word per index; plain multiples would make rows shifted copies of each other."""
    odd = _signed(2 * _mix_int(dim + 1) + 1)
    return _mix(index.to(torch.int32) * odd + dim)


def index_words(dim: int, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """The word that each global index along dimension `dim` adds to those before it."""
    odd = 2 * _mix_int(dim + 1) + 1
    return _mix_ints((index & 0xFFFFFFFF) * (odd & 0xFFFFFFFF) + dim).astype(np.uint32)


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


def _mix_ints(word: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`_mix_int` of many; a product of two words wraps, which leaves its low 32 bits right."""
    word = word & 0xFFFFFFFF
    word = (word ^ (word >> 16)) * _MULTIPLIERS[0] & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * _MULTIPLIERS[1] & 0xFFFFFFFF
    return word ^ (word >> 16)


def key_words(key: tuple[int, int, int]) -> tuple[int, int]:
    """Two signed 32-bit words from (seed, step, operator), so that a collision of one does not
    repeat a mask: all that the numbers of an operator depend on beside their indices."""
    first, second = _words(key)
    return _signed(first), _signed(second)


def _words(key: tuple[int, ...]) -> tuple[int, int]:
    words = [_GOLDEN, ~_GOLDEN]
    for part in key:
        for half in (part & 0xFFFFFFFF, part >> 32 & 0xFFFFFFFF):
            words = [_mix_int(words[0] + half), _mix_int((words[1] ^ half) + _GOLDEN)]
    return words[0], words[1]


def _signed(word: int) -> int:
    return (word + 0x80000000 & 0xFFFFFFFF) - 0x80000000
