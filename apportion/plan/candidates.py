"""choose: what a method finds, scored by the simulator; and `auto`, the best of many methods.

Methods minimise different things. Whatever they find is lowered and simulated, once, and only that
decides (`rank`): plans within the memory limit before others, then the seconds of a step.

A search sees memory by proxies. Where its plan turns out to be over the limit, it is asked again
with a limit that is lower by the excess, a few times. A search that has spent its budget is not
asked again: then its other strategies are looked at for one that fits.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import Ends, Storage, TaskGraph, lower, with_storage
from apportion.machine import Cluster, CostModel, default_cost
from apportion.search import METHODS, Problem, Progress, SearchResult, Unsuitable, tried_by_auto
from apportion.simulate import Timeline, simulate
from apportion.split import Space, Strategy, space_of

STARTS = 4  # how many of the best so far a method that takes starts is given
ROUNDS = 4  # how often a method is asked when its plans are over the memory limit
TRIES = 4  # how many other strategies of a search are scored when its best is over the limit

Curve = tuple[tuple[float, float], ...]
"""(seconds of search, seconds of a step) whenever the best improved."""
Start = tuple[Strategy, Space]
"""A Strategy that a search may begin with, and the Space that it is about."""


class CostSource(Protocol):
    """Where the costs of a search and of what it finds come from."""

    @property
    def seconds(self) -> float:
        """Spent on measuring so far. It is no part of the budget."""

    def known(self) -> CostModel:
        """What is known before there is a strategy."""

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        """What the tasks of a strategy cost."""


@dataclass(frozen=True, slots=True)
class DefaultCosts:
    """Prices from what comes with the package: nothing is measured."""

    cluster: Cluster
    seconds: float = 0.0

    def known(self) -> CostModel:
        return default_cost(self.cluster)

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return default_cost(self.cluster)


@dataclass(frozen=True, slots=True)
class PlanningProgress:
    """Where planning stands: the method at work, what it tells of itself, and, when a plan of it
    has been simulated, the seconds of a step and whether it is within the limit."""

    method: str
    progress: Progress | None = None
    step_seconds: float | None = None
    fits: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a Space for a Cluster, its prices, and the bytes per device to stay
    under (None: without a limit). `tell` hears where planning stands."""

    space: Space
    cluster: Cluster
    prices: CostSource
    memory_limit: tuple[int, ...] | None
    seed: int = 0
    tell: Callable[[PlanningProgress], None] | None = None


@dataclass(frozen=True)
class Candidate:
    """What a method found, lowered and simulated. `curve` and `figures` are those of the whole
    search that it is the outcome of."""

    method: str
    found: SearchResult
    search_seconds: float
    space: Space
    tasks: TaskGraph
    storage: Storage
    cost: CostModel
    timeline: Timeline
    notes: tuple[str, ...] = ()
    curve: Curve = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass
class SearchLog:
    """What has been searched so far.

    seen     strategies that were scored, each with its `excess`
    several  methods that have found other strategies too, with what they found
    seconds  of all searches
    figures  of the latest search that has any
    """

    seen: list[tuple[Strategy, tuple[int, ...]]] = field(default_factory=list)
    several: list[tuple[str, SearchResult]] = field(default_factory=list)
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """The best Candidate, the next best of those that fit, and whether choosing was interrupted
    before all were tried."""

    best: Candidate
    interrupted: bool = False
    others: tuple[Candidate, ...] = ()


def choose(request: PlanRequest, method: str, budget: float, keep: int = 1) -> Selection:
    """The best that a method, or "auto", finds within `budget` seconds, and `keep - 1` others, as
    far as there are so many that differ.

    An interrupt (KeyboardInterrupt) ends the search with the best so far, if there is any. Raises
    Unsuitable where the method is not for this step or cluster.
    """
    with _uncollected():
        if method == "auto":
            return _auto(request, budget, keep)
        record = SearchLog()
        return _best_of(request, candidates(request, method, budget, record), record, keep)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: searches make many objects and next to no cycles, and each
    full collection looks at all of torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _auto(request: PlanRequest, budget: float, keep: int) -> Selection:
    ends = _now(request) + budget
    tried: list[str] = []
    late: list[str] = []
    record = SearchLog()

    def several() -> Iterator[Candidate]:
        best: list[tuple[Rank, Start]] = []
        for method in tried_by_auto():
            row, left = METHODS[method], ends - _now(request)
            if method == "single" and not _one_holds_state(request):
                continue
            if not row.baseline and left <= 0:
                late.append(method)
                continue
            share = max(min(left, budget * row.share), 0.0)
            starts = [start for _, start in best] if row.takes_starts else ()
            try:
                for found in candidates(request, method, share, record, starts):
                    best.append((rank(request, found), (found.found.strategy, found.space)))
                    best = sorted(best, key=lambda one: one[0])[:STARTS]
                    yield found
                tried.append(method)
            except Unsuitable:
                continue

    chosen = _best_of(request, several(), record, keep)

    def noted(candidate: Candidate) -> Candidate:
        note = f"auto took {candidate.method} of {', '.join(tried or [candidate.method])}"
        if late:
            note += f"; the budget ended before {', '.join(late)}"
        return replace(candidate, notes=(*candidate.notes, note))

    return replace(chosen, best=noted(chosen.best), others=tuple(map(noted, chosen.others)))


