"""Divided training in one process that can be saved and resumed: all ranks here, files for real."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program, batch_leaves, setting_of, state_tensor
from apportion.capture.widen import widened
from apportion.checkpoint.checkpoint_record import CheckpointRecord
from apportion.checkpoint.folder import begin_saving
from apportion.checkpoint.group_settings import plain_groups
from apportion.checkpoint.rank_state import RankState
from apportion.checkpoint.saver import commit
from apportion.checkpoint.staging import StagedPart
from apportion.checkpoint.stored import StoredCheckpoint
from apportion.checkpoint.write_part import write_part
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank, gather, run_together
from apportion.lower.runnable import runnable
from apportion.run.vary_batch import vary
from apportion.split.space import Space
from apportion.split.strategy import Strategy, space_of

SEED, RUN = 5, "00112233"


def wide_program(spec: str, seed: int = SEED) -> Program:
    """A model's step in float64, by its Graph widened."""
    it = zoo.load(spec, seed)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
    return replace(program, graph=widened(program.graph))


class RanksHere:
    """All ranks of a strategy in this process."""

    def __init__(self, program: Program, strategy: Strategy, devices: int) -> None:
        self.program = program
        space = space_of(program.graph, strategy)
        executable = Executable(space, strategy, runnable(space, strategy, devices))
        self.ranks = [Rank(executable, device) for device in range(devices)]
        self.steps_done = 0
        for rank in self.ranks:
            rank.load(lambda value: state_tensor(program, value))

    @property
    def states(self) -> list[RankState]:
        return [RankState(self.program, rank) for rank in self.ranks]

    def train(self, batches: Iterable[Any]) -> list[float]:
        losses = []
        for batch in batches:
            leaves = batch_leaves(self.program, batch)
            for rank in self.ranks:
                rank.feed(leaves.__getitem__)
            context = Context(
                SEED, self.steps_done, lambda e: setting_of(self.program, e),
                self.program.graph.bodies,
            )  # fmt: skip
            loss = run_together(self.ranks, context)
            assert loss is not None
            losses.append(float(loss))
            self.steps_done += 1
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        """The whole state by key."""
        values = self.states[0].values
        found = gather(self.ranks)
        return {values[v].key: t for v, t in found.items() if v in values}

    def save(self, root: Path) -> Path:
        """A checkpoint, as processes write it."""
        states = self.states
        record = CheckpointRecord(
            run=RUN, number=0, step=self.steps_done, seed=SEED, tensors=states[0].tensors, files={},
            numbers=states[0].numbers, loose=states[0].loose,
            groups=plain_groups(self.program.live.param_groups), devices=len(states),
        )  # fmt: skip
        unfinished = begin_saving(root, self.steps_done, record.nbytes)
        for number, state in enumerate(states):
            staged = StagedPart(state.part, pinned=False)
            staged.take(state.rank.tensors, state.live())
            stored = [each.stored for each in state.part]
            pairs = list(zip(stored, staged.tensors, strict=True))
            write_part(unfinished, number, pairs, state.tensors)
        return commit(unfinished, len(states), record)

    def load(self, stored: StoredCheckpoint) -> tuple[str, ...]:
        """Goes on from a checkpoint; returns what was left out."""
        loaded = [state.read(stored, optimizer=True) for state in self.states]
        for state, each in zip(self.states, loaded, strict=True):
            state.use(each)
        assert stored.record is not None
        self.steps_done = stored.record.step
        return loaded[0].match.notes


def batches(program: Program, first: int, count: int) -> list[Any]:
    fixed = program.fixed_positions
    return [vary(program.batch, SEED, first + n, fixed=fixed) for n in range(count)]


def space(program: Program) -> Space:
    return Space(program.graph)


def close(found: torch.Tensor, true: torch.Tensor) -> bool:
    """Whether two tensors are equal, as float64 decides it."""
    scale = float(true.double().abs().max()) if true.numel() else 0.0
    return bool(((found - true).double().abs() <= 1e-9 * scale + 1e-9).all())
