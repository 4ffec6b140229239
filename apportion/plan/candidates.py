"""What a method finds, lowered and simulated: candidates for a Plan.

Part of the room plan. A PlanRequest and the name of a method come in, Candidates go out; auto.py
chooses among them.

Methods minimise different things. Whatever they find is lowered and simulated, once, and only that
decides (`ranking_key`): plans within the memory limit before others, then the seconds of a step.

A search sees memory by proxies. Where its plan turns out to be over the limit, it is asked again
with a limit that is lower by the excess, a few times. A search that has spent its budget is not
asked again: then its other strategies are looked at for one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import (
    Lowering,
    Storage,
    TaskGraph,
    runnable,
    verified_lowering,
    with_storage,
)
from apportion.machine import (
    GENERATED,
    GRAPH,
    INDUCTOR,
    INTERPRETER,
    Cluster,
    CostFile,
    CostModel,
    default_cost,
    hosts_of,
)
from apportion.memory import is_repeat
from apportion.plan.candidate import Candidate
from apportion.plan.choose_algorithm import priced_as_sent, worth_relaying
from apportion.plan.fused_storage import fused_storage
from apportion.plan.schedule_exchanges import (
    ExchangeScheduler,
    ScheduledExchanges,
    schedule_exchanges,
)
from apportion.search import METHODS, Problem, Progress, SearchResult, UnsuitableMethod
from apportion.simulate import host_excess, simulate
from apportion.split import AUTO, Space, Strategy, space_of
from apportion.work_clock import work_seconds

ROUNDS = 4  # how often a method is asked when its plans are over the memory limit
GAIN = 0.01  # an improvement of a step that is worth further search
TRIES = 4  # how many other strategies of a search are scored when its best is over the limit

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
    """Prices of ranks that are compiled by `mode`, from what comes with the package and from files
    of one's own: nothing is measured."""

    cluster: Cluster
    seconds: float = 0.0
    mode: str = GENERATED
    own: tuple[CostFile, ...] = ()

    def known(self) -> CostModel:
        return default_cost(self.cluster, self.mode, self.own)

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return default_cost(self.cluster, self.mode, self.own)


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """The costs that another Plan was made with: nothing is measured."""

    model: CostModel
    seconds: float = 0.0

    def known(self) -> CostModel:
        return self.model

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return self.model


