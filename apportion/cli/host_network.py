"""What `calibrate --hosts` does and shows: the network between the hosts of a torchrun job.

Part of the room cli. A rank of the job comes in; rank 0 writes the cluster file and answers, and
the others say nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from apportion.files import write_atomic
from apportion.machine import cluster
from apportion.quantity import format_quantity
from apportion.run import HostNetwork, cluster_text, join_job, measure_hosts, network_rows

JOIN_SECONDS = 120.0
COMMAND = (
    "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend apportion --rdzv-endpoint "
    "ADDRESS:29400 --no-python apportion calibrate --hosts --interface eth0 --out hosts.toml"
)


def check_hosts_request(models: object, given: object, out: Path | None) -> None:
    """Raises ValueError unless --hosts can be done here."""
    if models or given:
        raise ValueError("--hosts measures the network alone: give no model, --cluster or --procs.")
    if out is None or out.suffix != ".toml":
        raise ValueError("Give --out FILE.toml with --hosts: the cluster file to write.")
    if "RANK" not in os.environ:
        raise ValueError(f"--hosts runs on every host, inside torchrun: {COMMAND}")


def measured_network(interface: str | None, out: Path) -> HostNetwork | None:
    """Measures; on rank 0 writes the file and returns what is in it. None on the others."""
    join_job("", JOIN_SECONDS, interface)
    try:
        network = measure_hosts()
        if dist.get_rank() != 0:
            return None
        write_atomic(out, cluster_text(network, interface))
        cluster(str(out))  # that it can be read
        return network
    finally:
        dist.destroy_process_group()


def network_facts(network: HostNetwork, out: Path) -> dict[str, Any]:
    """What was measured, as plain data."""
    return {
        "cluster": str(out),
        "hosts": [host.name for host in network.hosts],
        "processes": [host.processes for host in network.hosts],
        "links": [
            {"hosts": [a, b], "latency_seconds": latency, "bytes_per_second": width}
            for (a, b), latency in network.latency.items()
            for width in (network.bandwidth[a, b],)
        ],
    }


def network_shown(network: HostNetwork, out: Path) -> list[Table | str]:
    """The same for people."""
    table = Table("host", "and host", "an empty message", "bandwidth", box=None)
    for one, other, latency, width in network_rows(network):
        table.add_row(one, other, format_quantity(latency, "s"), f"{format_quantity(width, 'B')}/s")
    return [table, f"written to {out}; plan with --cluster {out}"]
