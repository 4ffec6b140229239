"""A placement for people and programs: a table of devices, what it is worth, and JSON facts.

Part of the room show. A PlacedProblem comes in, a table with lines and plain data go out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from apportion.quantity import format_quantity
from apportion.show.plain_table import plain_table

if TYPE_CHECKING:
    from apportion.place import PlacedProblem

SHOWN_DEVICES = 32


def placement_facts(source: str, placed: PlacedProblem) -> dict[str, Any]:
    """The keys that stay stable; times in `unit`."""
    problem, judged = placed.problem, placed.evaluation
    names = [device.name for device in problem.devices]
    return {
        "input": source,
        "method": placed.method,
        "objective": placed.objective,
        "value": judged.value,
        "unit": problem.time_unit,
        "lower_bound": placed.lower_bound,
        "feasible": judged.feasible,
        "assignment": assignment(placed),
        "loads": dict(zip(names, map(float, judged.loads), strict=True)),
        "memory": dict(zip(names, map(int, judged.memory), strict=True)),
        "memory_limit": {device.name: device.memory_bytes for device in problem.devices},
        "single": {"value": placed.single.value, "feasible": placed.single.feasible},
        "search_seconds": placed.seconds,
        "evaluations": placed.evaluations,
        "interrupted": placed.result.interrupted,
        "notes": list(placed.result.notes),
        "curve": [list(point) for point in placed.result.curve],
        "figures": {name: float(x) for name, x in placed.result.figures.items()},
    }


def assignment(placed: PlacedProblem) -> dict[str, str]:
    """The device of each node; nodes of one name are told apart by a number."""
    problem = placed.problem
    found: dict[str, str] = {}
    for name, unit in zip(problem.node_names, problem.columns.unit, strict=True):
        key, again = name, 2
        while key in found:
            key, again = f"{name} ({again})", again + 1
        found[key] = problem.devices[int(placed.result.placement[unit])].name
    return found


def placed_tables(source: str, placed: PlacedProblem) -> list[Table | str]:
    """What each device does, and how good that is."""
    problem, judged = placed.problem, placed.evaluation
    device_of_node = np.asarray(placed.result.placement)[problem.columns.unit]
    count = np.bincount(device_of_node, minlength=len(problem.devices))
    table = plain_table("device")
    for head in ("load", "share", "memory", "limit", "nodes"):
        table.add_column(head, justify="right")
    busiest = float(max(judged.loads, default=0.0))
    for k, device in enumerate(problem.devices[:SHOWN_DEVICES]):
        share = f"{judged.loads[k] / busiest:.0%}" if busiest else ""
        limit = "" if device.memory_bytes is None else format_quantity(device.memory_bytes, "B")
        held = format_quantity(int(judged.memory[k]), "B")
        load = shown_time(float(judged.loads[k]), problem.time_unit)
        table.add_row(device.name, load, share, held, limit, f"{count[k]:,}")
    title = f"{source}: {placed.objective} by {placed.method}"
    shown: list[Table | str] = [title, table]
    if (left := len(problem.devices) - SHOWN_DEVICES) > 0:
        shown.append(f"and {left} more devices")
    shown += [*_worth(placed), *_over(placed)]
    if placed.result.interrupted:
        shown.append("interrupted: this is the best so far")
    return [*shown, *(f"note: {note}" for note in placed.result.notes)]


def shown_time(number: float, unit: str) -> str:
    """A time as people read it."""
    if unit in ("s", "ms"):
        return format_quantity(number / (1e3 if unit == "ms" else 1.0), "s")
    return f"{number:.6g}"


def _worth(placed: PlacedProblem) -> list[str]:
    """The value, beside one device's and the bound."""
    unit, value = placed.problem.time_unit, placed.evaluation.value
    suffix = f" {unit}" if unit in ("s", "ms") else f" times {unit}"
    lines = [f"{placed.objective}: {value:.6g}{suffix}"]
    alone = placed.single.value
    fits = "" if placed.single.feasible else ", which does not fit"
    if value > 0:
        lines.append(f"one device: {alone:.6g}, {alone / value:.2f} times as long{fits}")
    bound = placed.lower_bound
    if bound > 0:
        above = value / bound - 1
        times = f"{above:.1%} above it" if above < 1 else f"{value / bound:.3g} times that"
        lines.append(f"bound: {bound:.6g}, the placement is {times}")
    speed = f"{placed.seconds:.1f} s, {placed.evaluations:,} evaluations"
    return [*lines, f"search: {speed}"]


def _over(placed: PlacedProblem) -> list[str]:
    """Where nothing fits: by how much the nearest placement is over."""
    if placed.evaluation.feasible:
        return []
    lines = ["nothing fits; this is the nearest:"]
    for device, held in zip(placed.problem.devices, placed.evaluation.memory, strict=True):
        if device.memory_bytes is not None and held > device.memory_bytes:
            over = int(held) - device.memory_bytes
            share = f" ({over / device.memory_bytes:.1%})" if device.memory_bytes else ""
            lines.append(f"  {device.name} is {format_quantity(over, 'B')}{share} over its limit")
    if len(lines) == 1:
        return ["no contiguous placement was found; this one is not"]
    return lines
