"""Random numbers on a CPU are those of torch's operators, bit for bit, compiled or not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from apportion.capture.counter_random import key_words, uniform
from apportion.execute.host_random import _fill, _fill_plainly, uniform_on_host
from apportion.execute.kernels.random import global_index

KEY = (3, 7, 11)
BOXES = [
    (),
    (((5, 0, 5),),),
    (((5, 0, 0),),),
    (((5, 1, 4),), ((4, 1, 3), (6, 2, 5))),
    (((2, 1, 2),), ((30, 0, 30),), ((70000, 65000, 65100),)),
]


@pytest.mark.parametrize("where", BOXES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_box_has_the_same_numbers(
    where: tuple[tuple[tuple[int, int, int], ...], ...], kind: torch.dtype
) -> None:
    meant = uniform(KEY, [global_index(atoms, "cpu") for atoms in where], kind)
    found = uniform_on_host(*key_words(KEY), where, kind)
    assert found.dtype == kind
    assert torch.equal(found, meant)


def test_compiled_code_draws_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    for counts in ((), (5,), (3, 4, 7)):
        spreads = rng.integers(0, 2**32, sum(counts), np.uint32)
        how = (0x9ABCDEF0, 0x12345678, spreads, np.array(counts, np.int64))
        for kind in (np.float32, np.float64):
            rooms = [np.zeros(math.prod(counts), kind) for _ in range(2)]
            for fill, room in zip((_fill_plainly, _fill.dispatcher), rooms, strict=True):
                fill(*how, room)
            assert np.array_equal(rooms[0], rooms[1])
