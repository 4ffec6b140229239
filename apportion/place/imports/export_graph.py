"""export_graph: a PlacementProblem as a graph that other people's programs can place.

In: a PlacementProblem, of a captured step or of a file. Out: the JSON of
msr-fiddle/dnn-partitioning (fiddle.py), or a ValueError where the format has no words for it.

The format knows one kind of accelerator, CPUs beside them, and one transfer time for each node,
between an accelerator and the host. Devices of one kind become its accelerators, whatever they are.
A transfer is what a problem's file says; else the time of a node's outputs over the mean of the
routes between devices. A node that no CPU runs has its accelerator's time as `cpuLatency`, where
the format wants a number, and there is no CPU to take it. Memory is what stays on the device and
the node's outputs, since the format has no notion of when something is freed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from apportion.columns import Floats
from apportion.place.imports.imported_graph import CPU
from apportion.place.placement_problem import NEVER, PlacementProblem

NO_LIMIT = 1e30  # bytes
MILLISECONDS = {"s": 1e3}  # in a unit of time; of units that are not here, the unit itself


def fiddle_data(problem: PlacementProblem) -> dict[str, Any]:
    """The problem as plain JSON data."""
    c, scale = problem.columns, MILLISECONDS.get(problem.time_unit, 1.0)
    accelerator, host = _kinds(problem)
    held = c.resident + (
        np.bincount(c.source, c.nbytes, len(c.unit)).astype(np.int64) if problem.links.live else 0
    )
    names = problem.node_names
    numbers = [int(name) if _is_number(name) else -1 for name in names]
    ids = numbers if len(set(numbers) - {-1}) == len(names) else list(range(len(names)))
    nodes = []
    for node in range(len(names)):
        own = [_time(problem, node, device) for device in (accelerator, host)]
        latency = {
            "supportedOnFpga": int(own[0] is not None),
            "cpuLatency": (own[0] or 0.0) * scale if own[1] is None else own[1] * scale,
            "fpgaLatency": (own[1] or 0.0) * scale if own[0] is None else own[0] * scale,
        }
        nodes.append(
            {
                "id": ids[node], "name": names[node], **latency,
                "isBackwardNode": int(c.backward[node]), "colorClass": int(c.unit[node]),
                "size": float(held[node]),
            }
        )  # fmt: skip
    limits = {d.memory_bytes for d in problem.devices if d.kind != CPU or host is None}
    limit = min((size for size in limits if size is not None), default=NO_LIMIT)
    cpus = 0 if host is None else sum(d.kind == CPU for d in problem.devices)
    return {
        "maxSizePerFPGA": float(limit),
        "maxFPGAs": len(problem.devices) - cpus,
        "maxCPUs": cpus,
        "nodes": nodes,
        "edges": _edges(problem, ids, transfer_times(problem) * scale),
    }


def transfer_times(problem: PlacementProblem) -> Floats:
    """n: what sending all outputs of a node once takes, in time units: the file's own, or else the
    mean over the routes between all pairs of devices."""
    if problem.transfer is not None:
        return problem.transfer
    c, links, k = problem.columns, problem.links, len(problem.devices)
    slowest = np.zeros(k * k)
    for route in range(k * k):
        hops = links.hop_pace[links.hop_start[route] : links.hop_start[route + 1]]
        slowest[route] = hops.max(initial=0.0)
    apart = ~np.eye(k, dtype=bool)
    if not apart.any():
        return np.zeros(len(c.unit))
    pace = float((slowest.reshape(k, k) + links.drag)[apart].mean())
    each = float(links.lag[apart].mean())
    found: Floats = np.bincount(c.source, each + c.send * pace, len(c.unit)) / problem.tick
    return found


def _edges(problem: PlacementProblem, ids: list[int], cost: Floats) -> list[dict[str, Any]]:
    """Each pair of nodes once, with all bytes that one sends the other."""
    c = problem.columns
    found: dict[tuple[int, int], int] = {}
    for output, source in enumerate(c.source):
        for reader in c.reader[c.reader_start[output] : c.reader_start[output + 1]]:
            pair = (int(source), int(reader))
            found[pair] = found.get(pair, 0) + int(c.nbytes[output])
    return [
        {"sourceId": ids[a], "destId": ids[b], "cost": float(cost[a]), "size": float(size)}
        for (a, b), size in found.items()
    ]


def _kinds(problem: PlacementProblem) -> tuple[int | None, int | None]:
    """A device of each of the two kinds that the format knows."""
    first: dict[str, int] = {}
    for number, device in enumerate(problem.devices):
        first.setdefault(device.kind, number)
    others = [kind for kind in first if kind != CPU]
    if len(others) > 1:
        raise ValueError(
            f"the fiddle format knows one kind of accelerator, and here are {', '.join(others)}"
        )
    if not others:
        return first[CPU], None
    return first[others[0]], first.get(CPU)


def _time(problem: PlacementProblem, node: int, device: int | None) -> float | None:
    ticks = NEVER if device is None else problem.columns.duration[node, device]
    return None if ticks >= NEVER else float(ticks / problem.tick)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name
