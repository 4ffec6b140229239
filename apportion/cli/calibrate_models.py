"""What the command `calibrate` does and shows.

Part of the room cli. Names of models come in, a CostTable and how it is printed go out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from apportion import zoo
from apportion.capture import capture
from apportion.machine import (
    ASSUMED,
    Cluster,
    CostFile,
    CostLine,
    CostTable,
    first_devices,
    kind_of_signature,
    save_cost_file,
)
from apportion.machine import cluster as cluster_of
from apportion.plan import make_plan
from apportion.quantity import format_quantity
from apportion.run import (
    Calibrator,
    cached_costs,
    calibrate_cuda,
    condition_of,
    count_missing,
    host_lines,
    keep_costs,
    lower_strategy,
    machine_name,
    source_of_model,
)
from apportion.search import METHODS, Problem, UnsuitableMethod
from apportion.show import plain_table
from apportion.split import Space, Strategy

USUAL = ("mlp:width=512,batch=64", "gpt2:layers=2,width=256,heads=4,vocab=1000,seq=64,batch=8")
DRAWS = 2  # random strategies beside those of the methods
Note = Callable[[str], None]
HostLines = Mapping[str, CostLine]


def measured(
    models: Sequence[str],
    cluster: str | None,
    procs: int | None,
    budget: float,
    device: str,
    seed: int,
    out: Path | None,
    note: Note,
) -> CostTable:
    """Measures the steps of models on so many processes at the same time, or on a CUDA device."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither cpu nor cuda")
    if device == "cuda":
        tables = _cuda(models or USUAL, cluster, seed, note)
        for table in tables:
            keep_costs(table)
        _save(tables, out)
        return tables[0]
    if cluster is not None and not cluster.startswith("local:"):
        raise ValueError(f"only processes of this machine can be measured, not {cluster!r}")
    if cluster is not None and procs is not None:
        raise ValueError("Give either --cluster or --procs, not both.")
    place = cluster_of(cluster or f"local:{procs or 2}")
    for spec in models or USUAL:
        _model(spec, place, budget, seed, note)
    table = cached_costs().table(condition_of(place))
    _save((table,), out)
    return table


def _save(tables: tuple[CostTable, ...], out: Path | None) -> None:
    if out is not None:
        save_cost_file(CostFile(machine_name(), torch.__version__, tables), out)


def _cuda(
    models: Sequence[str], cluster: str | None, seed: int, note: Note
) -> tuple[CostTable, ...]:
    """What whole steps cost on this machine's CUDA device, which is one of the cluster's: in
    generated code, and compiled with fusion where that works."""
    if not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that torch can use")
    place = gpu_place(torch.cuda.get_device_name(), cluster)
    steps = []
    for spec in models:
        it = zoo.load(spec, seed, meta=False)
        program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
        steps.append((program, make_plan(program, place, "single")))
    generated = calibrate_cuda.calibrate(steps, note=note)
    tables: tuple[CostTable, ...] = (generated,)
    try:
        tables = (generated, calibrate_cuda.calibrate_fused(steps, generated, note))
    except ValueError as error:
        note(f"costs of fused kernels are not measured: {error}")
    return with_host(tables, note)


def with_host(
    tables: tuple[CostTable, ...], note: Note, measure: Callable[[], HostLines] = host_lines
) -> tuple[CostTable, ...]:
    """The tables with what copies to the host of the device and back take, and its updates."""
    try:
        lines = measure()
    except RuntimeError as error:  # of memory that cannot be pinned
        note(f"the host is not measured: {error}")
        return tables
    rates = {name: format_quantity(1 / line.per_byte, "B/s") for name, line in lines.items()}
    note("the host: " + ", ".join(f"{name} {rate}" for name, rate in rates.items()))
    return tuple(replace(table, lines={**table.lines, **lines}) for table in tables)


