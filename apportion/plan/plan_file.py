"""The file of a Plan: JSON with a schema version. Reading it checks it and executes nothing.

Part of the room plan. A Plan comes in and plain data goes out, or the other way round. A Plan that
was read can be simulated again without the model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, fields, replace
from typing import Any

from apportion import graph as graphs
from apportion.describe import find_description, reason_unsplit
from apportion.lower import Storage, TaskGraph, runnable, with_storage
from apportion.machine import cluster_from_json as load_cluster
from apportion.machine import cluster_to_json as dump_cluster
from apportion.machine import dump_cost, load_cost
from apportion.memory import Offload
from apportion.plan.plan import Plan, PlanTrial, Prediction, SimulatedStep
from apportion.simulate import restricted
from apportion.split import strategy as strategies

FORMAT, VERSION = "apportion plan", 4
READ = (3, 4)
"""Versions that are read; 3 has neither curve nor figures nor trials."""


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A Plan as plain data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model,
        "method": plan.method,
        "seed": plan.seed,
        "budget": plan.budget,
        "search_seconds": plan.search_seconds,
        "lower_bound": plan.lower_bound,
        "lower_bound_of": plan.lower_bound_of,
        "notes": list(plan.notes),
        "curve": [list(point) for point in plan.curve],
        "figures": dict(plan.figures),
        "measured": [asdict(trial) for trial in plan.measured],
        "memory_limit": plan.memory_limit and list(plan.memory_limit),
        "predicted": {
            "step_seconds": plan.predicted.step_seconds,
            "peak_bytes": list(plan.predicted.peak_bytes),
            "bytes_moved": plan.predicted.bytes_moved,
            "busy": list(plan.predicted.busy),
        },
        "cluster": dump_cluster(plan.cluster),
        "fingerprint": plan.graph.fingerprint,
        "graph": graphs.to_json(plan.graph),
        "strategy": strategies.to_json(plan.strategy),
        "storage": _storage_rows(plan.storage),
        "cost": dump_cost(restricted(plan.cost, plan.tasks)),
        **({"recomputed": list(plan.recomputed)} if plan.recomputed else {}),
        **({"offloaded": [list(astuple(o)) for o in plan.offloaded]} if plan.offloaded else {}),
    }


def _storage_rows(storage: Storage) -> list[list[Any]]:
    """What older files do not have is written only where there is some."""
    rows = [list(part) for part in astuple(storage)]
    return rows if storage.late else rows[:-1] if storage.kept else rows[:-2]


def plan_from_json(data: Any) -> Plan:
    """A Plan from plain data; raises ValueError, KeyError or TypeError if it is none."""
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
        recomputed=tuple(map(int, data.get("recomputed", ()))),
        offloaded=tuple(Offload(*map(int, row)) for row in data.get("offloaded", ())),
        **(_search(data) if data["version"] >= VERSION else {}),
    )
    return _checked(plan)


def _checked(plan: Plan) -> Plan:
    """The Plan with its tasks; raises ValueError unless all that it says fits together."""
    count = len(plan.cluster.devices)
    figures = (plan.predicted.peak_bytes, plan.memory_limit)
    if any(some is not None and len(some) != count for some in figures):
        raise ValueError(f"its figures are not for the {count} devices of its cluster")
    try:
        strategies.verify_strategy(plan.space, plan.strategy, count)
    except ValueError as error:
        raise ValueError(f"{error}{_how_to_describe(plan.graph)}") from None
    tasks = runnable(plan.space, plan.strategy, count)
    _check_storage(plan.storage, tasks)
    tasks = with_storage(tasks, plan.storage)
    return replace(plan, simulated=SimulatedStep(plan, plan.space, tasks))


def _check_storage(storage: Storage, tasks: TaskGraph) -> None:
    """Raises ValueError unless the storage can be that of these tasks."""
    count = len(tasks.became) or len(tasks)  # of the plain lowering
    if (
        not all(0 <= s < len(tasks.slot_base) and -1 <= b < s for s, b, _ in storage.slots)
        or not all(0 <= t < count for t, _ in storage.workspace)
        or not all(
            0 <= s < len(tasks.slot_base) and 0 <= t < count
            for s, t in (*storage.kept, *storage.late)
        )
        or len(storage.work) not in (0, count)
        or not all(-1 <= w < len(storage.works) for w in storage.work)
    ):
        raise ValueError("its storage is not that of its strategy's tasks")


def _how_to_describe(graph: graphs.Graph) -> str:
    """What to do about operators of the user's own, if they are not described here."""
    own = {op.kind for op in graph.ops if not op.kind.startswith(("aten.", "apportion."))}
    missing = sorted(
        kind for kind in own if find_description(kind) is None and reason_unsplit(kind) is None
    )
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


def _storage(
    slots: Any, workspace: Any, works: Any, work: Any, kept: Any = (), late: Any = ()
) -> Storage:
    return Storage(
        tuple((int(s), int(b), int(n)) for s, b, n in slots),
        tuple((int(t), int(n)) for t, n in workspace),
        tuple(map(str, works)),
        tuple(map(int, work)),
        tuple((int(s), int(t)) for s, t in kept),
        tuple((int(s), int(t)) for s, t in late),
    )
