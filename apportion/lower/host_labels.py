"""host_labels: where a device that uses its host is told what to do next.

A part of lower/. In: a TaskGraph. Out: a label for each task. A device runs tasks of one label that
follow each other without being disturbed: ranks run them as one segment (execute/rank_steps.py),
and what comes from the host is waited for before the first of them, which simulate/ knows.

    WORK      what it computes
    AT_HOST   a copy to the host or back begins or is waited for, or the host is given work
    STREAMED  an update of state that has come from the host for it: what is computed before it does
              not wait for that
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Bools, Ints
from apportion.describe import ON_HOST_KIND, UPDATE_KIND
from apportion.lower.task_graph import TaskGraph
from apportion.lower.task_kinds import COMPUTE, FROM_HOST

WORK, AT_HOST, STREAMED = range(3)


def uses_host(tasks: TaskGraph) -> bool:
    """Whether any task has to do with a host."""
    kinds = tasks.task_kinds
    return bool((kinds.is_host_copy | kinds.is_host_work)[tasks.kind].any())


def host_labels(tasks: TaskGraph) -> Ints:
    """The label of each task."""
    kinds, found = tasks.task_kinds, np.zeros(len(tasks), np.int64)
    found[(kinds.is_host_copy | kinds.is_host_work)[tasks.kind]] = AT_HOST
    computes = tasks.kind == COMPUTE
    found[computes & _of_kind(tasks, ON_HOST_KIND)] = AT_HOST
    reader = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
    made = np.where(tasks.in_slot >= 0, tasks.slot_first[tasks.in_slot], -1)
    come = np.zeros(len(tasks), np.bool_)
    come[reader[(made >= 0) & (tasks.kind[made] == FROM_HOST)]] = True
    found[computes & come & _of_kind(tasks, UPDATE_KIND)] = STREAMED
    return found


def _of_kind(tasks: TaskGraph, kind: str) -> Bools:
    """Which tasks are of Ops of a kind."""
    of_op = np.array([*(each == kind for each in tasks.kinds), False])
    found: Bools = of_op[np.minimum(tasks.op, len(of_op) - 1)]
    return found
