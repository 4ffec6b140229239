"""Losses of rows and images, with weights, ignored labels and every reduction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of

REDUCTIONS = (0, 1, 2)


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    for reduction in REDUCTIONS:
        yield from _pointwise(reduction)
        yield from _margins(reduction)
    labelled = ((6, 5), (), (3,)), ((4, 5, 3, 7), (2,), ()), ((7,), ())
    for reduction, (shape, *ignored) in itertools.product(REDUCTIONS, labelled):
        for weighted in (False, True):
            for given in ignored:
                yield from _likelihood(shape, reduction, weighted, given)


def _upstream(reduction: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape) if reduction == 0 else torch.randn(())


def _pointwise(reduction: int) -> Iterator[Sample]:
    x, y, grad = torch.randn(4, 6, 3), torch.randn(4, 6, 3), _upstream(reduction, 4, 6, 3)
    for name, *rest in (("mse",), ("smooth_l1", 0.7), ("huber", 0.7)):
        yield sample_of(getattr(aten, f"{name}_loss").default, x, y, reduction, *rest)
        backward = getattr(aten, f"{name}_loss_backward").default
        yield sample_of(backward, grad, x, y, reduction, *rest)
    sign = torch.randn(4, 6, 3).sign()
    yield sample_of(aten.soft_margin_loss.default, x, sign, reduction)
    yield sample_of(aten.soft_margin_loss_backward.default, grad, x, sign, reduction)
    p, t = (0.1 + 0.8 * torch.rand(4, 6, 3) for _ in range(2))
    for weight in (None, torch.rand(4, 6, 3), torch.rand(6, 1)):
        yield sample_of(aten.binary_cross_entropy.default, p, t, weight, reduction)
        yield sample_of(aten.binary_cross_entropy_backward.default, grad, p, t, weight, reduction)
        logits = aten.binary_cross_entropy_with_logits.default
        yield sample_of(logits, x, t, weight, None, reduction)
        yield sample_of(logits, x, t, weight, torch.rand(3), reduction)


def _margins(reduction: int) -> Iterator[Sample]:
    x, target = torch.randn(6, 5), torch.tensor([3, 0, 4, 1, 2, 2])
    grad = _upstream(reduction, 6)
    for p, margin, weight in ((1, 1.0, None), (2, 0.5, torch.rand(5))):
        yield sample_of(aten.multi_margin_loss.default, x, target, p, margin, weight, reduction)
        yield sample_of(
            aten.multi_margin_loss_backward.default, grad, x, target, p, margin, weight, reduction
        )
    labels = torch.tensor([[3, 0, -1, 1, 2], [1, -1, 0, 0, 0], [-1, 0, 0, 0, 0]]).repeat(2, 1)
    yield sample_of(aten.multilabel_margin_loss_forward.default, x, labels, reduction)
    marks = aten.multilabel_margin_loss_forward.default(x, labels, reduction)[1]
    yield sample_of(aten.multilabel_margin_loss_backward.default, grad, x, labels, reduction, marks)


def _likelihood(
    shape: tuple[int, ...], reduction: int, weighted: bool, ignored: tuple[int, ...]
) -> Iterator[Sample]:
    """Labels of one row, of rows or of images; an ignored one occurs among them."""
    rows, places = shape[: len(shape) > 1], shape[2:]
    classes = shape[len(rows)]
    x = torch.randn(shape).log_softmax(len(rows))
    target = torch.randint(classes, (*rows, *places))
    if ignored:
        target.reshape(-1)[::2] = ignored[0]
    weight = torch.rand(classes) if weighted else None
    size = "2d" if places else ""
    ignore = ignored[0] if ignored else -100
    forward = getattr(aten, f"nll_loss{size}_forward").default
    yield sample_of(forward, x, target, weight, reduction, ignore)
    total = forward(x, target, weight, reduction, ignore)[1]
    backward = getattr(aten, f"nll_loss{size}_backward").default
    grad = _upstream(reduction, *rows, *places)
    yield sample_of(backward, grad, x, target, weight, reduction, ignore, total)
