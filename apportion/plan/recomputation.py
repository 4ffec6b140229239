"""Candidates that recompute: plans that fit because the backward computes something again.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with recomputed Ops (memory/), if that is wanted. Every set of Ops that is considered is carried
over, lowered and simulated as any other Candidate.

    none     nothing is recomputed
    auto     what must be for the plan to fit, in the least time
    modules  as few whole layers as must be for the plan to fit
    full     all but what is handed from one segment of the forward to the next
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from apportion.memory import (
    MemoryPlan,
    RecomputeOutcome,
    choose_by_model,
    choose_modules,
    full_recompute,
    recompute,
    step_model,
)
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import PlanRequest, excess, fits, now, ranking_key
from apportion.plan.planned_memory import with_memory
from apportion.quantity import format_quantity

KEEP, AUTO, MODULES, FULL = "none", "auto", "modules", "full"
RECOMPUTE_MODES = (KEEP, AUTO, MODULES, FULL)
HOPE = 0.02  # of a step, by which what is promised may be too long


def check_recompute(mode: str) -> None:
    """Raises ValueError unless there is such a way to recompute."""
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"cannot recompute {mode!r}; choose {', '.join(RECOMPUTE_MODES)}")


def replace_recomputed(
    request: PlanRequest, chosen: Selection, mode: str, ends: float = math.inf
) -> Selection:
    """The choice with recomputed Ops, where these are wanted; where it is decided what must be, for
    what other methods found too, until the moment `ends`."""
    needed = mode in (AUTO, MODULES)  # what must be, and else nothing
    if mode == KEEP or (needed and fits(request, chosen.best)) or chosen.interrupted:
        return chosen

    beside: list[int] = []  # what was held at least beside the state

    def decide(start: Candidate) -> Candidate:
        device, limit = _fullest(request, start)
        least = _kept_after(start, device) + min(beside, default=0)
        if needed and least > limit:
            return start
        found = _recomputed(request, start, mode, ends)
        beside.append(found.timeline.peak_bytes[device] - _kept_after(found, device))
        return found

    return best_decided(request, chosen, needed, decide, ends)


def _fullest(request: PlanRequest, start: Candidate) -> tuple[int, int]:
    """The device that is most over its limit, and that limit."""
    over = excess(request, start)
    device = max(range(len(over)), key=over.__getitem__)
    return device, start.timeline.peak_bytes[device] - over[device]


def best_decided(
    request: PlanRequest,
    chosen: Selection,
    several: bool,
    decide: Callable[[Candidate], Candidate],
    ends: float,
) -> Selection:
    """The choice with the best of what is decided about its Candidate and, with `several`, about
    those that other methods found: these while nothing fits, and else until the moment `ends`, as
    each takes long. Of these the one comes next that would be quickest if the time that it needs
    for what it is over its limit were that of the first."""
    start, found = chosen.best, decide(chosen.best)
    took = found.timeline.step_seconds - start.timeline.step_seconds
    rate = max(took, 0.0) / max(1, *excess(request, start))

    def promise(one: Candidate) -> float:
        return one.timeline.step_seconds + rate * max(excess(request, one))

    decided = [found]
    for other in sorted(chosen.starts, key=promise) if several else ():
        if fits(request, found) and (
            now(request) > ends or promise(other) >= (1 + HOPE) * found.timeline.step_seconds
        ):
            break
        decided.append(decide(other))
        found = min(found, decided[-1], key=lambda one: ranking_key(request, one))
    return chosen.decided(request, found, decided)


def _recomputed(request: PlanRequest, start: Candidate, mode: str, ends: float) -> Candidate:
    """A Candidate with recomputed Ops, or itself if these do not help. When the moment `ends` is
    over and nothing fits yet, all is recomputed that can be."""
    device, _ = _fullest(request, start)
    graph = request.space.source
    model = step_model(
        start.space, start.tasks, start.timeline, device, request.cluster, start.cost
    )
    known: dict[frozenset[int], Candidate] = {frozenset(): start}

    def outcome(ops: frozenset[int]) -> RecomputeOutcome:
        if ops not in known:
            known[ops] = _scored(request, start, ops)
        return RecomputeOutcome(max(excess(request, known[ops])), known[ops].timeline.step_seconds)

    if mode == FULL:
        ops = full_recompute(graph, model.costs)
        outcome(ops)
    else:
        choose = choose_modules if mode == MODULES else choose_by_model
        ops = choose(model, outcome(frozenset()), outcome, lambda: now(request) > ends).ops
    if not ops:
        return start
    found = known[ops]
    note = _in_words(start, found, device)
    return replace(found, notes=(*found.notes, note))


def _kept_after(start: Candidate, device: int) -> int:
    """Bytes that a device holds when the step is over: its state, which nothing recomputed makes
    smaller."""
    return int(start.timeline.curves[device].nbytes[-1])


def _scored(request: PlanRequest, start: Candidate, ops: frozenset[int]) -> Candidate:
    made = recompute(request.space.source, ops)
    repeats = tuple(sorted({made.origins[op] for op in made.repeats}))
    return with_memory(request, start, MemoryPlan(recomputed=repeats))


def _in_words(start: Candidate, found: Candidate, device: int) -> str:
    before, after = (one.timeline.peak_bytes[device] for one in (start, found))
    longer = found.timeline.step_seconds / start.timeline.step_seconds - 1
    return (
        f"{len(found.memory.recomputed)} operators are computed again in the backward: "
        f"{format_quantity(before, 'B')} become {format_quantity(after, 'B')} on device {device}, "
        f"and a step takes {longer:+.1%}"
    )
