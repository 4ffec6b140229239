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


def check_mode(mode: str) -> str:
    """The mode, which may be `auto`; raises ValueError if there is none of that name."""
    if mode not in (*MODES, AUTO):
        known = ", ".join((*MODES, AUTO))
        raise ValueError(f"there is no way to compile {mode!r}; choose one of {known}")
    return mode


def predicted_mode(mode: str, cluster: Cluster) -> str:
    """The mode that steps on a Cluster are predicted for; ValueError if there is none such."""
    if check_mode(mode) == AUTO:
        fast = any(device.asynchronous for device in cluster.devices)
        return INDUCTOR if fast else GENERATED
    return mode
