"""How the tasks of a rank are compiled, as far as predictions care.

Part of the room machine. The name that a user gives comes in, the mode that a step on a Cluster is
predicted for goes out.

    none       an interpreter issues task after task
    generated  straight-line code between exchanges, updates fused
    graph      the same, replayed by the device without its host (CUDA graphs)
    inductor   kernels that are fused by torch's compiler, replayed likewise
    auto       the fastest that there is for the devices
"""

from __future__ import annotations

from apportion.machine.topology import Cluster

INTERPRETER, GENERATED, GRAPH, INDUCTOR, AUTO = "none", "generated", "graph", "inductor", "auto"
MODES = (INTERPRETER, GENERATED, GRAPH, INDUCTOR)
REPLAYED = (GRAPH, INDUCTOR)
"""Modes in which an asynchronous device is told once to do everything between two exchanges."""


def predicted_mode(mode: str, cluster: Cluster) -> str:
    """The mode that steps on a Cluster are predicted for; ValueError if there is none such."""
    if mode != AUTO and mode not in MODES:
        raise ValueError(f"unknown way to compile {mode!r}; known: {', '.join((*MODES, AUTO))}")
    if mode == AUTO:
        fast = any(device.asynchronous for device in cluster.devices)
        return INDUCTOR if fast else GENERATED
    return mode
