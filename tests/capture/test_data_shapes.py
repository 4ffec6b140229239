"""Shapes that depend on data are refused with a remedy; those that never change are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_read_probes import assert_equals_eager, captured
from torch import nn
from torch.nn import functional as F

from apportion.capture.program import Program
from apportion.capture.trace import CaptureError


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def data() -> Any:
    drawn = torch.Generator().manual_seed(1)
    x, y = (torch.randn(6, n, generator=drawn) for n in (4, 3))
    return x, y, torch.tensor([1, 2, 1, 1, 0, 1])


def program_of(loss: Any) -> Program:
    return captured(lambda model, batch: loss(model(batch[0]), batch), linear(), data())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda h, b: h[b[1][:, 0] > 0].mean(), "an index by a mask"),
        (lambda h, b: h.masked_select(b[1] > 0).mean(), "masked_select()"),
        (lambda h, b: h[(b[2] > 0).nonzero()[:, 0]].mean(), "nonzero()"),
        (lambda h, b: h[torch.where(b[2] > 0)].mean(), "weigh them by the mask"),
        (lambda h, b: h.mean() * torch.unique(b[2]).shape[0], "before the step"),
        (lambda h, b: h.repeat_interleave(b[2], dim=0).mean(), "repeat_interleave()"),
        (lambda h, b: (h * F.one_hot(b[2])).mean(), "give it num_classes"),
        (lambda h, b: (h.mean(0) * torch.bincount(b[2])).mean(), "one_hot(x, num_classes)"),
    ],
)
def test_a_shape_from_data_is_refused_with_a_remedy(loss: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=r"data at .*test_data_shapes\.py:") as caught:
        program_of(loss)
    assert text in str(caught.value)


def test_the_remedies_work() -> None:
    def loss(h: torch.Tensor, batch: Any) -> torch.Tensor:
        mask = batch[1] > 0
        counts = F.one_hot(batch[2], 3).sum(0)
        return (h * mask).sum() / mask.sum() + (h.mean(0) * counts).mean()

    assert_equals_eager(program_of(loss))


@pytest.mark.slow
def test_a_mask_that_never_changes_has_a_fixed_shape() -> None:
    def loss(h: torch.Tensor, _: Any) -> torch.Tensor:
        mask = torch.ones(6, 3).tril().bool()
        pairs = torch.combinations(torch.arange(6))
        rows = torch.unique(torch.tensor([3, 1, 3]))
        apart = (h[pairs[:, 0]] - h[pairs[:, 1]]).pow(2).mean()
        return (
            h[mask].mean()
            + h[rows].mean()
            + h.masked_select(mask).sum()
            + h[mask.nonzero()[:, 0]].max()
            + apart
        )

    program = program_of(loss)
    assert_equals_eager(program)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_has_lengths_that_never_change(reduction: str) -> None:
    def loss(h: torch.Tensor, batch: Any) -> torch.Tensor:
        scores = h.log_softmax(-1).unsqueeze(1).expand(-1, 2, -1)
        frames = torch.full((2,), 6, dtype=torch.long)
        targets = batch[2][:4].clamp(min=1).reshape(2, 2)
        return F.ctc_loss(scores, targets, frames, torch.tensor([2, 1]), reduction=reduction).mean()

    assert_equals_eager(program_of(loss))


@pytest.mark.slow
def test_ctc_loss_with_lengths_of_the_batch_is_refused() -> None:
    def loss(h: torch.Tensor, batch: Any) -> torch.Tensor:
        scores = h.log_softmax(-1).unsqueeze(1).expand(-1, 2, -1)
        return F.ctc_loss(scores, batch[2][:4].reshape(2, 2), torch.tensor([6, 6]), batch[2][:2])

    with pytest.raises(CaptureError, match=r"tuples of int that are the same for every batch"):
        program_of(loss)


class Masked(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 3), writes
        self.register_buffer("mask", torch.tensor([1, 0, 1, 1, 0, 1]).bool())

    def forward(self, x: torch.Tensor) -> Any:
        chosen = self.layer(x)[self.mask]
        if self.writes:
            self.mask = self.mask.logical_not()
        return chosen


@pytest.mark.slow
def test_a_mask_in_a_buffer_may_decide_a_shape_while_nothing_changes_it() -> None:
    program = captured(lambda m, b: m(b[0]).pow(2).mean(), Masked(writes=False), data())
    assert any("follows from mask" in note for note in program.notes)
    assert_equals_eager(program)
    with pytest.raises(CaptureError, match="the step changes mask"):
        captured(lambda m, b: m(b[0]).pow(2).mean(), Masked(writes=True), data())


@pytest.mark.filterwarnings("ignore")  # torch's own, on tensors that it has in prototype
@pytest.mark.parametrize(
    ("batch_of", "text"),
    [
        (torch.Tensor.to_sparse, "layout torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x[:2], x[:1]]), "nested"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_inputs_that_are_not_dense_are_refused(batch_of: Any, text: str) -> None:
    batch = batch_of(torch.eye(4))
    with pytest.raises(CaptureError, match=f"batch is a.*{text}"):
        captured(lambda m, b: m(b.to_dense()).mean(), linear(), batch)
