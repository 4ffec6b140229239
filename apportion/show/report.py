"""The report: a Plan as one HTML page that needs no network.

Part of the room show. A Plan comes in, a page goes out.
`page` gathers what the page shows as plain data, in columns and with repeated texts named once, and
puts it with the style sheet and the script of templates/ into one text. The data stands in a script
element that browsers do not run; what it holds is only ever shown as text.

    slices    tasks on the timeline; beyond MAX_SLICES short neighbours on a lane are drawn as one
    bands     bytes per category over time, with what is alive at the peak
    traffic   bytes and messages from device to device
    ops       each Op with its Choice, what is fetched for it and how long it takes
    search    the best step over the time of search, the methods that were tried, and the plans that
              were run
    graph     modules, how each is cut, and what flows between them (report_graph.py)
    alike     devices that do the same, of which one is drawn (report_folds.py)
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apportion.columns import Ints
from apportion.graph import Graph
from apportion.lower import (
    CATEGORIES,
    TaskGraph,
    TaskKinds,
)
from apportion.plan import Plan, Prediction, decision, throughput, utilisation
from apportion.show.report_folds import alike_devices
from apportion.show.report_graph import picture
from apportion.simulate import Curve, Peak, Timeline, breakdowns, peaks, shares
from apportion.split import Choice, Space
from apportion.version import VERSION

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = (
    "base", "summary", "graph", "timeline", "memory", "traffic", "operators", "search", "main",
)  # fmt: skip
MAX_SLICES = 200_000
MAX_POINTS = 12_000  # of all memory curves together; each keeps at least MIN_POINTS
MIN_POINTS = 60
MAX_BLOCKS = 64  # rows of the table of traffic


def page(plan: Plan, measured: Timeline | None = None) -> str:
    """The report of a Plan, with a measured step beside the predicted one where there is one.

    Raises ValueError if the measured Timeline is of another number of tasks than the Plan's.
    """
    tasks = plan.tasks
    if measured is not None and len(measured.start_ns) != len(tasks):
        raise ValueError(
            f"the measured timeline has {len(measured.start_ns)} tasks, the plan {len(tasks)}; "
            "it is of another plan"
        )
    lines = [plan.timeline] if measured is None else [plan.timeline, measured]
    parts = {
        "css": _template("report.css"),
        "js": "\n".join(_template(f"{name}.js") for name in SCRIPTS),
        "data": embed(gather(plan, lines)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _template("report.html"))


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text("ascii")


def embed(data: Any) -> str:
    """`data` as JSON in ASCII that can neither end a script element nor begin another."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # in JSON they occur inside of texts only
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def gather(plan: Plan, lines: Sequence[Timeline]) -> dict[str, Any]:
    """All that the page shows, as plain data; `lines` begins with the predicted Timeline."""
    tasks = plan.tasks
    share = MAX_SLICES // len(lines)
    ops = operators(plan, lines)
    return {
        "plan": _facts(plan, lines),
        "devices": _devices(plan),
        "provenance": _provenance(plan, lines),
        "categories": CATEGORIES,
        "kinds": task_kinds(tasks.task_kinds),
        "lanes": tasks.task_kinds.lanes,
        "groups": tasks.groups,
        "lines": [
            {
                "source": line.source,
                "step_ns": int(line.end_ns.max(initial=0)) + line.period_ns,
                "period_ns": line.period_ns,
                "figures": _figures(line) | {"shares": _shares(tasks, line)},
                "tasks": len(tasks),
                "slices": slices(tasks, line, share),
                "memory": _memory(plan.space.graph, tasks, line),
            }
            for line in lines
        ],
        "traffic": traffic(tasks),
        "ops": ops,
        "search": _search(plan),
        "graph": picture(plan, ops["fetched"], ops["length"][0]),
        "alike": alike_devices(tasks, lines[0]),
    }


