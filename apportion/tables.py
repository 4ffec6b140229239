"""Tables for the terminal: what commands print unless they print JSON."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from apportion.cluster import Cluster
    from apportion.graph import Graph
    from apportion.plan import Plan
    from apportion.run import Run
    from apportion.tdl import Description
    from apportion.zoo import Known


def models(known: Iterable[Known]) -> Table:
    """The zoo."""
    table = _table("model", "settings and defaults", "tiny", "what it is")
    for model in known:
        table.add_row(model.name, _settings(model.defaults), _settings(model.tiny), model.about)
    return table


def clusters(known: Iterable[tuple[str, str]]) -> Table:
    """Clusters that have a name."""
    table = _table("cluster", "what it is")
    for name, about in known:
        table.add_row(name, about)
    return table


def operators(descriptions: dict[str, Description]) -> Table:
    """Operators that have a description, with their axes."""
    table = _table("operator", "axes", "family")
    for name, description in sorted(descriptions.items()):
        axes = dict.fromkeys(_axes(description.formula.__code__))
        family = description.formula.__module__.rpartition(".")[2]
        table.add_row(name, " ".join(axes) or "those of its shapes", family)
    return table


def predicted(plan: Plan) -> Table:
    """What a Plan is expected to cost."""
    table = _table("", "predicted")
    table.title = f"{plan.model or 'a plan'} on {plan.cluster.name}, {plan.method}"
    table.title_justify = "left"
    table.add_row("step time", _seconds(plan.predicted.step_seconds))
    table.add_row("peak memory per device", _peaks(plan.predicted.peak_bytes))
    table.add_row("bytes moved", f"{plan.predicted.bytes_moved:,}")
    table.add_row("search time", _seconds(plan.search_seconds))
    table.add_row("feasible", _yes(plan.feasible))
    return table


def side_by_side(plans: Iterable[Plan]) -> Table:
    """One row per Plan."""
    table = _table("method", "step time", "peak memory", "bytes moved", "search time", "feasible")
    for plan in plans:
        table.add_row(
            plan.method,
            _seconds(plan.predicted.step_seconds),
            _bytes(max(plan.predicted.peak_bytes)),
            f"{plan.predicted.bytes_moved:,}",
            _seconds(plan.search_seconds),
            _yes(plan.feasible),
        )
    return table


def measured(plan: Plan, run: Run) -> list[Table | str]:
    """Measured beside predicted; after a check the verdict on the last line."""
    table = _table("", "predicted", "measured")
    guess = plan.predicted
    table.add_row("step time", _seconds(guess.step_seconds), _seconds(run.measured_step_seconds))
    table.add_row(
        "peak memory per device", _peaks(guess.peak_bytes), _peaks(run.measured_peak_bytes)
    )
    table.add_row("bytes moved", f"{guess.bytes_moved:,}", f"{run.measured_bytes_moved:,}")
    shown: list[Table | str] = [table, "losses: " + " ".join(f"{x:.6f}" for x in run.losses)]
    if run.equal is not None:
        shown += [
            f"largest difference from a single device, in float64: {run.max_abs_loss_diff:.1e} "
            f"of the losses, {run.max_rel_param_diff:.1e} of parameters and state",
            f"equal: {_yes(run.equal)}",
        ]
    return shown


def summary(model: str, graph: Graph) -> Table:
    """What a Graph begins with, and its Ops by phase."""
    table = _table(model, "")
    begin = [v for v, made in zip(graph.values, graph.producer, strict=True) if made is None]
    for role in dict.fromkeys(value.role for value in begin):
        sizes = [value.nbytes for value in begin if value.role == role]
        table.add_row(role, f"{len(sizes)} values, {_bytes(sum(sizes))}")
    for phase in dict.fromkeys(op.phase for op in graph.ops):
        table.add_row(f"{phase} ops", str(sum(op.phase == phase for op in graph.ops)))
    table.add_row("fingerprint", graph.fingerprint)
    return table


def kinds(graph: Graph) -> Table:
    """How often each operator is called."""
    counts: dict[str, int] = {}
    for op in graph.ops:
        counts[op.kind] = counts.get(op.kind, 0) + 1
    table = _table("operator", "count")
    for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(kind, str(count))
    return table


def devices(cluster: Cluster) -> Table:
    """Equal devices in one row."""
    table = _table("devices", "kind", "memory", "operations/s", "bytes/s", "source")
    counts = Counter(replace(device, name="") for device in cluster.devices)
    for device, count in counts.items():
        flops = ", ".join(f"{rate:.3g} ({8 * size} bit)" for size, rate in device.flops)
        table.add_row(
            str(count),
            device.kind,
            _bytes(device.memory_bytes),
            flops,
            f"{device.memory_bandwidth:.3g}",
            device.provenance,
        )
    return table


def links(cluster: Cluster) -> Table:
    """Equal links in one row."""
    table = _table("links", "bytes/s", "latency", "source")
    for link, count in Counter(replace(link, name="") for link in cluster.links).items():
        table.add_row(str(count), f"{link.bandwidth:.3g}", _seconds(link.latency), link.provenance)
    return table


def _axes(code: CodeType) -> Iterator[str]:
    """The parameters of the lambdas in a description: they are what names its axes."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            count = inner.co_argcount + bool(inner.co_flags & inspect.CO_VARARGS)
            for position, name in enumerate(inner.co_varnames[:count]):
                if inner.co_name == "<lambda>":
                    yield f"{name}..." if position >= inner.co_argcount else name
            yield from _axes(inner)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _settings(settings: dict[str, int | float]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _seconds(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(count: int) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.2f} {unit}"
    return f"{count} B"


def _peaks(peaks: Sequence[int]) -> str:
    """All of a few; the extremes of many."""
    if len(peaks) <= 8:
        return ", ".join(map(_bytes, peaks))
    return f"{_bytes(min(peaks))} to {_bytes(max(peaks))}"
