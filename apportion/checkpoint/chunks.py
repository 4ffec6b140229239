"""Chunks: the boxes of whole tensors that a checkpoint is made of, one range per dim.

Part of the room checkpoint. A Region of a Value comes in, which has one range per atom; out go the
Chunks that it is. A region that is one slice per dim is one Chunk; the heads of a matrix that has
queries, keys and values one below the other are three. Chunks are what torch.distributed.checkpoint
knows, and do not depend on how a plan sees a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from apportion.describe import Box


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """A box of a tensor: where it begins in each dim, and how long it is there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def meets(self, other: Chunk) -> bool:
        """Whether the two have an element in common."""
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in spans) and self.volume > 0


def whole_chunk(shape: Sequence[int]) -> Chunk:
    """All of a tensor."""
    return Chunk((0,) * len(shape), tuple(shape))


def region_chunks(
    dims: Sequence[tuple[int, ...]], region: Box
) -> list[tuple[Chunk, tuple[slice, ...]]]:
    """The Chunks of a region, each with where it lies in the tensor that holds the region. `dims`
    are the atoms of each dim."""
    runs, place = [], 0
    for factors in dims:
        runs.append(list(_runs(region[place : place + len(factors)], factors)))
        place += len(factors)
    return [
        (
            Chunk(tuple(run[0] for run in found), tuple(run[2] for run in found)),
            tuple(slice(run[1], run[1] + run[2]) for run in found),
        )
        for found in itertools.product(*runs)
    ]


def _runs(box: Box, factors: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The stretches of a dim that a box of its atoms is: where each begins in the dim, where in the
    box, and how long it is."""
    last, inner = len(factors) - 1, 1
    while last > 0 and box[last] == (0, factors[last]):
        inner *= factors[last]
        last -= 1
    if not factors:
        yield 0, 0, 1
        return
    low, high = box[last]
    length = (high - low) * inner
    outer = [range(*span) for span in box[:last]]
    for number, digits in enumerate(itertools.product(*outer)):
        begin = 0
        for digit, factor in zip(digits, factors[:last], strict=True):
            begin = begin * factor + digit
        yield (begin * factors[last] + low) * inner, number * length, length


def first_fault(shape: Sequence[int], chunks: Iterable[Chunk]) -> str:
    """What is wrong with Chunks that ought to be all of a tensor, each element once; "" if nothing
    is."""
    covered, known = 0, sorted(chunks)
    for chunk in known:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return f"a part has {len(chunk.sizes)} dims, the tensor {len(shape)}"
        ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(o < 0 or n < 0 or o + n > total for o, n, total in ends):
            return f"a part at {list(chunk.offsets)} of {list(chunk.sizes)} lies outside of it"
        covered += chunk.volume
    if covered < math.prod(shape):
        return "parts of it are missing"
    if covered > math.prod(shape) or any(map(_overlap, _neighbours(known))):
        return "parts of it overlap"
    return ""


def _overlap(pair: tuple[Chunk, Chunk]) -> bool:
    return pair[0].meets(pair[1])


def _neighbours(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Chunk]]:
    """Pairs of Chunks, in order of where they begin in the first dim, that have some of it in
    common."""
    for number, chunk in enumerate(chunks):
        end = chunk.offsets[0] + chunk.sizes[0] if chunk.offsets else 1
        for other in chunks[number + 1 :]:
            if other.offsets and other.offsets[0] >= end:
                break
            yield chunk, other
