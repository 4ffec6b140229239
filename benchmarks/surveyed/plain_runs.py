"""Plain PyTorch on a program of the survey, and how far a divided run may be from it.

The program is built anew from its seed for every run. The steps are the loop that anybody writes;
only random operators draw what the captured step draws, because nothing else could be compared. The
tolerance is measured: the same steps with parameters disturbed in their last bit. Where that is not
enough, float64 decides.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from apportion.capture.batch_tree import flatten, map_tensors

SEED = 0
RELATIVE, ABOVE_NOISE = 2e-5, 16.0


@dataclass
class Built:
    """A program with all its live objects; `after` is called after every step, outside it."""

    step: Any
    model: Any
    optimizer: Any
    batch: Any
    clip_norm: float | None = None
    fixed: Sequence[str] = ()
    after: Callable[[], Any] | None = None


@dataclass
class Plain:
    """What plain PyTorch made of a program: the losses it could see, and its objects afterwards."""

    losses: list[float]
    built: Built


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def build(make: Callable[[], Any], seed: int) -> Built:
    """The program from a seed of its own."""
    seeded(seed)
    return Built(*make())


def in_float64(make: Callable[[], Any]) -> Callable[[], Any]:
    """The same program in float64."""

    def made() -> Any:
        step, model, optimizer, batch, *rest = make()
        for module in modules_of(model):
            module.double()
        wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, batch)
        return step, model, optimizer, wide, *rest

    return made


def with_fixed(make: Callable[[], Any], names: Sequence[str]) -> Callable[[], Any]:
    """The same program, in whose batches these tensors are always those of the first."""
    seeded(0)
    first = flatten(make()[3])
    kept = {p: x for p, own, x in first.tensors if own in names}

    def made() -> Any:
        step, model, optimizer, batch, *rest = make()
        flat = flatten(batch)
        leaves = [kept[p].clone() if p in kept else x for p, x in enumerate(flat.leaves)]
        clip_norm, fixed, *more = (*rest, *(None, ())[len(rest) :])
        return step, model, optimizer, flat.rebuild(leaves), clip_norm, (*fixed, *names), *more

    return made


def own_loop(step: Any) -> bool:
    """Whether a step takes (model, optimizer, batch) and so has a loop body of its own."""
    needed = [
        p
        for p in inspect.signature(step).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 3


def several(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers, if there are several."""
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The modules, if there are several."""
    if isinstance(model, torch.nn.Module):
        return [model]
    return list(model.values()) if isinstance(model, Mapping) else list(model)


def plain(make: Callable[[], Any], steps: int, disturb: int = 0, eps: float = 0.0) -> Plain:
    """The steps by plain PyTorch, with another batch in each; disturbed if asked for."""
    batches = [build(make, seed).batch for seed in range(steps)]
    built = build(make, 0)
    if disturb:
        _disturb(built.model, disturb, eps)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(_plain_step(built, batch, number))
        if built.after is not None:
            built.after()
    return Plain(losses, built)


def _disturb(model: Any, seed: int, eps: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in modules_of(model):
            for p in module.parameters():
                if p.is_floating_point():
                    signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
                    p.mul_(1 + signs.to(p.dtype) * max(eps, torch.finfo(p.dtype).eps))


def _plain_step(built: Built, batch: Any, number: int) -> float:
    from apportion.capture.random_rules import CounterRandom

    with torch.random.fork_rng(devices=[]), CounterRandom(SEED, number):
        if own_loop(built.step):
            return loss_of(built.step(built.model, built.optimizer, batch))
        for optimizer in several(built.optimizer):
            optimizer.zero_grad()
        result = built.step(built.model, batch)
        loss = result["loss"] if isinstance(result, Mapping) else getattr(result, "loss", result)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
    if built.clip_norm is not None:
        trained = [p for o in several(built.optimizer) for g in o.param_groups for p in g["params"]]
        torch.nn.utils.clip_grad_norm_(trained, built.clip_norm)
    for optimizer in several(built.optimizer):
        optimizer.step()
    return float(loss.detach())


def loss_of(result: Any) -> float:
    """The loss in what a step returned; not-a-number where it returned none."""
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    if hasattr(result, "loss"):
        result = result.loss
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    scalar = isinstance(result, (int, float)) or (
        isinstance(result, torch.Tensor) and result.dim() == 0
    )
    if isinstance(result, torch.Tensor):
        result = result.detach()
    return float(result) if scalar else math.nan


# How far apart


def coarsest_precision(program: Any) -> float:
    """The relative rounding of the coarsest floating dtype that the step computes in."""
    kinds = {value.dtype for value in program.graph.values}
    found = [getattr(torch, kind.removeprefix("torch."), None) for kind in map(str, kinds)]
    return max(
        (torch.finfo(k).eps for k in found if k is not None and k.is_floating_point), default=0.0
    )


def noise_of(make: Callable[[], Any], steps: int, eps: float) -> list[Plain]:
    """Runs that differ from the truth by rounding only."""
    return [plain(make, steps, disturb=seed, eps=eps) for seed in (1, 2)]


def distance_of(
    program: Any,
    run: tuple[list[float], dict[int, list[Any]]],
    truth: Plain,
    noise: list[Plain],
    eps: float,
    relative: float = RELATIVE,
) -> str:
    """Empty if a divided run is equal to plain PyTorch; else which tensor differs and by how
    much."""
    losses, split = run
    relative = max(relative, eps)
    for number, true in enumerate(truth.losses):
        blur = max(_gap(one.losses[number], true) for one in noise)
        gap = _gap(losses[number], true) if losses else 0.0
        if not math.isnan(true) and not gap <= relative * abs(true) + ABOVE_NOISE * blur + 1e-7:
            return f"loss {number} is {losses[number]} and should be {true} (noise {blur:.1e})"
    from surveyed.divided_runs import ends_of

    true_state = ends_of(program, truth.built)
    blurred = [ends_of(program, one.built) for one in noise]
    carried = {before for before, _ in program.graph.state}
    for value, true in true_state.items():
        name = program.graph.values[value].name
        if name.startswith("result:"):  # what the step returns, which no object keeps
            continue
        copies = split.get(value, [])
        if value in carried and not copies:
            return f"no device has {name}"
        scale = _largest(true)
        blur = max(_largest(one[value].double() - true.double()) for one in blurred)
        for copy in copies:
            ours = copy.tensor[copy.filled].double()
            theirs = true.reshape(copy.tensor.shape)[copy.filled].double()
            if not torch.equal(ours.isnan(), theirs.isnan()):
                return f"{name} is not a number in other places"
            gap = _largest(ours - theirs)
            if not gap <= relative * scale + ABOVE_NOISE * blur + 1e-9:
                return f"{name} differs by {gap:.2e} of {scale:.2e} (noise {blur:.1e})"
    return ""


def _gap(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().nan_to_num().abs().max()) if tensor.numel() else 0.0
