"""Plan: the saved artefact. Graph, cluster, strategy, prediction, and how it was found.

A file of a Plan is JSON with a schema version; loading checks it and executes nothing. A loaded
Plan can be simulated again without the model.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from apportion import graph as graphs
from apportion import ops as ops
from apportion import strategy as strategies
from apportion.cluster import Cluster
from apportion.cluster import from_json as load_cluster
from apportion.cluster import to_json as dump_cluster
from apportion.cost import CostModel, default_cost, dump_cost, load_cost, restricted
from apportion.files import write_whole
from apportion.lower import lower
from apportion.perfetto import Links, trace
from apportion.report import page
from apportion.schedule import link_spans
from apportion.search import SEARCHES, Problem, Unsuitable
from apportion.simulate import network, simulate
from apportion.splits import Space
from apportion.tasks import Storage, TaskGraph, with_storage
from apportion.tdl import lookup, reason
from apportion.timeline import Timeline

if TYPE_CHECKING:
    from apportion.capture import Program

FORMAT, VERSION = "apportion plan", 2
AUTO = ("data", "fsdp", "tofu")  # what method "auto" chooses from


class PlanWarning(UserWarning):
    """What the user of a plan should know: operators that run unsplit, methods left out."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a simulated step costs."""

    step_seconds: float
    peak_bytes: tuple[int, ...]
    bytes_moved: int
    busy: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """How to run one step on one cluster.

    model           the specification it was made from, or ""
    memory_limit    bytes per device that a feasible plan stays under
    cost            the CostModel, or as much of it as the plan needs
    search_seconds  how long the method took
    lower_bound     proven least cost, where the method gives one
    """

    graph: graphs.Graph
    cluster: Cluster
    strategy: strategies.Strategy
    method: str
    seed: int
    budget: float
    search_seconds: float
    predicted: Predicted
    memory_limit: tuple[int, ...]
    cost: CostModel
    lower_bound: float | None = None
    model: str = ""
    storage: Storage = field(default_factory=Storage)

    @property
    def feasible(self) -> bool:
        """Whether every device stays under its memory limit."""
        limits = self.memory_limit
        return all(p <= n for p, n in zip(self.predicted.peak_bytes, limits, strict=True))

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
        links = Links(names, link_spans(net, (line.start_ns, line.end_ns)))
        trace(line, self.tasks, self.space.graph, path, links)

    def report(self, path: str | Path, measured: Timeline | None = None) -> None:
        """Writes one HTML page about the Plan, with a measured step beside it where there is
        one."""
        write_whole(Path(path), page(self, measured))

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
            "memory_limit": list(self.memory_limit),
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
    if data.get("version") != VERSION:
        raise ValueError(f"it has version {data.get('version')}, this is version {VERSION}")
    graph = graphs.from_json(data["graph"])
    if graph.fingerprint != data["fingerprint"]:
        raise ValueError("its graph does not have the fingerprint that it says; it was changed")
    predicted = data["predicted"]
    plan = Plan(
        graph=graph,
        cluster=load_cluster(data["cluster"]),
        strategy=strategies.from_json(data["strategy"]),
        method=str(data["method"]),
        seed=int(data["seed"]),
        budget=float(data["budget"]),
        search_seconds=float(data["search_seconds"]),
        predicted=Predicted(
            float(predicted["step_seconds"]),
            tuple(map(int, predicted["peak_bytes"])),
            int(predicted["bytes_moved"]),
            tuple(map(float, predicted["busy"])),
        ),
        memory_limit=tuple(map(int, data["memory_limit"])),
        cost=load_cost(data["cost"]),
        lower_bound=data["lower_bound"],
        model=str(data["model"]),
        storage=_storage(*data["storage"]),
    )
    count = len(plan.cluster.devices)
    if len(plan.memory_limit) != count or len(plan.predicted.peak_bytes) != count:
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


def _storage(slots: Any, workspace: Any, works: Any, work: Any) -> Storage:
    return Storage(
        tuple((int(s), int(b), int(n)) for s, b, n in slots),
        tuple((int(t), int(n)) for t, n in workspace),
        tuple(map(str, works)),
        tuple(map(int, work)),
    )


