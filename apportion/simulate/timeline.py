"""Timeline: when each task ran and what memory was held; one type for simulated and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.columns import Ints
from apportion.lower import CATEGORIES, TaskGraph
from apportion.simulate.memory_curve import Curve, curves
from apportion.simulate.schedule import LinkSpans

SIMULATED, MEASURED = "simulated", "measured"
MOST_BYTES = 2.0**61  # of all tensors and messages of a step together


@dataclass(frozen=True, eq=False)
class Timeline:
    """`start_ns` and `end_ns` have an entry per task, `curves` and `busy` one per device.

    `busy` is the share of the step during which the device's compute lane was occupied.
    `find_curves` is called when the curves are first asked for.
    `period_ns`: from step to step, where the next one begins before all tasks of this one are done.
    `link_spans`: when messages occupied links, where they overtake each other.
    """

    source: str
    start_ns: Ints
    end_ns: Ints
    busy: tuple[float, ...]
    bytes_moved: int
    find_curves: Callable[[], tuple[Curve, ...]] = tuple
    period_ns: int = 0
    link_spans: LinkSpans | None = None

    @cached_property
    def curves(self) -> tuple[Curve, ...]:
        """What each device holds over the step."""
        return self.find_curves()

    @property
    def step_ns(self) -> int:
        return self.period_ns or int(self.end_ns.max(initial=0))

    @property
    def step_seconds(self) -> float:
        return float(self.step_ns) / 1e9

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(curve.peak_bytes for curve in self.curves)

    @property
    def peak_categories(self) -> tuple[dict[str, int], ...]:
        """For every device the bytes of each category at its peak."""
        return tuple(
            dict(zip(CATEGORIES, curve.peak_categories, strict=True)) for curve in self.curves
        )

    def __str__(self) -> str:
        busy = sum(self.busy) / max(len(self.busy), 1)
        peak = max(self.peak_bytes, default=0)
        return (
            f"{self.source}: {self.step_seconds:.6g} s a step, peak {peak} bytes on a device, "
            f"{self.bytes_moved} bytes moved, devices {busy:.0%} busy"
        )


def timeline(
    tasks: TaskGraph,
    start_ns: Ints,
    end_ns: Ints,
    *,
    source: str,
    communication_on_device: bool = False,
    granule: Ints | None = None,
    occupied_ns: Ints | None = None,
    period_ns: int = 0,
) -> Timeline:
    """The Timeline of tasks that ran at these times; `granule` is that of `footprint.granules`, 1
    for every device unless given. `occupied_ns` is how long each occupied its devices, if not from
    its start to its end. `period_ns`: see Timeline."""
    length = period_ns or int(end_ns.max(initial=0))
    held = tasks.slot_nbytes.sum(dtype=np.float64) + tasks.nbytes.sum(dtype=np.float64)
    if held >= MOST_BYTES:
        raise ValueError(f"a step would hold and move {held:.3g} bytes, which cannot be counted")
    return Timeline(
        source=source,
        start_ns=start_ns,
        end_ns=end_ns,
        busy=_busy(tasks, start_ns, end_ns, communication_on_device, occupied_ns, length),
        bytes_moved=tasks.bytes_moved,
        find_curves=lambda: curves(tasks, start_ns, end_ns, granule),
        period_ns=period_ns,
    )


def verify(timeline: Timeline, tasks: TaskGraph) -> None:
    """Raises AssertionError unless all tasks ran, each after what it depends on."""
    start, end = timeline.start_ns, timeline.end_ns
    assert len(start) == len(end) == len(tasks), "times are missing"
    assert ((start >= 0) & (end >= start)).all(), "a task ends before it starts"
    owners = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    assert (end[tasks.dep] <= start[owners]).all(), "a task starts before its inputs are there"


def _busy(
    tasks: TaskGraph, start: Ints, end: Ints, on_device: bool, occupied: Ints | None, whole: int
) -> tuple[float, ...]:
    length, ends = end - start if occupied is None else occupied, tasks.ends
    occupies = tasks.is_work & (tasks.task_kinds.lane[tasks.kind] == 0)
    busy = _sums(tasks.device, np.where(occupies, length, 0), tasks.devices)
    if on_device:
        busy += _sums(ends.device, length[ends.task], tasks.devices)
        kinds = tasks.task_kinds
        at_host = (kinds.is_host_copy | kinds.is_host_work)[tasks.kind]
        busy += _sums(tasks.device, np.where(at_host, length, 0), tasks.devices)
    return tuple((busy / max(whole, 1)).tolist())


def _sums(where: Ints, amounts: Ints, devices: int) -> Ints:
    return np.bincount(where, amounts, devices).astype(np.int64)
