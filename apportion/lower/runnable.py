"""The tasks of a step in the form in which ranks run them.

Part of the room lower. A Space, a Strategy and a number of devices come in, a TaskGraph goes out:
that of lower(), which a search compares strategies by, after the passes over all of its tasks that
make it faster and leave its meaning. What is predicted of a plan, measured and run is this one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.graph import UPDATE
from apportion.lower.coalesce import coalesce
from apportion.lower.half_sums import half_sums
from apportion.lower.join_batch_norm import join_batch_norm
from apportion.lower.join_conv_backward import join_conv_backward
from apportion.lower.lower import Lowering, verified_lowering
from apportion.lower.task_columns import build_task_graph
from apportion.lower.task_graph import TaskGraph
from apportion.split import Space, Strategy


def runnable(
    space: Space,
    strategy: Strategy,
    devices: int,
    joined: bool = True,
    lowering: Lowering | None = None,
) -> TaskGraph:
    """The tasks of one step, as they run; `joined`: with one call for what capture has opened,
    where that can be; by a Lowering of this strategy, if there is one already. Raises ValueError if
    the strategy is not legal."""
    tasks = build_task_graph((lowering or verified_lowering(space, strategy, devices)).lowered())
    if strategy.wire:
        tasks = half_sums(space, strategy, tasks)
    for join in (join_batch_norm, join_conv_backward) if joined else ():
        tasks = join(space, strategy, tasks)
    updates = np.array([op.phase == UPDATE for op in space.graph.ops])
    how = strategy.communication
    if how.algorithm:
        tasks = replace(tasks, sends_directly=True)
    return coalesce(tasks, refetched=strategy.refetched, how=how, updates=updates)
