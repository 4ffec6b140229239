"""Idioms of training scripts, each on a network as small as it can be."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
from collections import OrderedDict, UserDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import IDIOM, Registry, classify, labels, regress

REGISTRY = Registry(IDIOM)
idiom = REGISTRY()


def net(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 10))


def pairs(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 8), labels(count)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def program(step: Any, model: Any = None, batch: Any = None, optimizer: Any = None) -> Any:
    model = net() if model is None else model
    return step, model, optimizer or adam(model), pairs() if batch is None else batch


# Forms of the step


@idiom
def own_backward() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return program(step)


@idiom
def returns_item() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return program(step)


@idiom
def returns_nothing() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    return program(step)


@idiom
def clips_norm() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = classify(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return program(step)


@idiom
def clips_value() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    return program(step)


@idiom
def clip_norm_given() -> Any:
    return (*program(classify), 0.1)


@idiom
def logs_gradient_norm() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss, "norm": norm.item()}

    return program(step)


@idiom
def accumulates() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return program(step)


@idiom
def accumulates_list_of_micro_batches() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        for x, y in batch:
            loss = F.cross_entropy(model(x), y) / len(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return program(step, batch=[pairs(4), pairs(4)])


@idiom
def gan_two_optimizers() -> Any:
    models = {"g": nn.Linear(4, 8), "d": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))}
    optimizers = {k: torch.optim.Adam(m.parameters(), lr=1e-3) for k, m in models.items()}

    def step(models: Any, optimizers: Any, batch: Any) -> Any:
        real, noise = batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        optimizers["d"].zero_grad()
        fake = models["g"](noise)
        judge = F.binary_cross_entropy_with_logits
        d_loss = judge(models["d"](real), ones) + judge(models["d"](fake.detach()), zeros)
        d_loss.backward()
        optimizers["d"].step()
        optimizers["g"].zero_grad()
        g_loss = judge(models["d"](fake), ones)
        g_loss.backward()
        optimizers["g"].step()
        return d_loss, g_loss

    return step, models, optimizers, (torch.randn(8, 8), torch.randn(8, 4))


@idiom
def two_optimizers_one_model() -> Any:
    model = net()
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.AdamW(model[2].parameters(), lr=1e-3),
    ]

    def step(model: nn.Module, optimizers: Any, batch: Any) -> Tensor:
        loss = classify(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, model, optimizers, pairs()


@idiom
def several_modules() -> Any:
    models = [nn.Linear(8, 16), nn.Linear(16, 10)]
    optimizer = torch.optim.Adam([p for m in models for p in m.parameters()])

    def step(models: Any, batch: Any) -> Tensor:
        encoder, head = models
        return F.cross_entropy(head(encoder(batch[0]).relu()), batch[1])

    return step, models, optimizer, pairs()


@idiom
def ema_by_hand() -> Any:
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
        return loss

    return program(step, model)


@idiom
def mean_teacher() -> Any:
    models = {"student": net(), "teacher": net().requires_grad_(False)}

    def step(models: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            target = models["teacher"](batch[0]).softmax(-1)
        logits = models["student"](batch[0])
        loss = F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits, target)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(
                models["teacher"].parameters(), models["student"].parameters(), strict=True
            ):
                t.lerp_(s, 0.01)
        return loss

    return step, models, adam(models["student"]), pairs()


@idiom
def averaged_model_swa() -> Any:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return program(step, model)


@idiom
def returns_tuple() -> Any:
    def step(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    return program(step)


@idiom
def returns_dict_with_metrics() -> Any:
    def step(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        right = (logits.argmax(-1) == batch[1]).float().mean()
        return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": right}

    return program(step)


@idiom
def loss_of_one_element() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch).reshape(1)

    return program(step)


@idiom
def criterion_with_parameters() -> Any:
    class Proxy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(10, 10))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(-torch.cdist(x, self.proxies), y)

    model, criterion = net(), Proxy()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=1e-2)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    return step, model, optimizer, pairs()


@idiom
def uncertainty_weights() -> Any:
    model, weights = net(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), weights], lr=1e-2)

    def step(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        losses = torch.stack([F.cross_entropy(logits, batch[1]), logits.square().mean()])
        return (losses * torch.exp(-weights) + weights).sum()

    return step, model, optimizer, pairs()


@idiom
def gradient_penalty() -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch.detach().requires_grad_()
        score = model(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return program(step, model, torch.randn(8, 8))


@idiom
def adversarial_training() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y)

    return program(step)


@idiom
def sharpness_aware() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        classify(model, batch).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss

    return program(step)


@idiom
def two_backwards_retained() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        logits = model(batch[0])
        first, second = F.cross_entropy(logits, batch[1]), logits.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first + second

    return program(step)


@idiom
def gradient_noise_by_hand() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()
        return loss

    return program(step)


@idiom
def weight_clamp_after_step() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        return loss

    return program(step)


@idiom
def closure_step() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = classify(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return program(step)


@idiom
def scheduler_in_step() -> Any:
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return step, model, optimizer, pairs()


@idiom
def learning_rate_by_counter() -> Any:
    class Counter:
        steps = 0

    counter = Counter()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        counter.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, counter.steps / 10)
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return program(step)


@idiom
def functools_partial() -> Any:
    def weighted(weight: float, model: nn.Module, batch: Any) -> Tensor:
        return weight * classify(model, batch)

    return program(functools.partial(weighted, 0.5))


@idiom
def callable_object() -> Any:
    class Step:
        def __init__(self) -> None:
            self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return self.loss(model(batch[0]), batch[1])

    return program(Step())


@idiom
def trainer_method() -> Any:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.log = model, []

        def step(self, model: nn.Module, batch: Any) -> Tensor:
            loss = classify(self.model, batch)
            self.log.append(loss.detach())
            return loss

    model = net()
    return program(Trainer(model).step, model)


# Hooks


@idiom
def gradient_hook() -> Any:
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 2)
    return program(classify, model)


@idiom
def post_accumulate_hook() -> Any:
    model = net()

    def double(parameter: Tensor) -> None:
        parameter.grad.mul_(2)

    model[0].weight.register_post_accumulate_grad_hook(double)
    return program(classify, model)


@idiom
def optimizer_step_hook() -> Any:
    model = net()
    optimizer = adam(model)

    def decay(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    optimizer.register_step_post_hook(decay)
    return classify, model, optimizer, pairs()


@idiom
def forward_hook_features() -> Any:
    model = net()
    seen: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda m, i, o: seen.__setitem__("hidden", o))

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        return loss + 0.01 * seen.pop("hidden").square().mean()

    return program(step, model)


@idiom
def forward_pre_hook() -> Any:
    model = net()
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    return program(classify, model)


@idiom
def full_backward_hook() -> Any:
    model = net()
    model[1].register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
    return program(classify, model)


@idiom
def tensor_hook_in_forward() -> Any:
    class Reverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x).relu()
            hidden.register_hook(lambda grad: -grad)
            return self.head(hidden)

    return program(classify, Reverse())


# Values that are read


@idiom
def item_for_progress_bar() -> Any:
    shown: list[float] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        shown[:] = [loss.item()]
        return loss

    return program(step)


@idiom
def prints_loss() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        print(f"loss {loss.item():.3f}")
        return loss

    return program(step)


@idiom
def asserts_finite() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        assert torch.isfinite(loss), "the loss is not finite"
        return loss

    return program(step)


@idiom
def raises_on_nan() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        if torch.isnan(logits).any():
            raise RuntimeError("not a number")
        return F.cross_entropy(logits, batch[1])

    return program(step)


@idiom
def skips_step_on_nan() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        if not math.isfinite(loss.item()):
            return loss
        loss.backward()
        optimizer.step()
        return loss

    return program(step)


@idiom
def branch_on_data() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        return loss * 2 if loss.item() > 2.5 else loss

    return program(step)


@idiom
def distribution_log_prob() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        chosen = torch.distributions.Categorical(logits=model(batch[0]))
        return -(chosen.log_prob(batch[1])).mean() - 0.01 * chosen.entropy().mean()

    return program(step)


@idiom
def distribution_rsample() -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        mean, spread = model(batch).chunk(2, -1)
        normal = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        prior = torch.distributions.Normal(0.0, 1.0)
        kl = torch.distributions.kl_divergence(normal, prior)
        return normal.rsample().square().mean() + kl.mean()

    return program(step, batch=torch.randn(8, 8))


@idiom
def accuracy_list() -> Any:
    history: list[float] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        history.append((logits.argmax(1) == batch[1]).sum().item())
        return F.cross_entropy(logits, batch[1])

    return program(step)


# Precision


@idiom
def autocast_bf16() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, batch)

    return program(step)


@idiom
def autocast_own_loop() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[0])
        loss = F.cross_entropy(logits.float(), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return program(step)


@idiom
def grad_scaler_disabled() -> Any:
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return program(step)


@idiom
def grad_scaler_enabled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return program(step)


@idiom
def bf16_model() -> Any:
    model = net().bfloat16()

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    return program(step, model)


@idiom
def bf16_with_dropout() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 10)).bfloat16()

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    return program(step, model)


@idiom
def float64_model() -> Any:
    model = net().double()
    return program(classify, model, (torch.randn(8, 8, dtype=torch.float64), labels(8)))


@idiom
def integer_times_float() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        weights = (batch[1] + 1) * 0.5
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).mean()

    return program(step)


# Batches


@idiom
def batch_encoding() -> Any:
    from transformers import BatchEncoding

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    x, y = pairs()
    return program(step, batch=BatchEncoding({"x": x, "y": y}))


@idiom
def batch_encoding_unpacked() -> Any:
    from transformers import BatchEncoding

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    x, y = pairs()
    return program(lambda m, b: m(**b), Net(), BatchEncoding({"x": x, "y": y}))


@dataclasses.dataclass
class Example:
    """A batch as a dataclass."""

    x: Tensor
    y: Tensor
    weight: float = 0.5


class Named(NamedTuple):
    """A batch as a named tuple."""

    x: Tensor
    y: Tensor


Plain = namedtuple("Plain", ["x", "y"])


class Bag:
    """A batch as an object of its own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def _attributes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


