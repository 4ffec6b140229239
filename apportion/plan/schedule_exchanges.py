"""How a plan's messages travel: a policy's decisions, made with the simulator.

Part of the room plan. A Strategy whose steps do not overlap comes in, with the step that follows;
out goes the same with a Communication (split/communication.py), and its step:

    none           gradients are held back until the backward pass is over
    wfbp           the Strategy as it is
    p3             slices of 40,000 numbers, one of them on the wire, as its authors released it
    tictac         whole messages, ranked by tictac.py
    bytescheduler  the slice and the credit of SLICES and CREDITS that take least time
    auto           whichever of these, and of orders, slices and credits besides, takes least time;
                   of those that fit in memory if there are some. Steps overlap as well where that
                   is predicted to gain nothing and a link is busy for much of the step (BUSY)

Under the last four steps overlap, if anything can travel meanwhile; a note says why if not. Where
links are busy for next to nothing of a step (LITTLE), gradients are held back under every policy:
to send them meanwhile costs processors more than it could gain, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apportion.lower import Storage, TaskGraph, pair_bytes, runnable, with_storage
from apportion.machine import Cluster, CostModel, on_different_hosts, wire_seconds
from apportion.plan.tictac import tictac_ranking
from apportion.simulate import Timeline, nanoseconds, simulate
from apportion.split import (
    AUTO,
    BYTESCHEDULER,
    NEED,
    NONE,
    P3,
    POLICIES,
    RANKED,
    TICTAC,
    WFBP,
    Communication,
    Space,
    Strategy,
)

P3_SLICE = 4 * 40_000
SLICES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
CREDITS = (1 << 17, 1 << 18, 0)
GAIN = 0.01  # that is worth the memory of gradients under way, or another slice and credit
BUSY = 0.4
"""The share of a step for which a link is busy, from which on steps overlap though no gain is
predicted: what a rank that is late for once leaves unhidden, a step that ends then has to wait for.
At half the step, overlapping took 0.94 to 1.02 of the time of four models (docs/p3.md),
at a quarter 0.98 to 1.07."""

LITTLE = 0.03
"""The share of a step for which the busiest link has something to carry, up to which there is
nothing to hide. What overlap costs processors then is told in docs/p3.md."""

ON_ONE_MACHINE = (
    "steps do not overlap: between processes of one machine no message travels while they compute"
)
NOTHING_LATE = (
    "steps do not overlap: no message brings what only updates read; clipping by the norm of all "
    "gradients, or a loss scale, has to have all of them first"
)
ABOUT_OVERLAP = ("steps overlap", "steps do not overlap", "gradients are held back")
NOT_ON_GPUS = "; ranks on GPUs do not do so yet, and their step will take longer than is predicted"


def check_communication(policy: str) -> str:
    """The policy; raises ValueError unless there is such a one."""
    if policy not in POLICIES:
        raise ValueError(f"there is no communication {policy!r}; choose {', '.join(POLICIES)}")
    return policy


@dataclass(frozen=True, slots=True)
class ScheduledExchanges:
    """A Strategy with its Communication, and the step that follows. `note`: how steps overlap, or
    why they do not though they were asked to."""

    strategy: Strategy
    tasks: TaskGraph
    timeline: Timeline
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds


@dataclass(frozen=True)
class ExchangeScheduler:
    """What is needed to try out a Communication on a Strategy."""

    space: Space
    given: ScheduledExchanges
    storage: Storage
    cost: CostModel
    cluster: Cluster

    def tried(self, how: Communication) -> ScheduledExchanges:
        """The step with these decisions."""
        strategy = replace(self.given.strategy, communication=how)
        tasks = runnable(self.space, strategy, len(self.cluster.devices))
        return self._simulated(strategy, with_storage(tasks, self.storage))

    def _simulated(self, strategy: Strategy, tasks: TaskGraph) -> ScheduledExchanges:
        line = simulate(tasks, self.cluster, self.cost)
        how = strategy.communication
        note = f"gradients are held back: {how}" if how.held else f"steps overlap: {how}"
        return ScheduledExchanges(strategy, tasks, line, note + NOT_ON_GPUS * self.on_gpus)

    def paced(self, found: ScheduledExchanges, size: int, credit: int) -> ScheduledExchanges:
        """The same messages in the same order, with another slice and credit."""
        how = replace(found.strategy.communication, slice_bytes=size, credit_bytes=credit)
        tasks = replace(found.tasks, slice_bytes=size, credit_bytes=credit)
        return self._simulated(replace(found.strategy, communication=how), tasks)

    def best_pace(self, found: ScheduledExchanges) -> ScheduledExchanges:
        """The slice and the credit that take least time; of equals the largest slice, which costs
        the processors least."""
        tried = [
            self.paced(found, size, credit)
            for size in reversed(SLICES)
            for credit in CREDITS
            if not 0 < credit < size
        ]
        return min([*tried, self.paced(found, 1 << 17, 1 << 17)], key=lambda each: each.seconds)

    def ranked(self, by_need: ScheduledExchanges) -> ScheduledExchanges:
        """Whole messages in TicTac's order."""
        tasks = by_need.tasks
        seconds = nanoseconds(tasks, self.cluster, self.cost) / 1e9
        slowest = max(1 / link.bandwidth for link in self.cluster.links)
        ranking = tictac_ranking(tasks, seconds, slowest)
        how = self.decided(TICTAC, overlaps=True, order=RANKED, ranking=ranking)
        return self.tried(how)

    def decided(self, policy: str, **decisions: Any) -> Communication:
        """Decisions of a policy, of exchanges by the algorithm that is given."""
        how = self.given.strategy.communication
        return Communication(policy, **decisions, algorithm=how.algorithm, levels=how.levels)

    @property
    def on_gpus(self) -> bool:
        return any(device.kind != "cpu" for device in self.cluster.devices)

    @property
    def on_one_machine(self) -> bool:
        """Whether no wire could be busy while the devices compute."""
        apart = on_different_hosts(self.cluster).any()
        return self.cluster.communication_on_device and not apart


