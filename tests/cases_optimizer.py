"""Optimizers as people write them, for tests: other people's forms, none of torch's."""

from __future__ import annotations

import math
from math import sqrt
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Writes to `p.data`, has no count of steps."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                mean, (first, second) = state["exp_avg"], group["betas"]
                update = mean * first + p.grad * (1 - first)
                p.add_(update.sign_(), alpha=-group["lr"])
                mean.mul_(second).add_(p.grad, alpha=1 - second)


class CountingAdam(torch.optim.Optimizer):
    """Keeps its count of steps as an int and its corrections as Python numbers."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": weight_decay}
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                first, second = group["betas"]
                state["step"] += 1
                mean.mul_(first).add_(p.grad.data, alpha=1 - first)
                square.mul_(second).addcmul_(p.grad.data, p.grad.data, value=1 - second)
                size = group["lr"] * math.sqrt(1 - second ** state["step"])
                size = size / (1 - first ** state["step"])
                p.data.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-size)
                if group["weight_decay"] > 0:
                    p.data.add_(p.data, alpha=-group["lr"] * group["weight_decay"])


class Rectified(torch.optim.Optimizer):
    """Branches on a number that depends on the count of steps, and uses math's sqrt by itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                count = state["step"]
                state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                state["mean"].mul_(first).add_(p.grad, alpha=1 - first)
                longest, power = 2 / (1 - second) - 1, second**count
                length = longest - 2 * count * power / (1 - power)
                if length >= 5:
                    grown = (length - 4) / (longest - 4) * (length - 2) / length
                    size = sqrt((1 - power) * grown * longest / (longest - 2))
                    root = state["square"].sqrt().add_(group["eps"])
                    p.addcdiv_(state["mean"], root, value=-group["lr"] * size)
                else:
                    p.add_(state["mean"], alpha=-group["lr"])


class Lamb(torch.optim.Optimizer):
    """Scales by norms, branches on them, keeps them as state, has an attribute of its own."""

    def __init__(self, params: Any, lr: float = 1e-2, limit: float = 10.0) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
        )
        self.limit = limit

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(first).add_(p.grad.data, alpha=1 - first)
                square.mul_(second).addcmul_(p.grad.data, p.grad.data, value=1 - second)
                update = mean / square.sqrt().add(group["eps"])
                if group["weight_decay"] != 0:
                    update.add_(p.data, alpha=group["weight_decay"])
                weight = p.data.pow(2).sum().sqrt().clamp(0, self.limit)
                size = update.pow(2).sum().sqrt()
                ratio = 1 if weight == 0 or size == 0 else weight / size
                state["trust_ratio"] = ratio
                p.data.add_(update, alpha=-group["lr"] * ratio)


class Stable(torch.optim.Optimizer):
    """Reads numbers by item(), takes the larger of two by max()."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                count = state["step"].item()
                state["m"].lerp_(
                    p.grad, 1 - first * (1 - first ** (count - 1)) / (1 - first**count)
                )
                state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                spread = (p.grad.pow(2) / state["v"].clip(min=group["eps"] ** 2)).mean().sqrt()
                rate = group["lr"] / max(1.0, spread.item())
                p.addcdiv_(state["m"], state["v"].sqrt() + group["eps"], value=-rate)


class SignedAdam(torch.optim.Adam):
    """Changes the gradient and lets its base class do the rest."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.add_(p.sign(), alpha=0.01)
        return super().step(closure)


class CountsOnItself(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.count)


class ClipsAll(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.pow(2).sum() for p in held]).sum().sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / norm.clamp(min=1.0), alpha=-group["lr"])


class Listed(torch.optim.SGD):
    """Keeps means over every dimension in a list, and a dict of what it has seen."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["means"] = [torch.zeros(n, dtype=p.dtype) for n in p.shape]
                    state["seen"] = {"steps": 0, "unused": None, "none": []}
                state["seen"]["steps"] += 1
                update = p.grad.clone()
                for dim, mean in enumerate(state["means"]):
                    others = [d for d in range(p.dim()) if d != dim]
                    square = p.grad.square()
                    mean.add_(square.mean(others) if others else square)
                    shape = [-1 if d == dim else 1 for d in range(p.dim())]
                    update.div_(mean.view(shape).sqrt() + state["seen"]["steps"])
                p.add_(update / (1 + update.norm()), alpha=-group["lr"])


class Several(torch.optim.SGD):
    """Keeps a momentum for each rate of decay, in a dict by the rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = {}
                    for rate in (0.0, 0.9, 0.99):
                        state["momentum"][rate] = torch.zeros_like(p)
                for rate, mean in state["momentum"].items():
                    mean.mul_(rate).add_(p.grad)
                    p.sub_(mean, alpha=group["lr"] / 3)


class ByRate(torch.optim.SGD):
    """Keeps its momentum under the number that its group has for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, rate = self.state[p], group["momentum"]
                if "momentum" not in state:
                    state["momentum"] = {rate: torch.zeros_like(p)}
                p.sub_(state["momentum"][rate].mul_(rate).add_(p.grad), alpha=group["lr"])


class Tabled(torch.optim.SGD):
    """Notes in a table what it has computed of the number of the step, as RAdam did."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["buffer"] = [[None, None] for _ in range(4)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                noted = group["buffer"][int(state["step"] % 4)]
                if state["step"] == noted[0]:
                    size = noted[1]
                else:
                    noted[0] = state["step"]
                    size = 1.0 - 0.9 ** state["step"] if state["step"] > 2 else 1.0
                    noted[1] = size
                p.add_(p.grad, alpha=-size * group["lr"])


class Averaging(torch.optim.SGD):
    """Weighs a mean in a way that has none at first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            k = group.setdefault("k", 0)
            weight = 0.0 if k < 2 else group["lr"]
            total = group["total"] = group.get("total", 0.0) + weight
            try:
                share = weight / total
            except ZeroDivisionError:
                share = 0.5
            for p in group["params"]:
                p.add_(p.grad, alpha=-share)
            group["k"] = k + 1


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


class Converts(torch.optim.SGD):
    """Makes a number of a tensor in a way that nobody can follow."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * float(p.grad.norm()))


class GroupCounting(torch.optim.Optimizer):
    """Keeps its count of steps, and what it sums over them, in the parameter group."""

    def __init__(self, params: Any, lr: float = 1e-2, r: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "r": r, "total": 0.0, "largest": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            largest = group["largest"] = max(group["lr"], group["largest"])
            weight = group["step"] ** group["r"] * largest**2
            total = group["total"] = group["total"] + weight
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = p.detach().clone()
                p.sub_(p.grad, alpha=group["lr"])
                state["mean"].lerp_(p, weight / total)


class PhaseInGroup(torch.optim.SGD):
    """Halves its steps once a gradient is small, which its group says in words."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slow = group.get("phase") == "slow"
                p.add_(p.grad, alpha=-group["lr"] * (0.5 if slow else 1.0))
                if p.grad.norm() < 100.0:
                    group["phase"] = "slow"


class PhaseInState(torch.optim.SGD):
    """The same, for each parameter by itself and in a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("slow", 0)
                p.add_(p.grad, alpha=-group["lr"] * (0.5 if state["slow"] else 1.0))
                if p.grad.norm() < 100.0:
                    state["slow"] = 1


class Buffered(torch.optim.SGD):
    """Keeps what it computed last in a list of its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["buffer"] = [[None, None] for _ in range(2)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                last = group["buffer"][0][0] or 0.0
                group["buffer"][0][0] = last + 1.0
                p.add_(p.grad, alpha=-group["lr"] * last)
