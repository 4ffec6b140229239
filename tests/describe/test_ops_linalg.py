"""Linear algebra: batches are cut whatever their strides, matrices never, right-hand sides by
columns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from graphs import CONTEXT, One, one

from apportion.verify.run_split import check_op

aten = torch.ops.aten


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def square(*shape: int) -> torch.Tensor:
    """Symmetric matrices far from singular."""
    x = real(*shape)
    return x @ x.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)


def cut_and_right(it: One, axes: str) -> None:
    """Exactly these axes can be cut, and every cut of them is right."""
    assert it.cuttable() == set(axes.split())
    found = check_op(it.space, 0, it.tensors, CONTEXT)
    assert [str(f) for f in found if not f.right] == []
    assert len(found) >= len(axes.split())


FACTORS = """
_linalg_det _linalg_slogdet _linalg_svd _linalg_eigh linalg_eig linalg_cholesky_ex linalg_inv_ex
linalg_ldl_factor_ex linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_qr cholesky_inverse
geqrf
"""


@pytest.mark.parametrize("name", FACTORS.split())
def test_functions_of_one_matrix_are_cut_along_both_dims_of_the_batch(name: str) -> None:
    cut_and_right(one(f"aten.{name}.default", square(3, 2, 4, 4)), "b0 b1")
    cut_and_right(one(f"aten.{name}.default", square(4, 4)), "")


ABSENT = [
    ("linalg_qr", (real(3, 5, 4), "r")),
    ("_linalg_svd", (real(3, 5, 4), False, False)),
    ("_linalg_eigh", (square(3, 4, 4), "U", False)),
]


@pytest.mark.parametrize(("name", "args"), ABSENT)
def test_outputs_that_are_not_asked_for_do_not_hinder(name: str, args: Any) -> None:
    cut_and_right(one(f"aten.{name}.default", *args), "b0")


A, LOWER = square(3, 4, 4), square(3, 4, 4).tril()
LU, PIVOTS, _ = aten.linalg_lu_factor_ex(A)
LD, LD_PIVOTS, _ = aten.linalg_ldl_factor_ex(A)
REFLECTORS, TAU = torch.geqrf(real(3, 5, 4))
COLUMNS, ROWS, SHARED = real(3, 4, 6), real(3, 6, 4), real(5, 1, 4, 6)

SOLUTIONS = [
    ("_linalg_solve_ex", (A, COLUMNS), {}, "b0 c"),
    ("_linalg_solve_ex", (A, ROWS), {"left": False}, "b0 c"),
    ("_linalg_solve_ex", (A, real(3, 4)), {}, "b0"),
    ("_linalg_solve_ex", (A, real(4, 6)), {}, "b0 c"),
    ("_linalg_solve_ex", (A[0], real(4)), {}, ""),
    ("_linalg_solve_ex", (A, SHARED), {}, "b0 b1 c"),
    ("linalg_solve_triangular", (LOWER, COLUMNS), {"upper": False}, "b0 c"),
    ("linalg_solve_triangular", (LOWER, ROWS), {"upper": False, "left": False}, "b0 c"),
    ("linalg_solve_triangular", (LOWER, SHARED), {"upper": False}, "b0 b1 c"),
    ("cholesky_solve", (COLUMNS, LOWER), {}, "b0 c"),
    ("linalg_lu_solve", (LU, PIVOTS, COLUMNS), {}, "b0 c"),
    ("linalg_lu_solve", (LU, PIVOTS, ROWS), {"left": False, "adjoint": True}, "b0 c"),
    ("linalg_ldl_solve", (LD, LD_PIVOTS, COLUMNS), {}, "b0 c"),
    ("ormqr", (REFLECTORS, TAU, real(3, 5, 6)), {}, "b0 c"),
    ("ormqr", (REFLECTORS, TAU, real(3, 6, 5), False), {}, "b0 c"),
    ("linalg_householder_product", (REFLECTORS, TAU), {}, "b0"),
    ("lu_unpack", (LU, PIVOTS), {}, "b0"),
    ("linalg_lstsq", (real(3, 6, 4), real(3, 6, 5)), {"driver": "gelsd"}, "b0 c"),
    ("linalg_lstsq", (real(3, 6, 4), real(3, 6)), {"driver": "gels"}, "b0"),
    ("linalg_lstsq", (real(3, 6, 4), real(3, 6, 5)), {"driver": "gelsy"}, "b0 c"),
]


@pytest.mark.parametrize("number", range(len(SOLUTIONS)), ids=lambda n: SOLUTIONS[n][0])
def test_systems_are_cut_along_batch_and_right_hand_sides(number: int) -> None:
    name, args, keywords, axes = SOLUTIONS[number]
    cut_and_right(one(f"aten.{name}.default", *args, **keywords), axes)


def test_whether_least_squares_leave_residuals_must_not_depend_on_the_part() -> None:
    a = real(3, 6, 4)
    a[1, :, 0] = 0  # one rank too low: none of the batch has residuals
    it = one("aten.linalg_lstsq.default", a, real(3, 6, 5), driver="gelsd")
    assert "ranks of all matrices" in it.space.undescribed["aten.linalg_lstsq.default"]


@pytest.mark.parametrize(("p", "axes"), [(1, "i j k"), (2, "i j"), (3, "i j"), (math.inf, "i j k")])
def test_distances_are_cut_along_coordinates_where_those_combine(p: float, axes: str) -> None:
    a, b = real(3, 4, 6), real(3, 5, 6)
    cut_and_right(one("aten._cdist_forward.default", a, b, float(p), None), f"b0 {axes}")
    dist = torch.cdist(a, b, p)
    backward = (real(3, 4, 5), a, b, float(p), dist)
    cut_and_right(one("aten._cdist_backward.default", *backward), "b0 i j k")
    pairs = torch.pdist(a[0], p)
    coordinate = "k" if "k" in axes else ""
    cut_and_right(one("aten._pdist_forward.default", a[0], float(p)), coordinate)
    cut_and_right(one("aten._pdist_backward.default", real(6), a[0], float(p), pairs), "k")


def test_a_part_computes_distances_the_way_the_whole_does() -> None:
    """More than 25 rows are multiplied, which loses digits where points are close."""
    it = one("aten._cdist_forward.default", real(30, 6), real(4, 6), 2.0, None)
    assert it.cuttable() == {"j"}
    it = one("aten._cdist_forward.default", real(60, 6), real(4, 6), 2.0, None)
    assert it.cuttable() == {"i", "j"}


def test_cross_products_broadcast() -> None:
    a, b = real(4, 3, 5), real(1, 3, 5)
    cut_and_right(one("aten.linalg_cross.default", a, b, dim=1), "i0 i2")
