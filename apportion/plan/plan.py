"""Plan: the saved artefact. Graph, cluster, strategy, prediction, and how it was found.

A file of a Plan is JSON with a schema version; loading checks it and executes nothing. A loaded
Plan can be simulated again without the model.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion import graph as graphs
from apportion.describe import lookup, reason
from apportion.files import write_whole
from apportion.lower import Storage, TaskGraph, lower, with_storage
from apportion.machine import (
    Cluster,
    CostModel,
    dump_cost,
    load_cost,
)
from apportion.machine import from_json as load_cluster
from apportion.machine import to_json as dump_cluster
from apportion.plan.candidates import (
    Candidate,
    CostSource,
    Curve,
    DefaultCosts,
    PlanningProgress,
    PlanRequest,
    choose,
    rank,
)
from apportion.plan.devices_needed import QUICK_METHODS, enough, shortfall
from apportion.search import METHODS, Problem, Unsuitable
from apportion.simulate import Timeline, link_spans, network, restricted, simulate
from apportion.split import Space
from apportion.split import strategy as strategies

if TYPE_CHECKING:
    from apportion.capture import Program
    from apportion.plan.explain import Tell
    from apportion.plan.explanation import Explanation

FORMAT, VERSION = "apportion plan", 4
READ = (3, 4)
"""Versions that are read; 3 has neither curve nor figures nor trials."""


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

    @property
    def feasible(self) -> bool:
        """Whether every device stays under its memory limit."""
        peaks = self.predicted.peak_bytes
        return all(p <= n for p, n in zip(peaks, self.memory_limit or peaks, strict=True))

    @cached_property
    def space(self) -> Space:
        """All legal splits of the Graph."""
        return strategies.space_of(self.graph, self.strategy)

    @cached_property
    def tasks(self) -> TaskGraph:
        """The tasks of one step, with what they really allocate."""
        tasks = lower(self.space, self.strategy, len(self.cluster.devices))
        return with_storage(tasks, self.storage)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return simulate(self.tasks, self.cluster, self.cost)

    def simulate(self) -> Plan:
        """The same Plan with its prediction made anew."""
        return replace(self, predicted=_predicted(self.timeline))

    def trace(self, path: str | Path) -> None:
        """Writes the simulated step for Perfetto."""
        line, net = self.timeline, network(self.tasks, self.cluster, self.cost)
        names = tuple(link.name for link in self.cluster.links)
        from apportion.show import LinkUsage, trace

        links = LinkUsage(names, link_spans(net, (line.start_ns, line.end_ns)))
        trace(line, self.tasks, self.space.graph, path, links)

    def report(self, path: str | Path, measured: Timeline | None = None) -> None:
        """Writes one HTML page about the Plan, with a measured step beside it where there is
        one."""
        from apportion.show import page

        write_whole(Path(path), page(self, measured))

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
        data = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "method": self.method,
            "seed": self.seed,
            "budget": self.budget,
            "search_seconds": self.search_seconds,
            "lower_bound": self.lower_bound,
            "lower_bound_of": self.lower_bound_of,
            "notes": list(self.notes),
            "curve": [list(point) for point in self.curve],
            "figures": dict(self.figures),
            "measured": [asdict(trial) for trial in self.measured],
            "memory_limit": self.memory_limit and list(self.memory_limit),
            "predicted": {
                "step_seconds": self.predicted.step_seconds,
                "peak_bytes": list(self.predicted.peak_bytes),
                "bytes_moved": self.predicted.bytes_moved,
                "busy": list(self.predicted.busy),
            },
            "cluster": dump_cluster(self.cluster),
            "fingerprint": self.graph.fingerprint,
            "graph": graphs.to_json(self.graph),
            "strategy": strategies.to_json(self.strategy),
            "storage": [list(part) for part in astuple(self.storage)],
            "cost": dump_cost(restricted(self.cost, self.tasks)),
        }
        write_whole(Path(path), json.dumps(data, separators=(",", ":")))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a Plan; raises ValueError, naming the file and what is wrong, if it is not one."""
        text = Path(path).read_bytes()
        try:
            return _parse(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is not a plan that can be read: {reason}") from None


def _parse(data: Any) -> Plan:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it does not say that it is one; make plans with `apportion plan --out`")
    if data.get("version") not in READ:
        raise ValueError(f"it has version {data.get('version')}, this is version {VERSION}")
    graph = graphs.from_json(data["graph"])
    if graph.fingerprint != data["fingerprint"]:
        raise ValueError("its graph does not have the fingerprint that it says; it was changed")
    predicted, limits = data["predicted"], data["memory_limit"]
    plan = Plan(
        graph=graph,
        cluster=load_cluster(data["cluster"]),
        strategy=strategies.from_json(data["strategy"]),
        method=str(data["method"]),
        seed=int(data["seed"]),
        budget=float(data["budget"]),
        search_seconds=float(data["search_seconds"]),
        predicted=Prediction(
            float(predicted["step_seconds"]),
            tuple(map(int, predicted["peak_bytes"])),
            int(predicted["bytes_moved"]),
            tuple(map(float, predicted["busy"])),
        ),
        memory_limit=None if limits is None else tuple(map(int, limits)),
        cost=load_cost(data["cost"]),
        lower_bound=_bound(data["lower_bound"]),
        model=str(data["model"]),
        storage=_storage(*data["storage"]),
        lower_bound_of=str(data["lower_bound_of"]),
        notes=_notes(data["notes"]),
        **(_search(data) if data["version"] >= VERSION else {}),
    )
    count = len(plan.cluster.devices)
    figures = (plan.predicted.peak_bytes, plan.memory_limit)
    if any(some is not None and len(some) != count for some in figures):
        raise ValueError(f"its figures are not for the {count} devices of its cluster")
    try:
        strategies.verify(plan.space, plan.strategy, count)
    except ValueError as error:
        raise ValueError(f"{error}{_unknown(graph)}") from None
    tasks = lower(plan.space, plan.strategy, count)
    slots, workspace = plan.storage.slots, plan.storage.workspace
    works, work = plan.storage.works, plan.storage.work
    if (
        not all(0 <= s < len(tasks.slot_base) and -1 <= b < s for s, b, _ in slots)
        or not all(0 <= t < len(tasks) for t, _ in workspace)
        or len(work) not in (0, len(tasks))
        or not all(-1 <= w < len(works) for w in work)
    ):
        raise ValueError("its storage is not that of its strategy's tasks")
    return plan


def _unknown(graph: graphs.Graph) -> str:
    """What to do about operators of the user's own, if they are not described here."""
    own = {op.kind for op in graph.ops if not op.kind.startswith(("aten.", "apportion."))}
    missing = sorted(kind for kind in own if lookup(kind) is None and reason(kind) is None)
    if not missing:
        return ""
    return f"; {missing[0]} is not described here, so import the file that describes it first"


def _bound(given: Any) -> float | None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (number and math.isfinite(given)):
        raise ValueError(f"its lower bound is {given!r}, neither a number nor null")
    return None if given is None else float(given)


def _notes(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(note, str) for note in given):
        raise ValueError("its notes are not a list of texts")
    return tuple(given)


def _search(data: Any) -> dict[str, Any]:
    """What a file says of how the plan was found."""
    figures, keys = data["figures"], {each.name for each in fields(PlanTrial)}
    if not isinstance(figures, dict):
        raise ValueError("its figures of the search have no names")
    if not all(isinstance(given, dict) and given.keys() == keys for given in data["measured"]):
        raise ValueError(f"its measured plans do not have {', '.join(sorted(keys))} each")
    return {
        "curve": tuple((float(at), float(seconds)) for at, seconds in data["curve"]),
        "figures": {name: float(number) for name, number in figures.items()},
        "measured": tuple(
            PlanTrial(
                str(given["method"]),
                float(given["predicted_seconds"]),
                float(given["measured_seconds"]),
                bool(given["chosen"]),
            )
            for given in data["measured"]
        ),
    }


def _storage(slots: Any, workspace: Any, works: Any, work: Any) -> Storage:
    return Storage(
        tuple((int(s), int(b), int(n)) for s, b, n in slots),
        tuple((int(t), int(n)) for t, n in workspace),
        tuple(map(str, works)),
        tuple(map(int, work)),
    )


def _predicted(timeline: Timeline) -> Prediction:
    return Prediction(
        timeline.step_seconds, timeline.peak_bytes, timeline.bytes_moved, timeline.busy
    )


def plan(
    program: Program | graphs.Graph,
    cluster: Cluster,
    method: str = "auto",
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    prices: CostSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
) -> Plan:
    """A Plan for a captured step (or its Graph) on a cluster, by `method` within `budget` seconds.

    `memory_limit` is in bytes per device; None means the devices' own memory, math.inf that there
    is no limit. "auto" keeps the best plan of many methods: one within the limit, of those the
    fastest; the Plan's `method` says whose it is. The baselines are among them whatever the budget.
    Where nothing fits the Plan is the nearest one, not `feasible`, and its `notes` say what is over
    and how many devices would do. An interrupt gives the best plan so far.

    Raises ValueError for an unknown method or one that is not for this cluster; warns (PlanWarning)
    once for each kind of operator that runs unsplit because it has no description. `progress` is
    told where planning stands.
    """
    how = (memory_limit, seed, prices, progress)
    return best_plans(program, cluster, method, budget, *how, keep=1)[0]


def best_plans(
    program: Program | graphs.Graph,
    cluster: Cluster,
    method: str,
    budget: float,
    memory_limit: float | None,
    seed: int,
    prices: CostSource | None,
    progress: Callable[[PlanningProgress], None] | None,
    keep: int,
) -> list[Plan]:
    """As `plan`, but the `keep` best that differ, best first; all but the first are feasible."""
    _check_methods([method])
    began = time.perf_counter()
    request = _request(program, cluster, memory_limit, seed, prices, progress)
    warn_unsplit(request.space, level=4)
    chosen = choose(request, method, budget, keep)
    found = [_keep(_made(request, c, budget), c) for c in (chosen.best, *chosen.others)]
    if found[0].feasible:
        return found
    left = 0.0 if chosen.interrupted else budget - (time.perf_counter() - began)
    several = method == "auto"
    return [_explained(found[0], request, chosen.best, left, several, tried=several)]


def compare(
    program: Program | graphs.Graph,
    cluster: Cluster,
    methods: Sequence[str] = tuple(METHODS),
    budget: float = 30.0,
    memory_limit: float | None = None,
    seed: int = 0,
    prices: CostSource | None = None,
    progress: Callable[[PlanningProgress], None] | None = None,
) -> list[Plan]:
    """A Plan by each method, each within `budget` seconds, under one simulator.

    A method that is not for this cluster or step is left out with a PlanWarning; ValueError if none
    is for it. An interrupt leaves out the methods that are not done. If no plan fits, the notes of
    the nearest say why.
    """
    _check_methods(methods)
    request = _request(program, cluster, memory_limit, seed, prices, progress)
    warn_unsplit(request.space)
    plans: list[Plan] = []
    refused: dict[str, Unsuitable] = {}
    best: Candidate | None = None
    at, interrupted = 0, False
    try:
        for method in methods:
            try:
                chosen = choose(request, method, budget)
            except Unsuitable as why:
                refused[method] = why
                continue
            if best is None or rank(request, chosen.best) < rank(request, best):
                best, at = chosen.best, len(plans)
            plans.append(replace(_made(request, chosen.best, budget), method=method))
            interrupted = chosen.interrupted
            if interrupted:
                break
    except KeyboardInterrupt:
        if not plans:
            raise
        interrupted = True
    if best is None:
        raise next(iter(refused.values()), ValueError("there are no methods to compare"))
    for method, refusal in refused.items():
        warnings.warn(f"{method} is left out: {refusal}", PlanWarning, stacklevel=2)
    if interrupted:
        done = {p.method for p in plans} | refused.keys()
        missing = ", ".join(m for m in methods if m not in done) or "none"
        warnings.warn(f"interrupted; methods not tried: {missing}", PlanWarning, stacklevel=2)
    _keep(plans[at], best)
    if not isinstance(request.prices, DefaultCosts):
        plans = [_priced(plan, request.prices.known()) for plan in plans]
    if not plans[at].feasible:
        left = 0.0 if interrupted else budget
        tried = "auto" in methods or set(QUICK_METHODS) <= {plan.method for plan in plans}
        plans[at] = _explained(plans[at], request, best, left, len(plans) > 1, tried)
    return plans


def _priced(made: Plan, cost: CostModel) -> Plan:
    """The Plan judged by what is known in the end: for later ones more may have been measured."""
    return made if made.cost is cost else replace(made, cost=cost).simulate()


def _request(
    program: Program | graphs.Graph,
    cluster: Cluster,
    memory_limit: float | None,
    seed: int,
    prices: CostSource | None,
    progress: Callable[[PlanningProgress], None] | None,
) -> PlanRequest:
    limits: tuple[int, ...] | None = tuple(d.memory_bytes for d in cluster.devices)
    if memory_limit is not None:
        count = len(cluster.devices)
        limits = None if math.isinf(memory_limit) else (int(memory_limit),) * count
    space = Space(program if isinstance(program, graphs.Graph) else program.graph)
    return PlanRequest(space, cluster, prices or DefaultCosts(cluster), limits, seed, progress)


def _made(request: PlanRequest, found: Candidate, budget: float) -> Plan:
    """The Plan of a Candidate, without what was worked out for it: of many Plans that is much."""
    return Plan(
        graph=request.space.source,
        cluster=request.cluster,
        strategy=found.found.strategy,
        method=found.method,
        seed=request.seed,
        budget=budget,
        search_seconds=found.search_seconds,
        predicted=_predicted(found.timeline),
        memory_limit=request.memory_limit,
        cost=found.cost,
        lower_bound=found.found.lower_bound,
        storage=found.storage,
        lower_bound_of=found.found.bound_of,
        notes=found.notes,
        curve=found.curve,
        figures=found.figures,
    )


def with_model(made: Plan, model: str) -> Plan:
    """The same Plan, of a model's specification, with what has been worked out for it."""
    return _with_caches(replace(made, model=model), made)


def with_trials(made: Plan, trials: Sequence[PlanTrial], notes: Sequence[str]) -> Plan:
    """The same Plan, kept because of these trials."""
    new = replace(made, measured=tuple(trials), notes=(*made.notes, *notes))
    return _with_caches(new, made)


def with_certificate(made: Plan, budget: float) -> Plan:
    """The same Plan, with notes that say how few bytes are proven to be possible at all."""
    from apportion.search import certify

    problem = Problem(Space(made.graph), made.cluster, made.cost)
    return _with_caches(replace(made, notes=(*made.notes, *certify(problem, budget))), made)


def _with_caches(new: Plan, made: Plan) -> Plan:
    known = ("space", "tasks", "timeline")
    new.__dict__.update({name: made.__dict__[name] for name in known if name in made.__dict__})
    return new


def _keep(made: Plan, found: Candidate) -> Plan:
    made.__dict__.update(space=found.space, tasks=found.tasks, timeline=found.timeline)
    return made


def _explained(
    made: Plan, request: PlanRequest, nearest: Candidate, budget: float, several: bool, tried: bool
) -> Plan:
    """A Plan that does not fit, with notes that say why and how many devices would do."""
    notes = [shortfall(request, nearest, several)]
    try:
        notes.append(enough(request, budget, tried))
    except KeyboardInterrupt:
        notes.append("interrupted before the number of devices that would do was found")
    return _keep(replace(made, notes=(*made.notes, *notes)), nearest)


def warn_unsplit(space: Space, level: int = 3) -> None:
    """One PlanWarning for each kind of operator that runs unsplit for want of a description, so
    many calls up."""
    graph = space.graph
    for kind, why in space.undescribed.items():
        ops = [
            op
            for index, op in enumerate(graph.ops)
            if op.kind == kind
            and not space.axes(index)
            and any(_several(graph.values[v].shape) for v in op.outputs)
        ]
        if ops:
            count = f"{len(ops)} operators, first" if len(ops) > 1 else "1 operator,"
            where = next((op.line for op in ops if op.line), ops[0].name)
            reason = "it has no description (ap.describe)" if why == "no description" else why
            text = f"{kind} runs unsplit ({count} at {where}): {reason}"
            warnings.warn(text, PlanWarning, stacklevel=level)


def _several(shape: tuple[int, ...] | None) -> bool:
    return shape is None or math.prod(shape) > 1


def _check_methods(names: Sequence[str]) -> None:
    for name in names:
        if name != "auto" and name not in METHODS:
            raise ValueError(f"unknown method {name!r}; known: auto, {', '.join(METHODS)}")
