"""What is chosen among candidates; and `auto`, the best of what many methods find.

Part of the room plan. A PlanRequest and a budget come in, a Selection goes out: the best Candidate
and the next best that differ. candidates.py asks the methods and scores what they find.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np

from apportion.collector import uncollected
from apportion.lower import Ends, TaskGraph
from apportion.machine import CostModel
from apportion.plan.candidate import Candidate, Curve
from apportion.plan.candidates import (
    DefaultCosts,
    PlanRequest,
    RankingKey,
    SearchLog,
    Start,
    candidates,
    fits,
    now,
    ranking_key,
    score_and_log,
    state_bytes,
)
from apportion.plan.plan import MethodFigures
from apportion.search import METHODS, UnsuitableMethod, tried_by_auto
from apportion.simulate import simulate

STARTS = 4  # how many of the best so far a method that takes starts is given
ROWS = 1_000_000  # tasks of plans that are kept for decisions about memory
BASELINE_SECONDS = 10.0  # that baselines have in any case; beyond that they keep to the budget
KEPT_SHARE = 1 / 3  # of the budget that is kept for methods which improve what others have found
PATIENCE_SHARE = 1 / 20  # of the budget that these go on without an improvement


@dataclass(frozen=True)
class Selection:
    """The best Candidate, the next best of those that fit, whether choosing was interrupted before
    all were tried, and the best of each method, the best of all first. Where nothing fits, `starts`
    are the quickest that other methods found: decisions about memory may begin with them."""

    best: Candidate
    interrupted: bool = False
    others: tuple[Candidate, ...] = ()
    tried: tuple[MethodFigures, ...] = ()
    starts: tuple[Candidate, ...] = ()

    def decided(
        self, request: PlanRequest, best: Candidate, several: Iterable[Candidate]
    ) -> Selection:
        """The choice of one of `several` Candidates with decisions about memory."""
        rows = {row.method: row for row in self.tried}
        if rows:
            rows |= {row.method: row for row in (_method_figures(request, one) for one in several)}
        tried = sorted(rows.values(), key=lambda row: (not row.fits, row.fits * row.step_seconds))
        return replace(self, best=best, others=(), tried=tuple(tried))


def choose(
    request: PlanRequest, method: str, budget: float, keep: int = 1, memory_seconds: float = 0.0
) -> Selection:
    """The best that a method, or "auto", finds within `budget` seconds, and `keep - 1` others, as
    far as there are so many that differ. While nothing fits, "auto" leaves `memory_seconds` of them
    to decisions about memory.

    An interrupt (KeyboardInterrupt) ends the search with the best so far, if there is any. Raises
    Unsuitable where the method is not for this step or cluster.
    """
    with uncollected():  # each full collection looks at all of torch
        if method == "auto":
            return _auto(request, budget, keep, memory_seconds)
        log = SearchLog()
        return _best_of(request, candidates(request, method, budget, log), log, keep)


def _auto(request: PlanRequest, budget: float, keep: int, memory_seconds: float) -> Selection:
    began = now(request)
    ends = began + budget
    tried: list[str] = []
    late: list[str] = []
    log, kept = SearchLog(), KEPT_SHARE * budget
    to_compile = {m: s for m in tried_by_auto() if (s := METHODS[m].compile_seconds()) > kept}
    if not any(METHODS[m].takes_starts for m in tried_by_auto() if m not in to_compile):
        kept = 0.0

    best: list[tuple[RankingKey, Start]] = []

    def each(methods: Iterable[str], kept: float) -> Iterator[Candidate]:
        nonlocal best
        for method in methods:
            row, left = METHODS[method], ends - now(request)
            if method == "single" and not _one_holds_state(request):
                continue
            nothing_fits = len(tried) <= 1 or best[0][0][0]
            if nothing_fits:
                left -= max(memory_seconds, 0.0 if row.takes_starts else kept)
            else:
                left -= 0.0 if row.takes_starts else kept
            if row.baseline:
                is_late = not nothing_fits and now(request) > max(ends, began + BASELINE_SECONDS)
            else:
                is_late = left <= 0
            if method in to_compile:
                continue
            if is_late:
                late.append(method)
                continue
            share = max(min(left, budget * row.share), 0.0)
            starts = [start for _, start in best] if row.takes_starts else ()
            try:
                patience = PATIENCE_SHARE * budget if row.takes_starts else math.inf
                for found in candidates(request, method, share, log, starts, patience):
                    best.append((ranking_key(request, found), (found.found.strategy, found.space)))
                    best = sorted(best, key=lambda one: one[0])[:STARTS]
                    yield found
                tried.append(method)
            except UnsuitableMethod:
                continue

    def several() -> Iterator[Candidate]:
        yield from each(tried_by_auto(), kept)
        missed = late[:]
        late.clear()
        yield from each(missed, 0.0)  # with what others have left over

    chosen = _best_of(request, several(), log, keep)

    def noted(candidate: Candidate) -> Candidate:
        note = f"auto took {candidate.method} of {', '.join(tried or [candidate.method])}"
        if late:
            note += f"; the budget ended before {', '.join(late)}"
        for method, seconds in to_compile.items():
            note += (
                f"; {method} was left out: its loops are compiled first, once on a machine, for "
                f"about {seconds:.0f} s, which a budget of {seconds / KEPT_SHARE:.0f} s allows"
            )
        return replace(candidate, notes=(*candidate.notes, note))

    return replace(chosen, best=noted(chosen.best), others=tuple(map(noted, chosen.others)))


def _one_holds_state(request: PlanRequest) -> bool:
    """Whether the state alone is within the limit of one device."""
    limits = request.memory_limit
    return limits is None or state_bytes(request.space.graph) <= max(limits)


def _best_of(
    request: PlanRequest, several: Iterator[Candidate], log: SearchLog, keep: int
) -> Selection:
    kept: list[Candidate] = []
    starts: list[Candidate] = []
    tried: dict[str, tuple[RankingKey, MethodFigures]] = {}
    history: list[_SearchOutcome] = []
    notes: tuple[str, ...] = ()
    try:
        for candidate in several:
            began = log.seconds - candidate.search_seconds
            own = candidate.found.curve
            history.append(
                _SearchOutcome(began, candidate.search_seconds, own, _step(request, candidate))
            )
            kept.append(candidate)
            starts = _starts(request, [*starts, candidate])
            _try(request, candidate, tried)
            if isinstance(request.costs, DefaultCosts):  # these do not change
                kept = _first(request, kept, keep)
        kept += _others(request, log, keep)
    except KeyboardInterrupt:
        if not kept:
            raise
        notes = ("interrupted: this is the best so far",)
    cost = request.costs.known()
    kept = [_priced(request, candidate, cost) for candidate in kept]
    if not isinstance(request.costs, DefaultCosts):
        tried.clear()  # more is known by now than when these were scored
        for candidate in kept:
            _try(request, candidate, tried)
        history = [
            replace(one, step_seconds=_step(request, candidate))
            for one, candidate in zip(history, kept, strict=False)
        ]
    found = [
        replace(
            one,
            search_seconds=log.seconds,
            notes=(*one.notes, *notes),
            curve=improvements(history),
            figures=one.found.figures or log.figures,
        )
        for one in _first(request, kept, keep)
    ]
    others = tuple(one for one in found[1:] if fits(request, one))
    rows = tuple(row for _, row in sorted(tried.values(), key=lambda one: one[0]))
    if fits(request, found[0]):
        starts = []
    starts = [one for one in starts if not _same(one.tasks, found[0].tasks)]
    return Selection(
        found[0], bool(notes), others, rows if len(rows) > 1 else (), tuple(starts[:STARTS])
    )


def _starts(request: PlanRequest, several: Iterable[Candidate]) -> list[Candidate]:
    """The quickest of some that do not fit and differ, one more than there are to be, and no more
    than may be kept."""
    found: list[Candidate] = []
    for one in sorted(several, key=lambda one: one.timeline.step_seconds):
        if not fits(request, one) and not any(_same(one.tasks, each.tasks) for each in found):
            found.append(one)
    rows = accumulate(len(one.tasks) for one in found)
    return [one for one, count in zip(found, rows, strict=True) if count <= ROWS][: STARTS + 1]


def _try(
    request: PlanRequest, candidate: Candidate, tried: dict[str, tuple[RankingKey, MethodFigures]]
) -> None:
    """Enters a Candidate among the best of each method, if it is."""
    key, known = ranking_key(request, candidate), tried.get(candidate.method)
    if known is None or key < known[0]:
        tried[candidate.method] = (key, _method_figures(request, candidate))


def _method_figures(request: PlanRequest, candidate: Candidate) -> MethodFigures:
    line, memory = candidate.timeline, candidate.memory
    peak, moved = max(line.peak_bytes), line.bytes_moved
    with_them = {
        "recompute": memory.recomputed, "offload": memory.offloaded, "host-state": memory.host_state
    }  # fmt: skip
    name = " + ".join((candidate.method, *(option for option, ops in with_them.items() if ops)))
    return MethodFigures(name, line.step_seconds, peak, moved, fits(request, candidate))


def _others(request: PlanRequest, log: SearchLog, keep: int) -> Iterator[Candidate]:
    """The other strategies that searches have found, scored: of each search as many as could
    count."""
    for method, found in log.several:
        known = [strategy for strategy, _ in log.seen]
        new = [other for other in found.others if other[0] not in known]
        for strategy, space in new[: keep - 1]:
            other = replace(found, strategy=strategy, space=space, others=())
            yield score_and_log(request, method, other, 0.0, log)


def _first(request: PlanRequest, several: Iterable[Candidate], keep: int) -> list[Candidate]:
    """The best few whose tasks differ, best first."""
    found: list[Candidate] = []
    for candidate in sorted(several, key=lambda c: ranking_key(request, c)):
        if len(found) < keep and not any(_same(candidate.tasks, one.tasks) for one in found):
            found.append(candidate)
    return found


def _same(a: TaskGraph, b: TaskGraph) -> bool:
    """Whether two steps do the same: all columns are equal, and the regions that slots hold."""
    if len(a) != len(b):
        return False
    names = [f.name for f in fields(TaskGraph) if f.name not in ("copies", "make_assemblies")]
    return all(_equal(getattr(a, name), getattr(b, name)) for name in names) and (
        a.assemblies.regions == b.assemblies.regions
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, Ends):
        return all(map(np.array_equal, a, b))
    return bool(a == b)


def _step(request: PlanRequest, candidate: Candidate) -> float | None:
    return candidate.timeline.step_seconds if fits(request, candidate) else None


@dataclass(frozen=True, slots=True)
class _SearchOutcome:
    """What a Candidate says of the curve: when its search began, how long it took, its own curve,
    and the seconds of a step, None if it does not fit."""

    began: float
    seconds: float
    curve: Curve
    step_seconds: float | None


def improvements(history: Iterable[_SearchOutcome]) -> Curve:
    """The best over the searches, one after the other, whenever it improved.

    A search that has a curve of its own may count with other costs than its outcome is scored with;
    its curve is then scaled to end where that is.
    """
    best, found = math.inf, []
    for one in history:
        if one.step_seconds is None:
            continue
        own, end = one.curve or ((one.seconds, one.step_seconds),), one.step_seconds
        scale = end / own[-1][1] if own[-1][1] > 0 else 1.0
        for at, seconds in [*((at, scale * cost) for at, cost in own[:-1]), (own[-1][0], end)]:
            if seconds < best:
                best = seconds
                found.append((one.began + at, seconds))
    return tuple(found)


def _priced(request: PlanRequest, candidate: Candidate, cost: CostModel) -> Candidate:
    """Judged by what is known in the end: later candidates may have had more measured."""
    if isinstance(request.costs, DefaultCosts) or candidate.cost == cost:
        return candidate
    line = simulate(candidate.tasks, request.cluster, cost)
    return replace(candidate, cost=cost, timeline=line)
