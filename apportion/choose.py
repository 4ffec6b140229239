"""choose: what a method finds, scored by the simulator; and `auto`, the best of many methods.

Methods minimise different things. Whatever they find is lowered and simulated, once, and only that
decides (`rank`): plans within the memory limit before others, then the seconds of a step.

A search sees memory by proxies. Where its plan turns out to be over the limit, it is asked again
with a limit that is lower by the excess, a few times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from apportion.cluster import Cluster
from apportion.cost import CostModel, default_cost
from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import lower
from apportion.search import SEARCHES, Problem, SearchResult, Unsuitable
from apportion.search.problem import Progress
from apportion.simulate import simulate
from apportion.splits import Space
from apportion.strategy import Strategy, space_of
from apportion.tasks import Storage, TaskGraph, with_storage
from apportion.timeline import Timeline

AUTO = (
    *("data", "fsdp", "single", "megatron", "owt", "tofu"),
    *("op-placement", "allrow-greedy", "spartan", "equalchop", "icml18"),
    *("tofu-seconds", "optcnn", "exact"),
)
"""What auto tries, in this order, as far as SEARCHES has it."""
SEARCHED = frozenset({"tofu", "tofu-seconds", "optcnn", "exact"})
"""Those that it tries only while budget is left. The others are baselines: it tries them whatever
the budget, so that it is never worse than any of them."""
SHARES = {"exact": 1 / 6}
"""Of the budget, to those that would use it up for a proof."""
ROUNDS = 4  # how often a method is asked when its plans are over the memory limit


class Prices(Protocol):
    """Where the costs of a search and of what it finds come from."""

    def known(self) -> CostModel:
        """What is known before there is a strategy."""

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        """What the tasks of a strategy cost."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """Prices from what comes with the package: nothing is measured."""

    cluster: Cluster

    def known(self) -> CostModel:
        return default_cost(self.cluster)

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return default_cost(self.cluster)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where planning stands: the method at work, what it tells of itself, and, when a plan of it
    has been simulated, the seconds of a step and whether it is within the limit."""

    method: str
    progress: Progress | None = None
    step_seconds: float | None = None
    fits: bool = False


@dataclass(frozen=True)
class Request:
    """What is to be planned: a Space for a Cluster, its prices, and the bytes per device to stay
    under (None: without a limit). `tell` hears where planning stands."""

    space: Space
    cluster: Cluster
    prices: Prices
    memory_limit: tuple[int, ...] | None
    seed: int = 0
    tell: Callable[[Stand], None] | None = None


@dataclass(frozen=True)
class Candidate:
    """What a method found, lowered and simulated."""

    method: str
    found: SearchResult
    search_seconds: float
    space: Space
    tasks: TaskGraph
    storage: Storage
    cost: CostModel
    timeline: Timeline
    notes: tuple[str, ...] = ()


Seen = tuple[Strategy, tuple[int, ...]]
"""A strategy that was scored, and its `excess`."""


@dataclass(frozen=True)
class Chosen:
    """The best Candidate, and whether choosing was interrupted before all were tried."""

    best: Candidate
    interrupted: bool = False


def choose(request: Request, method: str, budget: float) -> Chosen:
    """The best that a method, or "auto", finds within `budget` seconds.

    An interrupt (KeyboardInterrupt) ends the search with the best so far, if there is any. Raises
    Unsuitable where the method is not for this step or cluster.
    """
    with _uncollected():
        if method == "auto":
            return _auto(request, budget)
        return _best_of(request, candidates(request, method, budget, []))


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


def _auto(request: Request, budget: float) -> Chosen:
    ends = time.perf_counter() + budget
    tried: list[str] = []
    late: list[str] = []

    def several() -> Iterator[Candidate]:
        seen: list[Seen] = []
        for method in AUTO:
            left = ends - time.perf_counter()
            if method not in SEARCHES or (method == "single" and not _one_holds_state(request)):
                continue
            if method in SEARCHED and left <= 0:
                late.append(method)
                continue
            try:
                share = budget * SHARES.get(method, 1.0)
                yield from candidates(request, method, max(min(left, share), 0.0), seen)
                tried.append(method)
            except Unsuitable:
                continue

    chosen = _best_of(request, several())
    note = f"auto took {chosen.best.method} of {', '.join(tried or [chosen.best.method])}"
    if late:
        note += f"; the budget ended before {', '.join(late)}"
    return replace(chosen, best=replace(chosen.best, notes=(*chosen.best.notes, note)))


