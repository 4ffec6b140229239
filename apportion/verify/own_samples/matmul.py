"""Products."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield sample_of(aten.mm.default, torch.randn(4, 6), torch.randn(6, 8))
    yield sample_of(aten.bmm.default, torch.randn(3, 4, 5), torch.randn(3, 5, 7))
    yield sample_of(aten.addmm.default, torch.randn(7), torch.randn(5, 4), torch.randn(4, 7))
    yield sample_of(
        aten.baddbmm.default, torch.randn(3, 1, 7), torch.randn(3, 5, 2), torch.randn(3, 2, 7)
    )
    yield sample_of(aten.addmm.default, torch.randn(5, 1), torch.randn(5, 4), torch.randn(4, 7))
    yield sample_of(
        aten.addbmm.default, torch.randn(5, 7), torch.randn(3, 5, 2), torch.randn(3, 2, 7),
        beta=0.5, alpha=2,
    )  # fmt: skip
    yield sample_of(aten.addbmm.default, torch.randn(7), torch.randn(3, 5, 2), torch.randn(3, 2, 7))
    yield sample_of(aten.addmv.default, torch.randn(5), torch.randn(5, 4), torch.randn(4), beta=3)
    yield sample_of(aten.addmv.default, torch.randn(1), torch.randn(5, 4), torch.randn(4))
    yield sample_of(aten.addr.default, torch.randn(5, 4), torch.randn(5), torch.randn(4), alpha=2)
    yield sample_of(aten.addr.default, torch.randn(4), torch.randn(5), torch.randn(4), beta=0)
    yield sample_of(aten.mv.default, torch.randn(5, 4), torch.randn(4))
    yield sample_of(aten.dot.default, torch.randn(7), torch.randn(7))
    yield sample_of(aten.vdot.default, torch.randn(7), torch.randn(7))
    for gelu in (False, True):
        yield sample_of(
            aten._addmm_activation.default, torch.randn(7), torch.randn(5, 4), torch.randn(4, 7),
            use_gelu=gelu,
        )  # fmt: skip
    yield sample_of(
        aten._int_mm.default,
        torch.randint(-9, 9, (17, 16), dtype=torch.int8),
        torch.randint(-9, 9, (16, 24), dtype=torch.int8),
    )
    yield sample_of(
        aten._trilinear.default, torch.randn(3, 5), torch.randn(4, 5, 6), torch.randn(3, 6),
        [1, 3], [0], [1, 2], [2, 3],
    )  # fmt: skip
    ends = torch.tensor([3, 8, 8, 16], dtype=torch.int32)  # the third of the groups has no rows
    yield sample_of(aten._grouped_mm.default, torch.randn(16, 8), torch.randn(4, 8, 24), ends)
    yield sample_of(aten._grouped_mm.default, torch.randn(8, 16), torch.randn(16, 24), ends)
