"""half_sums: partial sums of gradients that travel in bfloat16.

A pass of lower/ over the plain tasks, for a Strategy whose `wire` says so. A TaskGraph comes in; in
the one that goes out every copy that a sum of float32 gradients is made of has two bytes for each
element instead of four, and the messages that carry such copies are smaller by as much. The sum
itself is in float32.

Copies that stay on their device have two bytes as well: they are rounded too, because several
devices may each add up the same terms, and their sums must be the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.columns import Bools
from apportion.graph import BACKWARD
from apportion.lower.task_graph import TaskGraph, message_ends
from apportion.split import Space, Strategy


def half_sums(space: Space, strategy: Strategy, tasks: TaskGraph) -> TaskGraph:
    """The tasks with gradients' terms in half precision on their way."""
    copies, count = tasks.make_copies(), len(tasks)
    adds, value = np.zeros(count, np.bool_), tasks.slot_value[copies.target]
    adds[copies.task[copies.term > 0]] = True
    arrives = np.zeros(len(space.graph.values), np.bool_)
    arrives[value[adds[copies.task] & (copies.message >= 0)]] = True
    chosen = adds[copies.task] & (arrives & _summed_gradients(space, strategy))[value]
    if not chosen.any():
        return tasks
    copies = replace(copies, nbytes=np.where(chosen, copies.nbytes // 2, copies.nbytes))
    sent = copies.message >= 0
    carried = np.bincount(copies.message[sent], copies.nbytes[sent], minlength=count)
    nbytes = np.where(tasks.is_message, carried.astype(np.int64), tasks.nbytes)
    new = replace(tasks, copies=copies, nbytes=nbytes)
    return replace(new, ends=message_ends(new))


def _summed_gradients(space: Space, strategy: Strategy) -> Bools:
    """Which Values are made by the backward pass, in float32, and by sums if by parts."""
    found = np.zeros(len(space.graph.values), np.bool_)
    for index, op in enumerate(space.graph.ops):
        if op.phase != BACKWARD:
            continue
        reducers = space.split(index, strategy.choices[index].parts).reducers
        for value, reducer in zip(op.outputs, reducers, strict=True):
            full = space.graph.values[value].dtype == "float32"
            found[value] = full and reducer in (None, "sum")
    return found
