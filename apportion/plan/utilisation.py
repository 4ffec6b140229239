"""Model FLOPs utilisation: how much of the devices' arithmetic a step's own operations use.

Part of the room plan. A Plan comes in, a number goes out: the seconds that all devices together
would need for the operations of the captured step at their peak rates, each in the precision that
it is computed in, as a share of the seconds of a step. What is computed again, or on several
devices, counts once.
"""

from __future__ import annotations

import numpy as np

from apportion.machine import rates_by_itemsize
from apportion.memory import is_repeat
from apportion.plan.plan import Plan


def utilisation(plan: Plan) -> float:
    """The model FLOPs utilisation of a Plan's predicted step, about from 0 to 1."""
    tasks, space, step = plan.tasks, plan.space, plan.predicted.step_seconds
    rates = np.array([rates_by_itemsize(device) for device in plan.cluster.devices]).sum(axis=0)
    computes = tasks.task_kinds.computes[tasks.kind]
    seconds = 0.0
    for op in range(len(space.graph.ops)):
        flops = space.split(op, (1,) * len(space.axes(op))).parts[0].flops
        if not flops or is_repeat(space.graph, op):
            continue
        mine = slice(int(tasks.op_start[op]), int(tasks.op_start[op + 1]))
        sizes = tasks.itemsize[mine][computes[mine]]
        if len(sizes):
            seconds += flops / float(rates[min(int(sizes[0]), len(rates) - 1)])
    return seconds / step if step > 0 else 0.0
