"""device_loads: how long the parts of an Op keep each device busy, by Choice.

In: a Problem. Out: nanoseconds per device of any Choice of an Op. A search draws Ops in proportion
to what they take alone.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Floats
from apportion.describe import find_description
from apportion.machine import compute_seconds
from apportion.search.problem import Problem
from apportion.split import Choice, Space


class DeviceLoads:
    """Nanoseconds of compute that an Op gives every device."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.cluster, self.cost, self.space = problem.cluster, problem.cost, space
        self.devices = problem.devices
        self._known: dict[tuple[int, int, Choice], Floats] = {}
        self._seconds: dict[tuple[int, int, tuple[int, ...]], Floats] = {}
        self._sizes = [value.itemsize for value in space.graph.values]
        rates = {(d.kind, d.flops, d.memory_bandwidth, d.launch_seconds)
                 for d in self.cluster.devices}  # fmt: skip
        self._even = len(rates) == 1

    def of(self, op: int, choice: Choice) -> Floats:
        """By device."""
        outputs = self.space.graph.ops[op].outputs
        size = self._sizes[outputs[0]] if outputs else 4
        key = (self.space.call_ids[op], size, choice)
        found = self._known.get(key)
        if found is None:
            parts = self._parts(op, choice, size)
            devices = np.array(choice.devices, np.int64)
            found = np.bincount(devices, parts, self.devices).astype(np.float64)
            self._known[key] = found
        return found

    def _parts(self, op: int, choice: Choice, size: int) -> Floats:
        """Nanoseconds of every part of every replica, on its device."""
        if not self._even:
            return self._timed(op, choice, size)
        key = (self.space.call_ids[op], size, choice.parts)
        found = self._seconds.get(key)
        if found is None:
            alone = Choice(choice.parts, (0,) * choice.count)
            found = self._seconds[key] = self._timed(op, alone, size)
        return np.tile(found, choice.replicas)

    def _timed(self, op: int, choice: Choice, size: int) -> Floats:
        graph = self.space.graph.ops[op]
        split = self.space.split(op, choice.parts)
        description = find_description(graph.kind)
        alias = description is not None and description.alias
        flops = np.array([part.flops for part in split.parts], np.float64)
        nbytes = np.zeros(len(split.parts), np.int64)
        for row, part in enumerate(() if alias else split.parts):
            read = {
                (graph.inputs[k], region)
                for k, region in enumerate(part.inputs)
                if k not in part.zeros
            }
            left = zip(graph.outputs, part.outputs, strict=True)
            nbytes[row] = sum(
                self._sizes[value] * _volume(region) for value, region in (*read, *left)
            )
        many = choice.replicas
        count = len(choice.devices)
        seconds, _ = compute_seconds(
            self.cost, self.cluster, [graph.kind], np.zeros(count, np.int64),
            np.array(choice.devices, np.int64), np.tile(flops, many), np.tile(nbytes, many),
            np.full(count, size, np.int64),
        )  # fmt: skip
        return np.maximum(np.rint(seconds * 1e9), 1.0)


def _volume(region: tuple[tuple[int, int], ...]) -> int:
    volume = 1
    for low, high in region:
        volume *= high - low
    return volume
