"""Reductions, orders, norms and products: which axes can be cut, and that the pieces are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from graphs import CONTEXT, One, one

from apportion.capture.lift_call import LiftedCall, lift_call
from apportion.capture.trace import CaptureError
from apportion.describe.errors import IllegalCut
from apportion.split.space import Space
from apportion.verify.run_split import check_op, run_op, run_split

aten = torch.ops.aten


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def strided(*shape: int) -> torch.Tensor:
    """Every other element, dimensions in the opposite order."""
    wide = real(*(2 * n for n in reversed(shape)))
    return wide[tuple(slice(None, None, 2) for _ in shape)].permute(*reversed(range(len(shape))))


def truth(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.4


def cut_and_right(it: One, axes: str) -> None:
    """Exactly these axes can be cut, and every cut of them is right."""
    assert it.cuttable() == set(axes.split())
    found = check_op(it.space, 0, it.tensors, CONTEXT)
    assert [str(f) for f in found if not f.right] == []
    assert len(found) >= len(axes.split())


REDUCTIONS = [
    ("any.default", (truth(5, 7),), "k0 k1"),
    ("any.dim", (truth(5, 7), -1, True), "i0 k0"),
    ("any.dims", (truth(3, 5, 7), [0, 2]), "i0 k0 k1"),
    ("any.dims", (truth(5, 7), []), "i0 i1"),
    ("all.dims", (truth(5, 7), None, True), "k0 k1"),
    ("all.dim", (real(5, 7), 0), "i0 k0"),
    ("aminmax.default", (strided(4, 5, 6),), "k0 k1 k2"),
    ("count_nonzero.default", (truth(4, 5), 1), "i0 k0"),
    ("nansum.default", (real(4, 5), [0]), "i0 k0"),
    ("logsumexp.default", (strided(4, 5, 6), [1, -1], True), "i0 k0 k1"),
    ("linalg_vector_norm.default", (real(4, 5), 1, [1]), "i0 k0"),
    ("linalg_vector_norm.default", (real(4, 5), math.inf), "k0 k1"),
    ("linalg_vector_norm.default", (real(4, 5), 3, [1]), "i0"),
    ("norm.Scalar", (real(4, 5), 0), "k0 k1"),
    ("norm.ScalarOpt_dim", (real(4, 5), 0.5, [0], True), "i1"),
    ("dist.default", (real(4, 5), real(5), -math.inf), "k0 k1"),
    ("dist.default", (real(4, 5), real(5), 3), ""),
    ("renorm.default", (real(4, 5, 6), 2, 1, 1.0), "i1"),
    ("trace.default", (strided(6, 6),), "k"),
    ("trace.default", (real(4, 7),), "k"),
    ("var.correction", (real(4, 5, 6), [1]), "i0 i1"),
    ("std_mean.correction", (strided(4, 5, 6), [0, 2]), "i0"),
]


@pytest.mark.parametrize("number", range(len(REDUCTIONS)), ids=lambda n: REDUCTIONS[n][0])
def test_reductions_are_cut_where_parts_combine(number: int) -> None:
    name, args, axes = REDUCTIONS[number]
    cut_and_right(one(f"aten.{name}", *args), axes)


ORDERS = [
    ("max.dim", (strided(4, 5, 6), 1), "i0 i1"),
    ("min.dim", (real(4, 5, 6), -1, True), "i0 i1"),
    ("median.dim", (real(4, 5), 0), "i0"),
    ("nanmedian.dim", (real(4, 5), 0, True), "i1"),
    ("median.default", (real(4, 5),), ""),
    ("mode.default", (torch.randint(3, (4, 5, 6)), 1), "i0 i1"),
    ("kthvalue.default", (real(4, 5, 6), 2, 1, True), "i0 i2"),
    ("argmax.default", (real(4, 5, 6), -2), "i0 i1"),
    ("argmin.default", (real(4, 5),), ""),
    ("topk.default", (strided(4, 5, 6), 2, 1), "i0 i2"),
    ("topk.default", (real(4, 5), 3, -1, False), "i0"),
    ("sort.default", (strided(4, 5, 6), 0, True), "i1 i2"),
    ("cummax.default", (real(4, 5, 6), 1), "i0 i2"),
    ("logcumsumexp.default", (strided(4, 5), -1), "i0"),
    ("_fft_r2c.default", (real(3, 4, 6), [1, 2], 0, True), "i0"),
    ("_fft_c2c.default", (torch.randn(3, 4, 6, dtype=torch.complex128), [1], 0, True), "i0 i2"),
    ("_fft_c2r.default", (torch.randn(3, 4, 6, dtype=torch.complex128), [0], 0, 5), "i1 i2"),
    ("_masked_softmax.default", (real(4, 5), truth(4, 5), 1, 2), "i0"),
    ("_masked_softmax.default", (real(3, 2, 5, 5), truth(5, 5), 3, 0), "b h"),
    ("_masked_softmax.default", (real(3, 2, 5, 5), truth(3, 5), 3, 1), "b h"),
]


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=lambda n: ORDERS[n][0])
def test_orders_are_not_cut_along_their_dimension(number: int) -> None:
    name, args, axes = ORDERS[number]
    cut_and_right(one(f"aten.{name}", *args), axes)


COUNTS = [
    ("histc.default", (real(5, 7), 4, -1, 1), {}, "k0 k1"),
    ("histc.default", (real(5, 7), 4), {}, ""),
    ("histogram.bin_ct", (real(9), 4), {"range": [-1.0, 1.0]}, "k0"),
    ("histogram.bin_ct", (real(9), 4), {}, ""),
    ("histogram.bins_tensor", (real(9), real(5).sort()[0]), {"weight": real(9)}, "k0"),
    ("histogram.bins_tensor", (real(9), real(5).sort()[0]), {"density": True}, ""),
    ("bincount.default", (torch.tensor([1, 0, 2, 2, 7, 1, 3]),), {}, "k0"),
    ("bincount.default", (torch.tensor([7, 0, 2, 2, 1, 1]), real(6), 9), {}, "k0"),
    ("segment_reduce.default", (real(9, 4), "sum"), {"lengths": torch.tensor([4, 5])}, "i1"),
]


@pytest.mark.parametrize("number", range(len(COUNTS)), ids=lambda n: COUNTS[n][0])
def test_counts_are_sums_if_the_bins_are_given(number: int) -> None:
    name, args, keywords, axes = COUNTS[number]
    cut_and_right(one(f"aten.{name}", *args, **keywords), axes)


PRODUCTS = [
    ("addbmm.default", (real(7), strided(3, 5, 2), real(3, 2, 7)), "i j n k"),
    ("addmv.default", (real(1), strided(5, 4), real(4)), "i k"),
    ("addr.default", (real(5, 1), real(5), real(4)), "i j"),
    ("_addmm_activation.default", (real(7), real(5, 4), real(4, 7)), "i j"),
    (
        "_trilinear.default",
        (real(3, 5), strided(4, 5, 6), real(3, 6), [1, 3], [0], [1, 2], [2, 3]),
        "d0 d1 d2 d3",
    ),
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)), ids=lambda n: PRODUCTS[n][0])
def test_products_are_cut_along_what_they_sum(number: int) -> None:
    name, args, axes = PRODUCTS[number]
    cut_and_right(one(f"aten.{name}", *args), axes)


# Norms


@pytest.mark.parametrize(("groups", "axes"), [(1, "n"), (4, "n g"), (12, "n g")])
def test_group_norm_is_cut_along_samples_and_groups(groups: int, axes: str) -> None:
    x, grad, weight = strided(3, 12, 5, 2), strided(3, 12, 5, 2), real(12)
    args = (3, 12, 10, groups)
    it = one("aten.native_group_norm.default", x, weight, None, *args, 1e-5)
    cut_and_right(it, axes)
    _, mean, rstd = aten.native_group_norm(x.contiguous(), weight, None, *args, 1e-5)
    backward = "aten.native_group_norm_backward.default"
    every = one(backward, grad, x, mean, rstd, weight, *args, [True, True, True])
    cut_and_right(every, axes)
    sums = one(backward, grad, x, mean, rstd, weight, *args, [False, True, True])
    inner = "c" if groups < 12 else ""
    cut_and_right(sums, f"{axes} {inner} s0 s1")


def test_a_part_of_a_group_norm_is_told_its_groups() -> None:
    it = one("aten.native_group_norm.default", real(2, 12, 5), None, None, 2, 12, 5, 4, 1e-5)
    parts = it.space.split(0, it.parts(g=2)).parts
    assert [part.args[3:7] for part in parts] == [(2, 6, 5, 2)] * 2


def test_batch_norm_is_cut_by_its_mode() -> None:
    x, grad, weight = strided(4, 3, 5), strided(4, 3, 5), real(3)
    mean, variance = real(3), torch.rand(3, dtype=torch.float64) + 1
    given = (x, weight, None, mean, variance)
    functional = "aten._native_batch_norm_legit_functional.default"
    cut_and_right(one(functional, *given, False, 0.1, 1e-5), "c i0 i1")
    cut_and_right(one(functional, *given, True, 0.1, 1e-5), "c")
    for training, axes in ((False, "c i0 i1"), (True, "c")):
        for mask in ([True, True, True], [False, False, True]):
            backward = (grad, x, weight, mean, variance, mean, variance, training, 1e-5, mask)
            cut_and_right(one("aten.native_batch_norm_backward.default", *backward), axes)


@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 1, 1)), (2, (1, 1, 6))])
def test_weight_norm_is_cut_along_its_dimension(dim: int, shape: tuple[int, ...]) -> None:
    v, g, grad = strided(4, 5, 6), real(*shape), strided(4, 5, 6)
    norms = v.norm(dim=[d for d in range(3) if d != dim], keepdim=True)
    cut_and_right(one("aten._weight_norm_interface.default", v, g, dim), f"i{dim}")
    backward = (grad, v, g, norms, dim)
    cut_and_right(one("aten._weight_norm_interface_backward.default", *backward), f"i{dim}")


# Decomposed


def lifted(target: Any, *args: Any) -> LiftedCall:
    return lift_call(target, args, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex128])
@pytest.mark.parametrize(("dims", "keepdim"), [(None, False), ([-1], True), ([0, 1], False)])
def test_a_euclidean_norm_is_the_root_of_a_sum_that_is_cut(
    dtype: torch.dtype, dims: Any, keepdim: bool
) -> None:
    x = (100 * torch.randn(4, 5, 6, dtype=torch.complex128)).to(torch.complex128)
    x = x if dtype.is_complex else x.real.to(dtype)
    it = lifted(aten.linalg_vector_norm.default, x, 2, dims, keepdim)
    kinds = [op.kind for op in it.graph.ops]
    assert kinds[:2] == ["apportion.square_sum", "aten.sqrt.default"]
    assert (len(kinds) == 3) == (dtype == torch.float16)  # squares of halves overflow
    space = Space(it.graph)
    assert all(space.cuttable(0))
    values = {it.inputs[0]: x}
    for index, op in enumerate(it.graph.ops):
        inputs = [values[v] for v in op.inputs]
        count = len(space.axes(index)) if index == 0 else 0
        split = space.split(index, (2,) * count or [1] * len(space.axes(index)))
        made = run_split(space, index, split, inputs, CONTEXT)
        values.update(zip(op.outputs, made, strict=True))
    (result,) = it.outputs
    assert result is not None
    whole = torch.linalg.vector_norm(x, 2, dims, keepdim)
    torch.testing.assert_close(values[result], whole)


def test_other_norms_stay_one_operator() -> None:
    wider = {"dtype": torch.float64}
    calls: list[Any] = [((real(4, 5), 3), {}), ((real(), 2), {}), ((torch.randn(4, 5), 2), wider)]
    for args, keywords in calls:
        it = lift_call(aten.linalg_vector_norm.default, args, keywords)
        assert [op.kind for op in it.graph.ops] == ["aten.linalg_vector_norm.default"]


# Labels and frames


def labels() -> tuple[Any, ...]:
    scores = real(9, 4, 6).log_softmax(2)
    return scores, torch.randint(1, 6, (4, 5)), [9, 7, 8, 9], [2, 3, 4, 1]


def test_ctc_is_cut_along_samples_though_their_lengths_differ() -> None:
    scores, targets, frames, letters = labels()
    it = lifted(aten._ctc_loss.default, scores, targets, frames, letters)
    (op,) = it.graph.ops
    assert op.kind == "apportion.ctc_loss"
    space = Space(it.graph)
    names = [axis.name for axis in space.axes(0)]
    assert {n for n, able in zip(names, space.cuttable(0), strict=True) if able} == {"n"}
    whole = run_op(op, op.args, [scores, targets], CONTEXT)
    split = space.split(0, [3 if name == "n" else 1 for name in names])
    assert [part.args[3] for part in split.parts] == [(2,), (3,), (4, 1)]
    made = run_split(space, 0, split, [scores, targets], CONTEXT)
    torch.testing.assert_close(made, whole, rtol=0, atol=0)
    direct, alpha = aten._ctc_loss.default(scores, targets, frames, letters)
    torch.testing.assert_close(whole[0], direct)
    assert whole[1].shape == alpha.shape
    grad = torch.rand(4, dtype=torch.float64)
    args = (grad, scores, targets, frames, letters, whole[0], whole[1], 0)
    cut_and_right(one("aten._ctc_loss_backward.default", *args), "n")
    ours = aten._ctc_loss_backward.default(*args)
    theirs = aten._ctc_loss_backward.default(*args[:5], direct, alpha, 0)
    torch.testing.assert_close(ours, theirs)


def test_ctc_with_targets_in_a_row_runs_unsplit() -> None:
    scores, _, frames, letters = labels()
    it = lifted(aten._ctc_loss.default, scores, torch.randint(1, 6, (10,)), frames, letters)
    space = Space(it.graph)
    assert "in a row" in space.undescribed["aten._ctc_loss.default"]


# Refusals


def test_an_opaque_dimension_says_why_it_is_not_cut() -> None:
    it = one("aten.sort.default", real(4, 5), 1)
    with pytest.raises(IllegalCut, match="axis i1 indexes an opaque result"):
        it.space.split(0, it.parts(i1=2))


def test_factors_of_a_strided_matrix_are_refused_when_captured() -> None:
    def determinant(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(x.mT)

    with pytest.raises(CaptureError, match="not contiguous"):
        lift_call(determinant, (real(3, 4, 4),), {})
