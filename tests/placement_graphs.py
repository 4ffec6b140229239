"""Small graphs in the formats that place/ reads, and where the published ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "dnn-partitioning"

FIDDLE_GRAPH: dict[str, Any] = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {"id": 7, "supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0,
         "isBackwardNode": 0, "colorClass": 5, "size": 30.5},
        {"id": 3, "supportedOnFpga": 0, "cpuLatency": 2, "fpgaLatency": 0,
         "isBackwardNode": False, "size": 20.0},
        {"id": 9, "supportedOnFpga": True, "cpuLatency": 30.0, "fpgaLatency": 3.0,
         "isBackwardNode": True, "colorClass": 5, "size": 30.0},
    ],
    "edges": [
        {"sourceId": 7, "destId": 3, "cost": 0.25, "size": 8.0},
        {"sourceId": 7, "destId": 9, "cost": 0.25},
        {"sourceId": 3, "destId": 9, "cost": 0.5, "size": 4.0},
    ],
}  # fmt: skip

DOPPLER_TEXT = """7
0, 1,
0, 1, 1, 2, 0, 1
2, 2, 3, 4, 3, 2
20000000000,80000000000
30000000000,40000000000,formation
10000000000,10000000000
50000000000,0
10000000000,0
"""


def layer(name: str, operator: str, forward: float, backward: float, *sizes: object) -> str:
    activation, parameters, *stage = sizes
    line = (
        f"{name} -- {operator} -- forward_compute_time={forward:.3f}, backward_compute_time="
        f"{backward:.3f}, activation_size={activation}, parameter_size={parameters}"
    )
    return "".join([line, *(f" -- stage_id={number}" for number in stage)])


# In the order of the real files: nodes first, in no order of their own, then edges.
PIPEDREAM_TEXT = "\n".join(
    [
        layer("node3", "Add()", 1.0, 2.0, "3000000.0", "0.0"),
        layer("node1", "Input0", 0.5, 0.0, "1000000.0", "0.0"),
        layer("node2", "Conv2d(3, 64, kernel_size=(7, 7))", 4.0, 8.0, "[1000000.0; 5e5]", "64.0"),
        layer("node4", "Linear(1, 1)", 2.0, 3.0, "8.0", "16.0"),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode1 -- node3",
        "\tnode3 -- node4",
    ]
)