def gpu_place(gpu: str, cluster: str | None) -> Cluster:
    """A cluster of one GPU with this name, of the kind that clusters call it."""
    if cluster is not None:
        whole = cluster_of(cluster)
        kinds = {device.kind for device in whole.devices}
        if len(kinds) != 1 or not whole.devices[0].asynchronous:
            raise ValueError(f"the devices of {cluster} are not GPUs of one kind")
        return first_devices(whole, 1, whole.name)
    kind = calibrate_cuda.kind_of_gpu(gpu)
    try:
        return cluster_of(f"1x{kind}")
    except ValueError:
        raise ValueError(
            f"no preset has the GPU {gpu!r}: describe it in a cluster file and give that as "
            "--cluster FILE.toml"
        ) from None


def _model(spec: str, place: Cluster, budget: float, seed: int, note: Note) -> None:
    it = zoo.load(spec, seed, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
    found = strategies(Space(program.graph), place, seed)
    with Calibrator(source_of_model(program, spec, seed), place, budget, note) as calibrator:
        for name, strategy in found:
            if calibrator.left <= 0:
                note(f"{spec}: the budget of {budget:g} s is spent before {name}")
                break
            tasks = lower_strategy(program.graph, strategy, len(place.devices)).tasks
            note(f"{spec}, {name}: {count_missing(calibrator.table, tasks)} calls are new")
            if calibrator.fits(tasks):
                calibrator.measure(strategy, tasks)


def strategies(space: Space, place: Cluster, seed: int) -> list[tuple[str, Strategy]]:
    """The divisions whose parts are measured: by each of the usual methods, and drawn ones."""
    names = [("single", seed), ("data", seed), ("fsdp", seed), ("tofu", seed)]
    names += [("random", seed + k) for k in range(DRAWS)]
    found = []
    for name, number in names:
        problem = Problem(space, place, ASSUMED)
        try:
            found.append((name, METHODS[name](problem, budget=10.0, seed=number).strategy))
        except UnsuitableMethod:
            continue
    return found


def facts(table: CostTable) -> dict[str, Any]:
    """What was measured, as plain data."""
    at = table.condition
    return {
        "kind": at.kind,
        "threads": at.threads,
        "processes": at.processes,
        "mode": at.mode,
        "works": len(table.works),
        "noise": table.noise,
        "fits": {name: fit._asdict() for name, fit in table.fits.items()},
        "lines": {name: line._asdict() for name, line in table.lines.items()},
    }


def shown(table: CostTable) -> list[Table | str]:
    """What was measured, for people: works and fits by kind, and what copies and messages cost."""
    kinds = plain_table("kind of operator", "calls measured", "total", "fit", "error")
    by_kind: dict[str, list[float]] = {}
    for signature, work in table.works.items():
        by_kind.setdefault(kind_of_signature(signature), []).append(work.seconds)
    for kind, seconds in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        fit = max((f for n, f in table.fits.items() if n.startswith(f"{kind}/")),
                  key=lambda f: f.points, default=None)  # fmt: skip
        what = "" if fit is None else f"{fit.launch * 1e6:.1f} us + {_rates(*fit[1:3])}"
        error = "" if fit is None else f"{fit.error:.0%}"
        kinds.add_row(kind, str(len(seconds)), f"{sum(seconds) * 1e3:.2f} ms", what, error)
    lines = [
        f"{name}: {x.each * 1e6:.0f} us + {x.per_box * 1e6:.1f} us per box or message + "
        f"{_rates(0.0, x.per_byte)} ({x.error:.0%} off, {x.points} points)"
        for name, x in table.lines.items()
    ]
    return [kinds, *lines, str(table), f"a reference kernel varied by {table.noise:.0%}"]


def _rates(per_flop: float, per_byte: float) -> str:
    parts = [f"{1e-9 / per_flop:.1f} GFLOP/s" if per_flop else ""]
    parts += [f"{1e-9 / per_byte:.2f} GB/s" if per_byte else ""]
    return ", ".join(part for part in parts if part) or "nothing"
