"""captured: a captured step as a PlacementProblem.

In: the Space of a Graph, a Cluster and its CostModel. Out: the PlacementProblem whose nodes are the
Ops, each whole, with what they take on each device.

A unit is a forward Op with everything that belongs to it: the backward Ops that differentiate it,
the updates of the parameters that it is the first to read, and what prepares these. A view moves
with what it is a view of. Further Ops, such as sums of gradients, move with what they read last.

State that survives the step lies where the Op that updates it is, and occupies memory there; if
other units read it too, a node of no duration at the start of the step sends it to them.

The rules are those of simulate/, less what only a TaskGraph knows: devices run their Ops in the
order of the Graph, an output is sent once to each device that reads it, and messages contend for
the links of their routes. The rules "placeto" are those of Placeto's simulator instead
(objectives/placeto_simulator.py), with its constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats, Ints, offsets
from apportion.graph import BUFFER, FORWARD, OPTIMIZER_STATE, PARAMETER, UPDATE, Graph
from apportion.lower import COMPUTE, lower
from apportion.machine import Cluster, CostModel, assemble_seconds, device_classes
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)
from apportion.simulate import issue_nanoseconds, nanoseconds
from apportion.split import Space, Strategy, unsplit_choice

STATE_ROLES = (PARAMETER, OPTIMIZER_STATE, BUFFER)
CLUSTER_RULES, PLACETO_RULES = "cluster", "placeto"


def captured_problem(
    space: Space,
    cluster: Cluster,
    cost: CostModel,
    memory_limit: Sequence[int] | None = None,
    rules: str = CLUSTER_RULES,
    name: str = "step",
) -> PlacementProblem:
    """The problem of placing every Op of a step whole. `memory_limit` in bytes per device: None for
    what the devices have."""
    graph = space.graph
    duration, issue, views = op_durations(space, cluster, cost)
    unit = op_units(graph, views)
    homes = _state_homes(graph)
    if rules == PLACETO_RULES:
        duration, issue = np.maximum(duration, issue), issue[:0]
    columns, names, kinds = _columns(graph, unit, duration, issue, homes)
    limits = memory_limit or [device.memory_bytes for device in cluster.devices]
    devices = tuple(
        PlacementDevice(device.name, device.kind, int(room))
        for device, room in zip(cluster.devices, limits, strict=True)
    )
    own = rules == CLUSTER_RULES
    links = cluster_links(cluster, cost) if own else placeto_links(len(devices))
    return PlacementProblem(name, names, kinds, columns, links, devices)


def op_of_node(problem: PlacementProblem, ops: int) -> Ints:
    """For every node of a captured problem its Op; -1 for nodes that stand for state."""
    return np.arange(len(problem.node_names)) - (len(problem.node_names) - ops)


def op_durations(space: Space, cluster: Cluster, cost: CostModel) -> tuple[Ints, Ints, Ints]:
    """Nanoseconds of every Op, whole, on each device, and of its issue by the device's host; and
    which Ops are views."""
    count, devices = len(space.graph.ops), len(cluster.devices)
    duration, issue = np.zeros((2, count, devices), np.int64)
    views = np.zeros(count, np.int64)
    for members, _ in device_classes(cluster):
        first = int(np.flatnonzero(members)[0])
        choices = tuple(unsplit_choice(space, op, (first,)) for op in range(count))
        strategy = Strategy(choices, digits=space.digits, opening=space.opening)
        tasks = lower(space, strategy, devices)
        rows = np.flatnonzero((tasks.kind == COMPUTE) & (tasks.op < count))
        took = nanoseconds(tasks, cluster, cost)[rows]
        issued = issue_nanoseconds(tasks, cluster, cost)[rows]
        work = tasks.flops[rows] + tasks.nbytes[rows]
        own = [np.bincount(tasks.op[rows], each, count) for each in (took, issued, work)]
        duration[:, members], issue[:, members] = own[0][:, None], own[1][:, None]
        views = (own[2] == 0).astype(np.int64)
    return duration, issue, views


# Units


def op_units(graph: Graph, views: Ints) -> Ints:
    """The unit of every Op, numbered as they begin."""
    home = [-1] * len(graph.ops)
    prepares = _readers_of_parameters(graph)
    for index, op in enumerate(graph.ops):
        makers = [made[0] for v in op.inputs if (made := graph.producer[v]) is not None]
        if op.phase == FORWARD:
            joins = makers[0] if views[index] and makers else prepares.get(index, index)
            home[index] = home[joins] if joins < index else index
        elif op.forward is not None and op.forward < index:
            home[index] = home[op.forward]
        elif op.phase == UPDATE and op.parameter is not None:
            home[index] = _first_home(graph, op.parameter, home, index)
        if home[index] < 0:
            home[index] = home[max(makers)] if makers else index
    for index in sorted(prepares, reverse=True):  # readers come later: they know their own by now
        if home[index] == index:
            home[index] = home[prepares[index]]
    for index in range(len(home)):  # whatever has joined an Op that has joined another since
        while home[home[index]] != home[index]:
            home[index] = home[home[index]]
    _, first, number = np.unique(np.array(home, np.int64), return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    found: Ints = rank[number.ravel()]
    return found


def _readers_of_parameters(graph: Graph) -> dict[int, int]:
    """Forward Ops whose inputs are made of parameters alone, such as a transposed weight, and the
    first Op that reads what they make."""
    from_parameters = {
        v for v, value in enumerate(graph.values)
        if value.role in STATE_ROLES and graph.producer[v] is None
    }  # fmt: skip
    found: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD and op.inputs and from_parameters.issuperset(op.inputs):
            readers = [r for v in op.outputs for r in graph.consumers[v]]
            if readers:
                found[index] = min(readers)
                from_parameters.update(op.outputs)
    return found


def _first_home(graph: Graph, parameter: int, home: Sequence[int], before: int) -> int:
    """The home of the first forward Op that reads a parameter, or -1."""
    for reader in graph.consumers[parameter]:
        if reader < before and graph.ops[reader].phase == FORWARD:
            return home[reader]
    return -1


def _state_homes(graph: Graph) -> dict[int, int]:
    """For every state that the step begins with and reads the Op at which it lies: the one that
    updates it, else the first that reads it."""
    ends = dict(graph.state)
    found: dict[int, int] = {}
    for value, it in enumerate(graph.values):
        if it.role not in STATE_ROLES or graph.producer[value] is not None:
            continue
        made = graph.producer[ends[value]] if value in ends else None
        if made is not None:
            found[value] = made[0]
        elif graph.consumers[value]:
            found[value] = graph.consumers[value][0]
    return found


# Columns


def _columns(
    graph: Graph, unit: Ints, duration: Ints, issue: Ints, homes: dict[int, int]
) -> tuple[PlacementColumns, tuple[str, ...], tuple[str, ...]]:
    """Columns, names and kinds of the nodes: first state that several units read, then all Ops."""
    sent = [v for v, op in homes.items() if any(unit[r] != unit[op] for r in graph.consumers[v])]
    extra, count = len(sent), len(graph.ops)
    node_unit = np.concatenate([np.array([unit[homes[v]] for v in sent], np.int64), unit])
    resident = np.zeros(extra + count, np.int64)
    for value, op in homes.items():
        resident[extra + op] += graph.values[value].nbytes
    outputs = [(k, value) for k, value in enumerate(sent)]
    outputs += [
        (extra + index, value)
        for index, op in enumerate(graph.ops)
        for value in op.outputs
        if graph.consumers[value]
    ]
    readers = [[extra + r for r in graph.consumers[value]] for _, value in outputs]
    source = np.array([node for node, _ in outputs], np.int64)
    nbytes = np.array([graph.values[value].nbytes for _, value in outputs], np.int64)
    columns = PlacementColumns(
        unit=node_unit,
        duration=np.concatenate([np.zeros((extra, duration.shape[1]), np.int64), duration]),
        backward=np.array([0] * extra + [int(op.phase != FORWARD) for op in graph.ops], np.int64),
        resident=resident,
        source=source,
        nbytes=np.where(source < extra, 0, nbytes),
        send=nbytes.astype(np.float64),
        output_start=offsets(np.bincount(source, minlength=extra + count)),
        reader_start=offsets(np.array([len(each) for each in readers], np.int64)),
        reader=np.array([r for each in readers for r in each], np.int64),
        allowed=np.ones((int(unit.max(initial=-1)) + 1, duration.shape[1]), bool),
        issue=np.concatenate([np.zeros((extra, duration.shape[1]), np.int64), issue])
        if issue.any()
        else issue[:0],
    )
    names = tuple([graph.values[v].name for v in sent] + [op.name for op in graph.ops])
    return columns, names, tuple(["state"] * extra + [op.kind for op in graph.ops])


# Rules


def cluster_links(cluster: Cluster, cost: CostModel) -> PlacementLinks:
    """The rules of simulate/ on a Cluster. A device assembles what it receives."""
    devices = np.arange(len(cluster.devices))
    least, most = (
        assemble_seconds(cost, cluster, devices, np.ones_like(devices), np.full_like(devices, n))[0]
        for n in (2_000_000, 4_000_000)
    )
    pace_of_copy = (most - least) / 1_000_000
    known = [cost.tables[d.kind].issue if d.kind in cost.tables else {} for d in cluster.devices]
    usual = [
        table.get("assemble", table.get("", device.launch_seconds)) if device.asynchronous else 0.0
        for table, device in zip(known, cluster.devices, strict=True)
    ]
    receive = np.stack([least - 1_000_000 * pace_of_copy, pace_of_copy, np.array(usual)], axis=1)
    routes = [route for row in cluster.routes for route in row]
    hops = [link for route in routes for link in route]
    lag = [
        [sum(cluster.links[k].latency for k in route) for route in row] for row in cluster.routes
    ]
    pace: Floats = np.array([1e9 / cluster.links[k].bandwidth for k in hops], np.float64)
    return PlacementLinks(
        in_order=1, once=0, live=1, device_hold=0, link_hold=0, links=len(cluster.links),
        hop_start=offsets(np.array([len(route) for route in routes], np.int64)),
        hop_link=np.array(hops, np.int64), hop_pace=pace, lag=np.array(lag, np.float64) * 1e9,
        drag=np.zeros((len(cluster.devices), len(cluster.devices))), grace=0,
        receive=np.ascontiguousarray(np.maximum(receive, 0) * 1e9),
    )  # fmt: skip


def placeto_links(devices: int) -> PlacementLinks:
    """The rules of Placeto's simulator, in nanoseconds: see objectives/placeto_simulator.py."""
    own = [[] if a == b else [a] for a in range(devices) for b in range(devices)]
    hops = [link for route in own for link in route]
    nothing = np.zeros((devices, devices))
    return PlacementLinks(
        in_order=0, once=1, live=1, device_hold=5_700, link_hold=25_000, links=devices,
        hop_start=offsets(np.array([len(route) for route in own], np.int64)),
        hop_link=np.array(hops, np.int64), hop_pace=np.full(len(hops), 1 / 7.6), lag=nothing,
        drag=nothing, grace=1_000,
    )  # fmt: skip
