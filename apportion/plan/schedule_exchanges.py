"""When gradients travel: the policy of a plan's exchanges, tuned by the simulator.

A part of plan/. A Strategy whose steps do not overlap comes in, with what is known of it. Under
`p3` the one goes out whose next step begins before all parameters are new (split/communication.py);
which share of the gradients is sent as it is made, and which in the order of need, is tried out,
coarsely and then around the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from apportion.lower import Storage, TaskGraph, runnable, with_storage
from apportion.machine import Cluster, CostModel, on_different_hosts
from apportion.simulate import Timeline, simulate
from apportion.split import P3, POLICIES, WFBP, Communication, Space, Strategy

AUTO = "auto"
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
FINER = 0.125
GAIN = 0.01  # that is worth the memory of gradients under way

ON_ONE_MACHINE = (
    "steps do not overlap: between processes of one machine no message travels while they compute"
)
NOTHING_LATE = "steps do not overlap: no message brings what only updates read"


def check_communication(policy: str) -> str:
    """The policy; raises ValueError unless there is such a one."""
    known = (*POLICIES, AUTO)
    if policy not in known:
        raise ValueError(f"there is no communication {policy!r}; choose {', '.join(known)}")
    return policy


@dataclass(frozen=True, slots=True)
class ScheduledExchanges:
    """A Strategy with its exchanges in an order, and the step that follows. `note`: why steps do
    not overlap though they were asked to."""

    strategy: Strategy
    tasks: TaskGraph
    timeline: Timeline
    note: str = ""


def schedule_exchanges(
    space: Space,
    given: ScheduledExchanges,
    storage: Storage,
    cost: CostModel,
    cluster: Cluster,
    policy: str,
    fits: Callable[[Timeline], bool],
) -> ScheduledExchanges:
    """The exchanges as the policy says. By `auto` steps overlap if a step is predicted to be
    shorter for it and to fit as well."""
    if policy == WFBP or len(cluster.devices) < 2:
        return given
    if cluster.communication_on_device and not on_different_hosts(cluster).any():
        return replace(given, note=ON_ONE_MACHINE if policy == P3 else "")
    tried: dict[float, ScheduledExchanges] = {}

    def seconds(share: float) -> float:
        if share not in tried:
            strategy = replace(given.strategy, communication=Communication(P3, share))
            tasks = with_storage(runnable(space, strategy, len(cluster.devices)), storage)
            tried[share] = ScheduledExchanges(strategy, tasks, simulate(tasks, cluster, cost))
        return tried[share].timeline.step_seconds

    if seconds(SHARES[0]) and tried[SHARES[0]].tasks.late_start < 0:
        return replace(given, note=NOTHING_LATE if policy == P3 else "")
    best = min(SHARES, key=seconds)
    around = [share for share in (best - FINER, best + FINER) if 0 <= share <= 1]
    found = tried[min([best, *around], key=seconds)]
    before, after = given.timeline, found.timeline
    worth = after.step_seconds < (1 - GAIN) * before.step_seconds
    return found if policy == P3 or (worth and (fits(after) or not fits(before))) else given
