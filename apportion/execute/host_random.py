"""Random numbers by global index on a CPU, in one pass over the result.

Part of the room execute. The two words of a key and the places of a box come in, the numbers go
out: bit for bit those of capture/counter_random.py, which takes some forty passes of torch's
operators and is what other devices run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from apportion.capture import computing_dtype, index_words
from apportion.columns import compiled

Words = npt.NDArray[np.uint32]
Atoms = tuple[tuple[int, int, int], ...]
"""(factor, low, high) of each atom of a dimension."""

_LOW, _FIRST, _SECOND = 0xFFFFFFFF, 0x7FEB352D, 0x846CA68B


def uniform_on_host(
    first: int, second: int, where: Sequence[Atoms], kind: torch.dtype
) -> torch.Tensor:
    """Numbers in [0, 1) for the box of these places, from the words of a key."""
    spreads = [_spread(dim, atoms) for dim, atoms in enumerate(where)] or [np.zeros(1, np.uint32)]
    room = uniform_room([len(spread) for spread in spreads][: len(where)], kind, "cpu")
    words = np.array([first & _LOW], np.uint32)
    for spread in spreads[:-1]:
        words = _next_words(words, spread)
    if where:
        _fill(words, spreads[-1], second & _LOW, room.view(-1).numpy())
    else:
        room.fill_(float(_mixed(words ^ np.uint32(second & _LOW))[0] >> 8) * 2.0**-24)
    return room.to(kind)


def uniform_room(size: Sequence[int], kind: torch.dtype, device: str) -> torch.Tensor:
    """What the numbers of a box are written to before they are of their dtype."""
    return torch.empty(size, dtype=computing_dtype(kind), device=device)


@lru_cache(maxsize=1024)
def _spread(dim: int, atoms: Atoms) -> Words:
    """A word for each index along a dimension."""
    index = np.zeros(1, np.int64)
    for factor, low, high in atoms:
        index = (index[:, None] * factor + np.arange(low, high)).reshape(-1)
    return index_words(dim, index)


def _mixed(words: Any) -> Words:
    """Words mixed, by NumPy."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(_FIRST)
    words = words ^ (words >> np.uint32(15))
    words = words * np.uint32(_SECOND)
    mixed: Words = words ^ (words >> np.uint32(16))
    return mixed


def _next_words(words: Words, spread: Words) -> Words:
    """The words one dimension on."""
    return _mixed((words[:, None] + spread).reshape(-1))


def _fill_plainly(words: Words, spread: Words, second: int, room: npt.NDArray[Any]) -> None:
    found = _mixed(_next_words(words, spread) ^ np.uint32(second)) >> np.uint32(8)
    np.multiply(found, 2.0**-24, out=room, casting="unsafe")


@compiled(plain=_fill_plainly)
def _fill(words: Words, spread: Words, second: int, room: npt.NDArray[Any]) -> None:
    """The numbers of the last dimension."""
    place = 0
    for i in range(len(words)):
        for j in range(len(spread)):
            word = (np.uint64(words[i]) + np.uint64(spread[j])) & np.uint64(0xFFFFFFFF)
            word ^= word >> np.uint64(16)
            word = (word * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
            word ^= word >> np.uint64(15)
            word = (word * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
            word ^= word >> np.uint64(16)
            word ^= np.uint64(second)
            word ^= word >> np.uint64(16)
            word = (word * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
            word ^= word >> np.uint64(15)
            word = (word * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
            word ^= word >> np.uint64(16)
            room[place] = np.float64(word >> np.uint64(8)) * 2.0**-24
            place += 1
