"""TicTac's order (TAO): which parameters to send first, from how long transfers and operators take.

Part of the room plan. The tasks of a step whose updates are late come in, with the seconds that
each takes; out goes a ranking of parameters for split/communication.py.

Hashemi, Abdu Jyothi and Campbell, "TicTac: accelerating distributed deep learning with
communication scheduling", MLSys 2019. Of what is still to be sent, for every parameter r:

    M   how long it takes to send it
    P   how long all that computes which waits for nothing but r
    M+  the least that has to be sent for some operator that needs r and others too

A goes before B if min(P_B, M_A) < min(P_A, M_B); if neither goes before the other, the one with the
smaller M+ does. All is worked out anew after each pick. An operator waits for a parameter if it or
anything that it depends on reads it.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from apportion.columns import Floats
from apportion.lower import TaskGraph

DEVICE = 0  # whose work decides


def tictac_ranking(tasks: TaskGraph, seconds: Floats, per_byte: float) -> tuple[int, ...]:
    """Parameters (Values) whose updates are late, the first to be sent first. `seconds`: of every
    task alone; `per_byte`: of the link."""
    sizes = _late_state(tasks)
    values = sorted(sizes)
    loads = _loads(tasks, seconds, {value: k for k, value in enumerate(values)})
    order = picked([sizes[value] * per_byte for value in values], loads)
    return tuple(values[k] for k in order)


def _late_state(tasks: TaskGraph) -> dict[int, int]:
    """The Values that late tasks make anew on the device, with their bytes there."""
    found: dict[int, int] = defaultdict(int)
    for end, begin in tasks.carry.tolist():
        if tasks.slot_first[end] >= tasks.late_start and tasks.slot_device[begin] == DEVICE:
            found[int(tasks.slot_value[begin])] += int(tasks.slot_nbytes[begin])
    return found


def _loads(tasks: TaskGraph, seconds: Floats, number: dict[int, int]) -> dict[int, float]:
    """Seconds of work on the device, by the set of parameters that it waits for, as bits."""
    begins = np.zeros(len(tasks.slot_device), np.bool_)
    begins[tasks.carry[:, 1]] = True
    masks, found = [0] * tasks.late_start, defaultdict[int, float](float)
    for task in range(tasks.late_start):
        mask = 0
        for before in tasks.dep[tasks.dep_start[task] : tasks.dep_start[task + 1]].tolist():
            mask |= masks[before]
        for slot in tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist():
            if slot >= 0 and begins[slot] and int(tasks.slot_value[slot]) in number:
                mask |= 1 << number[int(tasks.slot_value[slot])]
        masks[task] = mask
        if tasks.device[task] == DEVICE and tasks.is_work[task]:
            found[mask] += float(seconds[task])
    return found


def picked(transfer: list[float], loads: dict[int, float]) -> list[int]:
    """The order of transfers 0, 1, ..., given what each takes and the loads by sets of them."""
    left, order = set(range(len(transfer))), list[int]()
    while left:
        alone, impending = _figures(transfer, loads, left)
        best = min(left)
        for other in sorted(left):
            first = min(alone[best], transfer[other])
            second = min(alone[other], transfer[best])
            if (first, impending[other]) < (second, impending[best]):
                best = other
        order.append(best)
        left.remove(best)
        merged = defaultdict[int, float](float)
        for mask, load in loads.items():
            merged[mask & ~(1 << best)] += load
        loads = merged
    return order


def _figures(
    transfer: list[float], loads: dict[int, float], left: set[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """P and M+ of all transfers that are left."""
    alone, impending = dict.fromkeys(left, 0.0), dict.fromkeys(left, math.inf)
    for mask, load in loads.items():
        needed = [k for k in left if mask >> k & 1]
        if len(needed) == 1:
            alone[needed[0]] += load
        else:
            together = sum(transfer[k] for k in needed)
            for k in needed:
                impending[k] = min(impending[k], together)
    return alone, impending
