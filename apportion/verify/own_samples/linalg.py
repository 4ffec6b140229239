"""Factorisations, solutions of systems, and distances; batches that are broadcast."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _factors()
    yield from _solutions()
    yield from _least_squares()
    yield from _distances()


def _positive(*shape: int) -> torch.Tensor:
    """Matrices that are symmetric and far from singular."""
    x = torch.randn(shape)
    return x @ x.mT + shape[-1] * torch.eye(shape[-1])


def _factors() -> Iterator[Sample]:
    square, tall = torch.randn(3, 2, 4, 4), torch.randn(3, 5, 4)
    for op in (aten._linalg_det, aten._linalg_slogdet, aten.linalg_eig, aten.linalg_inv_ex):
        yield sample_of(op.default, square)
    for op in (aten.linalg_lu, aten.linalg_lu_factor_ex, aten.linalg_matrix_exp):
        yield sample_of(op.default, square)
    for op in (aten.geqrf, aten.linalg_qr, aten._linalg_svd):
        yield sample_of(op.default, tall)
    yield sample_of(aten.linalg_qr.default, tall, "r")
    yield sample_of(aten.linalg_qr.default, tall, "complete")
    yield sample_of(aten._linalg_svd.default, tall, True, False)
    positive = _positive(3, 4, 4)
    for op in (
        aten.linalg_cholesky_ex,
        aten._linalg_eigh,
        aten.linalg_ldl_factor_ex,
    ):
        yield sample_of(op.default, positive)
    yield sample_of(aten._linalg_eigh.default, positive, "U", False)
    yield sample_of(aten.cholesky_inverse.default, torch.linalg.cholesky(positive))
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(square)
    yield sample_of(aten.lu_unpack.default, lu, pivots)
    yield sample_of(aten.lu_unpack.default, lu, pivots, True, False)
    reflectors, tau = torch.geqrf(tall)
    yield sample_of(aten.linalg_householder_product.default, reflectors, tau)
    rtol = torch.tensor([1e-5, 1e-6, 1e-4])
    yield sample_of(aten.linalg_pinv.atol_rtol_tensor, tall, atol=None, rtol=rtol)


def _solutions() -> Iterator[Sample]:
    a, several, vectors = _positive(3, 4, 4), torch.randn(3, 4, 6), torch.randn(3, 4)
    rows, shared = torch.randn(3, 6, 4), torch.randn(5, 1, 4, 6)
    yield sample_of(aten._linalg_solve_ex.default, a, several)
    yield sample_of(aten._linalg_solve_ex.default, a, vectors)
    yield sample_of(aten._linalg_solve_ex.default, a, torch.randn(4, 6))
    yield sample_of(aten._linalg_solve_ex.default, a, shared)
    yield sample_of(aten._linalg_solve_ex.default, a, rows, left=False)
    lower = a.tril()
    for b in (several, shared):
        yield sample_of(aten.linalg_solve_triangular.default, lower, b, upper=False)
        yield sample_of(aten.cholesky_solve.default, b, lower)
    yield sample_of(aten.linalg_solve_triangular.default, lower, rows, upper=False, left=False)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    yield sample_of(aten.linalg_lu_solve.default, lu, pivots, several)
    yield sample_of(aten.linalg_lu_solve.default, lu, pivots, rows, left=False, adjoint=True)
    ld, pivots, _ = aten.linalg_ldl_factor_ex.default(a)
    yield sample_of(aten.linalg_ldl_solve.default, ld, pivots, several)
    reflectors, tau = torch.geqrf(torch.randn(3, 5, 4))
    yield sample_of(aten.ormqr.default, reflectors, tau, torch.randn(3, 5, 6))
    yield sample_of(aten.ormqr.default, reflectors, tau, torch.randn(3, 6, 5), False, True)


def _least_squares() -> Iterator[Sample]:
    a = torch.randn(3, 6, 4)
    for driver in ("gelsy", "gels", "gelsd", "gelss"):
        for b in (torch.randn(3, 6, 5), torch.randn(3, 6)):
            yield sample_of(aten.linalg_lstsq.default, a, b, None, driver=driver)


def _distances() -> Iterator[Sample]:
    a, b = torch.randn(3, 4, 6), torch.randn(3, 5, 6)
    yield sample_of(aten.linalg_cross.default, torch.randn(4, 3, 5), torch.randn(1, 3, 5), dim=1)
    for p in (0.0, 1.0, 2.0, 3.0, math.inf):
        yield sample_of(aten._cdist_forward.default, a, b, p, None)
        dist = torch.cdist(a, b, p)
        yield sample_of(aten._cdist_backward.default, torch.randn(3, 4, 5), a, b, p, dist)
        yield sample_of(aten._pdist_forward.default, a[0], p)
        pairs = torch.pdist(a[0], p)
        if p < math.inf:  # where gradients go is decided by equality with given distances
            yield sample_of(aten._pdist_backward.default, torch.randn(6), a[0], p, pairs)
    yield sample_of(aten._cdist_forward.default, torch.randn(5, 1, 4, 6), b, 2.0, 2)
    yield sample_of(aten._cdist_forward.default, torch.randn(30, 6), torch.randn(28, 6), 2.0, None)
