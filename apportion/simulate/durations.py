"""Durations: how long each task of a TaskGraph takes alone, by a CostModel.

Every kind of task has a price, a function in PRICES. Compute and assembly tasks are priced by
machine/cost_model.py; a call that was measured takes what it was measured to take. Messages are
priced here: from links where links are simulated, or from the measured line of an exchange where
messages burn the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, distinct
from apportion.lower import (
    ASSEMBLE,
    CATEGORIES,
    COLLECTIVE,
    COMPUTE,
    FROM_HOST,
    HOST_WORK,
    TO_HOST,
    TRANSFER,
    TaskGraph,
)
from apportion.machine import (
    AHEAD,
    ASSEMBLE_LINE,
    BEGIN,
    ESTIMATED,
    FITTED,
    FUSED_LINE,
    INDUCTOR,
    MEASURED,
    PACK_LINE,
    REPLAY,
    REPLAYED,
    Cluster,
    CostLine,
    CostModel,
    CostTable,
    assemble_seconds,
    compute_seconds,
    cost_fit,
    device_classes,
    exchange_line,
    fused_name,
    host_rates,
    kind_and_inputs,
    kind_of_signature,
    on_different_hosts,
    to_nanoseconds,
    wire_lines,
    wire_seconds,
)
from apportion.simulate.fusion import fused_traffic

SOURCES = ("measured", "fitted", "estimated")
LONGEST_SECONDS = 2.0**61 / 1e9  # 73 years
INPUT_CATEGORY = CATEGORIES.index("input")


def nanoseconds(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """Duration of each task; at least 1, so that simulated time always moves on. Raises ValueError
    where all of them together could not be counted."""
    seconds = _costs(tasks, cluster, cost)[0]
    _check_countable(seconds)
    found: Ints = to_nanoseconds(seconds)
    return found


def _check_countable(seconds: Floats) -> None:
    """Raises ValueError unless a step has fewer nanoseconds than an integer can count: beyond that
    it would seem to be faster."""
    total = float(seconds.sum()) if len(seconds) else 0.0
    if not 0 <= total < LONGEST_SECONDS:
        raise ValueError(
            f"by its costs the tasks of a step would take {total:.3g} s, which cannot be simulated"
        )


def sources(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """Where the duration of each task comes from: MEASURED, FITTED or ESTIMATED."""
    return _costs(tasks, cluster, cost)[1]


def shares(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> dict[str, float]:
    """The share of all tasks' predicted time that is measured, fitted and estimated."""
    seconds, source = _costs(tasks, cluster, cost)
    total = float(seconds.sum()) or 1.0
    return {name: float(seconds[source == k].sum()) / total for k, name in enumerate(SOURCES)}


