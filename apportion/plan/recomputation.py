"""Candidates that recompute: plans that fit because the backward computes something again.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with recomputed Ops (memory/), if that is wanted. Every set of Ops that is considered is carried
over, lowered and simulated as any other Candidate.

    none  nothing is recomputed
    auto  what must be for the plan to fit, in the least time
    full  all but what is handed from one segment of the forward to the next
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from apportion.memory import (
    MemoryPlan,
    RecomputeOutcome,
    choose_by_model,
    full_recompute,
    recompute,
    step_model,
)
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import (
    PlanRequest,
    SearchLog,
    candidates,
    excess,
    fits,
    now,
    ranking_key,
)
from apportion.plan.planned_memory import with_memory
from apportion.quantity import format_quantity
from apportion.search import UnsuitableMethod

KEEP, AUTO, FULL = "none", "auto", "full"
RECOMPUTE_MODES = (KEEP, AUTO, FULL)
STARTS = ("data", "fsdp")  # whose plans are tried too where all methods are


def check_recompute(mode: str) -> None:
    """Raises ValueError unless there is such a way to recompute."""
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"cannot recompute {mode!r}; choose {', '.join(RECOMPUTE_MODES)}")


def replace_recomputed(
    request: PlanRequest, chosen: Selection, mode: str, several: bool, ends: float = math.inf
) -> Selection:
    """The choice with recomputed Ops, where these are wanted; `several`: beside the best Candidate
    those of other methods are tried too, until the moment `ends`."""
    best = chosen.best
    if mode == KEEP or (mode == AUTO and fits(request, best)) or chosen.interrupted:
        return chosen
    many = several and mode == AUTO
    least = best_decided(request, best, many, lambda one: _recomputed(request, one, mode), ends)
    return replace(chosen, best=least, others=())


def best_decided(
    request: PlanRequest,
    best: Candidate,
    several: bool,
    decide: Callable[[Candidate], Candidate],
    ends: float,
) -> Candidate:
    """The best of what is decided about a Candidate and, with `several`, about those of other
    methods: these while nothing fits, and else until the moment `ends`, as each takes long."""
    found = decide(best)
    for start in other_starts(request, best) if several else ():
        if fits(request, found) and now(request) > ends:
            break
        found = min(found, decide(start), key=lambda one: ranking_key(request, one))
    return found


def other_starts(request: PlanRequest, best: Candidate) -> Iterator[Candidate]:
    """Candidates of other methods to begin with."""
    for method in STARTS:
        if method != best.method:
            try:
                yield from candidates(request, method, 0.0, SearchLog())
            except UnsuitableMethod:
                continue


def _recomputed(request: PlanRequest, start: Candidate, mode: str) -> Candidate:
    """A Candidate with recomputed Ops, or itself if these do not help."""
    over = excess(request, start)
    device = max(range(len(over)), key=over.__getitem__)
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
        ops = choose_by_model(model, outcome(frozenset()), outcome).ops
    if not ops:
        return start
    found = known[ops]
    note = _in_words(start, found, device)
    return replace(found, notes=(*found.notes, note))


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
