"""Candidates that offload: plans that fit because activations lie in the host's memory meanwhile.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with offloaded Values, and with recomputed Ops where these are allowed (memory/choose_memory.py).
Every decision that is considered is carried over, lowered and simulated as any other Candidate.

    none  nothing is offloaded
    auto  what must be for the plan to fit, in the least time
    full  whatever the forward keeps for the backward
"""

from __future__ import annotations

import math
from dataclasses import replace

from apportion.machine import host_link
from apportion.memory import (
    HostWay,
    MemoryDecision,
    MemoryPlan,
    RecomputeOutcome,
    choose_by_model,
    choose_memory,
    full_recompute,
    offloadable,
    recompute,
    step_model,
    time_offloads,
    views_of,
)
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import PlanRequest, excess, fits, now
from apportion.plan.planned_memory import with_memory
from apportion.plan.recomputation import AUTO, FULL, KEEP, best_decided
from apportion.quantity import format_quantity
from apportion.simulate import host_excess, host_peaks

OFFLOAD_MODES = (KEEP, AUTO, FULL)


def check_offload(mode: str) -> None:
    """Raises ValueError unless there is such a way to offload."""
    if mode not in OFFLOAD_MODES:
        raise ValueError(f"cannot offload {mode!r}; choose {', '.join(OFFLOAD_MODES)}")


def replace_offloaded(
    request: PlanRequest,
    chosen: Selection,
    recomputing: str,
    offloading: str,
    ends: float = math.inf,
) -> Selection:
    """The choice with offloaded Values and recomputed Ops, where these are wanted; where it is
    decided what must be, for what other methods found too, until the moment `ends`."""
    wanted = FULL in (recomputing, offloading)
    if chosen.interrupted or (not wanted and fits(request, chosen.best)):
        return chosen

    def decide(start: Candidate) -> Candidate:
        return _Trade(request, start, ends).best(recomputing, offloading)

    return best_decided(request, chosen, not wanted, decide, ends)


class _Trade:
    """Decisions about one Candidate, each simulated once."""

    def __init__(self, request: PlanRequest, start: Candidate, ends: float) -> None:
        self.request, self.start, self.ends = request, start, ends
        over = excess(request, start)
        self.device = max(range(len(over)), key=over.__getitem__)
        self.graph = request.space.source
        self.model = step_model(
            start.space, start.tasks, start.timeline, self.device, request.cluster, start.cost
        )
        self.costs = self.model.costs
        link = host_link(request.cluster, self.device)
        self.way = HostWay(link, not request.cluster.communication_on_device)
        self.known: dict[MemoryDecision, Candidate] = {MemoryDecision(): start}

    def best(self, recomputing: str, offloading: str) -> Candidate:
        """The Candidate with what is recomputed and offloaded, or itself if that does not help."""
        if FULL in (recomputing, offloading):
            decision = self._full(recomputing, offloading)
        else:
            decision = self._chosen(recomputing != KEEP)
        found = self.known[decision]
        return found if found is self.start else replace(found, notes=self._notes(found))

    def _full(self, recomputing: str, offloading: str) -> MemoryDecision:
        """Whatever can be, of what is wanted in full; and of what is wanted where it must be, if
        that is not enough."""
        graph, costs, none = self.graph, self.costs, frozenset[int]()
        ops = full_recompute(graph, costs) if recomputing == FULL else none
        values = offloadable(graph, costs, ops) if offloading == FULL else none
        decision = MemoryDecision(ops, values)
        if self.outcome(decision).over > 0 and AUTO in (recomputing, offloading):
            ops = full_recompute(graph, costs)
            decision = MemoryDecision(ops, offloadable(graph, costs, ops))
            self.outcome(decision)
        return decision

    def _chosen(self, recomputes: bool) -> MemoryDecision:
        """The fastest that fits, of all that are tried."""
        graph, costs, kept = self.graph, self.costs, self.outcome(MemoryDecision())
        if recomputes:  # first, because it takes least time to decide
            choose_by_model(
                self.model, kept, lambda ops: self.outcome(MemoryDecision(ops)), self._is_late
            )
        choose_memory(graph, costs, self.way, kept, self.outcome, recomputes, is_late=self._is_late)
        return min(self.known, key=lambda one: self.outcome(one).rank)

    def _is_late(self) -> bool:
        return now(self.request) > self.ends

    def outcome(self, decision: MemoryDecision) -> RecomputeOutcome:
        """A decision, simulated."""
        if decision not in self.known:
            self.known[decision] = self._scored(decision)
        found = self.known[decision]
        return RecomputeOutcome(max(excess(self.request, found)), found.timeline.step_seconds)

    def _scored(self, decision: MemoryDecision) -> Candidate:
        request, start, graph = self.request, self.start, self.graph
        again = recompute(graph, decision.ops | views_of(graph, self.costs, decision.values))
        away = time_offloads(again, self.costs, self.way, decision.values)
        repeats = tuple(sorted({again.origins[op] for op in again.repeats}))
        return with_memory(request, start, MemoryPlan(recomputed=repeats, offloaded=away))

    def _notes(self, found: Candidate) -> tuple[str, ...]:
        before, after = (one.timeline.peak_bytes[self.device] for one in (self.start, found))
        longer = found.timeline.step_seconds / self.start.timeline.step_seconds - 1
        viewed = {each.value for each in found.memory.offloaded}
        views = views_of(self.graph, self.costs, frozenset(viewed))
        repeated = len(set(found.memory.recomputed) - views)
        told = []
        if found.memory.offloaded:
            held = format_quantity(host_peaks(found.tasks)[self.device], "B")
            told.append(
                f"{len(found.memory.offloaded)} activations wait in the host's memory ({held})"
            )
        if repeated:
            told.append(f"{repeated} operators are computed again in the backward")
        note = (
            f"{' and '.join(told)}: {format_quantity(before, 'B')} become "
            f"{format_quantity(after, 'B')} on device {self.device}, and a step takes {longer:+.1%}"
        )
        return (*found.notes, note, *self._host_notes(found))

    def _host_notes(self, found: Candidate) -> tuple[str, ...]:
        """A sentence for each host that has no room for what is offloaded to it."""
        return tuple(
            f"host {name!r} has {format_quantity(there, 'B')} of memory, and "
            f"{format_quantity(held, 'B')} would be offloaded to it: offload less, or recompute"
            for name, (held, there) in host_excess(found.tasks, self.request.cluster).items()
        )