@idiom
def dataclass_batch() -> Any:
    return program(_attributes, batch=Example(*pairs()))


@idiom
def named_tuple_batch() -> Any:
    return program(_attributes, batch=Named(*pairs()))


@idiom
def collections_namedtuple_batch() -> Any:
    return program(_attributes, batch=Plain(*pairs()))


@idiom
def object_batch() -> Any:
    return program(_attributes, batch=Bag(*pairs()))


@idiom
def user_dict_batch() -> Any:
    x, y = pairs()
    return program(
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch=UserDict({"x": x, "y": y})
    )


@idiom
def ordered_dict_batch() -> Any:
    x, y = pairs()
    batch = OrderedDict(y=y, x=x, note="text", count=3)
    return program(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch=batch)


@idiom
def nested_batch() -> Any:
    x, y = pairs()
    batch = {"data": [x, {"targets": (y, None)}], "weight": 0.5}
    return program(
        lambda m, b: b["weight"] * F.cross_entropy(m(b["data"][0]), b["data"][1]["targets"][0]),
        batch=batch,
    )


@idiom
def numpy_batch() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(torch.from_numpy(batch["x"])), torch.as_tensor(batch["y"]))

    batch = {"x": torch.randn(8, 8).numpy(), "y": labels(8).numpy()}
    return program(step, batch=batch)


