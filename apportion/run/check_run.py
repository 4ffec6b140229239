"""How far a divided run is from what a single device trains.

Part of the room run. The answers of the ranks come in with plain PyTorch's results, a Distance goes
out. In float64 two runs are equal within a fixed tolerance; in a model's own precision, or for a
model that multiplies small differences, within the noise that was measured (noise.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from apportion.capture import EagerState, Program, eager_steps, state_tensor
from apportion.describe import lengths
from apportion.execute import dtype, slices
from apportion.graph import OPTIMIZER_STATE, PARAMETER
from apportion.lower import TaskGraph
from apportion.plan import Plan
from apportion.run.training import TrainingResult, losses_of
from apportion.run.vary_batch import vary
from apportion.split import Space

RELATIVE, PER_STEP = 1e-9, 1e-6
"""equal: |a - b| <= RELATIVE * max|tensor| + PER_STEP * learning rate * steps, in float64."""
ROUNDINGS = 8
"""equal in a precision of its own: |a - b| <= ROUNDINGS roundings of max|tensor|, without noise."""
NOISES = 10
"""How many times the noise that was measured once a difference may be."""
VANISHING = 1e-19
"""A difference that is none in float32 and coarser: the products of numbers like it underflow, so
that what becomes of them is a matter of the order."""


@dataclass(frozen=True)
class Distance:
    """How far a split run is from the whole one: `worst` is the parameter or state with the largest
    relative difference, `failed` the tensor that is farthest outside of what is allowed, if one is,
    by `excess` times."""

    max_abs_loss_diff: float
    max_rel_param_diff: float
    worst: str
    equal: bool
    failed: str = ""
    excess: float = 0.0


@dataclass(frozen=True)
class Noise:
    """By how much plain PyTorch differs from itself when its numbers are wrong by a rounding: of
    the loss of each step, and of each Value; `relative` is the largest of parameters and state."""

    losses: tuple[float, ...] = ()
    state: dict[int, float] = field(default_factory=dict)
    relative: float = 0.0


@dataclass(frozen=True)
class Tolerance:
    """What is allowed between two runs of a Program.

    own    they are in the step's own precision, not in float64
    slack  absolute, of every number
    noise  what was measured of it
    """

    own: bool = False
    slack: float = 0.0
    noise: Noise = field(default_factory=Noise)

    def of_value(self, program: Program, value: int, scale: float) -> float:
        """The largest difference allowed for a Value whose largest number is `scale`, or was: a
        running variance that falls from 1 to 0.0001 has the roundings of 1."""
        return self._allowed(program, value, scale, self.noise.state.get(value, 0.0))

    def of_loss(self, program: Program, step: int, scale: float) -> float:
        """The largest difference allowed for the loss of a step."""
        noise = self.noise.losses[step] if step < len(self.noise.losses) else 0.0
        return self._allowed(program, program.graph.loss, scale, noise)

    def _allowed(self, program: Program, value: int | None, scale: float, noise: float) -> float:
        relative, floor = RELATIVE, self.slack
        if self.own:
            kind = dtype((value is not None and program.graph.values[value].dtype) or "float32")
            relative = ROUNDINGS * _rounding(program, kind) if kind.is_floating_point else 0.0
            floor += VANISHING if relative > ROUNDINGS * torch.finfo(torch.float64).eps else 0.0
        return relative * (scale if math.isfinite(scale) else 0.0) + floor + NOISES * noise


def _rounding(program: Program, kind: torch.dtype) -> float:
    """The rounding of a number of that dtype: at least that of the parameters, as a number that a
    step shows is in float64, whatever it was computed in."""
    own = {p.dtype for p in program.live.parameters().values() if p.is_floating_point()}
    finest = min((torch.finfo(each).eps for each in own), default=0.0)
    return max(torch.finfo(kind).eps, finest)


def wide_slack(program: Program, steps: int) -> float:
    """What is allowed in float64 of every number: updates that divide by a vanishing gradient."""
    rate = max(float(group.get("lr") or 0.0) for group in program.live.param_groups)
    return PER_STEP * rate * steps


def compare_with_eager(
    program: Program, plan: Plan, ranks: list[TrainingResult], steps: int, seed: int
) -> Distance:
    """Losses, parameters, buffers and optimizer state of a split run against plain PyTorch, by the
    tolerance for float64."""
    fixed = program.fixed_positions
    batches = [vary(program.batch, seed, step, fixed=fixed) for step in range(steps)]
    losses, state = eager_steps(program, batches, seed)
    split = gather_copies(plan.space, plan.tasks, ranks)
    return distance(program, losses_of(ranks), split, losses, state, wide_slack(program, steps))


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
    state: EagerState,
    slack: float = 0.0,
    tolerance: Tolerance | None = None,
) -> Distance:
    """The largest differences, and whether all are allowed (by default in float64, with `slack`).
    Not-a-number equals only itself."""
    allowed = tolerance or Tolerance(slack=slack)
    values = program.graph.values
    carried = {before for before, _ in program.graph.state}
    differences = list(map(_loss_distance, losses, true_losses))
    excess, failed = 0.0, ""
    for step, (difference, true) in enumerate(zip(differences, true_losses, strict=True)):
        over = _over(difference, allowed.of_loss(program, step, abs(true)))
        if over > excess:
            excess, failed = over, f"the loss of step {step}"
    worst, name = 0.0, ""
    for value, true_state in state.items():
        copies = split.get(value, [])
        if value in carried and not (copies and copies[0].filled.all()):
            raise RuntimeError(f"no rank has all of {values[value].name!r}: a defect of lowering")
        scale = scale_of(true_state)
        largest_ever = max(scale, scale_of(state_tensor(program, value))) if allowed.own else scale
        limit = allowed.of_value(program, value, largest_ever)
        for copy in copies:
            difference = _difference(copy, true_state)
            over = _over(difference, limit)
            if over > excess:
                excess, failed = over, values[value].name
            relative = difference / scale if scale else difference
            if relative > worst and values[value].role in (PARAMETER, OPTIMIZER_STATE):
                worst, name = relative, values[value].name
    return Distance(max(differences), worst, name, not failed, failed, excess)


def _over(difference: float, allowed: float) -> float:
    """How many times what is allowed a difference is, 0 if it is allowed."""
    if difference <= allowed:
        return 0.0
    return difference / allowed if allowed else math.inf


def _loss_distance(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return 0.0 if a == b else abs(a - b)


def _difference(copy: GatheredCopy, true: torch.Tensor) -> float:
    ours = real_numbers(copy.tensor[copy.filled])
    theirs = real_numbers(true.detach().cpu().reshape(copy.tensor.shape)[copy.filled])
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    return largest((ours - theirs)[(ours != theirs) & ~ours.isnan()])


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in float64; a complex one has two for each."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.float64)


def largest(numbers: torch.Tensor) -> float:
    """The largest absolute number; not-a-number is none."""
    if not numbers.numel():
        return 0.0
    return float(numbers.abs().nan_to_num(nan=0.0, posinf=math.inf).max())


def scale_of(tensor: torch.Tensor) -> float:
    """The largest finite number of a tensor."""
    numbers = real_numbers(tensor)
    return largest(numbers[numbers.isfinite()])
