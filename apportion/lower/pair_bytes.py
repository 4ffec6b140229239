"""pair_bytes: what every device sends to every other one in a step.

Part of the room lower. A TaskGraph comes in, a matrix goes out. The bytes of a COLLECTIVE are
shared out evenly over its pairs, which differ by less than a factor of two (exchange.py); so no
copies have to be made for it.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Floats
from apportion.lower.task_graph import TaskGraph


def pair_bytes(tasks: TaskGraph) -> Floats:
    """Bytes by sender and receiver."""
    count = tasks.devices
    sent = np.flatnonzero(tasks.is_pairwise)
    pair = tasks.device[sent] * count + tasks.peer[sent]
    total = np.bincount(pair, tasks.nbytes[sent], count * count)
    found: Floats = total.astype(np.float64).reshape(count, count)
    together = np.flatnonzero(tasks.is_collective)
    if len(together):
        total = np.bincount(tasks.group[together], tasks.nbytes[together], len(tasks.groups))
        for group, nbytes in zip(tasks.groups, total.tolist(), strict=True):
            share = nbytes / (len(group) * (len(group) - 1))
            found[np.ix_(group, group)] += share * (1 - np.eye(len(group)))
    return found
