"""All ranks of a step in one process, their segments in a mode of the ladder.

Exchanges are handed over as bytes: a rank goes on until it waits for what nobody has sent yet, then
the next one has its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from graphs import context_of

from apportion.capture.program import Program, batch_leaves, state_tensor
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.ladder import Ladder, ladder
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Post, RankStep, Segment, rank_steps
from apportion.lower.runnable import runnable
from apportion.split.space import Space
from apportion.split.strategy import Strategy


class RanksInMode:
    """All ranks of a strategy, loaded with a program's state."""

    def __init__(
        self, program: Program, space: Space, strategy: Strategy, devices: int, mode: str
    ) -> None:
        self.program = program
        self.tasks = runnable(space, strategy, devices)
        self.executable = Executable(space, strategy, self.tasks)
        self.ranks = [Rank(self.executable, device) for device in range(devices)]
        self.steps = [rank_steps(self.executable, device) for device in range(devices)]
        self.ladders: list[Ladder] = []
        for rank, steps in zip(self.ranks, self.steps, strict=True):
            rank.load(self._state)
            self.ladders.append(ladder(self.executable, rank.device, "cpu", steps, mode))

    def _state(self, value: int) -> torch.Tensor:
        constants = self.program.constants
        return constants[value] if value in constants else state_tensor(self.program, value)

    @property
    def notes(self) -> list[str]:
        return [note for each in self.ladders for note in each.notes]

    def step(self, batch: Any, seed: int, number: int) -> list[float]:
        """One step; returns every copy of the loss."""
        leaves = batch_leaves(self.program, batch)
        for rank in self.ranks:
            rank.feed(lambda value: leaves[value])
        self._run(context_of(self.program, seed, number))
        losses = [rank.finish() for rank in self.ranks]
        return [float(loss) for loss in losses if loss is not None]

    def _run(self, context: Context) -> None:
        left: list[list[RankStep]] = [list(steps) for steps in self.steps]
        sent: dict[int, torch.Tensor] = {}
        while any(left):
            moved = False
            for rank, steps, how in zip(self.ranks, left, self.ladders, strict=True):
                while steps and self._can(steps[0], sent):
                    self._do(steps.pop(0), rank, how, sent, context)
                    moved = True
            assert moved, "all ranks wait"

    def _can(self, step: RankStep, sent: dict[int, torch.Tensor]) -> bool:
        if isinstance(step, Segment | Post):
            return True
        return all(number in sent for number, _ in step.exchange.receives)

    def _do(
        self,
        step: RankStep,
        rank: Rank,
        how: Ladder,
        sent: dict[int, torch.Tensor],
        context: Context,
    ) -> None:
        if isinstance(step, Segment):
            how.functions[step](rank, context)
        elif isinstance(step, Post):
            messages = self.executable.messages
            for number, _ in step.exchange.sends:
                sent[number] = rank.pack(number)
            for task in dict.fromkeys(messages[number].task for number, _ in step.exchange.sends):
                rank.free(task)
        else:
            for number, _ in step.exchange.receives:
                rank.received[number] = sent.pop(number)

    def state(self) -> list[dict[int, torch.Tensor]]:
        """Each rank's tensors between two steps, by slot."""
        return [dict(rank.tensors) for rank in self.ranks]


def differing_replicas(executable: Executable, ranks: Sequence[Rank]) -> list[int]:
    """Values of which two ranks hold the same region with different bits."""
    found: dict[Any, torch.Tensor] = {}
    different = []
    for rank in ranks:
        for slot, tensor in rank.tensors.items():
            meant = executable.slots[slot]
            first = found.setdefault((meant.value, meant.region), tensor)
            if not torch.equal(first, tensor):
                different.append(meant.value)
    return different
