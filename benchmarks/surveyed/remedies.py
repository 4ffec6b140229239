"""What the refusals of the survey propose, done: refused programs as a user has them afterwards.

A refusal says why a step cannot be captured, and what to do about it. A Remedy is the program after
that was done, and says how. programs.py judges it like any other; where it is captured and equal to
plain PyTorch, the refused program counts as remedied.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed import idioms, language, lucidrains, science, speech
from surveyed.registry import adamw, classifier, classify, images, labels, tokens


@dataclass(frozen=True)
class Remedy:
    """A refused program as it is once the remedy is followed; `done` says how."""

    done: str
    make: Callable[[], Any]


REMEDIES: dict[str, Remedy] = {}


def remedy(done: str, *names: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A decorator for a function that makes the remedied program of these names."""

    def added(make: Callable[[], Any]) -> Callable[[], Any]:
        REMEDIES.update({name: Remedy(done, make) for name in names})
        return make

    return added


# A setting of the package


def _performer(**more: Any) -> Any:
    how = lucidrains.LM | lucidrains.HEADS | {"max_seq_len": 16, "feature_redraw_interval": None}
    return lucidrains.trained_lm("performer_pytorch", "PerformerLM", **how, **more)


@remedy("`feature_redraw_interval=None`", "performer_pytorch/PerformerLM")
def performer() -> Any:
    return _performer()


@remedy("`feature_redraw_interval=None`", "performer_pytorch/PerformerLM_causal")
def causal_performer() -> Any:
    return _performer(causal=True, generalized_attention=True)


@remedy("`layer_dropout=0`", "vit_pytorch/cait_layer_dropout")
def cait() -> Any:
    from vit_pytorch.cait import CaiT

    return classifier(CaiT(**lucidrains.BASE, cls_depth=1, layer_dropout=0.0), images())


@remedy("`max_tokens_per_depth=(16, 16)`: no token is left out", "vit_pytorch/ats_vit")
def vit_of_all_tokens() -> Any:
    from vit_pytorch.ats_vit import ViT

    return classifier(ViT(**lucidrains.BASE, max_tokens_per_depth=(16, 16)), images())


@remedy("`threshold_ema_dead_code=0`", "encodec/encodec_quantizer")
def quantizer_without_expiry() -> Any:
    return speech.encodec_quantizer(threshold_ema_dead_code=0)


@remedy('`method="rk4"`: steps of a fixed size', "torchdiffeq/neural_ode_adaptive")
def ode_of_fixed_steps() -> Any:
    return science.neural_ode_adaptive("rk4")


@remedy("`rnn_class=LSTM`, which keeps no masks", "speechbrain/crdnn")
def crdnn_of_lstm() -> Any:
    from speechbrain.nnet.RNN import LSTM

    return speech.crdnn(rnn_class=LSTM)


@remedy("the step under `linear_operator.settings.trace_mode()`", "gpytorch/gaussian_process")
def gaussian_process_unchecked() -> Any:
    from linear_operator.settings import trace_mode

    step, *rest = science.gaussian_process()

    def unchecked(model: Any, batch: Tensor) -> Tensor:
        with trace_mode():
            return step(model, batch)

    return unchecked, *rest


@remedy("`use_num_updates=False`", "torch_ema/ema_of_weights")
def ema_of_fixed_decay() -> Any:
    return language.ema_of_weights(use_num_updates=False)


def _metric(name: str) -> Any:
    losses = importlib.import_module("pytorch_metric_learning.losses")
    reducers = importlib.import_module("pytorch_metric_learning.reducers")
    loss = getattr(losses, name)(reducer=reducers.MeanReducer())
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return loss(model(inputs), targets)

    batch = (torch.randn(8, 12), torch.arange(8) % 4)
    return step, model, adamw(model), batch, None, ("batch.1",)


@remedy('`fixed=["batch.1"]` and `reducer=MeanReducer()`', "pytorch_metric_learning/SupConLoss")
def mean_contrast() -> Any:
    return _metric("SupConLoss")


@remedy(
    '`fixed=["batch.1"]` and `reducer=MeanReducer()`', "pytorch_metric_learning/TripletMarginLoss"
)
def mean_triplets() -> Any:
    return _metric("TripletMarginLoss")


# Another optimizer


@remedy("AdamW", "prodigyopt/Prodigy", "torch_optimizer/SWATS")
def with_adamw() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))
    return classify, model, adamw(model), (torch.randn(8, 8), labels(8))


# A part written anew


def _one_hot(indices: Tensor, count: int) -> Tensor:
    """A one-hot vector of `count` numbers, all zero where the index is too large for it."""
    return F.one_hot(indices.clamp(max=count), count + 1)[..., :count]


@remedy("`safe_one_hot` with `num_classes`, indices clamped to it",
        "mixture_of_experts/mixture_of_experts")  # fmt: skip
def experts_of_fixed_capacity() -> Any:
    importlib.import_module("mixture_of_experts.mixture_of_experts").safe_one_hot = _one_hot  # type: ignore[attr-defined]
    return lucidrains.mixture_of_experts()


