"""Made-up steps of any size, to measure the simulator with.

Round by round each device computes COMPUTES times, one after the other, sends what came of it to
MESSAGES others, and puts together what it is sent. Half of what is computed in the first half of
the step lives until the mirror image of its round, as activations do that the backward pass reads.
"""

from __future__ import annotations

import math

import numpy as np

from apportion.columns import Ints
from apportion.lower.task_graph import (
    CATEGORIES,
    NO_ENDS,
    Copies,
    TaskGraph,
    counted,
    verify,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COMPUTE,
    TRANSFER,
)

COMPUTES, MESSAGES = 6, 2
PER_ROUND = COMPUTES + MESSAGES + 1
ACTIVATION = CATEGORIES.index("activation")


def made_up(count: int, devices: int = 64, seed: int = 0) -> TaskGraph:
    """At least `count` tasks, in whole rounds."""
    rng = np.random.default_rng(seed)
    rounds = math.ceil(count / (devices * PER_ROUND))
    shape = (rounds, PER_ROUND, devices)
    n = math.prod(shape)
    index = np.arange(n).reshape(shape)
    device = np.broadcast_to(np.arange(devices), shape)
    kind, peer, nbytes = np.full(shape, COMPUTE), np.full(shape, -1), np.zeros(shape, np.int64)
    kind[:, COMPUTES:-1], kind[:, -1] = TRANSFER, ASSEMBLE
    peer[:, COMPUTES:-1] = device[:, COMPUTES:-1] + rng.integers(1, devices, (rounds, MESSAGES, 1))
    peer[:, COMPUTES:-1] %= devices
    nbytes[:] = rng.integers(10**4, 10**7, shape)
    taker = index[:, -1].ravel()[np.arange(rounds)[:, None, None] * devices + peer[:, COMPUTES:-1]]
    dep_start, dep = _dependencies(index, taker)
    none, zeros = np.zeros(0, np.int64), np.zeros(n + 1, np.int64)
    tasks = TaskGraph(
        devices=devices, kind=kind.ravel(), op=index.ravel() // devices, part=device.ravel(),
        device=device.ravel(), peer=peer.ravel(),
        position=np.repeat(np.arange(rounds * PER_ROUND), devices), nbytes=nbytes.ravel(),
        flops=np.where(kind == COMPUTE, nbytes * 100.0, 0.0).ravel(), itemsize=np.full(n, 4),
        dep_start=dep_start, dep=dep, **_slots(index, nbytes), in_start=zeros, in_slot=none,
        out_start=zeros, out_slot=none, copies=_copies(index, taker, nbytes),
        op_start=np.append(np.arange(0, n + 1, devices), n), taken=none, ends=NO_ENDS,
    )  # fmt: skip
    tasks = counted(tasks)
    verify(tasks)
    return tasks


def _dependencies(index: Ints, taker: Ints) -> tuple[Ints, Ints]:
    """Computes wait for what their device did before, messages for the last of these, assemblies
    for their messages."""
    devices = index.shape[2]
    computes, messages = index[:, :COMPUTES].ravel()[devices:], index[:, COMPUTES:-1]
    made = np.broadcast_to(index[:, COMPUTES - 1 : COMPUTES], messages.shape)
    after = np.concatenate([computes, messages.ravel(), taker.ravel()])
    before = np.concatenate([computes - devices, made.ravel(), messages.ravel()])
    starts = np.append(0, np.cumsum(np.bincount(after, minlength=index.size)))
    return starts, before[np.argsort(after, kind="stable")]


def _slots(index: Ints, nbytes: Ints) -> dict[str, Ints]:
    """One for each compute and each assembly, in this order within a round."""
    rounds, _, devices = index.shape
    keeps = [*range(COMPUTES), PER_ROUND - 1]
    first = index[:, keeps]
    last = first + devices
    last[:, COMPUTES - 1] += (MESSAGES - 1) * devices
    half = rounds // 2
    last[:half, 1:-1:2] = index[::-1][:half, 1:COMPUTES:2]
    last[-1, -1] = index.size
    same = np.full(first.size, -1)
    return {
        "slot_device": np.tile(np.arange(devices), rounds * len(keeps)),
        "slot_value": np.zeros(first.size, np.int64),
        "slot_region": np.zeros(first.size, np.int64),
        "slot_nbytes": nbytes[:, keeps].ravel(),
        "slot_category": np.full(first.size, ACTIVATION),
        "slot_base": same,
        "slot_first": first.ravel(),
        "slot_last": last.ravel(),
    }


def _copies(index: Ints, taker: Ints, nbytes: Ints) -> Copies:
    """One for each message."""
    rounds, _, devices = index.shape
    slot = np.arange(rounds * (COMPUTES + 1) * devices).reshape(rounds, COMPUTES + 1, devices)
    source = np.broadcast_to(slot[:, COMPUTES - 1 : COMPUTES], taker.shape).ravel()
    target = slot[:, -1].ravel()[taker // (PER_ROUND * devices) * devices + taker % devices]
    zeros, none = np.zeros(taker.size, np.int64), np.zeros(0, np.int64)
    return Copies(
        source, target.ravel(), zeros, zeros, zeros, index[:, COMPUTES:-1].ravel(), taker.ravel(),
        nbytes[:, COMPUTES:-1].ravel(), none, none, np.zeros(1, np.int64), ((),),
    )  # fmt: skip
