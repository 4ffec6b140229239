"""Random numbers by global index on a CUDA device, in one kernel.

Part of the room execute. The two words of a key and the places of a box come in, the numbers go
out: bit for bit those of capture/counter_random.py, which takes some seventy kernels.

The kernel is written here and compiled by torch when it is first called (torch.cuda.jiterator: an
element-wise function of tensors that are broadcast). It is trusted only where it was found to draw
the same numbers as capture/counter_random.py; elsewhere, and for boxes of more dimensions than it
takes, that is called.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from apportion.capture import index_words, key_words, uniform_of_words
from apportion.execute.host_random import Atoms, places

MOST_DIMS = 6  # the compiler takes eight tensors at most
SAMPLE: tuple[Atoms, ...] = (((3, 0, 3),), ((2, 0, 2), (5, 1, 4)))

MIX = "w ^= w >> 16; w *= 0x7FEB352DU; w ^= w >> 15; w *= 0x846CA68BU; w ^= w >> 16;"


def uniform_on_cuda(
    first: int, second: int, where: tuple[Atoms, ...], kind: torch.dtype, place: str
) -> torch.Tensor:
    """Numbers in [0, 1) for the box of these places, from the words of a key."""
    if 0 < len(where) <= MOST_DIMS and is_trusted(place):
        return _by_kernel(first, second, where, kind, place)
    return _by_torch(first, second, where, kind, place)


@lru_cache(maxsize=64)
def is_trusted(place: str) -> bool:
    """Whether the kernel can be compiled here and draws the right numbers."""
    given = (*key_words((1, 2, 3)), SAMPLE, torch.float32, place)
    try:
        return torch.equal(_by_kernel(*given), _by_torch(*given))
    except Exception:  # a compiler that is not there may say so in any way
        return False


def source(dims: int) -> str:
    """The kernel for a box of so many dimensions: a number from a word for each of them, made of
    the bits of a float."""
    steps = " ".join(f"w += (unsigned int)a{d}; {MIX}" for d in range(dims))
    given = ", ".join(f"T a{d}" for d in range(dims))
    return (
        f"template <typename T> T apportion_draw({given}, T first, T second) {{ "
        f"unsigned int w = (unsigned int)first; {steps} w ^= (unsigned int)second; {MIX} "
        "return (T)__float_as_int((float)(w >> 8) * 5.9604644775390625e-08f); }"
    )


@lru_cache(maxsize=MOST_DIMS)
def _kernel(dims: int) -> Any:
    return torch.cuda.jiterator._create_jit_fn(source(dims), first=0, second=0)


@lru_cache(maxsize=1024)
def _words(where: tuple[Atoms, ...], place: str) -> tuple[torch.Tensor, ...]:
    """A word for each index along each dimension, to be broadcast to the box."""
    found = []
    for dim, atoms in enumerate(where):
        words = torch.from_numpy(index_words(dim, places(atoms)).view(np.int32))
        found.append(words.reshape(-1, *(1,) * (len(where) - 1 - dim)).to(place))
    return tuple(found)


def _by_kernel(
    first: int, second: int, where: tuple[Atoms, ...], kind: torch.dtype, place: str
) -> torch.Tensor:
    bits = _kernel(len(where))(*_words(where, place), first=first, second=second)
    drawn: torch.Tensor = bits.contiguous().view(torch.float32)
    return drawn.to(kind)  # 24 bits: exact in any wider one


def _by_torch(
    first: int, second: int, where: tuple[Atoms, ...], kind: torch.dtype, place: str
) -> torch.Tensor:
    indices = [torch.from_numpy(places(atoms)).to(place) for atoms in where]
    word = torch.full((), first, dtype=torch.int32, device=place)
    return uniform_of_words(word, second, indices, kind)