def _finite(data: Any) -> Any:
    """`data` with None for numbers that JSON cannot hold."""
    if isinstance(data, dict):
        return {key: _finite(item) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# The plan's table


def _facts(plan: Plan, lines: Sequence[Timeline]) -> dict[str, Any]:
    return {
        "model": plan.model,
        "cluster": plan.cluster.name,
        "about": plan.cluster.description,
        "communication_on_device": plan.cluster.communication_on_device,
        "method": plan.method,
        "communication": f"{plan.strategy.communication.policy}: {plan.strategy.communication}",
        "seed": plan.seed,
        "budget": plan.budget,
        "search_seconds": plan.search_seconds,
        "lower_bound": plan.lower_bound,
        "feasible": plan.feasible,
        "decision": decision(plan),
        "notes": list(plan.notes),
        "utilisation": utilisation(plan),
        "throughput": None if (done := throughput(plan)) is None else asdict(done),
        "ops": len(plan.graph.ops),
        "fingerprint": plan.graph.fingerprint,
        "version": VERSION,
        "predicted": _figures(plan.predicted),
        "renewed": _figures(plan.predicted) != _figures(lines[0]),
    }


def _search(plan: Plan) -> dict[str, Any]:
    keys = ("method", "predicted_seconds", "measured_seconds", "chosen")
    return {
        "seconds": plan.search_seconds,
        "curve": plan.curve,
        "figures": dict(plan.figures),
        "measured": [{key: getattr(trial, key) for key in keys} for trial in plan.measured],
        "tried": [asdict(row) for row in plan.tried],
    }


def _shares(tasks: TaskGraph, line: Timeline) -> list[list[float]]:
    """For every device which shares of a step it computes, assembles, exchanges and waits."""
    whole = max(line.step_seconds, 1e-12)
    return [
        [b.computes / whole, b.assembles / whole, b.exchanges / whole, b.waits / whole]
        for b in breakdowns(tasks, line)
    ]


def _figures(figures: Prediction | Timeline) -> dict[str, Any]:
    return {
        "step_seconds": figures.step_seconds,
        "peak_bytes": figures.peak_bytes,
        "bytes_moved": figures.bytes_moved,
        "busy": figures.busy,
    }


def _devices(plan: Plan) -> dict[str, Any]:
    devices = plan.cluster.devices
    return {
        "name": [device.name for device in devices],
        "kind": interned(device.kind for device in devices),
        "memory": [device.memory_bytes for device in devices],
        "limit": plan.memory_limit or [device.memory_bytes for device in devices],
    }


def _peak_provenance(plan: Plan) -> tuple[str, str, str]:
    counted = "at each moment of the step"
    if all(device.kind == "cpu" for device in plan.cluster.devices):
        return "peak memory", "exact", f"counted: tensors, messages and workspaces alive {counted}"
    return (
        "peak memory", "at least",
        f"counted: tensors and messages alive {counted}; the kernels' workspace on these devices "
        "is not known",
    )  # fmt: skip


def _sources(shares: dict[str, float]) -> str:
    """Where times come from: one word, or the share of each."""
    used = {source: share for source, share in shares.items() if share}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{share:.0%} {source}" for source, share in used.items()) or "nothing runs"


def _provenance(plan: Plan, lines: Sequence[Timeline]) -> list[tuple[str, str, str]]:
    """Rows (which figure, what it is, where it comes from)."""
    cost = plan.cost
    sure = _sources(shares(plan.tasks, plan.cluster, cost))
    bound = "none: this method proves no bound"
    rows = [
        ("bytes moved", "exact", "counted: the messages of the lowered step"),
        _peak_provenance(plan),
        ("step time, timeline, busy", sure,
         f"simulated with the {cost.name} cost model: {cost.provenance}"),
        ("search time", "measured", "where the plan was made"),
        ("lower bound", "none" if plan.lower_bound is None else "proven",
         bound if plan.lower_bound is None else "by the method, in the unit that it minimises"),
    ]  # fmt: skip
    if len(lines) > 1:
        rows.append(("measured figures", "measured", "a step that ran"))
    for what, parts in (("devices", plan.cluster.devices), ("links", plan.cluster.links)):
        counts = Counter(part.provenance or "not said" for part in parts)
        rows += [(f"rates of {n} {what}", "input", text) for text, n in counts.items()]
    return rows


# The timeline


@dataclass(frozen=True, slots=True, eq=False)
class LaneSlices:
    """What is on lanes, in columns, by device, receiver and start; a collective on every member."""

    task: Ints
    device: Ints
    peer: Ints
    start: Ints
    end: Ints
    nbytes: Ints  # of a collective, what this member sends


def task_kinds(kinds: TaskKinds) -> dict[str, Any]:
    """Columns of what kinds of task look like; lanes by their index."""
    return {
        "name": [kind.name for kind in kinds],
        "label": [kind.label for kind in kinds],
        "colour": [kind.colour for kind in kinds],
        "lane": kinds.lane.tolist(),
        "receiver_lane": kinds.receiver_lane.tolist(),
        "message": kinds.is_message.tolist(),
        "collective": kinds.is_collective.tolist(),
    }


def slices(tasks: TaskGraph, line: Timeline, limit: int) -> dict[str, Any]:
    """Columns of what is drawn, starts as differences; at most about `limit` rows.

    A row stands for `count` tasks: neighbours on one lane (and to one receiver), each short. Where
    steps overlap, two of them are drawn.
    """
    drawn = _drawn(tasks, line)
    if line.period_ns:
        drawn = _twice(drawn, line.period_ns)
    heads = np.flatnonzero(_heads(drawn, int(drawn.end.max(initial=0)), limit))
    first, start = drawn.task[heads], drawn.start[heads]
    ends = np.maximum.reduceat(drawn.end, heads) if len(heads) else heads
    nbytes = np.add.reduceat(drawn.nbytes, heads) if len(heads) else heads
    rows = len(drawn.task)
    return {
        "kind": tasks.kind[first].tolist(),
        "device": drawn.device[heads].tolist(),
        "peer": drawn.peer[heads].tolist(),
        "op": tasks.op[first].tolist(),
        "part": tasks.part[first].tolist(),
        "start": np.diff(start, prepend=0).tolist(),
        "length": (ends - start).tolist(),
        "nbytes": nbytes.tolist(),
        "group": tasks.group[first].tolist() if len(tasks.groups) else None,
        "count": np.diff(heads, append=rows).tolist() if len(heads) < rows else None,
    }


def _drawn(tasks: TaskGraph, line: Timeline) -> LaneSlices:
    alone, joint = np.flatnonzero(~tasks.is_collective), np.flatnonzero(tasks.is_collective)
    groups = [tasks.groups[group] for group in tasks.group[joint].tolist()] if len(joint) else []
    sizes = np.array([len(group) for group in groups], np.int64)
    members = np.array([device for group in groups for device in group], np.int64)
    task = np.concatenate([alone, np.repeat(joint, sizes)])
    device = np.concatenate([tasks.device[alone], members])
    shares = tasks.nbytes[joint] // np.maximum(sizes, 1)
    nbytes = np.concatenate([tasks.nbytes[alone], np.repeat(shares, sizes)])
    order = np.lexsort((line.start_ns[task], tasks.peer[task], device))
    task = task[order]
    return LaneSlices(
        task, device[order], tasks.peer[task], line.start_ns[task], line.end_ns[task], nbytes[order]
    )


def _twice(drawn: LaneSlices, period: int) -> LaneSlices:
    """The same once more, a period later."""
    columns = (drawn.task, drawn.device, drawn.peer, drawn.start, drawn.end, drawn.nbytes)
    task, device, peer, start, end, nbytes = (np.concatenate([each, each]) for each in columns)
    later = np.arange(len(task)) >= len(drawn.task)
    start, end = start + later * period, end + later * period
    order = np.lexsort((start, peer, device))
    return LaneSlices(*(each[order] for each in (task, device, peer, start, end, nbytes)))


def _heads(drawn: LaneSlices, step: int, limit: int) -> np.typing.NDArray[Any]:
    """Which rows begin a slice: all, or those that stand apart at some grain of time."""
    count = len(drawn.task)
    if count <= limit:
        return np.ones(count, bool)
    length = drawn.end - drawn.start
    apart = np.ones(count, bool)
    apart[1:] = (np.diff(drawn.device) != 0) | (np.diff(drawn.peer) != 0)
    grain = max(step // limit, 1)
    while True:
        long = length >= grain
        heads = apart | long
        heads[1:] |= long[:-1] | (np.diff(drawn.start // grain) != 0)
        if heads.sum() <= limit or grain > step:
            return heads
        grain *= 2


# Memory


def thinned(curve: Curve, points: int) -> Ints:
    """Rows to draw: where there are too many, the highest and the last of each span of time."""
    count = len(curve.time_ns)
    if count <= points:
        return np.arange(count)
    rows = np.arange(count)
    span = curve.time_ns * max(points // 2, 1) // (int(curve.time_ns[-1]) + 1)
    by_height = np.lexsort((-rows, curve.nbytes, span))  # the first of equal heights comes last
    ends = np.append(np.flatnonzero(np.diff(span)), count - 1)
    return np.unique(np.concatenate([by_height[ends], ends]))


def _memory(graph: Graph, tasks: TaskGraph, line: Timeline) -> list[dict[str, Any]]:
    points = max(MAX_POINTS // max(tasks.devices, 1), MIN_POINTS)
    found = peaks(line.curves, tasks, graph)
    curves = zip(line.curves, found, strict=True)
    return [_curve(curve, thinned(curve, points), peak) for curve, peak in curves]


def _curve(curve: Curve, rows: Ints, peak: Peak) -> dict[str, Any]:
    return {
        "time": curve.time_ns[rows].tolist(),
        "bands": [column if any(column) else None for column in curve.bands()[rows].T.tolist()],
        "changes": len(curve.time_ns),
        "peak_ns": peak.time_ns,
        "peak_op": peak.op,
        "peak": list(peak.categories.values()),
        "alive": [[c.name, c.type, c.category, c.nbytes, c.op, c.line] for c in peak.causes],
        "others": peak.others,
    }


# Traffic


def traffic(tasks: TaskGraph) -> dict[str, Any]:
    """Bytes and messages between devices, or between blocks of neighbours where they are many."""
    block = max(math.ceil(tasks.devices / MAX_BLOCKS), 1)
    count = math.ceil(tasks.devices / block)
    nbytes = np.zeros((count, count), np.int64)
    messages = np.zeros((count, count), np.int64)
    moving = tasks.is_pairwise
    ends = tasks.device[moving] // block, tasks.peer[moving] // block
    np.add.at(nbytes, ends, tasks.nbytes[moving])
    np.add.at(messages, ends, 1)
    joint = np.flatnonzero(tasks.is_collective)
    for group in np.unique(tasks.group[joint]).tolist() if len(joint) else []:
        mine = joint[tasks.group[joint] == group]
        pairs = [(a, b) for a in tasks.groups[group] for b in tasks.groups[group] if a != b]
        sent = int(tasks.nbytes[mine].sum()) // len(pairs)
        for a, b in pairs:
            nbytes[a // block, b // block] += sent
            messages[a // block, b // block] += len(mine)
    return {"block": block, "nbytes": nbytes.tolist(), "messages": messages.tolist()}


# Operators


def operators(plan: Plan, lines: Sequence[Timeline]) -> dict[str, Any]:
    """A row per Op, and one for what the end of the step moves."""
    ops, choices, tasks = plan.space.graph.ops, plan.strategy.choices, plan.tasks
    fetched, messages = _fetched(tasks, len(ops))
    sets = interned(tuple(sorted(set(choice.devices))) for choice in choices)
    return {
        "name": [*(op.name for op in ops), "end of step"],
        "kind": interned([*(op.kind for op in ops), ""]),
        "phase": interned([*(op.phase for op in ops), "end"]),
        "line": interned([*(op.line for op in ops), ""]),
        "module": interned([*(op.module for op in ops), ""]),
        "cut": interned([*(cut(plan.space, i, c) for i, c in enumerate(choices)), ""]),
        "parts": [*(choice.count for choice in choices), 0],
        "replicas": [*(choice.replicas for choice in choices), 0],
        "devices": {"of": [*sets["of"], -1], "names": sets["names"]},
        "fetched": fetched.tolist(),
        "messages": messages.tolist(),
        "length": [_lengths(tasks, line, len(ops)).tolist() for line in lines],
        "undescribed": plan.space.undescribed,
    }


def cut(space: Space, op: int, choice: Choice) -> str:
    """The axes that a Choice cuts, with their parts: `i.0:4 k:2`."""
    axes = zip(space.axes(op), choice.parts, strict=True)
    return " ".join(f"{axis.name}:{parts}" for axis, parts in axes if parts > 1)


def interned(items: Iterable[Any]) -> dict[str, list[Any]]:
    """Each distinct item once under `names`, and for every item its index under `of`."""
    index: dict[Any, int] = {}
    of = [index.setdefault(item, len(index)) for item in items]
    return {"names": list(index), "of": of}


def _fetched(tasks: TaskGraph, count: int) -> tuple[Ints, Ints]:
    """Bytes and messages that arrive for each Op, and for the end of the step."""
    nbytes, messages = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    moving = tasks.is_message
    np.add.at(nbytes, tasks.op[moving], tasks.nbytes[moving])
    np.add.at(messages, tasks.op[tasks.is_pairwise], 1)
    joint = np.flatnonzero(tasks.is_collective)
    pairs = np.array([len(group) * (len(group) - 1) for group in tasks.groups], np.int64)
    if len(joint):
        np.add.at(messages, tasks.op[joint], pairs[tasks.group[joint]])
    return nbytes, messages


def _lengths(tasks: TaskGraph, line: Timeline, count: int) -> Ints:
    """Nanoseconds that each Op takes (its assemblies included) on the device where it takes
    most."""
    work = tasks.is_work
    pairs, which = np.unique(
        tasks.op[work] * tasks.devices + tasks.device[work], return_inverse=True
    )
    sums = np.zeros(len(pairs), np.int64)
    np.add.at(sums, which, (line.end_ns - line.start_ns)[work])
    longest = np.zeros(count + 1, np.int64)
    np.maximum.at(longest, pairs // tasks.devices, sums)
    return longest
