"""When gradients travel: the policy of a plan's exchanges, tuned by the simulator.

A part of plan/. A Candidate comes in, whose steps do not overlap. Under `p3` the one goes out whose
next step begins before all parameters are new (split/communication.py); which share of the
gradients is sent as it is made, and which in the order of need, is tried out, coarsely and then
around the best. Under `auto` that one only if a step is predicted to be shorter and fits as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from apportion.lower import TaskGraph, runnable, with_storage
from apportion.machine import Cluster
from apportion.plan.candidate import Candidate
from apportion.simulate import simulate
from apportion.split import P3, POLICIES, WFBP, Communication, Strategy

AUTO = "auto"
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
FINER = 0.125
GAIN = 0.01  # that is worth the memory of gradients under way

Fits = Callable[[Candidate], bool]


def check_communication(policy: str) -> str:
    """The policy; raises ValueError unless there is such a one."""
    known = (*POLICIES, AUTO)
    if policy not in known:
        raise ValueError(f"there is no communication {policy!r}; choose {', '.join(known)}")
    return policy


def with_communication(found: Candidate, cluster: Cluster, policy: str, fits: Fits) -> Candidate:
    """The Candidate with exchanges as the policy says."""
    if policy == WFBP or len(cluster.devices) < 2:
        return found
    tried: dict[float, Candidate] = {}

    def seconds(share: float) -> float:
        if share not in tried:
            tried[share] = _overlapping(found, cluster, share)
        return tried[share].timeline.step_seconds

    if _overlapping_tasks(found, cluster, SHARES[0]).late_start < 0:
        return found  # there is nothing to send, or nothing that could be late
    best = min(SHARES, key=seconds)
    around = [share for share in (best - FINER, best + FINER) if 0 <= share <= 1]
    best = min([best, *around], key=seconds)
    if policy == P3:
        return tried[best]
    worth = seconds(best) < (1 - GAIN) * found.timeline.step_seconds
    return tried[best] if worth and (fits(tried[best]) or not fits(found)) else found


def _overlapping(found: Candidate, cluster: Cluster, share: float) -> Candidate:
    tasks = _overlapping_tasks(found, cluster, share)
    result = replace(found.found, strategy=_strategy(found, share))
    line = simulate(tasks, cluster, found.cost)
    return replace(found, found=result, tasks=tasks, timeline=line)


def _overlapping_tasks(found: Candidate, cluster: Cluster, share: float) -> TaskGraph:
    tasks = runnable(found.space, _strategy(found, share), len(cluster.devices))
    return with_storage(tasks, found.storage)


def _strategy(found: Candidate, share: float) -> Strategy:
    return replace(found.found.strategy, communication=Communication(P3, share))
