"""Tables for the terminal: what commands print unless they print JSON.

Part of the room show. Plans, Spaces, Graphs and Runs come in, tables and lines go out.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from apportion.describe import Description
    from apportion.graph import Graph
    from apportion.plan import Plan
    from apportion.run import Run
    from apportion.simulate import Peak
    from apportion.split import Space
    from apportion.verify import SurveySummary
    from apportion.zoo import Known


SHOWN_CAUSES = 6  # of a peak
ACTIVITIES = ("computes", "assembles", "exchanges", "waits")


def models(known: Iterable[Known], sizes: Mapping[str, Mapping[str, int]]) -> Table:
    """The zoo, with the figures of each model at its defaults."""
    heads = [head for head in ("parameters", "operators") if any(head in s for s in sizes.values())]
    table = _table("model", *heads, "what it is, and its source")
    for model in known:
        figures = [f"{sizes[model.name][head]:,}" for head in heads]
        table.add_row(model.name, *figures, f"{model.about}\n{model.source}")
    return table


def settings(model: Known) -> Table:
    """The settings of one model."""
    table = _table("setting", "default", "tiny")
    for name, default in model.defaults.items():
        table.add_row(name, str(default), str(model.tiny[name]))
    return table


def coverage(summary: SurveySummary) -> Table:
    """Counts of a verification."""
    table = _table("calls and splits", "", "")
    told = {
        "calls": "distinct operator calls",
        "right": "derived splits that equal the whole",
        "wrong": "derived splits that silently differ",
        "raised": "derived splits whose kernel raised",
        "refused": "cuts that the analysis does not allow",
        "falsely": "of those, cuts that blind search shows to hold",
        "finds": "splits found by blind search",
        "missing": "of those, splits that were not derived",
        "crashed": "tries of the blind search that killed their process",
    }
    for name, text in told.items():
        table.add_row(name, f"{getattr(summary.total, name):,}", text)
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
    if plan.lower_bound is not None:
        table.add_row("bound", f"{_bound(plan)}: {plan.lower_bound_of or 'what was minimised'}")
    table.add_row("feasible", _yes(plan.feasible))
    return table


def planned(plan: Plan) -> list[Table | str]:
    """What a Plan is expected to cost, why its fullest device is full, and how sure that is."""
    from apportion.simulate import peak, shares

    cost, line = plan.cost, plan.timeline
    parts = shares(plan.tasks, plan.cluster, cost).items()
    sure = ", ".join(f"{share:.0%} {source}" for source, share in parts if share)
    fullest = max(range(len(line.curves)), key=line.peak_bytes.__getitem__)
    curve, graph = line.curves[fullest], plan.space.graph
    most = peak(fullest, curve, plan.tasks, graph, SHOWN_CAUSES)
    held = sorted(most.categories.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{name} {_bytes(nbytes)}" for name, nbytes in held if nbytes)
    shown: list[Table | str] = [*expected(plan)]
    if most.causes:
        shown += [causes(most), f"in all: {kinds}"]
    shown.append(f"times: {sure}; cost model {cost.name}: {cost.provenance}")
    return [*shown, *(f"note: {note}" for note in plan.notes)]


def expected(plan: Plan) -> list[Table]:
    """What a Plan is expected to cost, and the trials that it was kept for, if there were any."""
    return [predicted(plan), *([trials(plan)] if plan.measured else [])]


def trials(plan: Plan) -> Table:
    """The plans that ran before one was kept: a step as predicted and as measured."""
    table = _table("by", "predicted", "measured", "error", "")
    table.title, table.title_justify = "plans that were run", "left"
    for trial in plan.measured:
        error = trial.predicted_seconds / trial.measured_seconds - 1
        figures = (_seconds(trial.predicted_seconds), _seconds(trial.measured_seconds))
        table.add_row(trial.method, *figures, f"{error:+.1%}", "kept" if trial.chosen else "")
    return table


def causes(peak: Peak) -> Table:
    """What fills a device at its peak."""
    made = any(cause.op for cause in peak.causes)
    table = _table("at the peak", "category", "bytes", "share", *(["made by"] if made else []))
    when = f"{_seconds(peak.time_ns / 1e9)} into the step" if peak.task >= 0 else "as it begins"
    during = f", in {peak.op}" if peak.op else ""
    table.title = f"device {peak.device} holds most, {_bytes(peak.nbytes)}, {when}{during}"
    table.title_justify = "left"
    for cause in peak.causes:
        share, maker = f"{cause.nbytes / peak.nbytes:.0%}", f"{cause.op} {cause.line}".strip()
        name = f"{cause.name} {cause.type}".rstrip()
        table.add_row(name, cause.category, _bytes(cause.nbytes), share, *([maker] if made else []))
    count, nbytes = peak.others
    if count:
        table.add_row(f"{count} others", "", _bytes(nbytes), f"{nbytes / peak.nbytes:.0%}")
    return table


def side_by_side(plans: Sequence[Plan]) -> Table:
    """One row per Plan; the fastest that fits is marked."""
    heads = ("step time", "peak memory", "bytes moved", "search time", "bound", "feasible", "")
    table, best = _table("method", *heads), fastest(plans)
    for plan in plans:
        table.add_row(
            plan.method,
            _seconds(plan.predicted.step_seconds),
            _bytes(max(plan.predicted.peak_bytes)),
            _bytes(plan.predicted.bytes_moved),
            _seconds(plan.search_seconds),
            _bound(plan),
            _yes(plan.feasible),
            "best" if plan is best else "",
        )
    return table


def compared(plans: Sequence[Plan]) -> list[Table | str]:
    """Plans side by side, what their bounds are of, and their notes."""
    bounds = [f"bound of {p.method}: {p.lower_bound_of}" for p in plans if p.lower_bound_of]
    notes = [f"{plan.method}: {note}" for plan in plans for note in plan.notes]
    return [side_by_side(plans), *bounds, *notes]


def fastest(plans: Sequence[Plan]) -> Plan | None:
    """Of the Plans that fit the fastest, of equal ones that which moves less."""
    fit = [plan for plan in plans if plan.feasible]
    return min(fit, key=lambda p: (p.predicted.step_seconds, p.predicted.bytes_moved), default=None)


def _bound(plan: Plan) -> str:
    """The lower bound in its unit, as far as its description begins with it."""
    if plan.lower_bound is None:
        return ""
    words = plan.lower_bound_of.lower().split()
    if "bytes" in words[:2]:
        return _bytes(math.floor(plan.lower_bound))
    return _seconds(plan.lower_bound) if "seconds" in words[:2] else f"{plan.lower_bound:.6g}"


def measured(plan: Plan, run: Run) -> list[Table | str]:
    """Measured beside predicted; after a check the verdict on the last line."""
    table = _table("a step", "predicted", "measured", "error")
    for row in run.comparison:
        figures = (row.predicted, row.measured)
        both = [_seconds(x) if row.unit == "s" else _bytes(int(x)) for x in figures]
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(f"a device {row.name}" if row.name in ACTIVITIES else row.name, *both, error)
    shown: list[Table | str] = [table, "losses: " + " ".join(f"{x:.6f}" for x in run.losses)]
    shown += [f"note: {note}" for note in run.notes]
    if run.equal is not None:
        shown += [
            f"largest difference from a single device, in float64: {run.max_abs_loss_diff:.1e} "
            f"of the losses, {run.max_rel_param_diff:.1e} of parameters and state",
            *([f"not equal: {run.reason}"] if run.reason else []),
            f"equal: {_yes(run.equal)}",
        ]
    return shown


@dataclass(slots=True)
class KindSummary:
    """All Ops of one kind together. `axes` gives for each axis how many Ops have it and in how many
    of them it can be cut in two; `undescribed` is how many Ops have no axes for want of a
    description."""

    count: int = 0
    flops: float = 0.0
    nbytes: int = 0
    undescribed: int = 0
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)


def inventory(space: Space) -> dict[str, KindSummary]:
    """What the Ops of a Graph do, by kind, those with the most operations first."""
    from apportion.describe import find_description

    found: dict[str, KindSummary] = {}
    for index, op in enumerate(space.graph.ops):
        kind = found.setdefault(op.kind, KindSummary())
        axes, description = space.axes(index), find_description(op.kind)
        kind.count += 1
        kind.undescribed += space.formulas[index] is None
        kind.flops += space.split(index, [1] * len(axes)).parts[0].flops
        if description is None or not description.alias:  # a view moves nothing
            kind.nbytes += sum(space.graph.values[v].nbytes for v in (*op.inputs, *op.outputs))
        cut: dict[str, bool] = {}
        for axis, can in zip(axes, space.cuttable(index), strict=True):
            name = axis.name.partition(".")[0]
            cut[name] = cut.get(name, False) or can
        for name, can in cut.items():
            having, cutting = kind.axes.get(name, (0, 0))
            kind.axes[name] = (having + 1, cutting + can)
    return dict(sorted(found.items(), key=lambda item: (-item[1].flops, -item[1].count, item[0])))


def summary(model: str, graph: Graph, kinds: Mapping[str, KindSummary]) -> Table:
    """What a Graph begins with, its Ops by phase, and what they do in all."""
    table = _table(model, "")
    for role, (values, elements, nbytes) in beginnings(graph).items():
        table.add_row(role, f"{values} values, {_count(elements)} elements, {_bytes(nbytes)}")
    for phase in dict.fromkeys(op.phase for op in graph.ops):
        table.add_row(f"{phase} ops", f"{sum(op.phase == phase for op in graph.ops):,}")
    table.add_row("floating-point operations", _count(sum(k.flops for k in kinds.values())))
    table.add_row("bytes read and written", _bytes(sum(k.nbytes for k in kinds.values())))
    table.add_row("fingerprint", graph.fingerprint)
    return table


def beginnings(graph: Graph) -> dict[str, tuple[int, int, int]]:
    """For each role the number of Values a Graph begins with, their elements and bytes."""
    found: dict[str, tuple[int, int, int]] = {}
    for value, made in zip(graph.values, graph.producer, strict=True):
        if made is None:
            values, elements, nbytes = found.get(value.role, (0, 0, 0))
            size = math.prod(value.shape or ())
            found[value.role] = (values + 1, elements + size, nbytes + value.nbytes)
    return found


def operators_by_kind(kinds: Mapping[str, KindSummary], reasons: Mapping[str, str]) -> Table:
    """How often each operator is called, what its calls do, and along which axes they can be
    cut."""
    table = _table("operator", "count", "FLOPs", "bytes", "axes that can be cut, and not")
    for name, kind in kinds.items():
        can = [
            axis if cut == having else f"{axis} ({cut} of {having})"
            for axis, (having, cut) in kind.axes.items()
            if cut
        ]
        cannot = [axis for axis, (_, cut) in kind.axes.items() if not cut]
        text = " ".join([*can, *(["not", *cannot] if cannot else [])])
        if kind.undescribed:
            text = f"{text}{text and '; '}{kind.undescribed} unsplit: {reasons[name]}"
        shown = name.removesuffix(".default")
        table.add_row(shown, f"{kind.count:,}", _count(kind.flops), _bytes(kind.nbytes), text)
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


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _seconds(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _count(number: float) -> str:
    for power, unit in ((5, "P"), (4, "T"), (3, "G"), (2, "M")):
        if number >= 1000**power:
            return f"{number / 1000**power:.2f} {unit}"
    return f"{number:,.0f}"


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
