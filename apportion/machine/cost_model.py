"""CostModel: how long a task takes alone. Where machine/ turns tables and rates into seconds.

A task's seconds are, in this order,

    measured   the call of a COMPUTE or ASSEMBLE was measured on this kind of device (cost_table.py)
    fitted     a line through measured calls of its kind (cost_fit.py); ASSEMBLE and messages: a
               line over boxes and bytes
    estimated  a line through all measured calls of its family, or where nothing was measured

                   COMPUTE   max(flops / (rate * efficiency), bytes / (bandwidth * efficiency))
                   ASSEMBLE  bytes / (bandwidth * efficiency)
                   TRANSFER  latencies of its links + bytes / the smallest of their bandwidths

               each plus the launch of a kernel on devices that are not asynchronous.

A view has no flops and no bytes. Waiting for lanes and links is left to simulate/; so is the time
that a message occupies links, except where messages burn the device and were measured: there its
duration is the CostModel's (`times_messages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from apportion.columns import Bools, Floats, Ints
from apportion.machine import cost_fit
from apportion.machine.cluster import cluster as named
from apportion.machine.cost_table import (
    AHEAD,
    ASSEMBLE_LINE,
    EXCHANGE_LINE,
    Condition,
    CostTable,
    Fit,
    Line,
    load,
    table_from_json,
    table_to_json,
)
from apportion.machine.topology import Cluster, Device

LARGEST_ITEM = 16  # bytes of a complex128
MEASURED, FITTED, ESTIMATED = 0, 1, 2
SHIPPED = Path(__file__).parent / "costs"


@dataclass(frozen=True, slots=True)
class CostModel:
    """`efficiency` is the share of a device's rates that a kernel is taken to reach where nothing
    was measured; `tables` holds what was, by kind of device."""

    name: str
    provenance: str
    efficiency: float
    tables: Mapping[str, CostTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"the efficiency {self.efficiency} is not above 0 and at most 1")


PUBLISHED = CostModel(
    "published", "published peak rates; every kernel is assumed to reach half of them", 0.5
)
ASSUMED = CostModel("assumed", "assumed rates of a CPU core, taken as what a kernel reaches", 1.0)


def default_cost(cluster: Cluster) -> CostModel:
    """The CostModel for a Cluster from what is shipped: measured tables of some GPUs, for others as
    large a share of their published rates as a measured one reaches."""
    if all(device.kind == "cpu" for device in cluster.devices):
        return ASSUMED
    known = {t.condition.kind: t for t in shipped()}
    tables, guessed = {}, set()
    for _, device in classes(cluster):
        if device.kind in known:
            tables[device.kind] = known[device.kind]
        elif device.asynchronous and REFERENCE in known and device.kind not in tables:
            tables[device.kind] = _scaled_table(device)
            guessed.add(device.kind)
    if not tables:
        return PUBLISHED
    texts = [f"measured on {kind}" for kind in sorted(tables.keys() - guessed)]
    texts += [
        f"{kind} is taken to reach the share of its published rates that {REFERENCE} was measured "
        "to reach" for kind in sorted(guessed)
    ]  # fmt: skip
    name = "estimated" if guessed else "measured"
    return CostModel(name, "; ".join(texts), PUBLISHED.efficiency, dict(sorted(tables.items())))


REFERENCE = "h200"


@lru_cache(maxsize=32)
def _scaled_table(device: Device) -> CostTable:
    """A table without works for a device that nobody has measured: the lines of the reference, at
    the pace of the device, and never faster than its published rates."""
    table = next(t for t in shipped() if t.condition.kind == REFERENCE)
    (model,) = named(f"1x{REFERENCE}").devices
    old, new = rates(model), rates(device)
    fits = {}
    for name, fit in cost_fit.fits(table.works, folds=0).items():
        size = min(int(name.rpartition("/")[2]), LARGEST_ITEM)
        flop = fit.per_flop * old[size] / new[size]
        byte = fit.per_byte * model.memory_bandwidth / device.memory_bandwidth
        fits[name] = fit._replace(
            per_flop=max(flop, 1 / new[size]) if flop else 0.0,
            per_byte=max(byte, 1 / device.memory_bandwidth) if byte else 0.0,
        )
    return CostTable(Condition(device.kind), fits=fits)


@lru_cache(maxsize=1)
def shipped() -> tuple[CostTable, ...]:
    """The tables that come with the package."""
    return tuple(t for path in sorted(SHIPPED.glob("*.json")) for t in load(path).tables)


def dump_cost(cost: CostModel) -> dict[str, Any]:
    """The CostModel as plain JSON data."""
    return {
        "name": cost.name,
        "provenance": cost.provenance,
        "efficiency": cost.efficiency,
        "tables": {kind: table_to_json(table) for kind, table in cost.tables.items()},
    }


def load_cost(data: Any) -> CostModel:
    """The CostModel written by `dump_cost`; ValueError, KeyError or TypeError on anything else."""
    if not isinstance(data["tables"], dict):
        raise ValueError("the tables of its costs are not by kind of device")
    tables = {str(kind): table_from_json(table) for kind, table in data["tables"].items()}
    return CostModel(str(data["name"]), str(data["provenance"]), float(data["efficiency"]), tables)


def times_messages(cluster: Cluster, cost: CostModel) -> bool:
    """Whether messages take what the CostModel says and occupy devices only, no links."""
    return cluster.communication_on_device and exchange_line(cluster, cost) is not None


def ahead_nanoseconds(cluster: Cluster, cost: CostModel) -> Ints:
    """For every device how much issued work its host may be ahead of it; 0 if nothing is known to
    limit that."""
    tables = [cost.tables.get(device.kind) for device in cluster.devices]
    ahead = [0.0 if table is None else table.issue.get(AHEAD, 0.0) for table in tables]
    return np.rint(np.array(ahead) * 1e9).astype(np.int64)


def classes(cluster: Cluster) -> list[tuple[Bools, Device]]:
    """Devices of one kind and rate are one class: (which devices, one of them)."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, d in enumerate(cluster.devices):
        same = (d.kind, d.flops, d.memory_bandwidth, d.launch_seconds, d.asynchronous)
        groups.setdefault(same, []).append(number)
    found = []
    for members in groups.values():
        where = np.zeros(len(cluster.devices), bool)
        where[members] = True
        found.append((where, cluster.devices[members[0]]))
    return found


