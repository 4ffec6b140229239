"""Products."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.database import Sample, sample_of

aten = torch.ops.aten


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield sample_of(aten.mm.default, torch.randn(4, 6), torch.randn(6, 8))
    yield sample_of(aten.bmm.default, torch.randn(3, 4, 5), torch.randn(3, 5, 7))
    yield sample_of(aten.addmm.default, torch.randn(7), torch.randn(5, 4), torch.randn(4, 7))
    yield sample_of(
        aten.baddbmm.default, torch.randn(3, 1, 7), torch.randn(3, 5, 2), torch.randn(3, 2, 7)
    )
