"""Losses of classes, cut by class: every part knows where its classes begin."""

from __future__ import annotations

import pytest
import torch
from graphs import CONTEXT, One, one

from apportion.execute.kernels.base import (
    kernel,
)
from apportion.verify.run_split import run_split

NONE, MEAN, SUM = 0, 1, 2


def pieces(found: One, **parts: int) -> tuple[torch.Tensor, ...]:
    split = found.space.split(0, found.parts(**parts))
    return run_split(found.space, 0, split, found.tensors, CONTEXT)


def labelled(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(shape, dtype=torch.float64)
    rows, classes, *places = shape
    target = torch.arange(rows * 7).reshape(rows, 7)[:, :1] % classes
    target = target.reshape(rows, *[1] * len(places)).expand(rows, *places).contiguous()
    return x, target, torch.rand(classes, dtype=torch.float64)


@pytest.mark.parametrize("parts", [{"c": 3}, {"n": 2, "c": 2}, {"c": 5}])
@pytest.mark.parametrize("ignore", [-100, 3])
@pytest.mark.parametrize("reduction", [NONE, SUM])
@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3, 2)])
def test_classes_can_be_cut(
    shape: tuple[int, ...], reduction: int, ignore: int, parts: dict[str, int]
) -> None:
    size = "2d" if len(shape) == 4 else ""
    x, target, weight = labelled(shape)
    places = {f"p{d}" for d in range(len(shape) - 2)}
    for scale in (None, weight):
        kind = f"aten.nll_loss{size}_forward"
        forward = one(f"{kind}.default", x, target, scale, reduction, ignore)
        assert forward.cuttable() == {"n", "c", *places}
        given = [x, target, scale, reduction, ignore]
        loss, total = getattr(torch.ops.aten, f"nll_loss{size}_forward").default(*given)
        for ours, whole in zip(pieces(forward, **parts), (loss, total), strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-12, atol=0)
        grad = torch.randn_like(loss)
        given = [grad, x, target, scale, reduction, ignore, total]
        backward = one(f"aten.nll_loss{size}_backward.default", *given)
        assert backward.cuttable() == {"n", "c", *places}
        whole = getattr(torch.ops.aten, f"nll_loss{size}_backward").default(*given)
        assert torch.equal(pieces(backward, **parts)[0], whole)


def test_the_gradient_of_a_mean_is_divided_by_the_total_weight() -> None:
    x, target, weight = labelled((6, 5))
    total = torch.ops.aten.nll_loss_forward.default(x, target, weight, MEAN, -100)[1]
    given = (torch.tensor(2.0).double(), x, target, weight, MEAN, -100, total)
    found = one("aten.nll_loss_backward.default", *given)
    whole = torch.ops.aten.nll_loss_backward.default(*given)
    assert torch.equal(pieces(found, n=3, c=2)[0], whole)
    assert float(whole.abs().sum()) == pytest.approx(2.0)


def test_a_label_of_no_class_is_an_error_in_a_part_too() -> None:
    x, target, _ = labelled((6, 5))
    run = kernel("aten.nll_loss_forward.default")
    run(CONTEXT, [x[:, 2:4], target, None, SUM, -100, 2, 5])
    target[1] = 5
    with pytest.raises(RuntimeError, match="outside of its 5 classes"):
        run(CONTEXT, [x[:, 2:4], target, None, SUM, -100, 2, 5])


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_margin_losses_are_cut_by_row_and_not_by_class(reduction: int) -> None:
    x, target, weight = labelled((6, 5))
    found = one("aten.multi_margin_loss.default", x, target, 2, 0.5, weight, reduction)
    assert found.cuttable() == {"n0"}
    whole = torch.ops.aten.multi_margin_loss.default(x, target, 2, 0.5, weight, reduction)
    torch.testing.assert_close(pieces(found, n0=4)[0], whole, rtol=1e-12, atol=0)
    grad = torch.rand_like(whole)
    given = (grad, x, target, 2, 0.5, weight, reduction)
    found = one("aten.multi_margin_loss_backward.default", *given)
    assert found.cuttable() == {"n0"}
    gradient = torch.ops.aten.multi_margin_loss_backward.default(*given)
    torch.testing.assert_close(pieces(found, n0=4)[0], gradient, rtol=1e-12, atol=0)


def test_a_loss_is_cut_where_its_input_is_broadcast() -> None:
    x, y = torch.randn(6, 1, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    found = one("aten.mse_loss.default", x, y, MEAN)
    assert found.cuttable() == {"i0", "i1"}
    whole = torch.ops.aten.mse_loss.default(x, y, MEAN)
    torch.testing.assert_close(pieces(found, i0=2, i1=3)[0], whole, rtol=1e-12, atol=0)