@remedy("`safe_one_hot` with `num_classes`, indices clamped to it", "st_moe_pytorch/st_moe")
def st_moe_of_fixed_capacity() -> Any:
    importlib.import_module("st_moe_pytorch.st_moe_pytorch").safe_one_hot = _one_hot  # type: ignore[attr-defined]
    return lucidrains.st_moe()


@remedy("`forward` with `torch.where` and weights by the masks", "electra_pytorch/electra")
def electra_by_weights() -> Any:
    from electra_pytorch import Electra
    from electra_pytorch.electra_pytorch import (
        get_mask_subset_with_prob,
        gumbel_sample,
        prob_mask_like,
    )

    class Weighted(Electra):
        def forward(self, ids: Tensor) -> Tensor:
            known = ids != self.pad_token_id
            mask = get_mask_subset_with_prob(known, self.mask_prob)
            hidden = mask & prob_mask_like(ids, self.replace_prob)
            logits = self.generator(ids.masked_fill(hidden, self.mask_token_id))
            wanted = ids.masked_fill(~mask, self.pad_token_id)
            made = F.cross_entropy(logits.mT, wanted, ignore_index=self.pad_token_id)
            drawn = gumbel_sample(logits, temperature=self.temperature).detach()
            shown = torch.where(mask, drawn, ids)
            judged = F.binary_cross_entropy_with_logits(
                self.discriminator(shown).squeeze(-1), (shown != ids).float(), reduction="none"
            )
            return made + self.disc_weight * (judged * known).sum() / known.sum()

    def encoder(out: int) -> nn.Module:
        body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.Sequential(nn.Embedding(64, 16), body, nn.Linear(16, out))

    model = Weighted(encoder(64), encoder(1), mask_token_id=2, pad_token_id=0)
    return (lambda model, batch: model(batch)), model, adamw(model), tokens()


@remedy("`torch.topk` of a fixed number", "torch_geometric/topk_pool")
def pool_of_fixed_size() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.out = nn.Linear(8, 1, bias=False), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            score = torch.tanh(self.score(x).squeeze(-1) / self.score.weight.norm())
            best, chosen = torch.topk(score, len(x) // 2)
            return self.out(x[chosen] * best[:, None]).mean()

    model = Net()
    return (lambda m, b: m(b).square()), model, adamw(model), torch.randn(12, 8)


@remedy("the accuracy by `one_hot(x, num_classes).sum(0)`", "torchmetrics/torchmetrics_logging")
def accuracy_by_one_hot() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))

    def step(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        logits = model(inputs)
        of_class = F.one_hot(targets, 10)
        right = (of_class * (logits.argmax(-1) == targets)[:, None]).sum(0)
        count = of_class.sum(0)
        accuracy = (right / count.clamp(min=1)).sum() / (count > 0).sum()
        return {"loss": F.cross_entropy(logits, targets), "accuracy": accuracy}

    return step, model, adamw(model), (torch.randn(4, 8), labels())


# Idioms


@remedy("`torch.where`", "branch_on_data")
def choice_by_where() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        return torch.where(loss > 2.5, loss * 2, loss)

    return idioms.program(step)


@remedy("a buffer, which the step adds to", "python_counter_changes_step")
def counter_in_buffer() -> Any:
    class Net(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = idioms.net()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x) * (1.0 / self.calls)

    return idioms.program(classify, Net())


@remedy("`torch.rand`", "python_randomness")
def randomness_of_torch() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * (0.5 + torch.rand(()))

    return idioms.program(step)


@remedy("the share drawn outside, in the batch", "numpy_mixup")
def mixup_in_batch() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y, share = batch
        logits = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y.flip(0))

    share = torch.tensor(np.random.beta(0.4, 0.4), dtype=torch.float32)
    return idioms.program(step, batch=(*idioms.pairs(), share))


@remedy("`torch.from_numpy` where the batch is made", "numpy_batch")
def batch_of_tensors() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    x, y = torch.randn(8, 8).numpy(), labels(8).numpy()
    return idioms.program(step, batch={"x": torch.from_numpy(x), "y": torch.from_numpy(y)})


@remedy("the plain module", "scripted_submodule")
def plain_submodule() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return idioms.program(classify, Net())


@remedy("`sparse=False`", "sparse_embedding")
def dense_embedding() -> Any:
    model = nn.Sequential(nn.EmbeddingBag(20, 8, sparse=False), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return idioms.program(classify, model, (torch.randint(20, (8, 4)), labels(8)), optimizer)


@remedy("`schedule.step()` after every step", "scheduler_in_step")
def scheduler_outside() -> Any:
    model = idioms.net()
    optimizer = idioms.adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return classify, model, optimizer, idioms.pairs(), None, (), schedule.step


@remedy("the rate set after every step", "learning_rate_by_counter")
def rate_set_outside() -> Any:
    model = idioms.net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def warm_up() -> None:
        for group in optimizer.param_groups:
            group["lr"] = min(1e-2, group["lr"] + 1e-3)

    return classify, model, optimizer, idioms.pairs(), None, (), warm_up
