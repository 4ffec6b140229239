"""pair_bytes: what every device sends to every other one in a step.

Part of the room lower. A TaskGraph comes in, or Flows before there are tasks, a matrix goes out.
The bytes of a COLLECTIVE are shared out evenly over its pairs, which differ by less than a factor
of two (exchange.py); so no copies have to be made for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats
from apportion.lower.task_graph import TaskGraph
from apportion.lower.value_flow import FLOWS, PIECES, FlowStore


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


def flow_pair_bytes(store: FlowStore, flows: Sequence[int], devices: int) -> Floats:
    """Bytes by sender and receiver of Flows, each as often as it is named."""
    named = np.bincount(np.array(flows, np.int64), minlength=int(store.used[FLOWS]))
    stages = store.stage_start[: len(named) + 1]
    first = store.piece_start[stages[:-1]]
    pieces = np.diff(first, append=store.used[PIECES])
    sources = np.diff(store.source_start[: pieces.sum() + 1])
    times = np.repeat(np.repeat(named, pieces), sources)
    receiver = np.repeat(store.device[: len(sources)], sources)
    sender = store.device[store.source[: len(receiver)]]
    nbytes = times * store.source_nbytes[: len(receiver)] * (sender != receiver)
    total = np.bincount(sender * devices + receiver, nbytes, devices * devices)
    found: Floats = total.astype(np.float64).reshape(devices, devices)
    return found
