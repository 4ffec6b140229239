"""Devices that do the same at the same time: a report draws one of them.

Part of the room show. Tasks and when they ran come in, groups of devices go out.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints
from apportion.lower import TaskGraph
from apportion.simulate import Timeline

SAME_TIME = 0.005  # of a step: differences in time that are too short to be seen


def alike_devices(tasks: TaskGraph, line: Timeline) -> list[list[int]]:
    """Groups of devices that run the same operators in the same order at about the same time, the
    one that holds most first; all devices are in one of them."""
    tolerance = SAME_TIME * max(line.step_ns, 1)
    groups: list[tuple[list[int], tuple[Ints, Ints, Ints, Ints]]] = []
    for device in range(tasks.devices):
        mine = np.flatnonzero((tasks.device == device) & tasks.is_work)
        mine = mine[np.argsort(line.start_ns[mine], kind="stable")]
        rows = (tasks.op[mine], tasks.kind[mine], line.start_ns[mine], line.end_ns[mine])
        for members, known in groups:
            if _alike(known, rows, tolerance):
                members.append(device)
                break
        else:
            groups.append(([device], rows))
    peaks = line.peak_bytes
    return [sorted(members, key=lambda d: (-peaks[d], d)) for members, _ in groups]


def _alike(
    a: tuple[Ints, Ints, Ints, Ints], b: tuple[Ints, Ints, Ints, Ints], tolerance: float
) -> bool:
    if len(a[0]) != len(b[0]) or not all(map(np.array_equal, a[:2], b[:2])):
        return False
    return all(
        not len(one) or int(np.abs(one - other).max()) <= tolerance
        for one, other in zip(a[2:], b[2:], strict=True)
    )
