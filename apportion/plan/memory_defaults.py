"""What may be done about memory where a user says nothing of it: whatever makes a plan fit, and
nothing where there is no limit.

Part of the room plan. A Cluster, a limit and what was said come in, modes go out.
"""

from __future__ import annotations

import math

from apportion.machine import Cluster
from apportion.plan.recomputation import AUTO, KEEP


def memory_defaults(
    cluster: Cluster,
    memory_limit: float | None,
    recompute: str | None,
    offload: str | None,
    host_state: str | None,
) -> tuple[str, str, str]:
    """The modes of recomputation, offloading and state on the host: who gives one decides about the
    others too. The limit is in bytes, None for the devices' own memory. A process of this machine
    has no other memory than its host's, so that nothing is moved there unless it is asked for."""
    limited = memory_limit is None or not math.isinf(memory_limit)
    if not limited or any(mode is not None for mode in (recompute, offload, host_state)):
        return recompute or KEEP, offload or KEEP, host_state or KEEP
    apart = all(device.kind != "cpu" for device in cluster.devices)
    return AUTO, AUTO if apart else KEEP, AUTO if apart else KEEP
