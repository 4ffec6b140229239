"""A step run divided and whole, all ranks in one process: how far apart the two are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from graphs import start, step

from apportion.capture.program import (
    Program,
)
from apportion.capture.reference import (
    eager_steps,
)
from apportion.execute.rank import Rank
from apportion.lower.task_graph import TaskGraph
from apportion.run.check_run import PER_STEP, Distance, GatheredCopy, distance, gather_copies
from apportion.run.training import vary
from apportion.split.space import Space
from apportion.split.strategy import Strategy

STEPS = 2


def batches(program: Program, seed: int, steps: int = STEPS) -> list[Any]:
    return [vary(program.batch, seed, number) for number in range(steps)]


class Reference:
    """Plain PyTorch's results, once per program and seed.

    Held by the program itself and for as long as it lives: the address of a program that is gone
    is soon another program's.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[Program, dict[tuple[int, int], Any]] = WeakKeyDictionary()

    def of(self, program: Program, seed: int, steps: int = STEPS) -> Any:
        known = self.known.setdefault(program, {})
        if (seed, steps) not in known:
            known[seed, steps] = eager_steps(program, batches(program, seed, steps), seed)
        return known[seed, steps]

    def borrow(self, program: Program, owner: Program, seed: int, steps: int = STEPS) -> None:
        """Lets a program written differently answer to the results of the one it came from."""
        self.known.setdefault(program, {})[seed, steps] = self.of(owner, seed, steps)


REFERENCE = Reference()


def copies(space: Space, tasks: TaskGraph, ranks: Sequence[Rank]) -> dict[int, list[GatheredCopy]]:
    """The state of all ranks as `apportion run --check` puts it together."""

    answers: Any = [
        SimpleNamespace(state=[(s, t.numpy()) for s, (_, t) in rank.state().items()])
        for rank in ranks
    ]
    return gather_copies(space, tasks, answers)


Corrupt = Callable[[int, torch.Tensor], torch.Tensor]


def compare(
    program: Program,
    space: Space,
    strategy: Strategy,
    devices: int,
    *,
    seed: int = 0,
    steps: int = STEPS,
    corrupt: Corrupt | None = None,
) -> Distance:
    """Runs the steps divided and whole; every replica must be bit-equal."""
    losses, state = REFERENCE.of(program, seed, steps)
    tasks, ranks = start(program, space, strategy, devices)
    for rank in ranks:
        rank.corrupt = corrupt
    made = []
    for number, batch in enumerate(batches(program, seed, steps)):
        held = step(program, ranks, batch, seed, number)
        assert corrupt is not None or len(set(held)) == 1, held
        made.append(max(held, key=lambda loss: abs(loss - losses[number])))
    found = copies(space, tasks, ranks)
    if corrupt is None:
        assert_replicas_equal(found)
    rate = max(float(group["lr"]) for group in program.live.param_groups)
    return distance(program, made, found, losses, state, PER_STEP * rate * steps)


def assert_replicas_equal(found: dict[int, list[GatheredCopy]]) -> None:
    for first, *others in found.values():
        for other in others:
            both = first.filled & other.filled
            assert torch.equal(first.tensor[both], other.tensor[both])
