"""All ranks of a divided step in this process, answering as processes would.

Part of the room run. A Program, a Strategy and batches come in; out go a TrainingResult for each
rank and the tasks that they ran. With `wide` the Graph is the one in float64. Slow for training,
and the quickest way to see whether a strategy trains the same model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion.capture import (
    Program,
    batch_leaves,
    check_settings,
    setting_of,
    state_tensor,
    widened,
)
from apportion.execute import Context, Executable, Rank, run_together
from apportion.graph import Graph
from apportion.lower import TaskGraph, runnable
from apportion.run.training import TrainingResult, default_dtype, state_array
from apportion.split import Space, Strategy, space_of, unsplit_choice


@dataclass(frozen=True)
class SharedRun:
    """What the ranks answer, and what they ran; `strategy` is None where it is not known."""

    space: Space
    tasks: TaskGraph
    ranks: list[TrainingResult]
    strategy: Strategy | None = None


def train_in_one_process(
    program: Program,
    strategy: Strategy | None,
    devices: int,
    batches: Iterable[Any],
    seed: int,
    wide: bool = False,
) -> SharedRun:
    """Trains on all batches, as the strategy says or, if it is None, undivided."""
    if wide:
        program = replace(program, graph=widened(program.graph))
    strategy = strategy or undivided(program.graph)
    space = space_of(program.graph, strategy)
    tasks = runnable(space, strategy, devices)
    executable = Executable(space, strategy, tasks)
    ranks = [Rank(executable, device) for device in range(devices)]
    losses: list[float | None] = []
    with default_dtype(torch.float64 if wide else None):
        for rank in ranks:
            rank.load(lambda value: state_tensor(program, value))
        for step, batch in enumerate(batches, program.steps_done):
            losses.append(_step(program, ranks, batch, seed, step))
    states = [[(s, state_array(t)) for s, (_, t) in rank.state().items()] for rank in ranks]
    answers = [TrainingResult(losses, [], [], 0, None, state, []) for state in states]
    return SharedRun(space, tasks, answers, strategy)


def _step(program: Program, ranks: list[Rank], batch: Any, seed: int, step: int) -> float | None:
    check_settings(program)
    leaves = batch_leaves(program, batch)
    for rank in ranks:
        rank.feed(leaves.__getitem__)
    context = Context(seed, step, lambda e: setting_of(program, e), program.graph.bodies)
    loss = run_together(ranks, context)
    return None if loss is None else float(loss)


def undivided(graph: Graph) -> Strategy:
    """All Ops whole on the first device."""
    space = Space(graph)
    return Strategy(tuple(unsplit_choice(space, op, (0,)) for op in range(len(graph.ops))))
