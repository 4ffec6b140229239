"""What commands print with `--json`: results as plain data.

Part of the room show. Plans, Spaces and Runs come in, dictionaries go out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apportion.show import plan_tables, tables

if TYPE_CHECKING:
    from apportion.plan import Plan
    from apportion.run import Run, WayOut
    from apportion.split import Space


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The keys that stay stable."""
    return {
        "model": plan.model,
        "cluster": plan.cluster.name,
        "method": plan.method,
        "step_seconds": plan.predicted.step_seconds,
        "search_seconds": plan.search_seconds,
        "peak_bytes": list(plan.predicted.peak_bytes),
        "bytes_moved": plan.predicted.bytes_moved,
        "ops": len(plan.graph.ops),
        "feasible": plan.feasible,
        "communication": plan.strategy.communication.to_json(),
        **({} if plan.staleness is None else {"staleness": plan.staleness}),
        "lower_bound": plan.lower_bound,
        "lower_bound_of": plan.lower_bound_of or None,
        "notes": list(plan.notes),
        "curve": [list(point) for point in plan.curve],
        "figures": dict(plan.figures),
        "measured": [asdict(trial) for trial in plan.measured],
        "tried": [asdict(row) for row in plan.tried],
    }


def comparison_facts(model: str, cluster: str, plans: Sequence[Plan]) -> dict[str, Any]:
    """A row for each Plan; `best` is the method of the fastest that fits, or null."""
    best = plan_tables.fastest(plans)
    return {
        "model": model,
        "cluster": cluster,
        "best": best.method if best else None,
        "results": [plan_facts(plan) for plan in plans],
    }


def why_facts(plan: Plan) -> dict[str, Any]:
    """What a plan decides, and what its prediction rests on: where its times come from, and what
    fills each device."""
    from apportion.plan import decision, throughput, utilisation
    from apportion.simulate import peaks, shares

    cost, tasks, done = plan.cost, plan.tasks, throughput(plan)
    return {
        "decision": decision(plan),
        "throughput": None if done is None else asdict(done),
        "model_flops_utilisation": utilisation(plan),
        "cost": {
            "model": cost.name,
            "provenance": cost.provenance,
            "compile": cost.mode,
            "shares": shares(tasks, plan.cluster, cost),
        },
        "peak_causes": [
            asdict(peak) for peak in peaks(plan.timeline.curves, tasks, plan.space.graph)
        ],
    }


def way_facts(plan: Plan, ways: Sequence[WayOut]) -> dict[str, Any]:
    """What would fit instead of a Plan that does not; nothing of one that does."""
    return {} if plan.feasible else {"ways_out": [asdict(way) for way in ways]}


def step_facts(model: str, space: Space, kinds: dict[str, tables.KindSummary]) -> dict[str, Any]:
    """What `show` tells of a captured step."""
    begin = tables.beginnings(space.graph)
    return {
        "model": model,
        "fingerprint": space.graph.fingerprint,
        "parameters": begin.get("parameter", (0, 0, 0))[1],
        "ops": len(space.graph.ops),
        "flops": sum(kind.flops for kind in kinds.values()),
        "bytes": sum(kind.nbytes for kind in kinds.values()),
        "begin": {
            role: {"values": values, "elements": elements, "bytes": nbytes}
            for role, (values, elements, nbytes) in begin.items()
        },
        "kinds": [
            {
                "kind": name,
                "count": kind.count,
                "flops": kind.flops,
                "bytes": kind.nbytes,
                "undescribed": kind.undescribed,
                "axes": {axis: {"of": of, "cut": cut} for axis, (of, cut) in kind.axes.items()},
            }
            for name, kind in kinds.items()
        ],
    }


def run_facts(run: Run) -> dict[str, Any]:
    """What a run measured; `comparison` sets it beside what was predicted."""
    facts = {
        "measured_step_seconds": run.measured_step_seconds,
        "measured_peak_bytes": list(run.measured_peak_bytes),
        "measured_bytes_moved": run.measured_bytes_moved,
        "losses": list(run.losses),
        "measured_steps": list(run.measured_steps),
        "mode": run.mode,
        "run_notes": list(run.notes),
        "comparison": [
            {"name": row.name, "unit": row.unit, "predicted": row.predicted,
             "measured": row.measured, "error": row.error}
            for row in run.comparison
        ],
    }  # fmt: skip
    if run.first_step:
        facts |= {"first_step": run.first_step}
    if run.saved:
        facts |= {
            "saved": run.saved,
            "save_seconds": run.save_seconds,
            "save_bytes": list(run.save_bytes),
        }
    if run.equal is None:
        return facts
    return facts | {
        "max_abs_loss_diff": run.max_abs_loss_diff,
        "max_rel_param_diff": run.max_rel_param_diff,
        "equal": run.equal,
        "float32": run.float32,
        "worst": run.worst,
        "noise": run.noise,
        "reason": run.reason,
    }


def finite(data: Any) -> Any:
    """`data` with null for numbers that JSON cannot hold."""
    if isinstance(data, dict):
        return {key: finite(item) for key, item in data.items()}
    if isinstance(data, list):
        return [finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
