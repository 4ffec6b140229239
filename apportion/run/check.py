"""check: whether a plan trains the model that the program trains.

Part of the room run. A Program and a Plan come in, a Check goes out. It is decided twice, with
other batches after the first:

    in float64           the divided step of the widened Graph against plain PyTorch in float64;
                         where the program cannot run so, against the widened Graph undivided
    as it really runs    the divided step against plain PyTorch, within the noise of rounding

The first finds what is wrong however small it is, in the division or in the capture; the second
what goes wrong only in the precision that is used. A program that computes with numbers of its own
precision has others in float64; then the divided step must be the captured one exactly, and that
the program's but for a small share of each change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion.capture import Program, at_loss_scale, eager_steps
from apportion.execute import dtype
from apportion.plan import Plan
from apportion.run.check_run import (
    Distance,
    Noise,
    Tolerance,
    distance,
    gather_copies,
    wide_slack,
)
from apportion.run.noise import (
    EagerRun,
    as_rounded_as_written,
    measured_noise,
    settled,
    share_of_changes,
)
from apportion.run.one_process import SharedRun, train_in_one_process
from apportion.run.planned_program import planned_program
from apportion.run.training import losses_of
from apportion.run.vary_batch import AS_GIVEN, FREE, accepted
from apportion.search import NOT_THE_SAME

_ALL_OVERFLOW, _NONE_OVERFLOWS = 2.0**80, 2.0**-12
"""Of the scale of a loss."""
_ON_THE_WIRE = (
    "sums of gradients travel in {}: in its own precision the step is compared within the rounding "
    "of that, in float64 with sums that travel as they are"
)
_OTHER_SCALES = (
    "the gradients of the scaled loss overflow in other steps than plain PyTorch's, as sums of "
    "parts and whole ones do so at different scales; the step was compared with one at which all "
    "overflow, and with one at which none does"
)


@dataclass(frozen=True)
class Check:
    """How far a plan's training is from plain PyTorch's.

    equal               whether both train the same model
    max_abs_loss_diff   of the losses, in float64
    max_rel_param_diff  of parameters and optimizer state, in float64
    worst               the tensor that is not equal, or else has the largest difference
    noise               by how much plain PyTorch differs from itself after a rounding, relative
    own                 the distance in the precision that the step runs in
    reason              why it is not equal, a sentence
    notes               what could not be compared, a sentence each
    """

    equal: bool
    max_abs_loss_diff: float
    max_rel_param_diff: float
    worst: str
    noise: float
    own: Distance
    reason: str = ""
    notes: tuple[str, ...] = ()


def check(program: Program, plan: Plan, steps: int = 2, seed: int = 0) -> Check:
    """Trains a few steps divided as the plan says, all ranks in this process, and compares with
    plain PyTorch. The model and the optimizer stay as they are. Raises ValueError if the plan is
    for another step or the model has no data."""
    if steps < 1:
        raise ValueError(f"{steps} steps are nothing to check; give at least 1")
    if plan.staleness is not None:
        raise ValueError(f"there is nothing to check: {NOT_THE_SAME}")
    divided = planned_program(program, plan)
    _, whole = eager_run(program, steps, seed)
    devices = len(plan.cluster.devices)
    given = (divided, plan.strategy, devices, whole.batches, seed)
    own = train_in_one_process(*given)
    try:
        wide = train_in_one_process(*given, wide=True)
    except ValueError as error:
        return judged(program, whole, own, None, seed, str(error))
    return judged(program, whole, own, wide, seed)


def eager_run(program: Program, steps: int, seed: int, most: int = FREE) -> tuple[int, EagerRun]:
    """What plain PyTorch makes of the batches, and how freely, at `most`, they could be varied for
    it."""

    def trial(batches: list[Any]) -> EagerRun:
        run = EagerRun(batches, *eager_steps(program, batches, seed))
        if math.isfinite(run.losses[0]) and not all(map(math.isfinite, run.losses)):
            raise FloatingPointError("the loss is not finite any more")
        return run

    try:
        first, fixed = program.steps_done, program.fixed_positions
        return accepted(program.batch, seed, steps, trial, fixed, first, most)
    except FloatingPointError:  # with the batch as it was given, too
        batches = [program.batch] * steps
        return AS_GIVEN, EagerRun(batches, *eager_steps(program, batches, seed))


def judged(
    program: Program,
    whole: EagerRun,
    own: SharedRun,
    wide: SharedRun | None,
    seed: int,
    unwidened: str = "",
) -> Check:
    """The Check of a divided run in its own precision and in float64; `whole` is what plain PyTorch
    made of the same batches. Without `wide`, which has the reason `unwidened`, the step's own
    precision decides alone."""
    notes: tuple[str, ...] = ()
    if own.strategy is not None and own.strategy.wire:
        whole = replace(whole, coarsest=torch.finfo(dtype(own.strategy.wire)).eps)
        notes = (_ON_THE_WIRE.format(own.strategy.wire),)
    noise = measured_noise(program, whole, seed)
    near, _ = settled(
        program, whole, seed,
        lambda known: _distance(program, whole, own, Tolerance(own=True, noise=known)), noise,
    )  # fmt: skip
    if not near.equal and (other := _at_other_scales(program, whole, own, seed)) is not None:
        near, notes = other, (*notes, _OTHER_SCALES)
    if wide is None:
        note = f"the step cannot be checked in float64: {unwidened}"
        return _check(near, near, noise, _too_far(near), (*notes, note))
    far, note, reason = _judged_wide(program, whole.batches, wide, seed)
    return _check(far, near, noise, reason or _too_far(near), (*notes, note) if note else notes)


def _at_other_scales(
    program: Program, whole: EagerRun, own: SharedRun, seed: int
) -> Distance | None:
    """The distance where the gradients of a scaled loss overflow in all steps, and if that is
    allowed, where they overflow in none; None if the step scales no loss.

    Between the two it depends on the division: sums of parts overflow where the whole does not.
    """
    found = None
    for factor in (_ALL_OVERFLOW, _NONE_OVERFLOWS):
        with at_loss_scale(program, factor) as count:
            if not count or own.strategy is None:
                return None
            again = EagerRun(whole.batches, *eager_steps(program, whole.batches, seed))
            split = train_in_one_process(program, own.strategy, len(own.ranks), whole.batches, seed)
            found = _settled(program, again, split, seed)
        if not found.equal:
            break
    return found


def _settled(program: Program, whole: EagerRun, own: SharedRun, seed: int) -> Distance:
    return settled(
        program, whole, seed,
        lambda known: _distance(program, whole, own, Tolerance(own=True, noise=known)),
    )[0]  # fmt: skip


def _check(
    far: Distance, near: Distance, noise: Noise, reason: str, notes: tuple[str, ...]
) -> Check:
    return Check(
        far.equal and near.equal, far.max_abs_loss_diff, far.max_rel_param_diff,
        far.failed or near.failed or far.worst, noise.relative, near, reason, notes,
    )  # fmt: skip


def _too_far(near: Distance) -> str:
    if near.equal:
        return ""
    return (
        f"{near.failed} differs from plain PyTorch's by more than rounding explains, in the "
        "precision that the step runs in"
    )


_DEPENDS_ON_PRECISION = (
    "the program computes with numbers that depend on its precision (such as "
    "torch.finfo(x.dtype).eps), so that float64 decides up to {}"
)


def _judged_wide(
    program: Program, batches: Sequence[Any], wide: SharedRun, seed: int
) -> tuple[Distance, str, str]:
    """The distance in float64, what could not be compared, and why it is not equal."""
    slack = wide_slack(program, len(batches))
    try:
        whole = EagerRun(batches, *eager_steps(program, batches, seed, wide=True), wide=True)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        found = _from_undivided(program, batches, wide, seed, slack)
        note = f"plain PyTorch cannot run this step in float64 ({why}), so the captured step did"
        return found, note, _divided_wrong(found)
    found, _ = settled(
        program, whole, seed,
        lambda noise: _distance(program, whole, wide, Tolerance(slack=slack, noise=noise)),
    )  # fmt: skip
    if found.equal:
        return found, "", ""
    if not _from_undivided(program, batches, wide, seed, slack).equal:
        return found, "", _divided_wrong(found)
    share = share_of_changes(program, whole)
    if _distance(program, whole, wide, Tolerance(slack=slack, noise=share)).equal:
        note = _DEPENDS_ON_PRECISION.format("a ten thousandth of a change")
        return replace(found, equal=True, failed=""), note, ""
    rounded, _ = settled(
        program, as_rounded_as_written(program, whole), seed,
        lambda noise: _distance(program, whole, wide, Tolerance(slack=slack, noise=noise)), share,
    )  # fmt: skip
    if rounded.equal:
        note = _DEPENDS_ON_PRECISION.format("what a rounding of that precision makes")
        return replace(found, equal=True, failed=""), note, ""
    reason = (
        f"{found.failed} differs from plain PyTorch's, though the divided step does what the "
        "captured one does: the program does something that was not captured, such as a hook, "
        "randomness of Python or state outside of modules"
    )
    return found, "", reason


def _divided_wrong(found: Distance) -> str:
    return "" if found.equal else f"{found.failed} differs between the divided step and the whole"


def _from_undivided(
    program: Program, batches: Sequence[Any], wide: SharedRun, seed: int, slack: float
) -> Distance:
    """How far the divided step is from the widened Graph on one device."""
    alone = train_in_one_process(program, None, 1, batches, seed, wide=True)
    copies = gather_copies(alone.space, alone.tasks, alone.ranks)
    state = {v: found[0].tensor for v, found in copies.items() if found[0].filled.all()}
    whole = EagerRun(batches, losses_of(alone.ranks), state, wide=True)
    return _distance(program, whole, wide, Tolerance(slack=slack))


def _distance(
    program: Program, whole: EagerRun, divided: SharedRun, tolerance: Tolerance
) -> Distance:
    split = gather_copies(divided.space, divided.tasks, divided.ranks)
    state = {v: t for v, t in whole.state.items() if v in program.bindings}
    return distance(
        program, losses_of(divided.ranks), split, whole.losses, state, tolerance=tolerance
    )
