"""CostModel: how long a task takes alone.

A task's seconds are, in this order,

    measured   the call of a COMPUTE or ASSEMBLE was measured on this kind of device (cost_table.py)
    fitted     a line through measured calls of its kind (cost_fit.py); ASSEMBLE and messages: a
               line over boxes and bytes
    estimated  a line through all measured calls of its family, or where nothing was measured

                   COMPUTE   max(flops / (rate * efficiency), bytes / (bandwidth * efficiency))
                   ASSEMBLE  bytes / (bandwidth * efficiency)
                   TRANSFER  latencies of its links + bytes / the smallest of their bandwidths

               each plus the launch of a kernel on devices that are not asynchronous.

A view has no flops and no bytes. Waiting for lanes and links is `simulate`'s; so is the time that a
message occupies links, except where messages burn the device and were measured: there its duration
is the CostModel's (`times_messages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from apportion import cost_fit
from apportion.cluster import Cluster, Device
from apportion.cluster import cluster as named
from apportion.cost_table import (
    AHEAD,
    ASSEMBLE_LINE,
    EXCHANGE_LINE,
    PACK_LINE,
    Condition,
    CostTable,
    Fit,
    Line,
    alike,
    kind_of,
    load,
    table_from_json,
    table_to_json,
)
from apportion.tasks import (
    ASSEMBLE,
    CATEGORIES,
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
    Floats,
    Ints,
    TaskGraph,
)
from apportion.wire import wire_lines, wire_seconds

Bools = npt.NDArray[np.bool_]

LARGEST_ITEM = 16  # bytes of a complex128
MEASURED, FITTED, ESTIMATED = 0, 1, 2
SOURCES = ("measured", "fitted", "estimated")
INPUT_CATEGORY = CATEGORIES.index("input")
SHIPPED = Path(__file__).parent / "costs"


@dataclass(frozen=True, slots=True)
class CostModel:
    """`efficiency` is the share of a device's rates that a kernel is taken to reach where nothing
    was measured; `tables` holds what was, by kind of device."""

    name: str
    provenance: str
    efficiency: float
    tables: Mapping[str, CostTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"the efficiency {self.efficiency} is not above 0 and at most 1")


PUBLISHED = CostModel(
    "published", "published peak rates; every kernel is assumed to reach half of them", 0.5
)
ASSUMED = CostModel("assumed", "assumed rates of a CPU core, taken as what a kernel reaches", 1.0)


def default_cost(cluster: Cluster) -> CostModel:
    """The CostModel for a Cluster from what is shipped: measured tables of some GPUs, for others as
    large a share of their published rates as a measured one reaches."""
    if all(device.kind == "cpu" for device in cluster.devices):
        return ASSUMED
    known = {t.condition.kind: t for t in shipped()}
    tables, guessed = {}, set()
    for _, device in classes(cluster):
        if device.kind in known:
            tables[device.kind] = known[device.kind]
        elif device.asynchronous and REFERENCE in known and device.kind not in tables:
            tables[device.kind] = _like(device)
            guessed.add(device.kind)
    if not tables:
        return PUBLISHED
    texts = [f"measured on {kind}" for kind in sorted(tables.keys() - guessed)]
    texts += [
        f"{kind} is taken to reach the share of its published rates that {REFERENCE} was measured "
        "to reach" for kind in sorted(guessed)
    ]  # fmt: skip
    name = "estimated" if guessed else "measured"
    return CostModel(name, "; ".join(texts), PUBLISHED.efficiency, dict(sorted(tables.items())))


REFERENCE = "h200"


@lru_cache(maxsize=32)
def _like(device: Device) -> CostTable:
    """A table without works for a device that nobody has measured: the lines of the reference, at
    the pace of the device, and never faster than its published rates."""
    table = next(t for t in shipped() if t.condition.kind == REFERENCE)
    (model,) = named(f"1x{REFERENCE}").devices
    old, new = rates(model), rates(device)
    fits = {}
    for name, fit in cost_fit.fits(table.works, folds=0).items():
        size = min(int(name.rpartition("/")[2]), LARGEST_ITEM)
        flop = fit.per_flop * old[size] / new[size]
        byte = fit.per_byte * model.memory_bandwidth / device.memory_bandwidth
        fits[name] = fit._replace(
            per_flop=max(flop, 1 / new[size]) if flop else 0.0,
            per_byte=max(byte, 1 / device.memory_bandwidth) if byte else 0.0,
        )
    return CostTable(Condition(device.kind), fits=fits)


@lru_cache(maxsize=1)
def shipped() -> tuple[CostTable, ...]:
    """The tables that come with the package."""
    return tuple(t for path in sorted(SHIPPED.glob("*.json")) for t in load(path).tables)


def restricted(cost: CostModel, tasks: TaskGraph) -> CostModel:
    """The CostModel with no more than what these tasks need: what a saved Plan keeps."""
    kinds = set(tasks.kinds) | {kind_of(work) for work in tasks.works}
    names = kinds | {cost_fit.family(kind) for kind in kinds} | {"apportion.feed"}
    calls = (*tasks.works, *(name for name, _, _ in feeds(tasks)))
    always = {"", ASSEMBLE_LINE, AHEAD, *tasks.works, *map(alike, tasks.works)}

    def needed(table: CostTable) -> CostTable:
        return replace(
            table,
            works={w: table.works[w] for w in calls if w in table.works},
            fits={n: f for n, f in table.fits.items() if n.rpartition("/")[0] in names},
            issue={k: s for k, s in table.issue.items() if k in kinds | always},
        )

    return replace(cost, tables={kind: needed(table) for kind, table in cost.tables.items()})


def dump_cost(cost: CostModel) -> dict[str, Any]:
    """The CostModel as plain JSON data."""
    return {
        "name": cost.name,
        "provenance": cost.provenance,
        "efficiency": cost.efficiency,
        "tables": {kind: table_to_json(table) for kind, table in cost.tables.items()},
    }


def load_cost(data: Any) -> CostModel:
    """The CostModel written by `dump_cost`; ValueError, KeyError or TypeError on anything else."""
    if not isinstance(data["tables"], dict):
        raise ValueError("the tables of its costs are not by kind of device")
    tables = {str(kind): table_from_json(table) for kind, table in data["tables"].items()}
    return CostModel(str(data["name"]), str(data["provenance"]), float(data["efficiency"]), tables)


# Durations of all tasks


def nanoseconds(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """Duration of each task; at least 1, so that simulated time always moves on."""
    return np.maximum(np.rint(_costs(tasks, cluster, cost)[0] * 1e9), 1).astype(np.int64)


def sources(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """Where the duration of each task comes from: MEASURED, FITTED or ESTIMATED."""
    return _costs(tasks, cluster, cost)[1]


def shares(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> dict[str, float]:
    """The share of all tasks' predicted time that is measured, fitted and estimated."""
    seconds, source = _costs(tasks, cluster, cost)
    total = float(seconds.sum()) or 1.0
    return {name: float(seconds[source == k].sum()) / total for k, name in enumerate(SOURCES)}