def _one_holds_state(request: Request) -> bool:
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


def _best_of(request: Request, several: Iterator[Candidate]) -> Chosen:
    kept: list[Candidate] = []
    seconds = 0.0
    notes: tuple[str, ...] = ()
    try:
        for candidate in several:
            seconds += candidate.search_seconds
            kept.append(candidate)
            if isinstance(request.prices, Shipped):  # these do not change
                kept = [min(kept, key=lambda c: rank(request, c))]
    except KeyboardInterrupt:
        if not kept:
            raise
        notes = ("interrupted: this is the best so far",)
    cost = request.prices.known()
    best = min((_priced(request, c, cost) for c in kept), key=lambda c: rank(request, c))
    best = replace(best, search_seconds=seconds, notes=(*best.notes, *notes))
    return Chosen(best, bool(notes))


def _priced(request: Request, candidate: Candidate, cost: CostModel) -> Candidate:
    """Judged by what is known in the end: later candidates may have had more measured."""
    if isinstance(request.prices, Shipped) or candidate.cost is cost:
        return candidate
    line = simulate(candidate.tasks, request.cluster, cost)
    return replace(candidate, cost=cost, timeline=line)


def rank(request: Request, candidate: Candidate) -> tuple[bool, float, int]:
    """Less is better: what fits before what does not, then the seconds of a step, or, of those that
    do not fit, the largest excess; of equal ones that which moves less."""
    line, over = candidate.timeline, max(excess(request, candidate))
    return over > 0, over if over > 0 else line.step_seconds, line.bytes_moved


def excess(request: Request, candidate: Candidate) -> tuple[int, ...]:
    """Bytes above its limit at the peak of each device, negative below it."""
    peaks = candidate.timeline.peak_bytes
    return tuple(p - n for p, n in zip(peaks, request.memory_limit or peaks, strict=True))


def candidates(
    request: Request, method: str, budget: float, seen: list[Seen]
) -> Iterator[Candidate]:
    """What a method finds under the limit and, while that is over it, under lower ones.

    Strategies that have been `seen` are not scored again; new ones are added.
    """
    ends = time.perf_counter() + budget
    aim, own = request.memory_limit, len(seen)
    for turn in range(ROUNDS):
        left, began = ends - time.perf_counter(), time.perf_counter()
        try:
            found = _searched(request, method, max(left, 0.0), aim)
        except Unsuitable:
            if turn:
                return
            raise
        seconds = time.perf_counter() - began
        at = next((k for k, (strategy, _) in enumerate(seen) if strategy == found.strategy), None)
        if at is not None and at >= own:  # the method does not mind the limit
            return
        if at is not None:
            over = seen[at][1]
        else:
            candidate = scored(request, method, found, seconds)
            over = excess(request, candidate)
            seen.append((found.strategy, over))
            _tell(request, Stand(method, None, candidate.timeline.step_seconds, max(over) <= 0))
            yield candidate
        if aim is None or max(over) <= 0 or ends - time.perf_counter() < seconds:
            return
        aim = tuple(a - max(o, 0) for a, o in zip(aim, over, strict=True))
        if min(aim) <= 0:
            return


def _searched(
    request: Request, method: str, budget: float, limit: tuple[int, ...] | None
) -> SearchResult:
    def report(progress: Progress) -> None:
        _tell(request, Stand(method, progress))

    _tell(request, Stand(method))
    problem = Problem(request.space, request.cluster, request.prices.known(), limit, report)
    return SEARCHES[method](problem, budget=budget, seed=request.seed)


def _tell(request: Request, stand: Stand) -> None:
    if request.tell is not None:
        request.tell(stand)


def scored(request: Request, method: str, found: SearchResult, seconds: float) -> Candidate:
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
    from apportion.execute import Executable, threads
    from apportion.storage import accelerator, measure

    executable = Executable(space, strategy, tasks)
    kinds = {device.kind for device in cluster.devices}
    if kinds == {"cpu"}:
        return measure(executable, threads(len(cluster.devices)))
    tables = default_cost(cluster).tables
    known = next((tables[kind] for kind in sorted(kinds) if kind in tables), None)
    return measure(executable, None, accelerator(known))