@idiom
def batch_changed_in_place() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x.clamp_(-1, 1)
        y[y == 0] = -100
        return F.cross_entropy(model(x), y)

    return program(step)


@idiom
def batch_dict_changed() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        y = batch.pop("y")
        return F.cross_entropy(model(input=batch["x"]), y)

    x, y = pairs()
    return program(step, batch={"x": x, "y": y})


@idiom
def batch_moved_to_device() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        device = next(model.parameters()).device
        x, y = (t.to(device, non_blocking=True) for t in batch)
        return F.cross_entropy(model(x), y)

    return program(step)


@idiom
def sample_weights_and_mask() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y, mask = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    return program(step, batch=(*pairs(), (torch.rand(8) > 0.3).float()))


@idiom
def boolean_mask_select() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y, mask = batch
        return F.cross_entropy(model(x)[mask], y[mask])

    return program(step, batch=(*pairs(), torch.arange(8) < 5))


@idiom
def ignore_index() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=3)

    return program(step)


# Modules


@idiom
def shared_module() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.again = self.first
            self.out = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.again(self.first(x).relu()))

    return program(classify, Net())


@idiom
def tied_weights() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return program(step, Net(), torch.randint(20, (4, 6)))


@idiom
def spectral_norm_parametrization() -> Any:
    model = net()
    nn.utils.parametrizations.spectral_norm(model[0])
    return program(classify, model)


