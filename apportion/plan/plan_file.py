"""The file of a Plan: JSON with a schema version. Reading it checks it and executes nothing.

Part of the room plan. A Plan comes in and plain data goes out, or the other way round. A Plan that
was read can be simulated again without the model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, fields, replace
from typing import Any

from apportion import graph as graphs
from apportion.checked import (
    LARGEST_NUMBER,
    brief,
    parse_json,
    read_call,
    read_every,
    read_field,
    read_flag,
    read_list,
    read_mapping,
    read_number,
    read_row,
    read_text,
    read_whole,
    read_wholes,
)
from apportion.describe import find_description, reason_unsplit
from apportion.lower import Storage, TaskGraph, runnable, with_storage
from apportion.machine import cluster_from_json as load_cluster
from apportion.machine import cluster_to_json as dump_cluster
from apportion.machine import dump_cost, load_cost
from apportion.memory import HostState, MemoryPlan, Offload
from apportion.plan.plan import (
    MethodFigures,
    Plan,
    PlanTrial,
    Prediction,
    SimulatedStep,
    prediction_of,
)
from apportion.plan.stale import SSP, stale_prediction
from apportion.simulate import restricted
from apportion.split import strategy as strategies

FORMAT, VERSION = "apportion plan", 4
READ = (3, 4)
"""Versions that are read; 3 has neither curve nor figures nor trials."""
RENEWED = "the file says"
"""How the note begins where its figures are not those of the simulation."""
NOTHING = Prediction(0.0, (), 0, ())


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A Plan as plain data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model,
        "method": plan.method,
        "seed": plan.seed,
        "budget": plan.budget if math.isfinite(plan.budget) else None,
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
        **_memory_fields(plan.memory),
        **({} if plan.staleness is None else {"staleness": plan.staleness}),
        **({"tried": [asdict(row) for row in plan.tried]} if plan.tried else {}),
    }


def _memory_fields(memory: MemoryPlan) -> dict[str, Any]:
    """What is decided about memory; what is not has no field, as in older files."""
    fields = {
        "order": list(memory.order),
        "recomputed": list(memory.recomputed),
        "host_state": [list(astuple(each)) for each in memory.host_state],
        "offloaded": [list(astuple(each)) for each in memory.offloaded],
    }
    return {name: rows for name, rows in fields.items() if rows}


def _memory(data: dict[str, Any]) -> MemoryPlan:
    return MemoryPlan(
        read_wholes(data.get("order", []), "its order of operators"),
        read_wholes(data.get("recomputed", []), "what it recomputes"),
        read_every(data.get("host_state", []), "a parameter on the host", _host_state),
        read_every(data.get("offloaded", []), "what it offloads", _offload),
    )


def _host_state(data: Any, what: str) -> HostState:
    parameter, update, fetches, *places = read_row(data, what, len(fields(HostState)))
    rows = read_every(fetches, what, lambda row, what: read_row(row, what, 2))
    return HostState(
        read_whole(parameter, what),
        read_text(update, what),
        tuple((read_whole(reader, what), read_whole(begin, what)) for reader, begin in rows),
        *(read_whole(place, what) for place in places),
    )


def _storage_rows(storage: Storage) -> list[list[Any]]:
    """What older files do not have is written only where there is some."""
    rows = [list(getattr(storage, part.name)) for part in fields(storage)]
    return rows if storage.late else rows[:-1] if storage.kept else rows[:-2]


def read_plan(text: bytes) -> Plan:
    """The Plan that a file says; raises ValueError, in a sentence, if it is none. Whatever goes
    wrong while what it says is put together is the file's fault."""
    data = parse_json(text)
    try:
        return plan_from_json(data)
    except ValueError:
        raise
    except MemoryError:
        raise ValueError("it needs more memory than there is") from None
    except (ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        kind, said = type(error).__name__, brief(str(error))
        raise ValueError(f"what it says does not hold together ({kind}: {said})") from error


def plan_from_json(data: Any) -> Plan:
    """A Plan from plain data, its prediction made anew; raises ValueError if it is none."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it does not say that it is one; make plans with `apportion plan --out`")
    if data.get("version") not in READ:
        version = brief(data.get("version"))
        raise ValueError(f"it has version {version}, this is version {VERSION}")
    data = read_mapping(data, "the plan")
    plan, said = _read_fields(data), _read_prediction(read_field(data, "predicted"))
    return _renewed(_checked(plan, said), said)


def _read_fields(data: dict[str, Any]) -> Plan:
    """What a file says of a Plan, but for its prediction."""

    def of(key: str) -> Any:
        return read_field(data, key)

    graph = graphs.from_json(of("graph"))
    if graph.fingerprint != of("fingerprint"):
        raise ValueError("its graph does not have the fingerprint that it says; it was changed")
    limits, bound, budget = of("memory_limit"), of("lower_bound"), of("budget")
    stale = data.get("staleness")
    return Plan(
        graph=graph,
        cluster=load_cluster(of("cluster")),
        strategy=strategies.from_json(of("strategy")),
        method=read_text(of("method"), "its method"),
        seed=read_whole(of("seed"), "its seed"),
        budget=math.inf if budget is None else read_number(budget, "its budget"),
        search_seconds=read_number(of("search_seconds"), "its search time"),
        predicted=NOTHING,
        memory_limit=None if limits is None else read_wholes(limits, "its memory limits"),
        cost=load_cost(of("cost")),
        lower_bound=None if bound is None else read_number(bound, "its lower bound"),
        model=read_text(of("model"), "its model"),
        storage=_storage(*read_row(of("storage"), "its storage", 4, 5, 6)),
        lower_bound_of=read_text(of("lower_bound_of"), "what its lower bound is of"),
        notes=read_every(of("notes"), "its notes", read_text),
        memory=_memory(data),
        staleness=None if stale is None else read_whole(stale, "its staleness"),
        tried=read_every(data.get("tried", []), "the methods tried", _method_figures),
        **(_search(data) if data["version"] >= VERSION else {}),
    )


def _read_prediction(data: Any) -> Prediction:
    data = read_mapping(data, "its prediction")
    step, peaks, moved, busy = (
        read_field(data, key, "its prediction")
        for key in ("step_seconds", "peak_bytes", "bytes_moved", "busy")
    )
    return Prediction(
        read_number(step, "its step time"),
        read_wholes(peaks, "its peaks"),
        read_whole(moved, "its bytes moved"),
        read_every(busy, "how busy devices are", read_number),
    )


def _checked(plan: Plan, said: Prediction) -> Plan:
    """The Plan with its tasks; raises ValueError unless all that it says fits together."""
    count = len(plan.cluster.devices)
    figures = (said.peak_bytes, said.busy, plan.memory_limit)
    if any(some is not None and len(some) != count for some in figures):
        raise ValueError(f"its figures are not for the {count} devices of its cluster")
    if plan.staleness is not None and plan.method != SSP:
        raise ValueError(f"it has a staleness, and only plans by {SSP} do")
    _check_memory_decisions(plan)
    try:
        strategies.verify_strategy(plan.space, plan.strategy, count)
    except ValueError as error:
        raise ValueError(f"{error}{_how_to_describe(plan.graph)}") from None
    tasks = runnable(plan.space, plan.strategy, count)
    _check_storage(plan.storage, tasks)
    tasks = with_storage(tasks, plan.storage)
    return replace(plan, simulated=SimulatedStep(plan, plan.space, tasks))


def _renewed(plan: Plan, said: Prediction) -> Plan:
    """The Plan with its prediction simulated: figures that a file says are not trusted. Where they
    differ a note says so, as after a change of the simulator."""
    found = prediction_of(plan.timeline)
    if plan.staleness is not None:
        found = stale_prediction(replace(plan, predicted=found, simulated=plan.step))
    notes = tuple(note for note in plan.notes if not note.startswith(RENEWED))
    if not _same_figures(said, found):
        notes += (
            f"{RENEWED} {said.step_seconds:.4g} s a step, {max(said.peak_bytes):,} bytes at the "
            f"peak and {said.bytes_moved:,} moved; simulated anew it is "
            f"{found.step_seconds:.4g} s, {max(found.peak_bytes):,} and {found.bytes_moved:,}, "
            "which is what counts",
        )
    return replace(plan, predicted=found, notes=notes, simulated=plan.step)


def _same_figures(said: Prediction, found: Prediction) -> bool:
    times = zip((said.step_seconds, *said.busy), (found.step_seconds, *found.busy), strict=True)
    return (said.peak_bytes, said.bytes_moved) == (found.peak_bytes, found.bytes_moved) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in times
    )


def _check_memory_decisions(plan: Plan) -> None:
    """Raises ValueError unless what is decided about memory is of the Graph."""
    ops, values, memory = len(plan.graph.ops), len(plan.graph.values), plan.memory
    if sorted(memory.order) != list(range(len(memory.order))):
        raise ValueError("its order of operators names one twice, or not at all")
    if not all(op < ops for op in memory.recomputed):
        raise ValueError(f"it recomputes an operator that is none of its {ops}")
    for state in memory.host_state:
        if state.parameter >= values:
            raise ValueError(f"it has value {state.parameter} on the host, of {values} values")


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


def _method_figures(data: Any, what: str) -> MethodFigures:
    data = read_mapping(data, what)
    method, step, peak, moved, fits = (
        read_field(data, each.name, what) for each in fields(MethodFigures)
    )
    return MethodFigures(
        read_text(method, what), read_number(step, what), read_whole(peak, what),
        read_whole(moved, what), read_flag(fits, what),
    )  # fmt: skip


def _offload(data: Any, what: str) -> Offload:
    count = len(fields(Offload))
    return Offload(*(read_whole(item, what, -1) for item in read_row(data, what, count)))


def _search(data: dict[str, Any]) -> dict[str, Any]:
    """What a file says of how the plan was found."""
    figures = read_mapping(read_field(data, "figures"), "its figures of the search")
    curve = read_every(
        read_field(data, "curve"), "its curve", lambda point, what: read_row(point, what, 2)
    )
    least = -LARGEST_NUMBER
    return {
        "curve": tuple(
            (read_number(at, "its curve"), read_number(seconds, "its curve"))
            for at, seconds in curve
        ),
        "figures": {
            name: read_number(item, f"the figure {brief(name)}", least)
            for name, item in figures.items()
        },
        "measured": read_every(read_field(data, "measured"), "a plan that was run", _trial),
    }


def _trial(data: Any, what: str) -> PlanTrial:
    data = read_mapping(data, what)
    method, predicted, measured, chosen = (
        read_field(data, each.name, what) for each in fields(PlanTrial)
    )
    return PlanTrial(
        read_text(method, what), read_number(predicted, what),
        read_number(measured, what, 1e-12), read_flag(chosen, what),
    )  # fmt: skip


def _storage(
    slots: Any, workspace: Any, works: Any, work: Any, kept: Any = (), late: Any = ()
) -> Storage:
    def rows(data: Any, length: int) -> tuple[tuple[int, ...], ...]:
        what = "its storage"
        return tuple(
            tuple([read_whole(item, what, -1) for item in read_row(row, what, length)])
            for row in read_list(data, what)
        )

    made: Any = Storage
    found: Storage = made(
        rows(slots, 3), rows(workspace, 2), read_every(works, "a kernel call", read_call),
        read_wholes(work, "its storage", -1), rows(kept, 2), rows(late, 2),
    )  # fmt: skip
    if any(row[-1] < 0 for row in (*found.slots, *found.workspace)):
        raise ValueError("its storage has a number of bytes that is negative")
    return found