def _one_holds_state(request: PlanRequest) -> bool:
    """Whether the state alone is within the limit of one device."""
    limits = request.memory_limit
    return limits is None or state_bytes(request.space.graph) <= max(limits)


def state_bytes(graph: Graph) -> int:
    """Bytes of parameters, optimizer state and buffers that the step reads: at any time they are
    somewhere."""
    roles = (PARAMETER, OPTIMIZER_STATE, BUFFER)
    begins = (made is None for made in graph.producer)
    return sum(
        value.nbytes
        for value, first, readers in zip(graph.values, begins, graph.consumers, strict=True)
        if first and readers and value.role in roles
    )


def _best_of(
    request: PlanRequest, several: Iterator[Candidate], record: SearchLog, keep: int
) -> Selection:
    kept: list[Candidate] = []
    history: list[_SearchOutcome] = []
    notes: tuple[str, ...] = ()
    try:
        for candidate in several:
            began = record.seconds - candidate.search_seconds
            own = candidate.found.curve
            history.append(
                _SearchOutcome(began, candidate.search_seconds, own, _step(request, candidate))
            )
            kept.append(candidate)
            if isinstance(request.prices, DefaultCosts):  # these do not change
                kept = _first(request, kept, keep)
        kept += _others(request, record, keep)
    except KeyboardInterrupt:
        if not kept:
            raise
        notes = ("interrupted: this is the best so far",)
    cost = request.prices.known()
    kept = [_priced(request, candidate, cost) for candidate in kept]
    if not isinstance(request.prices, DefaultCosts):
        history = [
            replace(one, step_seconds=_step(request, candidate))
            for one, candidate in zip(history, kept, strict=False)
        ]
    found = [
        replace(
            one,
            search_seconds=record.seconds,
            notes=(*one.notes, *notes),
            curve=improvements(history),
            figures=one.found.figures or record.figures,
        )
        for one in _first(request, kept, keep)
    ]
    others = tuple(one for one in found[1:] if fits(request, one))
    return Selection(found[0], bool(notes), others)


def _others(request: PlanRequest, record: SearchLog, keep: int) -> Iterator[Candidate]:
    """The other strategies that searches have found, scored: of each search as many as could
    count."""
    for method, found in record.several:
        known = [strategy for strategy, _ in record.seen]
        new = [other for other in found.others if other[0] not in known]
        for strategy, space in new[: keep - 1]:
            other = replace(found, strategy=strategy, space=space, others=())
            yield _scored_now(request, method, other, 0.0, record)


def _first(request: PlanRequest, several: Iterable[Candidate], keep: int) -> list[Candidate]:
    """The best few whose tasks differ, best first."""
    found: list[Candidate] = []
    for candidate in sorted(several, key=lambda c: rank(request, c)):
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
    if isinstance(request.prices, DefaultCosts) or candidate.cost is cost:
        return candidate
    line = simulate(candidate.tasks, request.cluster, cost)
    return replace(candidate, cost=cost, timeline=line)


Rank = tuple[bool, float, int]


def rank(request: PlanRequest, candidate: Candidate) -> Rank:
    """Less is better: what fits before what does not, then the seconds of a step, or, of those that
    do not fit, the largest excess; of equal ones that which moves less."""
    line, over = candidate.timeline, max(excess(request, candidate))
    return over > 0, over if over > 0 else line.step_seconds, line.bytes_moved


def fits(request: PlanRequest, candidate: Candidate) -> bool:
    """Whether no device is over the memory limit."""
    return max(excess(request, candidate)) <= 0


def excess(request: PlanRequest, candidate: Candidate) -> tuple[int, ...]:
    """Bytes above its limit at the peak of each device, negative below it."""
    peaks = candidate.timeline.peak_bytes
    return tuple(p - n for p, n in zip(peaks, request.memory_limit or peaks, strict=True))


