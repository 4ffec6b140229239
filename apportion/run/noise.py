"""How much of a difference between two runs is rounding: plain PyTorch against itself, disturbed.

Part of the room run. A Program, its batches and what plain PyTorch made of them come in; the steps
run again with every number of the batch, the model and the optimizer's state wrong by a rounding of
the coarsest precision that the step computes in. By how much the changes of the state then differ
is the Noise. A model that multiplies such errors (an ill-conditioned one, or Adam where a gradient
is truly zero) has much of it, and a fair judge allows a divided run as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from apportion.capture import EagerState, Program, begun_from, disturbed_changes
from apportion.execute import dtype
from apportion.graph import OPTIMIZER_STATE, PARAMETER
from apportion.run.check_run import Distance, Noise, real_numbers, scale_of

SIZES, COARSEST = (1, 4, 16, 64), 2.0**-5
"""Roundings that are tried one after the other while a difference is not allowed; and the largest
relative error that still counts as one."""


HOPELESS, NEAR = 1e4, 10.0
"""How many times what is allowed a difference may be for more roundings to be tried, and for them
to be drawn again."""
DRAWS = 3
"""A model that rounds on its way makes much of few errors, so that one draw may show none of it."""
SHARE = 1e-5
"""Of each change, a tenth of what is allowed where a program computes with its precision."""


@dataclass(frozen=True)
class EagerRun:
    """What plain PyTorch made of the batches."""

    batches: Sequence[Any]
    losses: list[float]
    state: EagerState
    wide: bool = False
    coarsest: float = 0.0
    """A rounding that a divided step makes and this one does not."""


def rounding(program: Program, run: EagerRun) -> float:
    """A rounding of the coarsest precision in the step, relative to the number; counts of steps are
    whole numbers whatever their dtype."""
    if run.wide:
        return max(torch.finfo(torch.float64).eps, run.coarsest)
    values = program.graph.values
    kinds = {dtype(v.dtype) for v in values if v.dtype and (v.shape or v.role != OPTIMIZER_STATE)}
    own = max((torch.finfo(k).eps for k in kinds if k.is_floating_point), default=0.0)
    return max(own, run.coarsest)


def measured_noise(
    program: Program, run: EagerRun, seed: int, roundings: int = 1, draw: int = 0
) -> Noise:
    """The noise of errors of so many roundings, drawn for the first time or another one."""
    size, drawn = min(roundings * rounding(program, run), COARSEST), roundings + 1000 * draw
    losses, changes = disturbed_changes(program, run.batches, seed, size, drawn, wide=run.wide)
    true = begun_from(program, run.state)
    found = {v: scale_of(real_numbers(changes[v]) - real_numbers(true[v])) for v in true}
    relative = 0.0
    for value, difference in found.items():
        scale = scale_of(run.state[value])
        if program.graph.values[value].role in (PARAMETER, OPTIMIZER_STATE) and scale:
            relative = max(relative, difference / scale)
    apart = (abs(a - b) for a, b in zip(losses, run.losses, strict=True))
    spread = tuple(x if math.isfinite(x) else 0.0 for x in apart)
    return Noise(spread, found, relative)


def share_of_changes(program: Program, run: EagerRun) -> Noise:
    """A small share of what the steps changed: what numbers that depend on the precision may make
    of it."""
    changes = begun_from(program, run.state)
    state = {v: SHARE * scale_of(change) for v, change in changes.items()}
    return Noise(tuple(SHARE * abs(loss) for loss in run.losses), state)


def as_rounded_as_written(program: Program, run: EagerRun) -> EagerRun:
    """A run in float64 whose noise is that of roundings of the precision that the step is written
    in: the numbers that it computes from its settings alone are rounded so in the captured step."""
    return replace(run, coarsest=rounding(program, replace(run, wide=False)))


def more_noise(one: Noise, other: Noise) -> Noise:
    """The larger of two measurements."""
    return Noise(
        tuple(map(max, one.losses, other.losses)),
        {v: max(x, other.state.get(v, 0.0)) for v, x in one.state.items()},
        max(one.relative, other.relative),
    )


def settled(
    program: Program,
    run: EagerRun,
    seed: int,
    compare: Callable[[Noise], Distance],
    noise: Noise | None = None,
) -> tuple[Distance, Noise]:
    """The distance of a divided run from plain PyTorch, allowing the noise of a rounding or, while
    it is not allowed, of a few, drawn a few times; and that noise. `noise` is what has been
    measured of it."""
    found = compare(noise or Noise())
    for draw, roundings in product(range(DRAWS), SIZES):
        if found.equal or (roundings > 1 and found.excess > HOPELESS):
            break
        if draw and found.excess > NEAR:
            break
        if roundings > 1 and (roundings // 4) * rounding(program, run) >= COARSEST:
            continue
        new = measured_noise(program, run, seed, roundings, draw)
        noise = new if noise is None else more_noise(noise, new)
        found = compare(noise)
    return found, noise or Noise()