def times_messages(cluster: Cluster, cost: CostModel) -> bool:
    """Whether messages take what `nanoseconds` says and occupy devices only, no links."""
    return cluster.communication_on_device and _exchange_line(cluster, cost) is not None


def issue_nanoseconds(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """What it takes the host to issue each task to an asynchronous device; 0 on others and for
    messages."""
    issue = np.zeros(len(tasks))
    names = _op_kinds(tasks)
    for where, device in classes(cluster):
        if not device.asynchronous:
            continue
        known = cost.tables[device.kind].issue if device.kind in cost.tables else {}
        usual = known.get("", device.launch_seconds)
        per_op = np.array([known.get(name, usual) for name in names] + [usual])
        mine = where[tasks.device] & (tasks.kind != TRANSFER) & (tasks.kind != COLLECTIVE)
        computes = mine & (tasks.kind == COMPUTE)
        issue[mine] = known.get("assemble", usual)
        issue[computes] = per_op[np.minimum(tasks.op[computes], len(names))]
        if len(tasks.work):
            calls = [known.get(w, known.get(alike(w), np.nan)) for w in tasks.works]
            own = np.array([*calls, np.nan])[tasks.work]
            issue[computes] = np.where(np.isnan(own), issue, own)[computes]
    return np.rint(issue * 1e9).astype(np.int64)


def ahead_nanoseconds(cluster: Cluster, cost: CostModel) -> Ints:
    """For every device how much issued work its host may be ahead of it; 0 if nothing is known to
    limit that."""
    tables = [cost.tables.get(device.kind) for device in cluster.devices]
    ahead = [0.0 if table is None else table.issue.get(AHEAD, 0.0) for table in tables]
    return np.rint(np.array(ahead) * 1e9).astype(np.int64)


def _costs(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> tuple[Floats, Ints]:
    """Seconds of each task, and where they come from."""
    if tasks.devices > len(cluster.devices):
        raise ValueError(
            f"the tasks are for {tasks.devices} devices, cluster {cluster.name!r} has "
            f"{len(cluster.devices)}"
        )
    seconds, source = np.zeros(len(tasks)), np.full(len(tasks), ESTIMATED)
    computes = np.flatnonzero(tasks.kind == COMPUTE)
    seconds[computes], source[computes] = compute_seconds(
        cost, cluster, _op_kinds(tasks), tasks.op[computes], tasks.device[computes],
        tasks.flops[computes], tasks.nbytes[computes], tasks.itemsize[computes],
    )  # fmt: skip
    joins = np.flatnonzero(tasks.kind == ASSEMBLE)
    if len(joins):
        boxes = tasks.taken[joins]
        seconds[joins], source[joins] = assemble_seconds(
            cost, cluster, tasks.device[joins], boxes, tasks.nbytes[joins]
        )
    _put_measured(tasks, cluster, cost, seconds, source)
    _put_feeds(tasks, cluster, cost, seconds)
    _put_messages(tasks, cluster, cost, seconds, source)
    return seconds, source


def _op_kinds(tasks: TaskGraph) -> Sequence[str]:
    return tasks.kinds or ("",) * max(len(tasks.op_start) - 2, 0)


def _put_measured(
    tasks: TaskGraph, cluster: Cluster, cost: CostModel, seconds: Floats, source: Ints
) -> None:
    if not len(tasks.work):
        return
    for where, device in classes(cluster):
        if device.kind not in cost.tables:
            continue
        known = cost.tables[device.kind].works
        found = [known[w].seconds if w in known else np.nan for w in tasks.works]
        measured = np.array([*found, np.nan])[tasks.work]
        here = where[tasks.device] & ~np.isnan(measured)
        seconds[here], source[here] = measured[here], MEASURED


def feeds(tasks: TaskGraph) -> list[tuple[str, int, int]]:
    """What takes the batch into each device that gets some of it: (signature, bytes, device)."""
    given = (tasks.slot_first == -1) & (tasks.slot_category == INPUT_CATEGORY)
    device, nbytes = tasks.slot_device[given], tasks.slot_nbytes[given]
    slots = np.bincount(device, minlength=tasks.devices).tolist()
    sizes = np.bincount(device, nbytes, tasks.devices).astype(np.int64).tolist()
    return [
        (f"apportion.feed({count} {size})", size, number)
        for number, (count, size) in enumerate(zip(slots, sizes, strict=True))
        if count
    ]


def _put_feeds(tasks: TaskGraph, cluster: Cluster, cost: CostModel, seconds: Floats) -> None:
    """The first task of a device also waits for its part of the batch, where that was measured."""
    if not cost.tables or not len(tasks.work):
        return
    working = np.flatnonzero((tasks.kind == COMPUTE) | (tasks.kind == ASSEMBLE))
    devices, first = np.unique(tasks.device[working], return_index=True)
    begins = dict(zip(devices.tolist(), working[first].tolist(), strict=True))
    for name, nbytes, device in feeds(tasks):
        table = cost.tables.get(cluster.devices[device].kind)
        if table is None or device not in begins:
            continue
        fit = table.fits.get(cost_fit.key(kind_of(name), 1))
        if name in table.works:
            seconds[begins[device]] += table.works[name].seconds
        elif fit is not None:
            seconds[begins[device]] += fit.launch + fit.per_byte * nbytes


def classes(cluster: Cluster) -> list[tuple[Bools, Device]]:
    """Devices of one kind and rate are one class: (which devices, one of them)."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, d in enumerate(cluster.devices):
        same = (d.kind, d.flops, d.memory_bandwidth, d.launch_seconds, d.asynchronous)
        groups.setdefault(same, []).append(number)
    found = []
    for members in groups.values():
        where = np.zeros(len(cluster.devices), bool)
        where[members] = True
        found.append((where, cluster.devices[members[0]]))
    return found


def compute_seconds(
    cost: CostModel,
    cluster: Cluster,
    kinds: Sequence[str],
    op: Ints,
    device: Ints,
    flops: Floats,
    nbytes: Ints,
    itemsize: Ints,
) -> tuple[Floats, Ints]:
    names, which = _distinct(tuple(kinds))
    kind, size = which[op], np.clip(itemsize, 0, LARGEST_ITEM)
    seconds, source = np.zeros(len(op)), np.full(len(op), ESTIMATED)
    for where, one in classes(cluster):
        here = where[device]
        rate = np.array(rates(one))[size[here]]
        arithmetic, memory = flops[here] / rate, nbytes[here] / one.memory_bandwidth
        launch = 0.0 if one.asynchronous else one.launch_seconds
        guess = np.maximum(arithmetic, memory) / cost.efficiency + launch
        if one.kind in cost.tables:
            lines, origin = fit_columns(cost.tables[one.kind], names)
            launches, per_flop, per_byte = lines[:, kind[here], size[here]]
            fitted = launches + flops[here] * per_flop + nbytes[here] * per_byte
            known = fitted > 0
            guess[known] = fitted[known]
            source[here] = np.where(known, origin[kind[here], size[here]], ESTIMATED)
        seconds[here] = guess
    return seconds, source


@lru_cache(maxsize=64)
def _distinct(kinds: tuple[str, ...]) -> tuple[tuple[str, ...], Ints]:
    """The different kinds, and for each Op which one it is; one more for the end of the step."""
    numbers: dict[str, int] = {}
    which = [numbers.setdefault(kind, len(numbers)) for kind in (*kinds, "")]
    return tuple(numbers), np.array(which, np.int64)


@lru_cache(maxsize=64)
def fit_columns(table: CostTable, kinds: tuple[str, ...]) -> tuple[Floats, Ints]:
    """Launch, per flop and per byte of every kind and size of element, zeros where nothing is
    known; and whether they are FITTED or ESTIMATED, as all are of a table without works."""
    lines = np.zeros((3, len(kinds), LARGEST_ITEM + 1))
    origin = np.full((len(kinds), LARGEST_ITEM + 1), ESTIMATED)
    for k, kind in enumerate(kinds):
        for size in range(LARGEST_ITEM + 1):
            own = table.fits.get(cost_fit.key(kind, size))
            found: Fit | None = own or table.fits.get(cost_fit.key(cost_fit.family(kind), size))
            if found is not None:
                lines[:, k, size] = found[:3]
                origin[k, size] = FITTED if own and table.works else ESTIMATED
    return lines, origin


def rates(device: Device) -> list[float]:
    """Operations per second by bytes per element: the largest listed size that fits."""
    sizes = [
        max((known for known, _ in device.flops if known <= size), default=device.flops[0][0])
        for size in range(LARGEST_ITEM + 1)
    ]
    return [dict(device.flops)[size] for size in sizes]


def assemble_seconds(
    cost: CostModel, cluster: Cluster, device: Ints, boxes: Ints, nbytes: Ints
) -> tuple[Floats, Ints]:
    seconds, source = np.zeros(len(device)), np.full(len(device), ESTIMATED)
    for where, one in classes(cluster):
        here = where[device]
        line = cost.tables[one.kind].lines.get(ASSEMBLE_LINE) if one.kind in cost.tables else None
        if line is None:
            launch = 0.0 if one.asynchronous else one.launch_seconds
            seconds[here] = nbytes[here] / one.memory_bandwidth / cost.efficiency + launch
        else:
            seconds[here] = line.each + boxes[here] * line.per_box + nbytes[here] * line.per_byte
            source[here] = FITTED
        if one.asynchronous:
            seconds[here & (nbytes == 0)] = 0.0  # a view: the device does not notice
    return seconds, source


# Messages


def _put_messages(
    tasks: TaskGraph, cluster: Cluster, cost: CostModel, seconds: Floats, source: Ints
) -> None:
    line = _exchange_line(cluster, cost)
    if cluster.communication_on_device and line is not None:
        _put_exchanges(tasks, cluster, cost, line, seconds, source)
        return
    moving = np.flatnonzero(tasks.kind == TRANSFER)
    seconds[moving] = _message_seconds(
        tasks.device[moving], tasks.peer[moving], tasks.nbytes[moving], cluster
    )


def _exchange_line(cluster: Cluster, cost: CostModel) -> Line | None:
    found = [cost.tables[d.kind].lines.get(EXCHANGE_LINE) for d in cluster.devices[:1]
             if d.kind in cost.tables]  # fmt: skip
    return found[0] if found else None


def _put_exchanges(
    tasks: TaskGraph,
    cluster: Cluster,
    cost: CostModel,
    line: Line,
    seconds: Floats,
    source: Ints,
) -> None:
    """An exchange takes as long as for the process with the most to do: messages sent and received,
    their bytes, and packing. Lanes put its messages one after another, so each gets a share."""
    lines = cost.tables[cluster.devices[0].kind].lines
    pack = lines.get(PACK_LINE) or lines.get(ASSEMBLE_LINE) or Line(0.0, 0.0, 0.0, 0.0, 0)
    moving = np.flatnonzero(tasks.kind == TRANSFER)
    if len(moving):
        boxes = tasks.taken[moving]
        nbytes = tasks.nbytes[moving]
        moved = line.per_box + nbytes * line.per_byte
        packed = moved + pack.each + boxes * pack.per_box + 2 * nbytes * pack.per_byte
        messages = tasks.position[moving], tasks.device[moving], tasks.peer[moving]
        seconds[moving] = _shared(
            *messages, packed.astype(np.float64), moved.astype(np.float64), line.each,
            tasks.devices, wire_seconds(*messages, nbytes, cluster),
        )  # fmt: skip
        source[moving] = FITTED
    among = np.flatnonzero(tasks.kind == COLLECTIVE)
    if len(among):
        size = np.array([len(group) for group in tasks.groups])[tasks.group[among]]
        share = tasks.nbytes[among] / size  # what one member sends, and what it receives
        both = 2 * (line.per_box * (size - 1) + share * line.per_byte)
        packing = (size - 1) * (pack.each + pack.per_box) + 2 * share * pack.per_byte
        late, pace = (part[tasks.group[among]] for part in wire_lines(tasks.groups, cluster))
        wire = late + pace * tasks.nbytes[among]
        seconds[among] = line.each + packing + np.maximum(both, wire)
        source[among] = FITTED


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _shared(
    position: Ints,
    sender: Ints,
    receiver: Ints,
    out: Floats,
    into: Floats,
    each: float,
    count: int,
    wire: Floats,
) -> Floats:
    """Seconds of messages so that those of one position, one after another in the lanes of their
    devices, take what the busiest device needs for all of its own, or for packing and the wire."""
    shares = np.empty(len(out))
    need, pack, depth = np.zeros(count), np.zeros(count), np.zeros(count)
    first = 0
    while first < len(out):
        last = first
        need[:], pack[:], depth[:] = 0.0, 0.0, 0.0
        while last < len(out) and position[last] == position[first]:
            a, b = sender[last], receiver[last]
            need[a] += out[last]
            need[b] += into[last]
            pack[a] += out[last] - into[last]
            depth[a] = depth[b] = max(depth[a], depth[b]) + out[last]
            last += 1
        whole = each + max(need.max(), pack.max() + wire[first])
        for k in range(first, last):
            shares[k] = whole * out[k] / max(depth.max(), 1e-12)
        first = last
    return shares


def _message_seconds(sender: Ints, receiver: Ints, nbytes: Ints, cluster: Cluster) -> Floats:
    count = len(cluster.devices)
    pairs, which = np.unique(sender * count + receiver, return_inverse=True)
    routes = [cluster.routes[pair // count][pair % count] for pair in pairs.tolist()]
    links = cluster.links
    latency = np.array([sum(links[k].latency for k in route) for route in routes])
    bandwidth = np.array([min(links[k].bandwidth for k in route) for route in routes])
    seconds: Floats = latency[which] + nbytes / bandwidth[which]
    return seconds
