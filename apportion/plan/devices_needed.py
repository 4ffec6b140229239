"""When no plan fits: what is over, what takes the space, and how many devices would do.

Part of the room plan. A PlanRequest and the nearest Candidate come in, sentences go out. The
number is found by planning: for more and more devices like those at hand, doubling and then
bisecting, so that the number found was planned and fits, and one less was planned and does not.
What a device holds does not depend on links, so the larger clusters are the same device repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from apportion.graph import UPDATE
from apportion.lower import COMPUTE
from apportion.machine import MAX_DEVICES, Cluster, Device, Link
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import (
    DefaultCosts,
    PlanRequest,
    SearchLog,
    candidates,
    excess,
    fits,
    state_bytes,
)
from apportion.quantity import format_quantity
from apportion.search import METHODS, UnsuitableMethod
from apportion.simulate import peak
from apportion.work_clock import work_seconds

QUICK_METHODS = ("fsdp", "tofu")  # quick, and sparing with memory
KINDS, CAUSES = 4, 3  # named of what fills a device
GROWTH = 1.5  # planning takes at most so much longer per device than the last time, or it waits


def shortfall(request: PlanRequest, nearest: Candidate, several: bool) -> str:
    """What is over the limit in a plan that does not fit, the nearest of `several` or the only one:
    where, by how much, and what fills the device."""
    over = excess(request, nearest)
    device = max(range(len(over)), key=over.__getitem__)
    most = peak(device, nearest.timeline.curves[device], nearest.tasks, nearest.space.graph, CAUSES)
    held = sorted(most.categories.items(), key=lambda item: -item[1])[:KINDS]
    kinds = ", ".join(f"{name} {format_quantity(nbytes, 'B')}" for name, nbytes in held if nbytes)
    largest = ", ".join(
        f"{cause.name} {format_quantity(cause.nbytes, 'B')}" for cause in most.causes
    )
    count = sum(n > 0 for n in over)
    also = f" ({count} of {len(over)} devices are over theirs)" if count > 1 else ""
    when = f"in {most.op}" if most.op else "as the step begins"
    needs, above, limit = (
        format_quantity(nbytes, "B")
        for nbytes in (most.nbytes, over[device], most.nbytes - over[device])
    )
    which = f"the plan by {nearest.method} does not fit: it"
    if several:
        which = f"no plan fits: the nearest, by {nearest.method},"
    return (
        f"{which} needs {needs} on device {device} ({request.cluster.devices[device].name}), "
        f"{above} over its limit of {limit}{also}; its peak, {when}, is {kinds}; the largest "
        f"there: {largest}{_too_large_alone(nearest, device, most.nbytes - over[device])}"
    )


def _too_large_alone(nearest: Candidate, device: int, limit: int) -> str:
    """What is said of an operator that by itself is over the limit; "" if there is none. Updates
    write over what they read."""
    tasks, graph = nearest.tasks, nearest.space.graph
    own = np.flatnonzero((tasks.kind == COMPUTE) & (tasks.device == device))
    own = own[[graph.ops[op].phase != UPDATE for op in tasks.op[own]]]
    largest = max(own, key=tasks.nbytes.__getitem__, default=-1)
    if largest < 0 or tasks.nbytes[largest] <= limit:
        return ""
    name, needs = (
        graph.ops[tasks.op[largest]].name,
        format_quantity(int(tasks.nbytes[largest]), "B"),
    )
    return (
        f"; {name} alone reads and writes {needs}, so that nothing that is recomputed or lies on "
        "the host is enough: it has to be divided over more devices, or the batch has to be smaller"
    )


def enough(request: PlanRequest, budget: float, tried: bool) -> str:
    """How many of the cluster's devices would do, found within `budget` seconds. `tried`: no plan
    is known to fit on those at hand."""
    devices, limits = request.cluster.devices, request.memory_limit or ()
    if len({replace(d, name="") for d in devices}) > 1 or len(set(limits)) != 1:
        return "how many devices would do cannot be told, because they are not equal"
    here, limit = len(devices), limits[0]
    needed = state_bytes(request.space.graph)
    least = max(math.ceil(needed / limit), 1)
    each = f"such devices of {format_quantity(limit, 'B')}"
    if least > MAX_DEVICES:
        state = format_quantity(needed, "B")
        return f"not even {MAX_DEVICES:,} {each} would do: the state alone is {state}"
    found = _smallest(_FitTest(request, limit), budget, here, max(here if tried else 0, least - 1))
    if found.high is None:
        if found.low >= MAX_DEVICES:
            return f"not even {MAX_DEVICES:,} {each} would do"
        return (
            f"whether more than {found.low:,} {each} would do was not found out within the budget"
        )
    if found.high == here:
        return f"on these devices there is a plan that fits, by {found.method}"
    would = f"{found.high:,} {each} would do (by {found.method})"
    if found.high > found.low + 1:
        return f"{would}; whether as few as {found.low + 1:,} would was not found out in the budget"
    return f"{would}, {found.low:,} would not"


@dataclass(frozen=True, slots=True)
class _DeviceRange:
    """No plan was found, or none can be, for `low` devices; one for `high`, if that is a number."""

    low: int
    high: int | None
    method: str = ""


def _smallest(
    trial: Callable[[int, float], str], budget: float, here: int, low: int
) -> _DeviceRange:
    """Doubles from `low`, which is known not to do, or `here`; then bisects."""
    ends, pace = work_seconds() + budget, 0.0
    found = _DeviceRange(low, None)
    following = here if low < here else min(max(2 * here, low + 1), MAX_DEVICES)
    while found.low < MAX_DEVICES and (found.high is None or found.high > found.low + 1):
        if found.high is not None:
            following = (found.low + found.high) // 2
        began = work_seconds()
        if ends - began <= GROWTH * pace * following:
            break
        method = trial(following, ends - began)
        pace = (work_seconds() - began) / following
        if method:
            found = _DeviceRange(found.low, following, method)
            if following == here:
                break
        else:
            found = replace(found, low=following)
            following = min(2 * following, MAX_DEVICES)
    return found


@dataclass(frozen=True, slots=True)
class _FitTest:
    """Plans for a number of devices; called, it says which method's plan fits, "" if none does."""

    request: PlanRequest
    limit: int

    def __call__(self, count: int, budget: float) -> str:
        place = repeated(self.request.cluster, count)
        limits, costs = (self.limit,) * count, self.request.costs
        costs = (
            replace(costs, cluster=place)
            if isinstance(costs, DefaultCosts)
            else DefaultCosts(place)
        )
        request = replace(self.request, cluster=place, costs=costs, memory_limit=limits, tell=None)
        for method in QUICK_METHODS:
            if method not in METHODS:
                continue
            try:
                for candidate in candidates(request, method, budget, SearchLog()):
                    if fits(request, candidate):
                        return method
            except UnsuitableMethod:
                continue
        return ""


def repeated(cluster: Cluster, count: int) -> Cluster:
    """So many of the cluster's first device, each with a link out and one in as fast as the slowest
    on its way to the second (where it is alone, as its memory)."""
    device = cluster.devices[0]
    wires = [cluster.links[k] for k in cluster.routes[0][1]] if len(cluster.devices) > 1 else []
    bandwidth = min([wire.bandwidth for wire in wires] or [device.memory_bandwidth])
    latency = sum(wire.latency for wire in wires) / 2
    names = [f"{device.kind}{k}" for k in range(count)]
    links = [
        Link(f"{name}.{way}", bandwidth, latency, "as slow as the slowest of the cluster at hand")
        for name in names
        for way in ("out", "in")
    ]
    return Cluster(
        name=f"{count} times {device.kind}",
        description=f"{count} devices as in {cluster.name}",
        devices=tuple(_named(device, name) for name in names),
        links=tuple(links),
        routes=tuple(
            tuple((2 * a, 2 * b + 1) if a != b else () for b in range(count)) for a in range(count)
        ),
        host_routes=((),) * count,
        communication_on_device=cluster.communication_on_device,
    )


def _named(device: Device, name: str) -> Device:
    return replace(device, name=name)
