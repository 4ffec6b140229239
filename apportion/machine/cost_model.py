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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apportion.checked import (
    brief,
    read_field,
    read_mapping,
    read_number,
    read_text,
)
from apportion.columns import Bools, Floats, Ints, compiled_part
from apportion.machine import cost_fit
from apportion.machine.cluster import cluster as named
from apportion.machine.compile_mode import GENERATED, INTERPRETER, MODES, predicted_mode
from apportion.machine.cost_table import (
    AHEAD,
    ASSEMBLE_LINE,
    EXCHANGE_LINE,
    Condition,
    CostFile,
    CostLine,
    CostTable,
    Fit,
    load_cost_file,
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
    was measured; `tables` holds what was, by kind of device; `mode` is how the ranks that it is
    about are compiled (compile_mode.py)."""

    name: str
    provenance: str
    efficiency: float
    tables: Mapping[str, CostTable] = field(default_factory=dict)
    mode: str = GENERATED

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"the efficiency {self.efficiency} is not above 0 and at most 1")


PUBLISHED = CostModel(
    "published", "published peak rates; every kernel is assumed to reach half of them", 0.5
)
ASSUMED = CostModel("assumed", "assumed rates of a CPU core, taken as what a kernel reaches", 1.0)


def default_cost(
    cluster: Cluster, mode: str = GENERATED, own: Sequence[CostFile] = ()
) -> CostModel:
    """The CostModel for a Cluster whose ranks are compiled by `mode`: from the files of one's own,
    the last first, then from what is shipped: measured tables of some GPUs, for others as large a
    share of their published rates as a measured one reaches."""
    mode = predicted_mode(mode, cluster)
    if all(device.kind == "cpu" for device in cluster.devices):
        return _cpu_cost(cluster, mode, own)
    tables, texts, estimated = {}, [], False
    for _, device in device_classes(cluster):
        kind = device.kind
        if kind in tables:
            continue
        mine = [file for file in own if any(t.condition.kind == kind for t in file.tables)]
        measured = [t for t in shipped() if t.condition.kind == kind]
        unknown = not measured and device.asynchronous and _reference()
        measured += [t for file in mine for t in file.tables if t.condition.kind == kind]
        guessed = [_scaled_table(device, mode)] if unknown else []
        if guessed or measured:
            tables[kind] = _combined((*guessed, *measured), mode)
            texts.append(_provenance(kind, mine, bool(measured)))
            estimated |= not measured
    if not tables:
        return PUBLISHED if mode == PUBLISHED.mode else replace(PUBLISHED, mode=mode)
    name = "estimated" if estimated else "measured"
    kinds = dict(sorted(tables.items()))
    return CostModel(name, "; ".join(sorted(texts)), PUBLISHED.efficiency, kinds, mode)


def _cpu_cost(cluster: Cluster, mode: str, own: Sequence[CostFile]) -> CostModel:
    """The CostModel of processes on hosts: by a table of one's own, of those that were measured
    with as many processes at the same time as the cluster has on a host, or nearly."""
    assumed = ASSUMED if mode == ASSUMED.mode else replace(ASSUMED, mode=mode)
    found = [
        (file, table)
        for file in own
        for table in file.tables
        if table.condition.kind == "cpu" and table.condition.mode == mode and table.works
    ]
    if not found:
        return assumed
    together = max((len(host.devices) for host in cluster.hosts), default=len(cluster.devices))
    file, table = min(found, key=lambda each: abs(each[1].condition.processes - together))
    count = table.condition.processes
    text = f"measured on {file.machine}, {count} processes at the same time"
    return CostModel("measured", text, ASSUMED.efficiency, {"cpu": table}, mode)


def _provenance(kind: str, own: Sequence[CostFile], measured: bool) -> str:
    if own:
        return f"measured on {kind} of {own[-1].machine}, torch {own[-1].torch}"
    if measured:
        return f"measured on {kind}"
    return (
        f"{kind} is taken to reach the share of its published rates that {REFERENCE} was measured "
        "to reach"
    )


def check_kinds(file: CostFile, path: str | Path, cluster: Cluster) -> None:
    """ValueError unless a file has costs of some kind of the cluster's devices."""
    has, wanted = {t.condition.kind for t in file.tables}, {d.kind for d in cluster.devices}
    if not has & wanted:
        raise ValueError(
            f"{path} has costs of {', '.join(sorted(has)) or 'nothing'}, and the devices of "
            f"{cluster.name} are {', '.join(sorted(wanted))}: measure one of those with `apportion "
            "calibrate`"
        )


REFERENCE = "h200"


def _reference() -> bool:
    return any(t.condition.kind == REFERENCE for t in shipped())


@lru_cache(maxsize=32)
def _combined(tables: tuple[CostTable, ...], mode: str) -> CostTable:
    """What tables of one kind of device say together of a mode, later ones before earlier ones.

    A call takes the device as long in generated code as for the interpreter; what another mode does
    otherwise its own tables say.
    """
    modes = (INTERPRETER, GENERATED) if mode == INTERPRETER else (INTERPRETER, GENERATED, mode)
    found: CostTable | None = None
    for other in dict.fromkeys(modes):
        for table in (t for t in tables if t.condition.mode == other):
            found = table if found is None else _laid_over(found, table)
    hosts = [t for t in tables if t.condition.mode == mode and t.issue]
    found = found or CostTable(replace(tables[-1].condition, mode=mode))
    issue = {k: v for t in hosts for k, v in t.issue.items()} if hosts else found.issue
    return replace(found, condition=replace(found.condition, mode=mode), issue=issue)


def _laid_over(base: CostTable, top: CostTable) -> CostTable:
    """Two tables of one kind of device as one; what both have is the second one's. Convolutions in
    the memory order of another mode say nothing about those of the second."""
    alike = base.condition.mode == top.condition.mode
    turned = (
        set() if alike else {kind for kind in map(cost_fit.fit_kind, top.works) if _turns(kind)}
    )
    works = {
        w: x for w, x in base.works.items() if not turned or cost_fit.fit_kind(w) not in turned
    }
    works |= top.works
    new = {cost_fit.fit_kind(w) for w, work in top.works.items() if base.works.get(w) != work}
    new |= {cost_fit.family(kind) for kind in new}
    fits = cost_fit.fits(works, folds=0) if alike and base.works and new else {}
    fits = {name: fit for name, fit in fits.items() if name.rpartition("/")[0] in new}
    return replace(
        top,
        works=works,
        fits={**base.fits, **top.fits, **fits},
        lines={**base.lines, **top.lines},
        issue={**(base.issue if alike else {}), **top.issue} or base.issue,
        resident=top.resident or base.resident,
    )


def _turns(kind: str) -> bool:
    """Whether modes may differ in the memory order of what calls of this kind read."""
    return "conv" in kind and cost_fit.family(kind) != cost_fit.OTHER


@lru_cache(maxsize=32)
def _scaled_table(device: Device, mode: str) -> CostTable:
    """A table without works for a device that nobody has measured: the lines of the reference, at
    the pace of the device, and never faster than its published rates."""
    tables = tuple(t for t in shipped() if t.condition.kind == REFERENCE)
    table = _combined(tables, mode)
    (model,) = named(f"1x{REFERENCE}").devices
    old, new = rates_by_itemsize(model), rates_by_itemsize(device)
    fits = {}
    for name, fit in cost_fit.fits(table.works, folds=0).items():
        size = min(int(name.rpartition("/")[2]), LARGEST_ITEM)
        flop = fit.per_flop * old[size] / new[size]
        byte = fit.per_byte * model.memory_bandwidth / device.memory_bandwidth
        fits[name] = fit._replace(
            per_flop=max(flop, 1 / new[size]) if flop else 0.0,
            per_byte=max(byte, 1 / device.memory_bandwidth) if byte else 0.0,
        )
    return CostTable(Condition(device.kind, mode=mode), fits=fits)


@lru_cache(maxsize=1)
def shipped() -> tuple[CostTable, ...]:
    """The tables that come with the package."""
    return tuple(t for path in sorted(SHIPPED.glob("*.json")) for t in load_cost_file(path).tables)


def dump_cost(cost: CostModel) -> dict[str, Any]:
    """The CostModel as plain JSON data."""
    found: dict[str, Any] = {
        "name": cost.name,
        "provenance": cost.provenance,
        "efficiency": cost.efficiency,
        "tables": {kind: table_to_json(table) for kind, table in cost.tables.items()},
    }
    return found if cost.mode == INTERPRETER else found | {"mode": cost.mode}


def load_cost(data: Any) -> CostModel:
    """The CostModel written by `dump_cost`; ValueError on anything else."""
    data = read_mapping(data, "its costs")
    given = read_mapping(read_field(data, "tables", "its costs"), "the tables of its costs")
    tables = {kind: table_from_json(table) for kind, table in given.items()}
    # plans of earlier versions do not say it
    mode = read_text(data.get("mode", INTERPRETER), "how ranks are compiled")
    if mode not in MODES:
        raise ValueError(f"its costs are of ranks compiled by {brief(mode)!r}, which is unknown")
    name, provenance, efficiency = (
        read_field(data, key, "its costs") for key in ("name", "provenance", "efficiency")
    )
    return CostModel(
        read_text(name, "the name of its costs"),
        read_text(provenance, "where its costs come from"),
        read_number(efficiency, "the efficiency of its costs", 1e-6, 1.0),
        tables,
        mode,
    )


def times_messages(cluster: Cluster, cost: CostModel) -> bool:
    """Whether messages take what the CostModel says and occupy devices only, no links."""
    return cluster.communication_on_device and exchange_line(cluster, cost) is not None


def ahead_nanoseconds(cluster: Cluster, cost: CostModel) -> Ints:
    """For every device how much issued work its host may be ahead of it; 0 if nothing is known to
    limit that."""
    tables = [cost.tables.get(device.kind) for device in cluster.devices]
    ahead = [0.0 if table is None else table.issue.get(AHEAD, 0.0) for table in tables]
    return np.rint(np.array(ahead) * 1e9).astype(np.int64)


def device_classes(cluster: Cluster) -> list[tuple[Bools, Device]]:
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
    """Seconds of parts of Ops, and where each comes from (FITTED or ESTIMATED). `kinds` are those
    of all Ops; the columns have a row for each task."""
    names, which = _distinct_kinds(tuple(kinds))
    table = price_table(cost, cluster, names)
    own, size = table.device_class[device], np.clip(itemsize, 0, LARGEST_ITEM)
    operator = which[op]
    fit = table.fit[own, operator, size]
    seconds = fit[:, 0] + flops * fit[:, 1] + nbytes * fit[:, 2]
    source = table.fit_source[own, operator, size]
    guess = np.flatnonzero(~(seconds > 0))
    own, size = own[guess], size[guess]
    arithmetic = flops[guess] / table.rate[own, size]
    memory = nbytes[guess] / table.bandwidth[own]
    seconds[guess] = np.maximum(arithmetic, memory) / table.efficiency + table.launch[own]
    source[guess] = ESTIMATED
    return seconds, source


def assemble_seconds(
    cost: CostModel, cluster: Cluster, device: Ints, boxes: Ints, nbytes: Ints
) -> tuple[Floats, Ints]:
    """Seconds of assemblies of so many boxes and bytes, and where they come from."""
    table = price_table(cost, cluster, ())
    own = table.device_class[device]
    line, known = table.assembly[own], table.has_assembly[own] > 0
    fitted = line[:, 0] + boxes * line[:, 1] + nbytes * line[:, 2]
    guess = nbytes / table.bandwidth[own] / table.efficiency + table.launch[own]
    view = (nbytes == 0) & (table.free_views[own] > 0)  # the device does not notice
    seconds = np.where(view, 0.0, np.where(known, fitted, guess))
    return seconds, np.where(known, FITTED, ESTIMATED)


def to_nanoseconds(seconds: Floats) -> Ints:
    """Seconds in whole nanoseconds; at least 1, so that simulated time moves on."""
    return np.maximum(np.rint(seconds * 1e9).astype(np.int64), 1)


# Prices in compiled code: what the functions above say of columns, of one task


class PriceTable(NamedTuple):  # numba takes no dataclass
    """What computing and assembling take, on classes c of devices, by bytes per element."""

    device_class: Ints  # by device
    efficiency: float
    rate: Floats  # c x bytes: operations per second
    bandwidth: Floats  # c
    launch: Floats  # c: seconds
    free_views: Ints  # c: whether a view takes nothing
    fit: Floats  # c x operator x bytes x 3: launch, per flop, per byte; zeros if nothing is known
    fit_source: Ints  # c x operator x bytes: FITTED or ESTIMATED
    assembly: Floats  # c x 3: each, per box, per byte
    has_assembly: Ints  # c: whether that is known


def price_table(cost: CostModel, cluster: Cluster, operators: Sequence[str]) -> PriceTable:
    """The prices of these operators, by their numbers."""
    found, names = device_classes(cluster), tuple(operators)
    number, devices = np.zeros(len(cluster.devices), np.int64), [device for _, device in found]
    for k, (where, _) in enumerate(found):
        number[where] = k
    tables = [cost.tables.get(one.kind) for one in devices]
    shape = len(names), LARGEST_ITEM + 1
    nothing = np.zeros((3, *shape)), np.full(shape, ESTIMATED)
    fits = [nothing if table is None else fit_columns(table, names) for table in tables]
    lines = [None if table is None else table.lines.get(ASSEMBLE_LINE) for table in tables]
    return PriceTable(
        number, cost.efficiency, np.array([rates_by_itemsize(one) for one in devices]),
        np.array([one.memory_bandwidth for one in devices]),
        np.array([0.0 if one.asynchronous else one.launch_seconds for one in devices]),
        np.array([one.asynchronous for one in devices], np.int64),
        np.ascontiguousarray(np.moveaxis(np.array([fit for fit, _ in fits]), 1, 3)),
        np.array([source for _, source in fits], np.int64),
        np.array([(0.0, 0.0, 0.0) if line is None else line[:3] for line in lines], np.float64),
        np.array([line is not None for line in lines], np.int64),
    )  # fmt: skip


@compiled_part
def compute_price(table, operator, device, flops, nbytes, itemsize):  # type: ignore[no-untyped-def]
    """Seconds of a part of an Op, and where they come from. `table` is a PriceTable, `flops` a
    float64, all others are int64."""
    own, size = table.device_class[device], min(max(itemsize, 0), LARGEST_ITEM)
    fit, source = table.fit, table.fit_source[own, operator, size]
    launch, per_flop = fit[own, operator, size, 0], fit[own, operator, size, 1]
    seconds = launch + flops * per_flop + nbytes * fit[own, operator, size, 2]
    if not seconds > 0:
        arithmetic, memory = flops / table.rate[own, size], nbytes / table.bandwidth[own]
        seconds = max(arithmetic, memory) / table.efficiency + table.launch[own]
        source = ESTIMATED
    return seconds, source


@compiled_part
def assembly_price(table, device, boxes, nbytes):  # type: ignore[no-untyped-def]
    """Seconds of an assembly, and where they come from. `table` is a PriceTable, all others are
    int64."""
    own, source = table.device_class[device], ESTIMATED
    if table.has_assembly[own]:
        line, source = table.assembly, FITTED
        seconds = line[own, 0] + boxes * line[own, 1] + nbytes * line[own, 2]
    else:
        seconds = nbytes / table.bandwidth[own] / table.efficiency + table.launch[own]
    if nbytes == 0 and table.free_views[own]:
        seconds = 0.0  # a view: the device does not notice
    return seconds, source


@compiled_part
def whole_nanoseconds(seconds):  # type: ignore[no-untyped-def]
    """A float64 of seconds in whole nanoseconds; at least 1, so that simulated time moves on."""
    return max(np.int64(np.rint(seconds * 1e9)), np.int64(1))


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
            names = dict.fromkeys((kind, kind.partition("~")[0]))
            lines_of_kind = (table.fits.get(cost_fit.key(name, size)) for name in names)
            own = next((fit for fit in lines_of_kind if fit is not None), None)
            found: Fit | None = own or table.fits.get(cost_fit.key(cost_fit.family(kind), size))
            if found is not None:
                lines[:, k, size] = found[:3]
                origin[k, size] = FITTED if own and table.works else ESTIMATED
    return lines, origin


def rates_by_itemsize(device: Device) -> list[float]:
    """Operations per second by bytes per element: the largest listed size that fits."""
    sizes = [
        max((known for known, _ in device.flops if known <= size), default=device.flops[0][0])
        for size in range(LARGEST_ITEM + 1)
    ]
    return [dict(device.flops)[size] for size in sizes]


def exchange_line(cluster: Cluster, cost: CostModel) -> CostLine | None:
    """The measured line of exchanges between processes, if there is one."""
    found = [cost.tables[d.kind].lines.get(EXCHANGE_LINE) for d in cluster.devices[:1]
             if d.kind in cost.tables]  # fmt: skip
    return found[0] if found else None
