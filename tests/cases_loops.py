"""Small trainings in all forms of step: own loops, clipping, accumulation, several optimizers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Training = tuple[Any, Any, Any, Any]
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def net(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.GELU(), nn.Linear(8, outputs)).double()


def pairs(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 4).double(), torch.randn(count, 3).double()


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def plain(clip: Callable[[Any], Any] | None = None, none: bool = True) -> Any:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=none)
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            clip(list(model.parameters()))
        optimizer.step()
        return loss

    return step


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def with_net(step: Any, optimizer: Any = momentum) -> Training:
    model = net()
    return step, model, optimizer(model.parameters()), pairs()


def clipped_by_hand() -> Training:
    def clip(parameters: list[Any]) -> None:
        for p in parameters:
            p.grad.data.clamp_(-0.01, 0.01)

    return with_net(plain(clip))


def clipped_over_groups() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.05)
        optimizer.step()
        return loss

    model = net()
    groups: Any = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}]
    return step, model, Adam(groups, lr=0.1, weight_decay=0.1), pairs()


def accumulated() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for x, y in zip(batch[0].split(2), batch[1].split(2), strict=True):
            (loss_of(model, (x, y)) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return with_net(step, functools.partial(Adam, lr=0.1))


def adversarial() -> Training:
    def step(models: Any, optimizers: Any, batch: Any) -> dict[str, torch.Tensor]:
        made = models["made"](batch[0])
        optimizers["judge"].zero_grad()
        judged = models["judge"](made.detach()).mean() - models["judge"](batch[1]).mean()
        judged.backward()
        optimizers["judge"].step()
        optimizers["made"].zero_grad()
        loss = -models["judge"](made).mean()
        loss.backward()
        optimizers["made"].step()
        return {"judged": judged, "loss": loss}

    models = {"made": net(), "judge": net(3, 1)}
    optimizers = {
        "made": Adam(models["made"].parameters(), lr=0.1),
        "judge": SGD(models["judge"].parameters(), lr=0.2, momentum=0.5),
    }
    return step, models, optimizers, pairs()


def critic_twice() -> Training:
    """The same parameters are updated twice in a step, and clamped."""

    def step(models: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(models[0], batch)
            loss.backward()
            optimizer.step()
            for p in models[0].parameters():
                p.data.clamp_(-0.3, 0.3)
        return loss

    model = net()
    return step, [model], Adam(model.parameters(), lr=0.1), pairs()


def averaged() -> Training:
    model = net()
    average = copy.deepcopy(model)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = plain()(model, optimizer, batch)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
        return loss

    return step, model, Adam(model.parameters(), lr=0.1), pairs()


def averaged_through_data() -> Training:
    model = net()
    average = copy.deepcopy(model)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        held = [p.data for p in model.parameters()]  # views from before the update
        loss = plain()(model, optimizer, batch)
        for mean, p in zip(average.parameters(), held, strict=True):
            mean.data.mul_(0.9).add_(p, alpha=0.1)
        return loss

    return step, model, SGD(model.parameters(), lr=0.1), pairs()


def averaged_by_torch(**how: Any) -> Training:
    model = nn.Sequential(*net(), nn.BatchNorm1d(3)).double()
    average = torch.optim.swa_utils.AveragedModel(model, **how)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = plain()(model, optimizer, batch)
        average.update_parameters(model)
        return loss

    return step, model, SGD(model.parameters(), lr=0.1), pairs()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3).double())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(a, b) * torch.exp(-self.log) + self.log


def criterion_in_the_closure() -> Training:
    model, criterion = net(), Scaled()
    both = [*model.parameters(), *criterion.parameters()]
    return lambda m, b: criterion(m(b[0]), b[1]), model, SGD(both, lr=0.1), pairs()


def parameter_in_the_closure() -> Training:
    model, scale = net(), nn.Parameter(torch.tensor(0.3).double())

    def step(model: Any, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * torch.exp(-scale) + scale

    return step, model, SGD([*model.parameters(), scale], lr=0.1), pairs()


def partial_with_a_teacher() -> Training:
    def step(model: Any, batch: Any, teacher: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0]), wanted)

    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    return functools.partial(step, teacher=net()), model, optimizer, pairs()


class Trainer:
    """A step that is a method, with model and optimizer as attributes."""

    def __init__(self) -> None:
        self.criterion = Scaled()
        self.model = net()
        both = [*self.model.parameters(), *self.criterion.parameters()]
        self.optimizer = SGD(both, lr=0.1, momentum=0.9)

    def step(self, model: Any, batch: Any) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "scale": self.criterion.log.detach()}


def method_of_a_trainer() -> Training:
    trainer = Trainer()
    return trainer.step, trainer.model, trainer.optimizer, pairs()


def quarter(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.25)


def hooked(own: bool) -> Training:
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[2].weight.register_post_accumulate_grad_hook(quarter)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.grad.mul_(0.5)

    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.clamp_(-0.3, 0.3)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(clamp)
    return plain() if own else loss_of, model, optimizer, pairs()


def updated_in_backward() -> Training:
    model = net()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Any) -> None:
        held = next(o for o in optimizers.values() if o.param_groups[0]["params"][0] is p)
        held.step()
        held.zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return step, model, list(optimizers.values()), pairs()


def unused(own: bool) -> Training:
    model: Any = nn.ModuleDict({"used": net(), "idle": net()})

    def step(model: Any, batch: Any) -> torch.Tensor:
        return loss_of(model["used"], batch)

    def loop(model: Any, optimizer: Any, batch: Any) -> Any:
        return plain()(model["used"], optimizer, batch)

    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    return loop if own else step, model, optimizer, pairs()


def penalised() -> Training:
    """A gradient of a gradient, as gradient penalties have it."""

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        out = model(x).pow(2).mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + grad.pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss

    return with_net(step)


def with_closure() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return with_net(step)


def disabled_scaler() -> Training:
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return with_net(step)


def checkpointed() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        half = torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=True)
        loss = F.mse_loss(model[2](half), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return with_net(step)


LOOPS: dict[str, Callable[[], Training]] = {
    "plain": lambda: with_net(plain()),
    "zeros, not none": lambda: with_net(plain(none=False)),
    "clip_grad_norm_": lambda: with_net(plain(lambda ps: nn.utils.clip_grad_norm_(ps, 0.05))),
    "clip_grad_value_": lambda: with_net(plain(lambda ps: nn.utils.clip_grad_value_(ps, 0.01))),
    "clipped by foreach": lambda: with_net(
        plain(lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, foreach=True))
    ),
    "clipped by hand": clipped_by_hand,
    "clipped over groups": clipped_over_groups,
    "accumulated": accumulated,
    "adversarial": adversarial,
    "updated twice": critic_twice,
    "averaged": averaged,
    "averaged through data": averaged_through_data,
    "averaged by torch": averaged_by_torch,
    "averaged by torch with a decay": lambda: averaged_by_torch(
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    ),
    "criterion in the closure": criterion_in_the_closure,
    "parameter in the closure": parameter_in_the_closure,
    "partial with a teacher": partial_with_a_teacher,
    "method of a trainer": method_of_a_trainer,
    "hooks, loss returned": lambda: hooked(False),
    "hooks, own loop": lambda: hooked(True),
    "updated in backward": updated_in_backward,
    "unused, loss returned": lambda: unused(False),
    "unused, own loop": lambda: unused(True),
    "gradient penalty": penalised,
    "loss of one element": lambda: with_net(lambda m, b: loss_of(m, b).reshape(1)),
    "closure": with_closure,
    "disabled scaler": disabled_scaler,
    "reentrant checkpoint": checkpointed,
}


def made(name: str) -> Training:
    torch.manual_seed(0)
    return LOOPS[name]()