def issue_nanoseconds(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """What it takes the host to issue each task to an asynchronous device; 0 on others and for
    messages. A device that replays is told once between two exchanges."""
    issue = np.zeros(len(tasks))
    names = _op_kinds(tasks)
    for where, device in device_classes(cluster):
        if not device.asynchronous:
            continue
        known = cost.tables[device.kind].issue if device.kind in cost.tables else {}
        usual = known.get("", device.launch_seconds)
        if cost.mode in REPLAYED:
            told = _first_tasks(tasks, where, after_messages=True)
            issue[told] = known.get(REPLAY, device.launch_seconds)
            if REPLAY in known:  # else they are of code that issues every task
                issue[_first_tasks(tasks, where)] += known.get(BEGIN, 0.0)
            continue
        per_op = np.array([known.get(name, usual) for name in names] + [usual])
        mine = where[tasks.device] & tasks.is_work
        computes = mine & (tasks.kind == COMPUTE)
        per_kind = np.array([known.get(kind.name, usual) for kind in tasks.task_kinds])
        issue[mine] = per_kind[tasks.kind[mine]]
        issue[computes] = per_op[np.minimum(tasks.op[computes], len(names))]
        if len(tasks.work):
            calls = [known.get(w, known.get(kind_and_inputs(w), np.nan)) for w in tasks.works]
            own = np.array([*calls, np.nan])[tasks.work]
            issue[computes] = np.where(np.isnan(own), issue, own)[computes]
            issue[_first_tasks(tasks, where)] += known.get(BEGIN, 0.0)
    _check_countable(issue)
    return np.rint(issue * 1e9).astype(np.int64)


def _first_tasks(tasks: TaskGraph, where: Bools, after_messages: bool = False) -> Ints:
    """The first task of work of each of some devices, and after the messages of each; none where
    calls are not known, since then there may be tasks around these."""
    if not len(tasks.work):
        return np.zeros(0, np.int64)
    found = []
    working = tasks.is_work & where[tasks.device]
    for device in distinct(tasks.device[working]).tolist():
        mine = np.flatnonzero(working & (tasks.device == device))
        if not after_messages:
            found.append(mine[:1])
            continue
        cuts = distinct(tasks.ends.task[tasks.ends.device == device])
        first = np.searchsorted(mine, np.append(-1, cuts))
        found.append(mine[distinct(first[first < len(mine)])])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def restricted(cost: CostModel, tasks: TaskGraph) -> CostModel:
    """The CostModel with no more than what these tasks need: what a saved Plan keeps."""
    kinds = set(tasks.kinds) | {cost_fit.fit_kind(work) for work in tasks.works}
    kinds |= {kind_of_signature(work) for work in tasks.works}
    names = kinds | {cost_fit.family(kind) for kind in kinds} | {"apportion.feed"}
    feeding = (name for name, _, _ in feeds(tasks))
    calls = (*tasks.works, *map(fused_name, tasks.works), *feeding)
    always = {
        "",
        ASSEMBLE_LINE,
        AHEAD,
        BEGIN,
        REPLAY,
        *tasks.works,
        *map(kind_and_inputs, tasks.works),
    }

    def needed(table: CostTable) -> CostTable:
        there = {*calls, *table.lines}
        return replace(
            table,
            provisional=tuple(name for name in table.provisional if name in there),
            works={w: table.works[w] for w in calls if w in table.works},
            fits={n: f for n, f in table.fits.items() if n.rpartition("/")[0] in names},
            issue={k: s for k, s in table.issue.items() if k in kinds | always},
        )

    return replace(cost, tables={kind: needed(table) for kind, table in cost.tables.items()})


def _costs(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> tuple[Floats, Ints]:
    """Seconds of each task, and where they come from."""
    if tasks.devices > len(cluster.devices):
        raise ValueError(
            f"the tasks are for {tasks.devices} devices, cluster {cluster.name!r} has "
            f"{len(cluster.devices)}"
        )
    seconds, source = np.zeros(len(tasks)), np.full(len(tasks), ESTIMATED)
    for number, kind in enumerate(tasks.task_kinds):
        rows = np.flatnonzero(tasks.kind == number)
        if len(rows):
            assert number in PRICES, f"tasks of the kind {kind.name!r} have no price"
            seconds[rows], source[rows] = PRICES[number](tasks, rows, cluster, cost)
    _put_measured(tasks, cluster, cost, seconds, source)
    if cost.mode == INDUCTOR:
        _put_fused(tasks, cluster, cost, seconds, source)
    _put_feeds(tasks, cluster, cost, seconds)
    return seconds, source


def _compute_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    kinds, which = _op_kinds(tasks), tasks.op[rows]
    if len(tasks.work):  # a call may do the work of several Ops
        kinds, which = tuple(map(cost_fit.fit_kind, tasks.works)), tasks.work[rows]
    return compute_seconds(
        cost, cluster, kinds, which, tasks.device[rows], tasks.flops[rows], tasks.nbytes[rows],
        tasks.itemsize[rows],
    )  # fmt: skip


def _assemble_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    boxes = tasks.taken[rows]
    return assemble_seconds(cost, cluster, tasks.device[rows], boxes, tasks.nbytes[rows])


def _host_copy_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    """What the link to the host takes; the bytes of such a task are read and written."""
    out = tasks.task_kinds.to_host[tasks.kind[rows]]
    rates = [host_rates(cluster, cost, device) for device in range(tasks.devices)]
    lines = [[rate.back, rate.out] for rate in rates]
    return _by_line(tasks, rows, np.array(lines)[tasks.device[rows], out.astype(np.int64)], 2)


def _host_work_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    """What the host's memory takes to be read and written."""
    rates = [host_rates(cluster, cost, device) for device in range(tasks.devices)]
    return _by_line(tasks, rows, np.array([rate.work for rate in rates])[tasks.device[rows]], 1)


def _by_line(tasks: TaskGraph, rows: Ints, lines: Floats, times: int) -> tuple[Floats, Ints]:
    """Seconds by the CostLine of each task, whose bytes are counted so many `times`."""
    each, per_byte, points = lines[:, 0], lines[:, 2], lines[:, 4]
    seconds: Floats = each + tasks.nbytes[rows] // times * per_byte
    return seconds, np.where(points > 0, FITTED, ESTIMATED)


def _op_kinds(tasks: TaskGraph) -> Sequence[str]:
    return tasks.kinds or ("",) * max(len(tasks.op_start) - 2, 0)


def _put_measured(
    tasks: TaskGraph, cluster: Cluster, cost: CostModel, seconds: Floats, source: Ints
) -> None:
    if not len(tasks.work):
        return
    for where, device in device_classes(cluster):
        if device.kind not in cost.tables:
            continue
        known = cost.tables[device.kind].works
        found = [known[w].seconds if w in known else np.nan for w in tasks.works]
        measured = np.array([*found, np.nan])[tasks.work]
        here = where[tasks.device] & ~np.isnan(measured)
        seconds[here], source[here] = measured[here], MEASURED


def _put_fused(
    tasks: TaskGraph, cluster: Cluster, cost: CostModel, seconds: Floats, source: Ints
) -> None:
    """What may be part of a fused kernel takes its share of one, where calls are known."""
    if not len(tasks.work):
        return
    traffic = fused_traffic(tasks)
    for where, device in device_classes(cluster):
        table = cost.tables.get(device.kind)
        line = None if table is None else table.lines.get(FUSED_LINE)
        if table is None or line is None:
            continue
        here = traffic.fused & where[tasks.device]
        guess = traffic.kernels * line.per_box + traffic.nbytes * line.per_byte
        seconds[here], source[here] = guess[here], FITTED
        shares = (table.works.get(fused_name(w)) for w in tasks.works)
        own = np.array([*(np.nan if s is None else s.seconds for s in shares), np.nan])[tasks.work]
        known = here & ~np.isnan(own)
        seconds[known], source[known] = own[known], MEASURED


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
    working = np.flatnonzero(tasks.is_work)
    devices, first = np.unique(tasks.device[working], return_index=True)
    begins = dict(zip(devices.tolist(), working[first].tolist(), strict=True))
    for name, nbytes, device in feeds(tasks):
        table = cost.tables.get(cluster.devices[device].kind)
        if table is None or device not in begins:
            continue
        fit = table.fits.get(cost_fit.key(kind_of_signature(name), 1))
        if name in table.works:
            seconds[begins[device]] += table.works[name].seconds
        elif fit is not None:
            seconds[begins[device]] += fit.launch + fit.per_byte * nbytes


# Messages


def _transfer_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    """Where messages burn the device, an exchange takes as long as for the process with the most to
    do: messages sent and received, their bytes, and packing. Lanes put its messages one after
    another, so each gets a share."""
    nbytes = tasks.nbytes[rows]
    line = _line_on_device(cluster, cost)
    if line is None:
        seconds = _message_seconds(tasks.device[rows], tasks.peer[rows], nbytes, cluster)
        return seconds, np.full(len(rows), ESTIMATED)
    pack = _packing_line(cluster, cost)
    moved = line.per_box + nbytes * line.per_byte
    packed = moved + pack.each + tasks.taken[rows] * pack.per_box + 2 * nbytes * pack.per_byte
    messages = tasks.position[rows], tasks.device[rows], tasks.peer[rows]
    wire = wire_seconds(*messages, nbytes, cluster)
    shared: Floats = _shared(
        *messages, packed.astype(np.float64), moved.astype(np.float64), line.each,
        tasks.devices, np.zeros(len(rows)) if _is_overlapped(tasks) else wire,
    )  # fmt: skip
    return shared, np.full(len(rows), FITTED)


def _collective_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    """Seconds where messages burn the device; else its links take the time, and it costs none."""
    line = _line_on_device(cluster, cost)
    if line is None:
        return np.zeros(len(rows)), np.full(len(rows), ESTIMATED)
    pack, nbytes, group = _packing_line(cluster, cost), tasks.nbytes[rows], tasks.group[rows]
    size = np.array([len(members) for members in tasks.groups])[group]
    share = nbytes / size  # what one member sends, and what it receives
    both = 2 * (line.per_box * (size - 1) + share * line.per_byte)
    packing = (size - 1) * (pack.each + pack.per_box) + 2 * share * pack.per_byte
    late, pace = (part[group] for part in wire_lines(tasks.groups, cluster))
    wire = np.zeros(len(rows)) if _is_overlapped(tasks) else late + pace * nbytes
    return line.each + packing + np.maximum(both, wire), np.full(len(rows), FITTED)


def _is_overlapped(tasks: TaskGraph) -> bool:
    """Whether devices go on while their messages are on a wire."""
    return len(tasks.became) > 0


def on_wire(tasks: TaskGraph, cluster: Cluster) -> Bools:
    """n: whether a message goes from host to host while its devices go on."""
    found = np.zeros(len(tasks), bool)
    if cluster.hosts and _is_overlapped(tasks):
        apart = on_different_hosts(cluster)
        pairs = np.flatnonzero(tasks.is_pairwise)
        found[pairs] = apart[tasks.device[pairs], tasks.peer[pairs]]
        if len(tasks.groups):
            spread = np.array([apart[np.ix_(group, group)].any() for group in tasks.groups])
            together = np.flatnonzero(tasks.is_collective)
            found[together] = spread[tasks.group[together]]
    return found


def leads(tasks: TaskGraph, beside: Bools, cluster: Cluster, cost: CostModel) -> Ints:
    """For every message on a wire how long its devices pack it first, in nanoseconds; else -1."""
    pack, rows, found = (
        _packing_line(cluster, cost),
        np.flatnonzero(beside),
        np.full(len(beside), -1),
    )
    nbytes, boxes = tasks.nbytes[rows].astype(np.float64), tasks.taken[rows]
    if len(tasks.groups):
        size = np.array([*map(len, tasks.groups), 1])[tasks.group[rows]]
        nbytes, boxes = nbytes / size, boxes / size
    seconds = pack.each + boxes * pack.per_box + 2 * nbytes * pack.per_byte
    most = nanoseconds(tasks, cluster, cost)[rows]
    found[rows] = np.minimum(to_nanoseconds(seconds), most)
    return found


def _line_on_device(cluster: Cluster, cost: CostModel) -> CostLine | None:
    """The measured line of exchanges, where they burn the device."""
    return exchange_line(cluster, cost) if cluster.communication_on_device else None


def _packing_line(cluster: Cluster, cost: CostModel) -> CostLine:
    lines = cost.tables[cluster.devices[0].kind].lines
    return lines.get(PACK_LINE) or lines.get(ASSEMBLE_LINE) or CostLine(0.0, 0.0, 0.0, 0.0, 0)


@compiled
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


Price = Callable[[TaskGraph, Ints, Cluster, CostModel], tuple[Floats, Ints]]
"""Seconds of some tasks, given by their indices, and where each comes from."""

# By kind of task: a registry, so that a kind that is added to the table is priced by an entry here.
PRICES: dict[int, Price] = {
    COMPUTE: _compute_price,
    TO_HOST: _host_copy_price,
    FROM_HOST: _host_copy_price,
    HOST_WORK: _host_work_price,
    TRANSFER: _transfer_price,
    ASSEMBLE: _assemble_price,
    COLLECTIVE: _collective_price,
}