@dataclass(frozen=True, slots=True)
class PlanningProgress:
    """Where planning stands: the method at work, what it tells of itself, and, when a plan of it
    has been simulated, the seconds of a step, whether it is within the limit, the bytes at the
    peak of its fullest device and those that it moves."""

    method: str
    progress: Progress | None = None
    step_seconds: float | None = None
    fits: bool = False
    peak_bytes: int = 0
    bytes_moved: int = 0


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a Space for a Cluster, its costs, and the bytes per device to stay
    under (None: without a limit). `tell` hears where planning stands. `policy` is a file of what
    was learned before, for the methods that take one. `wire` and `communication` are those of
    `make_plan`."""

    space: Space
    cluster: Cluster
    costs: CostSource
    memory_limit: tuple[int, ...] | None
    seed: int = 0
    tell: Callable[[PlanningProgress], None] | None = None
    policy: Path | None = None
    wire: str = ""
    communication: str = AUTO


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


RankingKey = tuple[bool, float, int]


def ranking_key(request: PlanRequest, candidate: Candidate) -> RankingKey:
    """Less is better: what fits before what does not, then the seconds of a step, or, of those that
    do not fit, the largest excess; of equal ones that which moves less."""
    line, over = candidate.timeline, max(excess(request, candidate))
    return over > 0, over if over > 0 else line.step_seconds, line.bytes_moved


def fits(request: PlanRequest, candidate: Candidate) -> bool:
    """Whether no device is over the memory limit."""
    return max(excess(request, candidate)) <= 0


def excess(request: PlanRequest, candidate: Candidate) -> tuple[int, ...]:
    """Bytes above its limit at the peak of each device, negative below it; or above the memory of
    its host, where that is more."""
    peaks = candidate.timeline.peak_bytes
    over = [p - n for p, n in zip(peaks, request.memory_limit or peaks, strict=True)]
    if candidate.memory.uses_host:
        short = host_excess(candidate.tasks, request.cluster)
        for host in hosts_of(request.cluster):
            held, there = short.get(host.name, (0, 0))
            for device in host.devices if held > there else ():
                over[device] = max(over[device], held - there)
    return tuple(over)


def candidates(
    request: PlanRequest,
    method: str,
    budget: float,
    log: SearchLog,
    starts: Sequence[Start] = (),
    patience: float = math.inf,
) -> Iterator[Candidate]:
    """What a method finds under the limit and, while that is over it, under lower ones.

    Strategies that have been seen are not scored again; new ones are logged. `starts` are
    strategies to begin with, for a method that takes them; it ends when it has not improved for
    `patience` seconds. A search that was interrupted is the last thing that is done:
    KeyboardInterrupt follows its Candidate.
    """
    ends = now(request) + budget
    aim, own = request.memory_limit, len(log.seen)
    for turn in range(ROUNDS):
        left, before = ends - now(request), log.seconds
        try:
            found = _searched(request, method, max(left, 0.0), aim, log, starts, patience)
        except UnsuitableMethod:
            if turn:
                return
            raise
        seconds = log.seconds - before
        known = [k for k, (strategy, _) in enumerate(log.seen) if strategy == found.strategy]
        if known and known[0] >= own:  # the method does not mind the limit
            return
        if known:
            over = log.seen[known[0]][1]
        else:
            yield (candidate := score_and_log(request, method, found, seconds, log))
            over = excess(request, candidate)
        if found.interrupted:
            raise KeyboardInterrupt
        if aim is None or max(over) <= 0:
            return
        if ends - now(request) < seconds:
            yield from _fitting(request, method, found, seconds, log)
            return
        aim = tuple(a - max(o, 0) for a, o in zip(aim, over, strict=True))
        if min(aim) <= 0:
            return


def _fitting(
    request: PlanRequest, method: str, found: SearchResult, seconds: float, log: SearchLog
) -> Iterator[Candidate]:
    """The other strategies of a search, scored up to the first that fits."""
    for strategy, space in found.others[:TRIES]:
        if not any(strategy == known for known, _ in log.seen):
            other = replace(found, strategy=strategy, space=space, others=(), curve=())
            yield (candidate := score_and_log(request, method, other, seconds, log))
            if fits(request, candidate):
                return


def score_and_log(
    request: PlanRequest, method: str, found: SearchResult, seconds: float, log: SearchLog
) -> Candidate:
    """What a search has just found, scored, logged and told of."""
    candidate = scored(request, method, found, seconds)
    log.seen.append((found.strategy, excess(request, candidate)))
    line = candidate.timeline
    figures = (line.step_seconds, fits(request, candidate), max(line.peak_bytes), line.bytes_moved)
    _tell(request, PlanningProgress(method, None, *figures))
    return candidate


def _searched(
    request: PlanRequest,
    method: str,
    budget: float,
    limit: tuple[int, ...] | None,
    log: SearchLog,
    starts: Sequence[Start],
    patience: float,
) -> SearchResult:
    improvement = _LastImprovement(patience)

    def report(progress: Progress) -> None:
        improvement.hear(progress)
        _tell(request, PlanningProgress(method, progress))

    _tell(request, PlanningProgress(method))
    cost = request.costs.known()
    problem = Problem(request.space, request.cluster, cost, limit, report, improvement.is_long_ago)
    how: dict[str, Any] = {"starts": tuple(starts)} if starts else {}
    if request.policy is not None and METHODS[method].takes_policy:
        how["policy"] = request.policy
    began = work_seconds()
    try:
        found = METHODS[method](problem, budget=budget, seed=request.seed, **how)
    finally:
        log.seconds += work_seconds() - began
    log.figures = found.figures or log.figures
    if found.others:
        log.several.append((method, found))
    return found


@dataclass
class _LastImprovement:
    """When a search has last found what is worth further search, and how long it may go on without
    that."""

    seconds: float
    best: float = math.inf
    since: float = math.inf

    def hear(self, progress: Progress) -> None:
        """Takes note of where the search is; it has begun when there are proposals."""
        worth = progress.best is not None and progress.best < (1 - GAIN) * self.best
        if worth or self.since == math.inf:
            self.best = self.best if progress.best is None else progress.best
            self.since = math.inf if progress.proposals is None else work_seconds()

    def is_long_ago(self) -> bool:
        return work_seconds() - self.since > self.seconds


def now(request: PlanRequest) -> float:
    """Seconds by a clock that stands still while costs are measured."""
    return work_seconds() - request.costs.seconds


def _tell(request: PlanRequest, progress: PlanningProgress) -> None:
    if request.tell is not None:
        request.tell(progress)


def scored(request: PlanRequest, method: str, found: SearchResult, seconds: float) -> Candidate:
    """A strategy lowered, with what its kernels allocate and what its tasks cost, and simulated."""
    if request.wire:
        found = replace(found, strategy=replace(found.strategy, wire=request.wire))
    space, cluster, strategy = request.space, request.cluster, found.strategy
    if found.space is not None:
        space = found.space
    elif (strategy.digits, strategy.opening) != (space.digits, space.opening):
        space = space_of(space.source, strategy, space)
    strategy = priced_as_sent(strategy, cluster)
    lowering = verified_lowering(space, strategy, len(cluster.devices))
    made = _lowered(request, method, found, seconds, strategy, lowering)
    how = worth_relaying(lowering, strategy, cluster, made.timeline.step_seconds)
    if how is not None:
        relayed = replace(strategy, communication=how)
        by_relays = lowering.relayed(how.levels)
        made = _better(request, made, _lowered(request, method, found, seconds, relayed, by_relays))
    within = ScheduledExchanges(made.found.strategy, made.tasks, made.timeline)
    ordered = schedule_exchanges(
        ExchangeScheduler(space, within, made.storage, made.cost, cluster), request.communication,
        lambda new: fits(request, replace(made, timeline=new)),
    )  # fmt: skip
    notes = (*made.notes, ordered.note) if ordered.note else made.notes
    found = replace(made.found, strategy=ordered.strategy)
    return replace(made, found=found, tasks=ordered.tasks, timeline=ordered.timeline, notes=notes)


def _lowered(
    request: PlanRequest,
    method: str,
    found: SearchResult,
    seconds: float,
    strategy: Strategy,
    lowering: Lowering,
) -> Candidate:
    """The strategy simulated, its exchanges while the backward pass goes on."""
    cluster, space = request.cluster, lowering.space
    tasks = runnable(space, strategy, len(cluster.devices), lowering=lowering)
    storage = _measured_storage(space, strategy, tasks, cluster, request.costs.known())
    tasks = with_storage(tasks, storage)
    cost = request.costs.cost(strategy, tasks)
    line, found = simulate(tasks, cluster, cost), replace(found, strategy=strategy)
    return Candidate(method, found, seconds, space, tasks, storage, cost, line, found.notes)


def _better(request: PlanRequest, direct: Candidate, relayed: Candidate) -> Candidate:
    """The one with relays, if its step is shorter and fits as well; a note says by how much."""
    one, other = direct.timeline.step_seconds, relayed.timeline.step_seconds
    if other >= one or (not fits(request, relayed) and fits(request, direct)):
        return direct
    how = relayed.found.strategy.communication
    note = f"exchanges are {how.algorithm_in_words}: {-(1 - other / one):+.1%} of step time"
    return replace(relayed, notes=(*relayed.notes, note))


def _measured_storage(
    space: Space, strategy: Strategy, tasks: TaskGraph, cluster: Cluster, cost: CostModel
) -> Storage:
    """What the kernels allocate. Needs torch, which a loaded Plan does not: it has the result."""
    from apportion.execute import (
        Executable,
        compiled_pieces,
        device_memory_facts,
        measure_storage,
        threads,
    )

    executable, fused = Executable(space, strategy, tasks), cost.mode != INTERPRETER
    kinds = {device.kind for device in cluster.devices}
    if kinds == {"cpu"}:
        return measure_storage(executable, threads(len(cluster.devices)), None, fused)
    known = next((cost.tables[kind] for kind in sorted(kinds) if kind in cost.tables), None)
    facts = device_memory_facts(known)
    if cost.mode == GRAPH:  # libraries keep as much for the stream of recordings
        facts = replace(facts, resident=2 * facts.resident)
    found = measure_storage(executable, None, facts, fused)
    if cost.mode != INDUCTOR:
        return found
    again = any(is_repeat(space.graph, op) for op in range(len(space.graph.ops)))
    return fused_storage(tasks, found, cluster, cost, compiled_pieces(executable), again)
