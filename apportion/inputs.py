"""Own inputs: calls of operators that training meets and the database does not, or hardly.

Each function yields Samples of one family.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.database import Sample, sample_of

aten = torch.ops.aten


def samples() -> Iterator[Sample]:
    """All of them, the same at every call."""
    torch.manual_seed(0)
    yield from matmul()


def matmul() -> Iterator[Sample]:
    """Products."""
    yield sample_of(aten.mm.default, torch.randn(4, 6), torch.randn(6, 8))