def compute_seconds(
    cost: CostModel,
    cluster: Cluster,
    kinds: Sequence[str],
    op: Ints,
    device: Ints,
    flops: Floats,
    nbytes: Ints,
    itemsize: Ints,
) -> tuple[Floats, Ints]:
    """Seconds of COMPUTE tasks, and where each comes from (FITTED or ESTIMATED). `kinds` are those
    of all Ops; the columns have a row for each task."""
    names, which = _distinct_kinds(tuple(kinds))
    kind, size = which[op], np.clip(itemsize, 0, LARGEST_ITEM)
    seconds, source = np.zeros(len(op)), np.full(len(op), ESTIMATED)
    for where, one in classes(cluster):
        here = where[device]
        rate = np.array(rates(one))[size[here]]
        arithmetic, memory = flops[here] / rate, nbytes[here] / one.memory_bandwidth
        launch = 0.0 if one.asynchronous else one.launch_seconds
        guess = np.maximum(arithmetic, memory) / cost.efficiency + launch
        if one.kind in cost.tables:
            lines, origin = fit_columns(cost.tables[one.kind], names)
            launches, per_flop, per_byte = lines[:, kind[here], size[here]]
            fitted = launches + flops[here] * per_flop + nbytes[here] * per_byte
            known = fitted > 0
            guess[known] = fitted[known]
            source[here] = np.where(known, origin[kind[here], size[here]], ESTIMATED)
        seconds[here] = guess
    return seconds, source


@lru_cache(maxsize=64)
def _distinct_kinds(kinds: tuple[str, ...]) -> tuple[tuple[str, ...], Ints]:
    """The different kinds, and for each Op which one it is; one more for the end of the step."""
    numbers: dict[str, int] = {}
    which = [numbers.setdefault(kind, len(numbers)) for kind in (*kinds, "")]
    return tuple(numbers), np.array(which, np.int64)


@lru_cache(maxsize=64)
def fit_columns(table: CostTable, kinds: tuple[str, ...]) -> tuple[Floats, Ints]:
    """Launch, per flop and per byte of every kind and size of element, zeros where nothing is
    known; and whether they are FITTED or ESTIMATED, as all are of a table without works."""
    lines = np.zeros((3, len(kinds), LARGEST_ITEM + 1))
    origin = np.full((len(kinds), LARGEST_ITEM + 1), ESTIMATED)
    for k, kind in enumerate(kinds):
        for size in range(LARGEST_ITEM + 1):
            own = table.fits.get(cost_fit.key(kind, size))
            found: Fit | None = own or table.fits.get(cost_fit.key(cost_fit.family(kind), size))
            if found is not None:
                lines[:, k, size] = found[:3]
                origin[k, size] = FITTED if own and table.works else ESTIMATED
    return lines, origin


def rates(device: Device) -> list[float]:
    """Operations per second by bytes per element: the largest listed size that fits."""
    sizes = [
        max((known for known, _ in device.flops if known <= size), default=device.flops[0][0])
        for size in range(LARGEST_ITEM + 1)
    ]
    return [dict(device.flops)[size] for size in sizes]


def assemble_seconds(
    cost: CostModel, cluster: Cluster, device: Ints, boxes: Ints, nbytes: Ints
) -> tuple[Floats, Ints]:
    """Seconds of ASSEMBLE tasks, and where each comes from (FITTED or ESTIMATED)."""
    seconds, source = np.zeros(len(device)), np.full(len(device), ESTIMATED)
    for where, one in classes(cluster):
        here = where[device]
        line = cost.tables[one.kind].lines.get(ASSEMBLE_LINE) if one.kind in cost.tables else None
        if line is None:
            launch = 0.0 if one.asynchronous else one.launch_seconds
            seconds[here] = nbytes[here] / one.memory_bandwidth / cost.efficiency + launch
        else:
            seconds[here] = line.each + boxes[here] * line.per_box + nbytes[here] * line.per_byte
            source[here] = FITTED
        if one.asynchronous:
            seconds[here & (nbytes == 0)] = 0.0  # a view: the device does not notice
    return seconds, source


def exchange_line(cluster: Cluster, cost: CostModel) -> Line | None:
    """The measured line of exchanges between processes, if there is one."""
    found = [cost.tables[d.kind].lines.get(EXCHANGE_LINE) for d in cluster.devices[:1]
             if d.kind in cost.tables]  # fmt: skip
    return found[0] if found else None
