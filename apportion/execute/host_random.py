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
from apportion.columns import Ints, compiled, compiled_part

Words = npt.NDArray[np.uint32]
Atoms = tuple[tuple[int, int, int], ...]
"""(factor, low, high) of each atom of a dimension."""

_LOW, _FIRST, _SECOND = 0xFFFFFFFF, 0x7FEB352D, 0x846CA68B


def uniform_on_host(
    first: int, second: int, where: tuple[Atoms, ...], kind: torch.dtype
) -> torch.Tensor:
    """Numbers in [0, 1) for the box of these places, from the words of a key."""
    spreads, counts, size = _spreads(where)
    room = uniform_room(size, kind, "cpu")
    _fill(first & _LOW, second & _LOW, spreads, counts, room.view(-1).numpy())
    return room.to(kind)


def uniform_room(size: Sequence[int], kind: torch.dtype, device: str) -> torch.Tensor:
    """What the numbers of a box are written to before they are of their dtype."""
    return torch.empty(size, dtype=computing_dtype(kind), device=device)


def prepare() -> None:
    """Compiles the loop, or loads it, before a step needs it."""
    _fill.native = _fill.dispatcher
    for kind in (torch.float32, torch.float64):
        uniform_on_host(1, 2, (((1, 0, 1),),), kind)


@lru_cache(maxsize=1024)
def _spreads(where: tuple[Atoms, ...]) -> tuple[Words, Ints, tuple[int, ...]]:
    """A word for each index along each dimension, one dimension after the other, and how many."""
    found = [index_words(dim, places(atoms)) for dim, atoms in enumerate(where)]
    size = tuple(map(len, found))
    return np.concatenate([*found, np.zeros(0, np.uint32)]), np.array(size, np.int64), size


def places(atoms: Atoms) -> npt.NDArray[np.int64]:
    """Global indices along a dimension with these atoms."""
    index = np.zeros(1, np.int64)
    for factor, low, high in atoms:
        index = (index[:, None] * factor + np.arange(low, high)).reshape(-1)
    return index


def _mixed(words: Any) -> Words:
    """Words mixed, by NumPy."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(_FIRST)
    words = words ^ (words >> np.uint32(15))
    words = words * np.uint32(_SECOND)
    mixed: Words = words ^ (words >> np.uint32(16))
    return mixed


def _fill_plainly(
    first: int, second: int, spreads: Words, counts: Ints, room: npt.NDArray[Any]
) -> None:
    words = np.array([first], np.uint32)
    begin = 0
    for count in counts.tolist():
        words = _mixed((words[:, None] + spreads[begin : begin + count]).reshape(-1))
        begin += count
    np.multiply(_mixed(words ^ np.uint32(second)) >> np.uint32(8), 2.0**-24, out=room)


@compiled_part
def _mix(word: Any) -> Any:
    word ^= word >> np.uint64(16)
    word = (word * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
    word ^= word >> np.uint64(15)
    word = (word * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
    return word ^ (word >> np.uint64(16))


@compiled(plain=_fill_plainly)
def _fill(first: int, second: int, spreads: Words, counts: Ints, room: npt.NDArray[Any]) -> None:
    """Writes the numbers of a box whose dimensions have so many words each."""
    words = np.array([first], np.uint64)
    begin = 0
    for dim in range(len(counts) - 1):
        count = counts[dim]
        longer = np.empty(len(words) * count, np.uint64)
        for i in range(len(words)):
            for j in range(count):
                word = (words[i] + np.uint64(spreads[begin + j])) & np.uint64(0xFFFFFFFF)
                longer[i * count + j] = _mix(word)
        words = longer
        begin += count
    if len(counts) == 0:
        room[0] = np.float64(_mix(words[0] ^ np.uint64(second)) >> np.uint64(8)) * 2.0**-24
        return
    count = counts[-1]
    for i in range(len(words)):
        for j in range(count):
            word = _mix((words[i] + np.uint64(spreads[begin + j])) & np.uint64(0xFFFFFFFF))
            word = _mix(word ^ np.uint64(second)) >> np.uint64(8)
            room[i * count + j] = np.float64(word) * 2.0**-24