def candidates(
    request: PlanRequest,
    method: str,
    budget: float,
    record: SearchLog,
    starts: Sequence[Start] = (),
) -> Iterator[Candidate]:
    """What a method finds under the limit and, while that is over it, under lower ones.

    Strategies that have been seen are not scored again; new ones are put on record. `starts` are
    strategies to begin with, for a method that takes them. A search that was interrupted is the
    last thing that is done: KeyboardInterrupt follows its Candidate.
    """
    ends = _now(request) + budget
    aim, own = request.memory_limit, len(record.seen)
    for turn in range(ROUNDS):
        left, before = ends - _now(request), record.seconds
        try:
            found = _searched(request, method, max(left, 0.0), aim, record, starts)
        except Unsuitable:
            if turn:
                return
            raise
        seconds = record.seconds - before
        known = [k for k, (strategy, _) in enumerate(record.seen) if strategy == found.strategy]
        if known and known[0] >= own:  # the method does not mind the limit
            return
        if known:
            over = record.seen[known[0]][1]
        else:
            yield (candidate := _scored_now(request, method, found, seconds, record))
            over = excess(request, candidate)
        if found.interrupted:
            raise KeyboardInterrupt
        if aim is None or max(over) <= 0:
            return
        if ends - _now(request) < seconds:
            yield from _fitting(request, method, found, seconds, record)
            return
        aim = tuple(a - max(o, 0) for a, o in zip(aim, over, strict=True))
        if min(aim) <= 0:
            return


def _fitting(
    request: PlanRequest, method: str, found: SearchResult, seconds: float, record: SearchLog
) -> Iterator[Candidate]:
    """The other strategies of a search, scored up to the first that fits."""
    for strategy, space in found.others[:TRIES]:
        if not any(strategy == known for known, _ in record.seen):
            other = replace(found, strategy=strategy, space=space, others=(), curve=())
            yield (candidate := _scored_now(request, method, other, seconds, record))
            if fits(request, candidate):
                return


def _scored_now(
    request: PlanRequest, method: str, found: SearchResult, seconds: float, record: SearchLog
) -> Candidate:
    """What a search has just found, scored, put on record and told of."""
    candidate = scored(request, method, found, seconds)
    record.seen.append((found.strategy, excess(request, candidate)))
    step = candidate.timeline.step_seconds
    _tell(request, PlanningProgress(method, None, step, fits(request, candidate)))
    return candidate


def _searched(
    request: PlanRequest,
    method: str,
    budget: float,
    limit: tuple[int, ...] | None,
    record: SearchLog,
    starts: Sequence[Start],
) -> SearchResult:
    def report(progress: Progress) -> None:
        _tell(request, PlanningProgress(method, progress))

    _tell(request, PlanningProgress(method))
    problem = Problem(request.space, request.cluster, request.prices.known(), limit, report)
    how = {"starts": tuple(starts)} if starts else {}
    began = time.perf_counter()
    try:
        found = METHODS[method](problem, budget=budget, seed=request.seed, **how)
    finally:
        record.seconds += time.perf_counter() - began
    record.figures = found.figures or record.figures
    if found.others:
        record.several.append((method, found))
    return found


def _now(request: PlanRequest) -> float:
    """Seconds of a clock that stands still while costs are measured."""
    return time.perf_counter() - request.prices.seconds


def _tell(request: PlanRequest, stand: PlanningProgress) -> None:
    if request.tell is not None:
        request.tell(stand)


def scored(request: PlanRequest, method: str, found: SearchResult, seconds: float) -> Candidate:
    """A strategy lowered, with what its kernels allocate and what its tasks cost, and simulated."""
    space, cluster, strategy = request.space, request.cluster, found.strategy
    if found.space is not None:
        space = found.space
    elif (strategy.digits, strategy.opening) != (space.digits, space.opening):
        space = space_of(space.source, strategy, space)
    tasks = lower(space, strategy, len(cluster.devices))
    storage = _measured_storage(space, strategy, tasks, cluster)
    tasks = with_storage(tasks, storage)
    cost = request.prices.cost(strategy, tasks)
    line = simulate(tasks, cluster, cost)
    return Candidate(method, found, seconds, space, tasks, storage, cost, line, found.notes)


def _measured_storage(
    space: Space, strategy: Strategy, tasks: TaskGraph, cluster: Cluster
) -> Storage:
    """What the kernels allocate. Needs torch, which a loaded Plan does not: it has the result."""
    from apportion.execute import Executable, accelerator, measure, threads

    executable = Executable(space, strategy, tasks)
    kinds = {device.kind for device in cluster.devices}
    if kinds == {"cpu"}:
        return measure(executable, threads(len(cluster.devices)))
    tables = default_cost(cluster).tables
    known = next((tables[kind] for kind in sorted(kinds) if kind in tables), None)
    return measure(executable, None, accelerator(known))
