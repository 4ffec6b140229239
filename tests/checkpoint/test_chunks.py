"""A region of a tensor's atoms is exactly its Chunks, each element once, where the slot has it."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from apportion.checkpoint.chunks import Chunk, first_fault, region_chunks, whole_chunk
from apportion.describe.interval import lengths


def random_dims(rng: Random) -> list[tuple[int, ...]]:
    return [
        tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 3))
    ]


def random_box(rng: Random, factors: list[int]) -> tuple[tuple[int, int], ...]:
    found = []
    for size in factors:
        low = rng.randrange(size)
        found.append((low, rng.randint(low + 1, size)) if rng.random() < 0.6 else (0, size))
    return tuple(found)


@pytest.mark.parametrize("seed", range(200))
def test_chunks_of_a_region_are_its_elements(seed: int) -> None:
    rng = Random(seed)
    dims = random_dims(rng)
    factors = [size for dim in dims for size in dim]
    box = random_box(rng, factors)
    shape = [math.prod(dim) for dim in dims]
    whole = torch.arange(math.prod(shape)).reshape(shape)
    region = whole.reshape(factors)[tuple(slice(*span) for span in box)]
    sizes, place = [], 0
    for dim in dims:
        sizes.append(math.prod(lengths(box[place : place + len(dim)])))
        place += len(dim)
    held = region.reshape(sizes)
    found = region_chunks(dims, box)
    for chunk, where in found:
        assert torch.equal(whole[chunk.slices], held[where])
    elements = torch.cat([whole[chunk.slices].reshape(-1) for chunk, _ in found])
    assert torch.equal(elements.sort().values, held.reshape(-1).sort().values)


def test_heads_of_a_joined_matrix_are_three_chunks() -> None:
    """Queries, keys and values one below the other: 3 x 4 heads x 8, of which heads 1 and 2."""
    found = region_chunks([(3, 4, 8), (32,)], ((0, 3), (1, 3), (0, 8), (0, 32)))
    assert [chunk.offsets for chunk, _ in found] == [(8, 0), (40, 0), (72, 0)]
    assert {chunk.sizes for chunk, _ in found} == {(16, 32)}


@pytest.mark.parametrize("seed", range(100))
def test_faults_are_those_of_a_count_of_every_element(seed: int) -> None:
    rng = Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    chunks = cut_up(rng, whole_chunk(shape))
    if rng.random() < 0.6:
        spoil(rng, chunks)
    count = torch.zeros(shape, dtype=torch.int64)
    outside = False
    for chunk in chunks:
        reach = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        outside |= any(o + n > size for o, n, size in reach)
        count[chunk.slices] += 1
    right = bool((count == 1).all()) and not outside
    assert (first_fault(shape, chunks) == "") == right


def cut_up(rng: Random, chunk: Chunk) -> list[Chunk]:
    dim = rng.randrange(len(chunk.sizes))
    if chunk.sizes[dim] < 2 or rng.random() < 0.2:
        return [chunk]
    at = rng.randint(1, chunk.sizes[dim] - 1)
    low, high = list(chunk.sizes), list(chunk.sizes)
    low[dim], high[dim] = at, chunk.sizes[dim] - at
    there = list(chunk.offsets)
    there[dim] += at
    one, other = Chunk(chunk.offsets, tuple(low)), Chunk(tuple(there), tuple(high))
    return [*cut_up(rng, one), *cut_up(rng, other)]


def spoil(rng: Random, chunks: list[Chunk]) -> None:
    number = rng.randrange(len(chunks))
    chunk = chunks.pop(number)
    dim = rng.randrange(len(chunk.sizes))
    offsets = list(chunk.offsets)
    offsets[dim] += rng.choice([-1, 1])
    if rng.random() < 0.5 and min(offsets) >= 0:
        chunks.append(Chunk(tuple(offsets), chunk.sizes))
