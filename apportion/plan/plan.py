"""Plan: how to run one step on one cluster, its prediction, and how it was found.

Part of the room plan. A Plan is the saved artefact: it can be simulated, explained, reported and
run. plan_file.py writes and reads its file, make_plan.py makes Plans from what searches find.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from apportion import graph as graphs
from apportion.checked import brief
from apportion.files import write_atomic
from apportion.lower import Storage, TaskGraph, runnable, with_storage
from apportion.machine import (
    Cluster,
    CostFile,
    CostModel,
    check_kinds,
    default_cost,
    load_cost_file,
)
from apportion.memory import HostState, MemoryPlan, Offload
from apportion.plan.candidate import Curve
from apportion.plan.schedule_exchanges import (
    ABOUT_OVERLAP,
    ExchangeScheduler,
    ScheduledExchanges,
    check_communication,
    schedule_exchanges,
)
from apportion.search import Problem
from apportion.simulate import (
    LinkSpans,
    Timeline,
    host_excess,
    link_spans,
    network,
    simulate,
)
from apportion.split import Communication, Space
from apportion.split import strategy as strategies

if TYPE_CHECKING:
    from apportion.plan.explain import Tell
    from apportion.plan.explanation import Explanation


MOST_SAID = 400  # characters of what is wrong with a file


class PlanWarning(UserWarning):
    """What the user of a plan should know: operators that run unsplit, methods left out."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulated step costs."""

    step_seconds: float
    peak_bytes: tuple[int, ...]
    bytes_moved: int
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A plan that was run for a few steps: whose it is, what a step was predicted to take and
    really took, and whether it is the one that was kept."""

    method: str
    predicted_seconds: float
    measured_seconds: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """The best plan that a method found while several were tried: what a step of it is predicted to
    take, the bytes at the peak of its fullest device and those that move, and whether it fits."""

    method: str
    step_seconds: float
    peak_bytes: int
    bytes_moved: int
    fits: bool


class SimulatedStep:
    """What follows from a strategy: its Space, its tasks and the simulated step. Each is worked out
    when it is first asked for, unless it was known before."""

    def __init__(
        self,
        plan: Plan,
        space: Space | None = None,
        tasks: TaskGraph | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._graph, self._strategy, self._storage = plan.graph, plan.strategy, plan.storage
        self._cluster, self._cost = plan.cluster, plan.cost
        self._space, self._tasks, self._timeline = space, tasks, timeline

    @cached_property
    def space(self) -> Space:
        """All legal splits of the Graph."""
        return self._space or strategies.space_of(self._graph, self._strategy)

    @cached_property
    def tasks(self) -> TaskGraph:
        """The tasks of one step, with what they really allocate."""
        if self._tasks is not None:
            return self._tasks
        tasks = runnable(self.space, self._strategy, len(self._cluster.devices))
        return with_storage(tasks, self._storage)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self._timeline or simulate(self.tasks, self._cluster, self._cost)


@dataclass(frozen=True)
class Plan:
    """How to run one step on one cluster.

    model           the specification it was made from, or ""
    memory_limit    bytes per device that a feasible plan stays under; None: there is no limit
    cost            the CostModel, or as much of it as the plan needs
    search_seconds  how long the method took
    lower_bound     proven least cost, where the method gives one
    lower_bound_of  what that is a bound of, and among which strategies
    notes           what one should know of how it was found, a sentence each
    curve           (seconds of search, seconds of a step) whenever the best improved
    figures         counts of the search by name, such as proposals
    measured        the trials that decided, where plans were run before one was kept
    memory          what is decided about memory: the order of Ops, those that the backward computes
                    again, and what lies on the host; `graph` is the one in which it is so
    staleness       how many steps old the parameters may be that ranks train on (stale.py); None:
                    the result is the single device's
    tried           the best of each method, where several were tried, the best of all first
    simulated       what has been worked out of it already; `replace` drops it, because it depends
                    on the other fields
    """

    graph: graphs.Graph
    cluster: Cluster
    strategy: strategies.Strategy
    method: str
    seed: int
    budget: float
    search_seconds: float
    predicted: Prediction
    memory_limit: tuple[int, ...] | None
    cost: CostModel
    lower_bound: float | None = None
    model: str = ""
    storage: Storage = field(default_factory=Storage)
    lower_bound_of: str = ""
    notes: tuple[str, ...] = ()
    curve: Curve = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[PlanTrial, ...] = ()
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    staleness: int | None = None
    tried: tuple[MethodFigures, ...] = ()
    simulated: InitVar[SimulatedStep | None] = None
    _step: SimulatedStep = field(init=False, repr=False, compare=False)

    def __post_init__(self, simulated: SimulatedStep | None) -> None:
        object.__setattr__(self, "_step", simulated or SimulatedStep(self))

    @property
    def feasible(self) -> bool:
        """Whether every device stays under its memory limit, and every host has room for what lies
        there."""
        peaks = self.predicted.peak_bytes
        under = all(p <= n for p, n in zip(peaks, self.memory_limit or peaks, strict=True))
        return under and not (self.memory.uses_host and host_excess(self.tasks, self.cluster))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Ops of the captured Graph that the backward computes again."""
        return self.memory.recomputed

    @property
    def offloaded(self) -> tuple[Offload, ...]:
        """Values that lie in the host's memory between forward and backward."""
        return self.memory.offloaded

    @property
    def host_state(self) -> tuple[HostState, ...]:
        """Parameters that lie in the host's memory, with what the optimizer keeps of them."""
        return self.memory.host_state

    @property
    def step(self) -> SimulatedStep:
        """What follows from the Plan: its Space, tasks and Timeline."""
        return self._step

    @property
    def space(self) -> Space:
        """All legal splits of the Graph."""
        return self.step.space

    @property
    def tasks(self) -> TaskGraph:
        """The tasks of one step, with what they really allocate."""
        return self.step.tasks

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.step.timeline

    def simulate(self) -> Plan:
        """The same Plan with its prediction made anew; one that trains on stale parameters keeps
        it, since its messages are not simulated."""
        if self.staleness is not None:
            return self
        return replace(self, predicted=prediction_of(self.timeline))

    def with_communication(self, policy: str) -> Plan:
        """The same Plan with its messages as another policy has them: "none", "wfbp", "p3",
        "tictac", "bytescheduler" or "auto", as in `ap.plan`."""
        check_communication(policy)
        how = self.strategy.communication
        how = Communication(algorithm=how.algorithm, levels=how.levels)
        strategy = replace(self.strategy, communication=how)
        within = replace(self, strategy=strategy)
        limit = self.memory_limit
        given = ScheduledExchanges(strategy, within.tasks, within.timeline)
        scheduler = ExchangeScheduler(within.space, given, self.storage, self.cost, self.cluster)
        found = schedule_exchanges(
            scheduler, policy,
            lambda line: limit is None or all(map(int.__le__, line.peak_bytes, limit)),
        )  # fmt: skip
        notes = [note for note in self.notes if not note.startswith(ABOUT_OVERLAP)]
        notes += [found.note] if found.note else []
        return replace(self, strategy=found.strategy, notes=tuple(notes)).simulate()

    def trace(self, path: str | Path, measured: Timeline | None = None) -> None:
        """Writes the simulated step for Perfetto, or a measured one (`runner.timeline()`)."""
        if measured is not None:
            from apportion.show import trace as write

            write(measured, self.tasks, self.space.graph, path)
            return
        line, spans = self.timeline, self.timeline.link_spans
        if spans is None:
            net = network(self.tasks, self.cluster, self.cost)
            spans = link_spans(net, (line.start_ns, line.end_ns))
        names = tuple(link.name for link in self.cluster.links)
        from apportion.show import LinkUsage, trace

        real = spans.link < len(names)  # hosts that compute are drawn in lanes of their own
        links = LinkUsage(names, LinkSpans(*(column[real] for column in spans)))
        trace(line, self.tasks, self.space.graph, path, links)

    def report(self, path: str | Path, measured: Timeline | None = None) -> None:
        """Writes one HTML page about the Plan, with a measured step beside it where there is
        one."""
        from apportion.show import page

        write_atomic(Path(path), page(self, measured))

    def explain(
        self,
        op: str | int,
        alternatives: int = 12,
        budget: float = 10.0,
        progress: Tell | None = None,
    ) -> Explanation:
        """Why an Op (its name or number, or a module's path) has its Choice, what the best
        `alternatives` would cost, and what keeps them from being taken; within `budget` seconds
        of simulation. Raises ValueError, with the nearest names, if nothing is named so."""
        from apportion.plan.explain import explain

        return explain(self, op, alternatives, budget, progress)

    def save(self, path: str | Path) -> None:
        """Writes the Plan; an existing file is replaced whole or not at all."""
        from apportion.plan.plan_file import plan_to_json

        write_atomic(Path(path), json.dumps(plan_to_json(self), separators=(",", ":")))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a Plan; raises ValueError, naming the file and what is wrong, if it is not one.
        Its prediction is simulated anew: figures in a file are not trusted."""
        from apportion.plan.plan_file import read_plan

        text = Path(path).read_bytes()
        try:
            return read_plan(text)
        except ValueError as error:
            reason = brief(str(error), MOST_SAID)
            raise ValueError(f"{path} is not a plan that can be read: {reason}") from None


def prediction_of(timeline: Timeline) -> Prediction:
    """What a simulated step costs."""
    return Prediction(
        timeline.step_seconds, timeline.peak_bytes, timeline.bytes_moved, timeline.busy
    )


def with_model(made: Plan, model: str) -> Plan:
    """The same Plan, of a model's specification, with what has been worked out for it."""
    return replace(made, model=model, simulated=made.step)


def with_costs(made: Plan, path: str | Path) -> Plan:
    """The same Plan, priced by a file of costs where that says something; ValueError if it is not
    one for the devices of its cluster."""
    file = load_cost_file(path)
    check_kinds(file, path, made.cluster)
    before = CostFile("the plan", "", tuple(made.cost.tables.values()))
    cost = default_cost(made.cluster, made.cost.mode, (before, file))
    return replace(made, cost=cost)


def with_trials(made: Plan, trials: Sequence[PlanTrial], notes: Sequence[str]) -> Plan:
    """The same Plan, kept because of these trials."""
    notes = (*made.notes, *notes)
    return replace(made, measured=tuple(trials), notes=notes, simulated=made.step)


def with_certificate(made: Plan, budget: float) -> Plan:
    """The same Plan, with notes that say how few bytes are proven to be possible at all."""
    from apportion.search import certify

    problem = Problem(Space(made.graph), made.cluster, made.cost)
    notes = (*made.notes, *certify(problem, budget))
    return replace(made, notes=notes, simulated=made.step)
