"""fiddle: graphs and splits in the JSON of msr-fiddle/dnn-partitioning (Tarnawski et al. 2020).

In: the text of a file. Out: an ImportedGraph; of a file of human-experts/ a device for every node.

    {"maxSizePerFPGA": 17185374208.0, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 1, "supportedOnFpga": 1, "cpuLatency": 6.96, "fpgaLatency": 0.696,
                "isBackwardNode": 0, "colorClass": 3, "size": 131325952.0}, ...],
     "edges": [{"sourceId": 1, "destId": 2, "cost": 0.25, "size": 4194304.0}, ...]}

"FPGA" is whatever accelerator. The cost of an edge is what the output of its source takes between
an accelerator and the memory of the host, and the same for all edges of one source; a file in which
they differ is refused, as the authors' program does. `colorClass`, names and the sizes of edges may
be missing. Every file is taken literally: the published layer graphs for training have backward
edges in the direction of the forward ones, and none between forward and backward nodes; and the
costs of edges are 1000 times smaller in throughput-inputs/ than in latency-inputs/. Times are taken
for milliseconds, of which the files say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from apportion.graph import ImportedCosts
from apportion.place.imports.imported_graph import (
    ACCELERATOR,
    CPU,
    MOST_BYTES,
    ImportedGraph,
    ImportedNode,
    build_graph,
    checked_bytes,
    checked_count,
    checked_time,
)

FIDDLE = "fiddle"
REQUIRED = ("id", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode", "size")


def read_fiddle(text: str, name: str) -> ImportedGraph:
    """The graph in a text; ValueError, in one sentence, if there is none."""
    data = load_object(text)
    if "fpgas" in data and "nodes" not in data:
        raise ValueError("this is a split of a graph, and not a graph")
    limit = _limit(_field(data, "maxSizePerFPGA", "the file"))
    accelerators = checked_count(_field(data, "maxFPGAs", "the file"), "maxFPGAs")
    cpus = checked_count(_field(data, "maxCPUs", "the file"), "maxCPUs")
    rows, edges = _rows(data, "nodes"), _rows(data, "edges")
    if not rows:
        raise ValueError("the graph has no nodes")
    position: dict[int, int] = {}
    for row in rows:
        number = _whole(_field(row, "id", "a node"), "the id of a node")
        if number in position:
            raise ValueError(f"two nodes have the id {number}")
        position[number] = len(position)
    cost, nbytes, readers = _edges(edges, position)
    nodes = [
        _node(row, cost.get(here, 0.0), [(nbytes.get(here, 0), readers.get(here, ()))])
        for here, row in enumerate(rows)
    ]
    return ImportedGraph(name, FIDDLE, build_graph(nodes), "ms", accelerators, cpus, limit)


def read_split(text: str) -> Mapping[str, str]:
    """The device of each node of a split: fpgas are acc0, acc1, ..., cpus cpu0, cpu1, ... Or of a
    placement that this package wrote, which names them."""
    data = load_object(text)
    if isinstance(named := data.get("assignment"), dict):
        if not all(isinstance(device, str) for device in named.values()):
            raise ValueError("the assignment has a device that is not a name")
        return named
    devices: dict[str, str] = {}
    for group, kind in (("fpgas", ACCELERATOR), ("cpus", CPU)):
        for number, part in enumerate(_rows(data, group)):
            nodes = _field(part, "nodes", f"{group}[{number}]")
            if not isinstance(nodes, list):
                raise ValueError(f"{group}[{number}].nodes is not a list")
            for node in nodes:
                key = str(_whole(node, f"a node of {group}[{number}]"))
                if key in devices:
                    raise ValueError(f"the split has node {key} twice")
                devices[key] = f"{kind}{number}"
    return devices


def load_object(text: str) -> dict[str, Any]:
    """A JSON object, or a ValueError."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"this is not JSON{where}") from None
    except ValueError:  # a number of thousands of digits
        raise ValueError("this JSON has a number that is too long") from None
    if not isinstance(data, dict):
        raise ValueError("the JSON is not an object")
    return data


def _limit(number: object) -> int | None:
    """Bytes of an accelerator; None for more than any has, which is how one writes no limit."""
    if isinstance(number, int | float) and not isinstance(number, bool) and number > MOST_BYTES:
        return None
    return checked_bytes(number, "maxSizePerFPGA")


def _node(row: Mapping[str, Any], cost: float, outputs: Sequence[Any]) -> ImportedNode:
    what = f"node {row['id']}"
    for key in REQUIRED:
        _field(row, key, what)
    times = [(CPU, checked_time(row["cpuLatency"], f"the cpuLatency of {what}"))]
    accelerated = checked_time(row["fpgaLatency"], f"the fpgaLatency of {what}")
    if _flag(row["supportedOnFpga"], f"supportedOnFpga of {what}"):
        times.insert(0, (ACCELERATOR, accelerated))
    colour = row.get("colorClass")
    group = None if colour is None else str(_whole(colour, f"the colorClass of {what}"))
    size = checked_bytes(row["size"], f"the size of {what}")
    label = row.get("name", "")
    return ImportedNode(
        str(row["id"]),
        "imported",
        ImportedCosts(tuple(times), cost, size, group),
        outputs,
        _flag(row["isBackwardNode"], f"isBackwardNode of {what}"),
        label if isinstance(label, str) else "",
    )


def _edges(
    edges: Sequence[Mapping[str, Any]], position: Mapping[int, int]
) -> tuple[dict[int, float], dict[int, int], dict[int, list[int]]]:
    """By source: the cost of its transfer, the most bytes that an edge says, and its readers."""
    cost: dict[int, float] = {}
    nbytes: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for edge in edges:
        ends = [_whole(_field(edge, key, "an edge"), key) for key in ("sourceId", "destId")]
        what = f"the edge from {ends[0]} to {ends[1]}"
        for end in ends:
            if end not in position:
                raise ValueError(f"{what} names node {end}, which is not there")
        source, target = position[ends[0]], position[ends[1]]
        paid = checked_time(_field(edge, "cost", what), f"the cost of {what}")
        known = cost.setdefault(source, paid)
        if abs(known - paid) > 1e-9 * max(known, paid):
            raise ValueError(
                f"the edges from node {ends[0]} cost {known:g} and {paid:g}; a node has one "
                "transfer cost"
            )
        size = checked_bytes(edge.get("size", 0), f"the size of {what}")
        nbytes[source] = max(nbytes.get(source, 0), size)
        readers.setdefault(source, []).append(target)
    return cost, nbytes, readers


def _rows(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = _field(data, key, "the file")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{key} is not a list of objects")
    return rows


def _field(row: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in row:
        raise ValueError(f"{what} has no {key}")
    return row[key]


def _whole(number: object, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{what} is {number!r}, not a whole number")
    return number


def _flag(value: object, what: str) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{what} is {value!r}, neither true nor false")
    return bool(value)
