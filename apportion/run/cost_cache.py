"""Where the costs that were measured on this machine are kept from one command to the next.

Part of the room run. One CostTable for each Condition (so many processes with so many threads) goes
in and comes out; they are in one file for each machine and version of torch (`cache_file`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from apportion.execute import carrier, threads
from apportion.machine import (
    ASSUMED,
    GENERATED,
    INTERPRETER,
    Cluster,
    Condition,
    CostFile,
    CostModel,
    CostTable,
    load_cost_file,
    save_cost_file,
)

BUDGET = 20.0  # seconds for measuring by itself what a plan needs
QUANTILE = 0.25
"""Of several measurements of the same this one counts: whatever disturbs makes them longer."""


def machine_name() -> str:
    """This machine in words: what costs depend on."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def cache_file() -> Path:
    """Where this machine's measurements are: under APPORTION_CACHE, or the user's cache folder."""
    folder = os.environ.get("APPORTION_CACHE")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = os.path.join(base, "apportion")
    facts = f"{machine_name()} torch {torch.__version__}, messages by {carrier()}"
    name = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return Path(folder) / f"costs-{name}.json"


def cached_costs() -> CostFile:
    """This machine's measurements; none if there are none yet or they cannot be read."""
    empty = CostFile(machine_name(), torch.__version__)
    try:
        return load_cost_file(cache_file()) if cache_file().exists() else empty
    except ValueError:
        return empty


def keep_costs(table: CostTable, before: CostTable | None = None) -> None:
    """Puts a table into the cache. `before` is the table that the cache had when measuring began:
    what it has more by now was measured by another command meanwhile, and stays."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise ValueError(f"cannot write into {path.parent}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = cached_costs()
        if before is not None:
            table = with_others(table, before, file.table(table.condition))
        save_cost_file(file.with_table(table), path)


def with_others(table: CostTable, before: CostTable, now: CostTable) -> CostTable:
    """A table with the works that are in the cache now, were not before, and are not in it."""
    known = before.works.keys() | table.works.keys()
    others = {name: work for name, work in now.works.items() if name not in known}
    doubtful = tuple(name for name in now.provisional if name in others)
    return replace(
        table,
        works={**table.works, **others},
        provisional=(*table.provisional, *doubtful),
    )


def condition_of(cluster: Cluster, mode: str = GENERATED) -> Condition:
    """Under which Condition the processes of a local cluster run. What is compiled further than
    generated code is taken to cost as much: on processors it has the same kernels in most."""
    count = len(cluster.devices)
    return Condition(
        "cpu", threads(count), count, INTERPRETER if mode == INTERPRETER else GENERATED
    )


def measured_cost(table: CostTable) -> CostModel:
    """The CostModel of a local cluster from a table."""
    mode = table.condition.mode
    if not table.works:
        return ASSUMED if mode == ASSUMED.mode else replace(ASSUMED, mode=mode)
    text = f"measured on this machine, {table.condition.processes} processes at the same time"
    return CostModel("calibrated", text, ASSUMED.efficiency, {"cpu": table}, mode)