def schedule_exchanges(
    scheduler: ExchangeScheduler, policy: str, fits: Callable[[Timeline], bool]
) -> ScheduledExchanges:
    """The exchanges as the policy says. By `auto` steps overlap if a step is predicted to be
    shorter for it and to fit as well, and not on GPUs, where they would not run so."""
    given = scheduler.given
    asked = policy != AUTO
    if len(scheduler.cluster.devices) < 2:
        return given
    if policy == NONE:
        return scheduler.tried(scheduler.decided(NONE, held=True))
    share = _wire_seconds(given.tasks, scheduler.cluster) / max(given.seconds, 1e-9)
    if 0 < share < LITTLE and not scheduler.on_gpus:
        held = scheduler.tried(scheduler.decided(policy, held=True))
        note = f"{held.note}; links carry messages for {share:.1%} of a step, too little to hide"
        if fits(held.timeline) or not fits(given.timeline):
            return replace(held, note=note)
    if policy == WFBP:
        return given
    if scheduler.on_one_machine:
        return replace(given, note=ON_ONE_MACHINE if asked else "")
    if policy == AUTO and scheduler.on_gpus:
        return given
    start = scheduler.decided(policy, overlaps=True, order=NEED)
    by_need = scheduler.tried(replace(start, slice_bytes=P3_SLICE, credit_bytes=P3_SLICE))
    if by_need.tasks.late_start < 0:
        return replace(given, note=NOTHING_LATE if asked else "")
    if policy == P3:
        return by_need
    if policy == TICTAC:
        return scheduler.ranked(by_need)
    if policy == BYTESCHEDULER:
        return scheduler.best_pace(by_need)
    return _best(given, _worth_trying(scheduler, by_need), fits)


def _worth_trying(
    scheduler: ExchangeScheduler, by_need: ScheduledExchanges
) -> Iterator[ScheduledExchanges]:
    """What `auto` chooses from, the plainest first: what the others would choose among it."""
    yield by_need
    yield scheduler.best_pace(by_need)
    ranked = scheduler.ranked(by_need)
    how = replace(ranked.strategy.communication, policy=AUTO)
    ranked = replace(ranked, strategy=replace(ranked.strategy, communication=how))
    yield ranked
    yield scheduler.best_pace(ranked)


def _best(
    given: ScheduledExchanges,
    others: Iterator[ScheduledExchanges],
    fits: Callable[[Timeline], bool],
) -> ScheduledExchanges:
    """The fastest, if it is worth its memory; of those that are about as fast the first, since
    slices and credits that differ by less than a prediction errs are not told apart by it."""
    tried = list(others)
    least = min(each.seconds for each in tried)
    best = next(each for each in tried if each.seconds <= (1 + GAIN) * least)
    share = 1 + GAIN if _busiest_link(best.timeline) >= BUSY else 1 - GAIN
    worth = best.seconds < share * given.seconds
    return best if worth and (fits(best.timeline) or not fits(given.timeline)) else given


def _wire_seconds(tasks: TaskGraph, cluster: Cluster) -> float:
    """For how long the busiest link between hosts carries the messages of a step."""
    carried = pair_bytes(tasks)
    source, target = np.nonzero(carried)
    together, nbytes = np.zeros(len(source), np.int64), carried[source, target].astype(np.int64)
    return float(wire_seconds(together, source, target, nbytes, cluster).max(initial=0.0))


def _busiest_link(line: Timeline) -> float:
    """The share of a step for which one link is busy, the largest."""
    spans = line.link_spans
    if spans is None or not len(spans.link):
        return 0.0
    busy = np.bincount(spans.link, spans.end - spans.start)
    return float(busy.max() / max(line.step_seconds * 1e9, 1.0))