class Prices(Protocol):
    """Where the costs of a search and of what it finds come from."""

    def known(self) -> CostModel:
        """What is known before there is a strategy."""

    def cost(self, strategy: strategies.Strategy, tasks: TaskGraph) -> CostModel:
        """What the tasks of a strategy cost."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """Prices from what comes with the package: nothing is measured."""

    cluster: Cluster

    def known(self) -> CostModel:
        return default_cost(self.cluster)

    def cost(self, strategy: strategies.Strategy, tasks: TaskGraph) -> CostModel:
        return default_cost(self.cluster)


def _predicted(timeline: Timeline) -> Predicted:
    return Predicted(
        timeline.step_seconds, timeline.peak_bytes, timeline.bytes_moved, timeline.busy
    )


def plan(
    program: Program | graphs.Graph,
    cluster: Cluster,
    method: str = "auto",
    budget: float = 30.0,
    memory_limit: int | None = None,
    seed: int = 0,
    prices: Prices | None = None,
) -> Plan:
    """A Plan for a captured step (or its Graph) on a cluster, by `method` within `budget` seconds.

    `memory_limit` is in bytes per device; None means the devices' own memory. "auto" plans by data,
    fsdp and, on 2, 4, 8, ... devices, tofu, with a third of the budget each, and keeps the fastest
    feasible plan: the Plan's `method` says which. Raises ValueError for an unknown method or one
    that is not for this cluster; warns (PlanWarning) once for each kind of operator that runs
    unsplit because it has no description.
    """
    _check_methods([method])
    space = Space(program if isinstance(program, graphs.Graph) else program.graph)
    warn_unsplit(space)
    prices = prices or Shipped(cluster)
    return _search(space, cluster, method, budget, memory_limit, seed, prices)


def compare(
    program: Program | graphs.Graph,
    cluster: Cluster,
    methods: Sequence[str] = tuple(SEARCHES),
    budget: float = 30.0,
    memory_limit: int | None = None,
    seed: int = 0,
    prices: Prices | None = None,
) -> list[Plan]:
    """A Plan by each method, under one simulator.

    A method that is not for this cluster is left out with a PlanWarning; ValueError if none is.
    """
    _check_methods(methods)
    space = Space(program if isinstance(program, graphs.Graph) else program.graph)
    warn_unsplit(space)
    prices = prices or Shipped(cluster)
    plans, refused = _each(space, cluster, methods, budget, memory_limit, seed, prices)
    if not plans and refused:
        raise next(iter(refused.values()))
    for method, why in refused.items():
        warnings.warn(f"{method} is left out: {why}", PlanWarning, stacklevel=2)
    return plans


def warn_unsplit(space: Space) -> None:
    """One PlanWarning for each kind of operator that runs unsplit for want of a description."""
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
            warnings.warn(text, PlanWarning, stacklevel=3)


def _several(shape: tuple[int, ...] | None) -> bool:
    return shape is None or math.prod(shape) > 1


def _check_methods(names: Sequence[str]) -> None:
    for name in names:
        if name != "auto" and name not in SEARCHES:
            raise ValueError(f"unknown method {name!r}; known: auto, {', '.join(SEARCHES)}")


def _each(
    space: Space,
    cluster: Cluster,
    methods: Sequence[str],
    budget: float,
    memory_limit: int | None,
    seed: int,
    prices: Prices,
) -> tuple[list[Plan], dict[str, Unsuitable]]:
    """Plans by those methods that can be used here, and what the others say."""
    plans, refused = [], {}
    for method in methods:
        try:
            plans.append(_search(space, cluster, method, budget, memory_limit, seed, prices))
        except Unsuitable as why:
            refused[method] = why
    return plans, refused


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest feasible one, of equal ones that which moves less; if none is feasible, the one
    that needs the least memory."""

    def rank(plan: Plan) -> tuple[bool, float, int]:
        guess = plan.predicted
        cost = guess.step_seconds if plan.feasible else max(guess.peak_bytes)
        return not plan.feasible, cost, guess.bytes_moved

    best = min(plans, key=rank)
    return _kept(best, replace(best, search_seconds=sum(p.search_seconds for p in plans)))


def _kept(before: Plan, after: Plan) -> Plan:
    """`after` with what `before` has worked out."""
    for name in ("space", "tasks", "timeline"):
        after.__dict__[name] = before.__dict__[name]
    return after


def _search(
    space: Space,
    cluster: Cluster,
    method: str,
    budget: float,
    memory_limit: int | None,
    seed: int,
    prices: Prices,
) -> Plan:
    if method == "auto":
        share = budget / len(AUTO)
        return _best(_each(space, cluster, AUTO, share, memory_limit, seed, prices)[0])
    search = SEARCHES[method]
    problem = Problem(space, cluster, prices.known())
    began = time.perf_counter()
    found = search(problem, budget=budget, seed=seed)
    seconds = time.perf_counter() - began
    limits = tuple(d.memory_bytes for d in cluster.devices)
    if memory_limit is not None:
        limits = (memory_limit,) * len(limits)
    empty = Predicted(0.0, (0,) * len(limits), 0, (0.0,) * len(limits))
    if (found.strategy.digits, found.strategy.opening) != (space.digits, space.opening):
        space = strategies.space_of(space.source, found.strategy)
    tasks = lower(space, found.strategy, len(limits))
    storage = _measured_storage(space, found.strategy, tasks, cluster)
    tasks = with_storage(tasks, storage)
    cost = prices.cost(found.strategy, tasks)
    draft = Plan(
        space.source, cluster, found.strategy, method, seed, budget, seconds, empty, limits, cost,
        found.lower_bound, storage=storage,
    )  # fmt: skip
    draft.__dict__.update(space=space, tasks=tasks)
    return _kept(draft, draft.simulate())


def _measured_storage(
    space: Space, strategy: strategies.Strategy, tasks: TaskGraph, cluster: Cluster
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
