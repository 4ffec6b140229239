"""run: a Plan on real processes, measured, and on request compared with the single device.

The comparison is decided in float64: model and batch are cast and captured again, and the same
steps run split on the processes and whole by plain PyTorch. The distances in the model's own
precision are reported beside it and decide nothing: Adam turns the rounding noise of gradients that
are truly zero into steps of the size of the learning rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion import zoo
from apportion.capture import Program, capture, capture_as, eager_steps
from apportion.describe import lengths
from apportion.execute import slices
from apportion.graph import OPTIMIZER_STATE, PARAMETER
from apportion.plan import Plan
from apportion.run.pool import ProcessPool
from apportion.run.process import TrainingRequest, TrainingResult, step_seconds, vary
from apportion.run.runner import check_plan
from apportion.simulate import Row, Timeline, comparison, measured_timeline
from apportion.split import Space, space_of

RELATIVE, PER_STEP = 1e-9, 1e-6
"""equal: |a - b| <= RELATIVE * max|tensor| + PER_STEP * learning rate * steps, in float64."""


@dataclass(frozen=True)
class Distance:
    """How far a split run is from the whole one."""

    max_abs_loss_diff: float
    max_rel_param_diff: float
    worst: str
    equal: bool


@dataclass(frozen=True)
class Run:
    """What was measured: all steps, and in `timeline` the last one. The last four are None unless
    the run was checked."""

    losses: list[float]
    measured_step_seconds: float
    measured_steps: tuple[float, ...]
    measured_peak_bytes: tuple[int, ...]
    measured_bytes_moved: int
    timeline: Timeline
    comparison: tuple[Row, ...]
    max_abs_loss_diff: float | None = None
    max_rel_param_diff: float | None = None
    equal: bool | None = None
    float32: dict[str, Any] | None = None


def run(
    spec: str,
    plan: Plan,
    steps: int = 3,
    seed: int = 0,
    check: bool = False,
    timeout: float = 600.0,
    note: Callable[[str], None] = lambda text: None,
) -> Run:
    """Runs a plan of the model `spec` on as many processes as it has devices. A plan for one GPU
    runs on the GPU of this machine, if it has one; all others on its CPU.

    Raises ValueError for a wrong request (a plan for another model), RuntimeError if a process
    fails.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps are nothing to run; give at least 1")
    program = _load(spec, seed)
    check_plan(program, plan)
    devices = len(plan.cluster.devices)
    place = place_of(plan)
    note(f"starting {devices} processes" if place == "cpu" else f"running on {place}")
    with ProcessPool(devices, timeout) as pool:
        job = TrainingRequest(
            spec, seed, False, plan.strategy, devices, steps, seed, check, True, place
        )
        ranks = pool.train(job)
        note(f"ran {steps} steps")
        measured = _measured(plan, ranks, steps)
        if not check:
            return measured
        own = compare_with_eager(program, plan, ranks, steps, seed)
        note("checking in float64")
        exact = capture_as(program, torch.float64)
        double = replace(job, double=True, state=True, profile=False)
        distance = compare_with_eager(exact, plan, pool.train(double), steps, seed)
    return _checked(measured, distance, own)


def place_of(plan: Plan) -> str:
    """The device that torch runs a plan on here: a GPU if it is for one and there is one."""
    one = len(plan.cluster.devices) == 1 and plan.cluster.devices[0].kind != "cpu"
    return "cuda" if one and torch.cuda.is_available() else "cpu"


def _load(spec: str, seed: int) -> Program:
    it = zoo.load(spec, seed)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def _measured(plan: Plan, ranks: list[TrainingResult], steps: int) -> Run:
    per_step = tuple(step_seconds(ranks))
    seconds = statistics.median(per_step[1:] or per_step)
    peaks = tuple(r.peak_bytes or 0 for r in ranks)
    moved = sum(r.sent_bytes for r in ranks) // steps
    line = measured_timeline(plan.tasks, (r.spans for r in ranks))
    rows = comparison(plan.tasks, plan.timeline, line, seconds, peaks, moved)
    return Run(losses_of(ranks), seconds, per_step, peaks, moved, line, rows)


def losses_of(ranks: list[TrainingResult]) -> list[float]:
    """The loss of each step, from a rank that has it."""
    held = next(r for r in ranks if r.losses[0] is not None)
    return [float(loss) for loss in held.losses if loss is not None]


def _checked(measured: Run, distance: Distance, own: Distance) -> Run:
    return replace(
        measured,
        max_abs_loss_diff=distance.max_abs_loss_diff,
        max_rel_param_diff=distance.max_rel_param_diff,
        equal=distance.equal,
        float32={
            "max_abs_loss_diff": own.max_abs_loss_diff,
            "max_rel_param_diff": own.max_rel_param_diff,
            "worst": own.worst,
        },
    )


def compare_with_eager(
    program: Program, plan: Plan, ranks: list[TrainingResult], steps: int, seed: int
) -> Distance:
    """Losses, parameters, buffers and optimizer state of a split run against plain PyTorch."""
    batches = [vary(program.batch, seed, step) for step in range(steps)]
    losses, state = eager_steps(program, batches, seed)
    space = space_of(program.graph, plan.strategy)
    split = gather(space, plan, ranks)
    rate = max(float(group["lr"]) for group in program.optimizer.param_groups)
    return distance(program, losses_of(ranks), split, losses, state, PER_STEP * rate * steps)


@dataclass(frozen=True)
class GatheredCopy:
    """One copy of a Value put together from the ranks' regions, and which of its elements some rank
    has."""

    tensor: torch.Tensor
    filled: torch.Tensor


def gather(space: Space, plan: Plan, ranks: list[TrainingResult]) -> dict[int, list[GatheredCopy]]:
    """The state of all ranks, whole; several copies where regions are replicated."""
    tasks = plan.tasks
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
