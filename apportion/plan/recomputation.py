"""Candidates that recompute: plans that fit because the backward computes something again.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with recomputed Ops (memory/), if that is wanted. Every set of Ops that is considered is carried
over, lowered and simulated as any other Candidate.

    none  nothing is recomputed
    auto  what must be for the plan to fit, in the least time
    full  all but what is handed from one segment of the forward to the next
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from apportion.lower import TaskGraph
from apportion.machine import CostModel
from apportion.memory import (
    RecomputeOutcome,
    carry_strategy,
    choose_by_model,
    full_recompute,
    recompute,
    step_model,
)
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import (
    CostSource,
    PlanRequest,
    SearchLog,
    candidates,
    excess,
    fits,
    ranking_key,
    scored,
)
from apportion.quantity import format_quantity
from apportion.search import UnsuitableMethod
from apportion.split import Space, Strategy

KEEP, AUTO, FULL = "none", "auto", "full"
RECOMPUTE_MODES = (KEEP, AUTO, FULL)
STARTS = ("data", "fsdp")  # whose plans are tried too where all methods are


def check_recompute(mode: str) -> None:
    """Raises ValueError unless there is such a way to recompute."""
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"cannot recompute {mode!r}; choose {', '.join(RECOMPUTE_MODES)}")


def replace_recomputed(
    request: PlanRequest, chosen: Selection, mode: str, several: bool
) -> Selection:
    """The choice with recomputed Ops, where these are wanted; `several`: beside the best Candidate
    those of other methods are tried too."""
    best = chosen.best
    if mode == KEEP or (mode == AUTO and fits(request, best)) or chosen.interrupted:
        return chosen
    starts = [best, *(other_starts(request, best) if several and mode == AUTO else ())]
    found = [_recomputed(request, start, mode) for start in starts]
    least = min(found, key=lambda candidate: ranking_key(request, candidate))
    return replace(chosen, best=least, others=())


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
    strategy = carry_strategy(start.found.strategy, request.space, made)
    found = replace(start.found, strategy=strategy, space=None, others=())
    again = replace(request, space=Space(made.graph), costs=KnownCosts(request.costs))
    candidate = scored(again, start.method, found, start.search_seconds)
    return replace(
        candidate,
        notes=start.notes,
        curve=start.curve,
        figures=start.figures,
        recomputed=tuple(sorted({made.origins[op] for op in made.copies})),
    )


def _in_words(start: Candidate, found: Candidate, device: int) -> str:
    before, after = (one.timeline.peak_bytes[device] for one in (start, found))
    longer = found.timeline.step_seconds / start.timeline.step_seconds - 1
    return (
        f"{len(found.recomputed)} operators are computed again in the backward: "
        f"{format_quantity(before, 'B')} become {format_quantity(after, 'B')} on device {device}, "
        f"and a step takes {longer:+.1%}"
    )


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Costs as far as they are known: a copy is the same call as the Op that it repeats, and
    nothing is measured for it."""

    source: CostSource

    @property
    def seconds(self) -> float:
        return self.source.seconds

    def known(self) -> CostModel:
        return self.source.known()

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return self.source.known()
