"""AveragedModel.update_parameters without a question: the average of a model in operators alone.

Part of capture/. torch.optim.swa_utils.AveragedModel copies the model the first time and averages
later, and asks its count of updates which of both to do. While a step is recorded, the function of
this file stands in its place: it computes the average and takes the model itself where the count is
zero, which comes to the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import get_swa_avg_fn


def update_parameters(averaged: Any, model: torch.nn.Module) -> None:
    """What AveragedModel.update_parameters does."""
    inner, count = averaged.module, averaged.n_averaged
    means: list[torch.Tensor] = list(averaged.parameters())
    news: list[torch.Tensor] = list(model.parameters())
    if averaged.use_buffers:
        means = [*inner.parameters(), *inner.buffers()]
        news = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        old = [mean.detach() for mean in means[: len(news)]]
        new = [each.detach() for each in news[: len(old)]]
        for mean, after, first in zip(old, _averages(averaged, old, new), new, strict=True):
            mean.copy_(torch.where(count == 0, first, after))
        if not averaged.use_buffers:
            for mean, each in zip(inner.buffers(), model.buffers(), strict=True):
                mean.detach().copy_(each.detach())
        count += 1


def _averages(averaged: Any, old: list[torch.Tensor], new: list[torch.Tensor]) -> list[Any]:
    count = averaged.n_averaged
    if averaged.multi_avg_fn is not None:
        found = [mean.clone() for mean in old]
        averaged.multi_avg_fn(found, new, count)
        return found
    average = averaged.avg_fn or get_swa_avg_fn()
    return [average(mean, each, count) for mean, each in zip(old, new, strict=True)]
