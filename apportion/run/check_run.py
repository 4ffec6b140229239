"""Whether a divided run trained what a single device trains.

Part of the room run. The answers of the ranks come in, a Distance from plain PyTorch goes out. The
comparison is decided in float64: the same steps run divided on the processes, which capture the
step again in float64, and whole by plain PyTorch here, which needs no Graph and so no capture. The
distances in the model's own precision are reported beside it and decide nothing: Adam turns the
rounding noise of gradients that are truly zero into steps of the size of the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from apportion.capture import Program, eager_steps
from apportion.describe import lengths
from apportion.execute import slices
from apportion.graph import OPTIMIZER_STATE, PARAMETER
from apportion.lower import TaskGraph
from apportion.plan import Plan
from apportion.run.training import TrainingResult, losses_of, vary
from apportion.split import Space

RELATIVE, PER_STEP = 1e-9, 1e-6
"""equal: |a - b| <= RELATIVE * max|tensor| + PER_STEP * learning rate * steps, in float64."""


@dataclass(frozen=True)
class Distance:
    """How far a split run is from the whole one."""

    max_abs_loss_diff: float
    max_rel_param_diff: float
    worst: str
    equal: bool


def compare_with_eager(
    program: Program, plan: Plan, ranks: list[TrainingResult], steps: int, seed: int
) -> Distance:
    """Losses, parameters, buffers and optimizer state of a split run against plain PyTorch."""
    batches = [vary(program.batch, seed, step) for step in range(steps)]
    losses, state = eager_steps(program, batches, seed)
    split = gather_copies(plan.space, plan.tasks, ranks)
    rate = max(float(group["lr"]) for group in program.live.param_groups)
    return distance(program, losses_of(ranks), split, losses, state, PER_STEP * rate * steps)


@dataclass(frozen=True)
class GatheredCopy:
    """One copy of a Value put together from the ranks' regions, and which of its elements some rank
    has."""

    tensor: torch.Tensor
    filled: torch.Tensor


def gather_copies(
    space: Space, tasks: TaskGraph, ranks: list[TrainingResult]
) -> dict[int, list[GatheredCopy]]:
    """The state of all ranks, whole; several copies where regions are replicated."""
    found: dict[int, list[GatheredCopy]] = {}
    for rank in ranks:
        for slot, array in rank.state:
            value = int(tasks.slot_value[slot])
            region = tasks.boxes[int(tasks.slot_region[slot])]
            box = torch.from_numpy(array).reshape(lengths(region))
            _place(found.setdefault(value, []), space.factors(value), slices(region), box)
    return found


def _place(
    copies: list[GatheredCopy],
    factors: tuple[int, ...],
    region: tuple[slice, ...],
    box: torch.Tensor,
) -> None:
    """Puts a region into the first copy that has nothing of it yet."""
    for copy in copies:
        if not copy.filled[region].any():
            break
    else:
        copy = GatheredCopy(
            torch.zeros(factors, dtype=box.dtype), torch.zeros(factors, dtype=torch.bool)
        )
        copies.append(copy)
    copy.tensor[region] = box
    copy.filled[region] = True


def distance(
    program: Program,
    losses: list[float],
    split: dict[int, list[GatheredCopy]],
    true_losses: list[float],
    state: dict[int, torch.Tensor],
    slack: float,
) -> Distance:
    """The largest differences, and whether all are within the tolerance. Not-a-number equals only
    itself."""
    values = program.graph.values
    carried = {before for before, _ in program.graph.state}
    loss_diff = max(map(_loss_distance, losses, true_losses))
    equal = loss_diff <= RELATIVE * max(map(abs, true_losses)) + slack
    worst, name = 0.0, ""
    for value, true in state.items():
        copies = split.get(value, [])
        if value in carried and not (copies and copies[0].filled.all()):
            raise RuntimeError(f"no rank has all of {values[value].name!r}: a defect of lowering")
        scale = _largest(true)
        for copy in copies:
            difference = _difference(copy, true)
            equal = equal and difference <= RELATIVE * scale + slack
            relative = difference / scale if scale else difference
            if relative > worst and values[value].role in (PARAMETER, OPTIMIZER_STATE):
                worst, name = relative, values[value].name
    return Distance(loss_diff, worst, name, equal)


def _loss_distance(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return 0.0 if a == b else abs(a - b)


def _difference(copy: GatheredCopy, true: torch.Tensor) -> float:
    ours = copy.tensor[copy.filled].to(torch.float64)
    theirs = true.detach().reshape(copy.tensor.shape)[copy.filled].to(torch.float64)
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    return _largest((ours - theirs)[(ours != theirs) & ~ours.isnan()])


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.detach().to(torch.float64)
    return float(finite.abs().nan_to_num(nan=0.0, posinf=math.inf).max()) if tensor.numel() else 0.0