@idiom
def spectral_norm_old() -> Any:
    model = net()
    nn.utils.spectral_norm(model[0])
    return program(classify, model)


@idiom
def weight_norm_parametrization() -> Any:
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    return program(classify, model)


@idiom
def orthogonal_parametrization() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
    nn.utils.parametrizations.orthogonal(model[0], orthogonal_map="cayley")
    return program(classify, model)


@idiom
def pruned() -> Any:
    model = net()
    from torch.nn.utils import prune

    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return program(classify, model)


@idiom
def checkpointed() -> Any:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(), nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    return program(classify, Net())


@idiom
def checkpointed_reentrant() -> Any:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body = nn.Linear(8, 8), net()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, self.first(x), use_reentrant=True)

    return program(classify, Net())


@idiom
def checkpointed_dropout() -> Any:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 10))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    return program(classify, Net())


@idiom
def compiled_submodule() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.compile(nn.Linear(8, 16), backend="eager")
            self.head = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).relu())

    return program(classify, Net())


@idiom
def scripted_submodule() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU()))
            self.head = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return program(classify, Net())


class Straight(torch.autograd.Function):
    """Rounds, with the gradient passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


@idiom
def custom_autograd_function() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(Straight.apply(model[0](batch[0])[:, :8])), batch[1])

    return program(step)


@idiom
def functional_call() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        shifted = {n: p + 0.01 for n, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, shifted, (batch[0],)), batch[1])

    return program(step)


@idiom
def vmap_per_sample() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(torch.vmap(model)(batch[0]), batch[1])

    return program(step)


@idiom
def func_grad_maml() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        parameters = dict(model.named_parameters())

        def loss(weights: Any) -> Tensor:
            return F.cross_entropy(
                torch.func.functional_call(model, weights, (batch[0],)), batch[1]
            )

        grads = torch.func.grad(loss)(parameters)
        return loss({n: p - 0.1 * grads[n] for n, p in parameters.items()})

    return program(step)


@idiom
def maml_by_autograd_grad() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        parameters = dict(model.named_parameters())
        inner = classify(model, batch)
        grads = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, fast, (batch[0],)), batch[1])

    return program(step)


@idiom
def buffer_running_mean() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("mean", torch.zeros(10))

        def forward(self, x: Tensor) -> Tensor:
            made = self.net(x)
            self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
            return made - self.mean

    return program(classify, Net())


@idiom
def buffer_in_place() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(10), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            made = self.net(x)
            self.count += 1
            self.mean.lerp_(made.detach().mean(0), 0.1)
            return made - self.mean

    return program(classify, Net())


@idiom
def memory_queue_moco() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("queue", F.normalize(torch.randn(10, 16), dim=0))

        def forward(self, x: Tensor) -> Tensor:
            keys = F.normalize(self.net(x), dim=1)
            logits = torch.cat([(keys * keys).sum(1, keepdim=True), keys @ self.queue.clone()], 1)
            with torch.no_grad():
                self.queue.copy_(torch.cat([keys.detach().T, self.queue[:, :-8]], 1))
            return logits / 0.1

    return program(lambda m, b: F.cross_entropy(m(b[0]), torch.zeros(8, dtype=torch.long)), Net())


@idiom
def cached_mask_attribute() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.mask = nn.Linear(8, 10), None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.tril(torch.ones(x.shape[1], x.shape[1]))
            weights = (x @ x.transpose(1, 2)).masked_fill(self.mask == 0, -1e9).softmax(-1)
            return self.out((weights @ x).mean(1))

    return program(classify, Net(), (torch.randn(8, 6, 8), labels(8)))


@idiom
def state_in_attribute() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.hidden = net(), torch.zeros(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = (0.5 * self.hidden + self.net(x)).detach() * 0.1 + self.net(x)
            made, self.hidden = self.hidden, self.hidden.detach()
            return made

    return program(classify, Net())


@idiom
def python_counter_changes_step() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = net(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x) * (1.0 / self.calls)

    return program(classify, Net())


@idiom
def python_counter_unused() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = net(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    return program(classify, Net())


@idiom
def python_randomness() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * (0.5 + random.random())

    return program(step)


@idiom
def numpy_mixup() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        share = float(np.random.beta(0.4, 0.4))
        mixed = share * x + (1 - share) * x.flip(0)
        logits = model(mixed)
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y.flip(0))

    return program(step)


@idiom
def torch_mixup() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        share, order = torch.rand(()), torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])

    return program(step)


@idiom
def dropout_and_noise() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        return F.cross_entropy(model(F.dropout(x, 0.3)), batch[1])

    return program(step)


@idiom
def dropout2d_alpha_feature() -> Any:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), nn.SELU(), nn.AlphaDropout(0.1), nn.Flatten(),
        nn.Linear(4 * 36, 10),
    )  # fmt: skip
    return program(classify, model, (torch.randn(8, 1, 8, 8), labels(8)))


@idiom
def gumbel_softmax() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        hard = F.gumbel_softmax(model(batch[0]), tau=0.5, hard=True)
        return (hard * torch.arange(10.0)).sum(-1).mean() + classify(model, batch)

    return program(step)


@idiom
def layer_drop() -> Any:
    class Net(nn.Module):
        def __init__(self, p: float = 0.0) -> None:
            super().__init__()
            self.layers, self.p = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), p
            self.out = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.training and torch.rand([]) < self.p:
                    continue
                x = layer(x).relu()
            return self.out(x)

    return program(classify, Net())


@idiom
def unused_parameters() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.idle = net(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    return program(classify, Net())


@idiom
def frozen_backbone() -> Any:
    model = net()
    model[0].requires_grad_(False)
    return program(classify, model, None, torch.optim.SGD(model[2].parameters(), lr=0.1))


@idiom
def batch_norm_training() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    return program(classify, model)


@idiom
def batch_norm_frozen() -> Any:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    model[1].eval()
    return program(classify, model, (torch.randn(8, 1, 8, 8), labels(8)))


@idiom
def batch_norm_cumulative() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 10))
    return program(classify, model)


@idiom
def sync_batch_norm() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    return program(classify, nn.SyncBatchNorm.convert_sync_batchnorm(model))


@idiom
def lazy_modules() -> Any:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(10))
    model(torch.randn(2, 8))
    return program(classify, model)


@idiom
def channels_last() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 8, 8).to(memory_format=torch.channels_last)
    return program(classify, model, (x, labels(8)))


@idiom
def parameter_list_and_dict() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.1)] * 2)
            self.heads = nn.ParameterDict({"a": nn.Parameter(torch.randn(8, 10) * 0.1)})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = (x @ weight).relu() + x
            return x @ self.heads["a"]

    return program(classify, Net())


@idiom
def parameter_groups() -> Any:
    model = net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return program(classify, model, None, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)))


@idiom
def l1_and_l2_penalty() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        size = sum(p.abs().sum() for p in model.parameters())
        return classify(model, batch) + 1e-3 * size

    return program(step)


@idiom
def siamese_triplet() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.triplet_margin_loss(*(model(x) for x in batch))

    return program(step, batch=tuple(torch.randn(8, 8) for _ in range(3)))


@idiom
def info_nce() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        one, other = (F.normalize(model(x), dim=-1) for x in batch)
        logits = one @ other.T / 0.1
        targets = torch.arange(len(one), device=logits.device)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    return program(step, batch=(torch.randn(8, 8), torch.randn(8, 8)))


# Networks of pytorch/examples


@idiom
def word_lm_lstm() -> Any:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, dropout=0.2)
            self.out = nn.Linear(8, 20)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor, hidden: Any) -> Tensor:
            made, _ = self.lstm(self.embed(x), hidden)
            return self.out(made)

    def step(model: nn.Module, batch: Any) -> Tensor:
        words, hidden = batch
        hidden = tuple(h.detach() for h in hidden)
        return F.cross_entropy(model(words[:-1], hidden).flatten(0, 1), words[1:].flatten())

    state = (torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
    return (*program(step, Words(), (torch.randint(20, (7, 4)), state)), 0.25)


@idiom
def gru_classifier() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = (
                nn.GRU(8, 8, batch_first=True, bidirectional=True),
                nn.Linear(16, 10),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.gru(x)[0][:, -1])

    return program(classify, Net(), (torch.randn(8, 5, 8), labels(8)))


@idiom
def plain_rnn_cell_loop() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTMCell(8, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            h, c = torch.zeros(len(x), 8), torch.zeros(len(x), 8)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
            return self.out(h)

    return program(classify, Net(), (torch.randn(8, 4, 8), labels(8)))


@idiom
def transformer_sequence_first() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1), 2)
            self.out = nn.Linear(8, 20)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(len(x))
            return self.out(self.body(self.embed(x), mask=mask, is_causal=True))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:-1]).flatten(0, 1), batch[1:].flatten())

    return program(step, Net(), torch.randint(20, (7, 4)))


@idiom
def transformer_seq2seq() -> Any:
    model = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def step(model: nn.Module, batch: Any) -> Tensor:
        source, target, wanted = batch
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return F.mse_loss(model(source, target, tgt_mask=mask), wanted)

    return program(step, model, tuple(torch.randn(4, 5, 8) for _ in range(3)))


@idiom
def transformer_padding_mask() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.body, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(8, 10)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.out(self.body(x, src_key_padding_mask=padding)[:, 0])

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, padding, y = batch
        return F.cross_entropy(model(x, padding), y)

    padding = torch.arange(5)[None] >= torch.tensor([[5], [3], [4], [2]])
    return program(step, Net(), (torch.randn(4, 5, 8), padding, labels(4)))


@idiom
def packed_sequence() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 10)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.out(self.lstm(packed)[1][0][-1])

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, lengths, y = batch
        return F.cross_entropy(model(x, lengths), y)

    return program(step, Net(), (torch.randn(4, 5, 8), torch.tensor([5, 4, 3, 2]), labels(4)))


@idiom
def ctc_loss() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0]).log_softmax(-1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, targets, x_lengths, y_lengths = batch
        return F.ctc_loss(model(x), targets, x_lengths, y_lengths)

    lengths = (torch.full((4,), 10), torch.full((4,), 3))
    return program(step, Net(), (torch.randn(10, 4, 8), torch.randint(1, 6, (4, 3)), *lengths))


@idiom
def embedding_bag_offsets() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 10)

        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return self.out(self.bag(text, offsets))

    def step(model: nn.Module, batch: Any) -> Tensor:
        text, offsets, y = batch
        return F.cross_entropy(model(text, offsets), y)

    offsets = torch.tensor([0, 3, 5, 9])
    return program(step, Net(), (torch.randint(20, (12,)), offsets, labels(4)))


@idiom
def vae() -> Any:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Any:
            mean, log_variance = self.encode(x).chunk(2, -1)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
            return self.decode(z), mean, log_variance

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made, mean, log_variance = model(batch)
        kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy_with_logits(made, batch, reduction="sum") + kl

    return program(step, Vae(), torch.rand(8, 8))


@idiom
def super_resolution() -> Any:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    return program(regress, model, (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 16, 16)))


@idiom
def dcgan_discriminator() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0), nn.Flatten(0),
    )  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch), torch.ones(len(batch)))

    return program(step, model, torch.randn(8, 3, 16, 16))


@idiom
def actor_critic() -> Any:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = (
                nn.Linear(8, 16),
                nn.Linear(16, 3),
                nn.Linear(16, 1),
            )

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.body(x))
            return self.actor(x), self.critic(x).squeeze(-1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen, actions, returns = batch
        logits, values = model(seen)
        chosen = torch.distributions.Categorical(logits=logits).log_prob(actions)
        advantage = (returns - values).detach()
        return -(chosen * advantage).mean() + F.smooth_l1_loss(values, returns)

    return program(step, Policy(), (torch.randn(8, 8), torch.randint(3, (8,)), torch.randn(8)))


@idiom
def dqn_target_network() -> Any:
    models = {"online": net(), "target": net().requires_grad_(False)}

    def step(models: Any, batch: Any) -> Tensor:
        seen, actions, reward, after = batch
        values = models["online"](seen).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = reward + 0.99 * models["target"](after).max(1).values
        return F.smooth_l1_loss(values, wanted)

    batch = (torch.randn(8, 8), torch.randint(10, (8,)), torch.randn(8), torch.randn(8, 8))
    return step, models, adam(models["online"]), batch


@idiom
def style_transfer_gram() -> Any:
    model = nn.Conv2d(3, 4, 3, padding=1)

    def gram(x: Tensor) -> Tensor:
        flat = x.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[-1]

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(gram(model(batch[0])), gram(model(batch[1])).detach())

    return program(step, model, (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)))


@idiom
def mixture_of_experts_topk() -> Any:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList([nn.Linear(8, 10) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            weight, index = self.gate(x).softmax(-1).topk(2)
            full = torch.zeros(len(x), 4).scatter(1, index, weight)
            return sum(full[:, k, None] * e(x) for k, e in enumerate(self.experts))

    return program(classify, Experts())


@idiom
def deep_equilibrium_loop() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        with torch.no_grad():
            for _ in range(3):
                x = torch.tanh(model[0](x)[:, :8]) + batch[0]
        return F.cross_entropy(model(x), batch[1])

    return program(step)


@idiom
def weighted_class_loss_buffer() -> Any:
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10), label_smoothing=0.1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0]), batch[1])

    return program(step)


@idiom
def no_sync_context_and_train_call() -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(True):
            loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return program(step)


@idiom
def data_parallel_wrapper() -> Any:
    return program(classify, nn.DataParallel(net()))


@idiom
def sparse_embedding() -> Any:
    model = nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return program(classify, model, (torch.randint(20, (8, 4)), labels(8)), optimizer)


@idiom
def nonzero_count() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        rows = torch.nonzero(batch[1] > 2).squeeze(1)
        return F.cross_entropy(logits[rows], batch[1][rows])

    return program(step)


# Optimizers of PyTorch


def _torch_optimizer(name: str, **settings: Any) -> Any:
    def make() -> Any:
        model = net()
        kind = getattr(torch.optim, name)
        trained = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]
        return classify, model, kind(trained, **{"lr": 1e-2} | settings), pairs()

    return make


for _name, _settings in {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"maximize": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
    "LBFGS": {},
    "SparseAdam": {},
}.items():
    if _name not in ("LBFGS",):
        REGISTRY.add(f"optimizer_{_name}", _torch_optimizer(_name, **_settings))
REGISTRY.add("optimizer_SGD_dampening", _torch_optimizer("SGD", momentum=0.9, dampening=0.1))


@idiom
def optimizer_subclass() -> Any:
    class Signed(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr, "beta": 0.9})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if "mean" not in state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].lerp_(p.grad, 1 - group["beta"])
                    p.add_(state["mean"].sign(), alpha=-group["lr"])

    model = net()
    return classify, model, Signed(model.parameters()), pairs()


@idiom
def optimizer_with_existing_state() -> Any:
    model = net()
    optimizer = adam(model)
    classify(model, pairs()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return classify, model, optimizer, pairs()


@idiom
def existing_gradients() -> Any:
    model = net()
    optimizer = adam(model)
    classify(model, pairs()).backward()
    return classify, model, optimizer, pairs()


@idiom
def tensor_learning_rate() -> Any:
    model = net()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=torch.tensor(1e-2), capturable=False, foreach=False
    )
    return classify, model, optimizer, pairs()
