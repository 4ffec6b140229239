"""Plans whose ranks train on stale parameters: what they say, and what a step is predicted to take.

Part of the room plan. A Plan by the method ssp and a number of clocks come in, out goes a Plan that
says so. Its tasks are those of data parallelism, of which only the work on the devices is done;
instead of the exchanges each rank sends its changes to the servers of a table and is sent those of
the others. Messages may be as late as staleness allows, so that a step takes as long as its work or
as its messages, whichever is longer; with staleness 0 as long as both. Messages are not simulated
one by one, and a note says so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.graph import PARAMETER
from apportion.plan.plan import Plan, Prediction

SSP = "ssp"


def with_staleness(plan: Plan, staleness: int | None) -> Plan:
    """A Plan of the method ssp with its staleness (0 if None); plans of others are left alone.
    Raises ValueError if it is not a number of steps."""
    if plan.method != SSP:
        return plan
    clocks = staleness or 0
    if clocks < 0:
        raise ValueError(f"a staleness of {clocks} steps makes no sense; give 0 or more")
    note = (
        f"parameters may be {clocks} steps old; a step is predicted from its work and its bytes, "
        "not message by message"
    )
    return replace(
        plan,
        staleness=clocks,
        predicted=stale_prediction(replace(plan, staleness=clocks, simulated=plan.step)),
        notes=(*plan.notes, note),
    )


def stale_prediction(plan: Plan) -> Prediction:
    """What a step of a Plan with a staleness takes and moves; its peaks are the Plan's."""
    tasks, line = plan.tasks, plan.timeline
    length = line.end_ns - line.start_ns
    works = tasks.is_work & (tasks.task_kinds.lane[tasks.kind] == 0)
    count = len(plan.cluster.devices)
    work = np.bincount(tasks.device[works], length[works], count).max(initial=0) / 1e9
    made = {value for op in plan.graph.ops for value in op.outputs}
    values = enumerate(plan.graph.values)
    parameters = sum(v.nbytes for k, v in values if v.role == PARAMETER and k not in made)
    sent = 2 * (count - 1) * parameters // count  # changes to servers, rows to clients
    wire = max(_wire_seconds(plan, device, sent) for device in range(count)) if count > 1 else 0.0
    step = work + wire if plan.staleness == 0 else max(work, wire)
    busy = tuple([float(work / step) if step else 0.0] * count)
    peaks = plan.predicted.peak_bytes
    return Prediction(float(step), peaks, sent * count, busy)


def _wire_seconds(plan: Plan, device: int, nbytes: int) -> float:
    """Seconds that the slowest link of a device is busy with what it sends to all others."""
    links = plan.cluster.links
    others = [d for d in range(len(plan.cluster.devices)) if d != device]
    routes = [plan.cluster.routes[device][other] for other in others]
    slowest = min(links[link].bandwidth for route in routes for link in route)
    return nbytes / slowest
