"""cluster: from a specification to a Cluster (topology.py).

    cluster("p2.8xlarge")   a preset (`known()` lists them; the files are in presets/)
    cluster("8xh100")       one node of eight;  cluster("2x8xa100"): two nodes of eight
    cluster("local:4")      this machine, its cores shared by four processes
    cluster("p2.8xlarge:4") the first four devices of a preset
    cluster("mine.toml")    a file of one's own

The main file of machine/. cluster_file.py says what a file may contain, cluster_tree.py makes a
Cluster of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from apportion.machine.cluster_file import (
    MAX_DEVICES,
    check_tables,
    countable_kinds,
    preset_names,
    preset_tables,
    read,
)
from apportion.machine.cluster_tree import grow
from apportion.machine.topology import Cluster, first_devices

# A core of an unknown CPU and gloo on it, until `calibrate` has measured them. Transport:
# one-way messages between 2 ranks, and between more ranks than cores, on a 2-core EPYC.
CORE_FLOPS = ((2, 30e9), (4, 30e9), (8, 15e9))
CORE_BANDWIDTH = 8e9
CORE_LAUNCH = 5e-6
GLOO_LATENCY, GLOO_BANDWIDTH = 62e-6, 3.9e9
GLOO_CROWDED_LATENCY, GLOO_CROWDED_BANDWIDTH = 0.8e-3, 0.8e9


def cluster(spec: str) -> Cluster:
    """The Cluster that `spec` names (see the head of this file); ValueError if there is none."""
    if spec.endswith(".toml"):
        return _build(read(Path(spec)), f"cluster file {spec}")
    if spec.startswith("local:"):
        return _local_cluster(_parse_count(spec.removeprefix("local:"), "processes", spec))
    kinds = "|".join(map(re.escape, countable_kinds()))  # a kind may have an x itself
    if counted := re.fullmatch(rf"(?:([^x]*)x)?([^x]*)x({kinds})", spec):
        nodes = 1 if counted[1] is None else _parse_count(counted[1], "nodes", spec)
        return _counted_preset(spec, counted[3], nodes, _parse_count(counted[2], "devices", spec))
    name, colon, count = spec.partition(":")
    if name in preset_names():
        whole = _build(preset_tables(name), f"preset {name}")
        return first_devices(whole, _parse_count(count, "devices", spec), spec) if colon else whole
    raise ValueError(
        f"unknown cluster {spec!r}; known: {', '.join(preset_names())}, local:N, counts such as "
        "8xh100 or 2x8xa100, and paths that end in .toml"
    )


def known_clusters() -> list[tuple[str, str]]:
    """(name, one line about it) of everything `cluster` understands but files."""
    presets = [(name, str(preset_tables(name)["description"])) for name in preset_names()]
    return [
        *presets,
        ("PRESET:N", "the first N devices of a preset"),
        ("NxKIND, MxNxKIND", f"M nodes of N devices; kinds: {', '.join(countable_kinds())}"),
        ("local:N", "this machine, its cores shared by N processes"),
    ]


# Specifications


def _parse_count(text: str, what: str, spec: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= MAX_DEVICES:
        raise ValueError(f"cluster {spec!r}: the number of {what} must be 1 to {MAX_DEVICES}")
    return int(text)


def _counted_preset(spec: str, kind: str, nodes: int, count: int) -> Cluster:
    """The preset `kind` with so many nodes and so many devices on each."""
    tables = preset_tables(kind)
    tables["name"] = spec
    tables["device"][0]["count"] = count
    for switch in tables["switch"]:
        if switch["name"] == "node":
            switch["count"] = nodes
    return _build(tables, f"cluster {spec!r}")


def _local_cluster(count: int) -> Cluster:
    shared = usable_cores()
    share = shared / count
    crowded = count > shared
    latency = GLOO_CROWDED_LATENCY if crowded else GLOO_LATENCY
    wire = {
        "bandwidth": GLOO_CROWDED_BANDWIDTH if crowded else GLOO_BANDWIDTH,
        "latency": latency / 2,  # a message crosses two ports
    }
    rates = {f"float{8 * size}": rate * share for size, rate in CORE_FLOPS}
    device = {
        "name": "process",
        "kind": "cpu",
        "on": "machine",
        "count": count,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count,
        "memory_bandwidth": CORE_BANDWIDTH * share,
        "launch_seconds": CORE_LAUNCH,
        "flops": rates,
        "port": wire,
        "provenance": f"assumed, not measured: {count} processes share {shared} cores and the "
        f"memory, {share:.3g} cores each of {CORE_FLOPS[1][1]:.3g} float32 operations and "
        f"{CORE_BANDWIDTH:.3g} bytes a second; gloo as measured on another machine",
    }
    tables = {
        "name": f"local:{count}",
        "description": f"this machine, its {shared} cores shared by {count} processes",
        "communication_on_device": True,
        "switch": [{"name": "machine"}],
        "device": [device],
    }
    return _build(tables, f"cluster 'local:{count}'")


def usable_cores() -> int:
    """Cores of this machine that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _build(tables: dict[str, Any], where: str) -> Cluster:
    """The Cluster that the tables of a file describe; `where` heads every complaint."""
    file = check_tables(tables, where)
    try:
        return grow(file)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
