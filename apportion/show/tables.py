"""Tables about models, steps and operators, which commands print unless they print JSON.

Part of the room show. Spaces, Graphs and descriptions come in, tables go out. plan_tables.py has
those about Plans.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING

from rich.table import Table

from apportion.show.plain_table import plain_table

if TYPE_CHECKING:
    from apportion.catalogue import Known, OpenModel
    from apportion.describe import Description
    from apportion.graph import Graph
    from apportion.split import Space
    from apportion.verify import SurveySummary


def models(known: Iterable[Known], sizes: Mapping[str, Mapping[str, int]]) -> Table:
    """The zoo, with the figures of each model at its defaults."""
    heads = [head for head in ("parameters", "operators") if any(head in s for s in sizes.values())]
    table = plain_table("model", *heads, "what it is, and its source")
    for model in known:
        figures = [f"{sizes[model.name][head]:,}" for head in heads]
        table.add_row(model.name, *figures, f"{model.about}\n{model.source}")
    return table


OPEN_MODELS_HINT = (
    "A published model is planned by its name: apportion plan meta-llama/Llama-3.1-8B. Where "
    "transformers' cache has its config.json, that counts instead; `apportion models NAME` shows "
    "what is built in."
)


def open_models(published: Iterable[OpenModel]) -> Table:
    """The published models whose shapes are built in, a row for each family and owner."""
    families: dict[tuple[str, str], list[str]] = {}
    for model in published:
        owner, _, own = model.name.partition("/")
        families.setdefault((model.family, owner), []).append(own)
    table = plain_table("published", "owner/", "model, by transformers")
    for (family, owner), names in families.items():
        table.add_row(family, f"{owner}/", ", ".join(names))
    return table


def open_model(model: OpenModel) -> Table:
    """What is known of one published model."""
    table = plain_table(model.name, "")
    table.add_row("parameters", f"{model.parameters:,}{'' if model.stated else ', by its shape'}")
    table.add_row("class", f"{model.model}{model.part and ': '}{model.part}")
    if model.also:
        table.add_row("also", ", ".join(model.also))
    for name, value in model.config.items():
        table.add_row(name, str(value))
    table.add_row("source", model.source)
    return table


def settings(model: Known) -> Table:
    """The settings of one model."""
    table = plain_table("setting", "default", "tiny")
    for name, default in model.defaults.items():
        table.add_row(name, str(default), str(model.tiny[name]))
    return table


def coverage(summary: SurveySummary) -> Table:
    """Counts of a verification."""
    table = plain_table("calls and splits", "", "")
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
    table = plain_table("operator", "axes", "family")
    for name, description in sorted(descriptions.items()):
        axes = dict.fromkeys(_axes(description.formula.__code__))
        family = description.formula.__module__.rpartition(".")[2]
        table.add_row(name, " ".join(axes) or "those of its shapes", family)
    return table


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
    table = plain_table(model, "")
    for role, (values, elements, nbytes) in beginnings(graph).items():
        table.add_row(role, f"{values} values, {_count(elements)} elements, {bytes_text(nbytes)}")
    for phase in dict.fromkeys(op.phase for op in graph.ops):
        table.add_row(f"{phase} ops", f"{sum(op.phase == phase for op in graph.ops):,}")
    table.add_row("floating-point operations", _count(sum(k.flops for k in kinds.values())))
    table.add_row("bytes read and written", bytes_text(sum(k.nbytes for k in kinds.values())))
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
    table = plain_table("operator", "count", "FLOPs", "bytes", "axes that can be cut, and not")
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
        table.add_row(shown, f"{kind.count:,}", _count(kind.flops), bytes_text(kind.nbytes), text)
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


def yes_or_no(truth: bool) -> str:
    """A truth in words."""
    return "yes" if truth else "no"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _count(number: float) -> str:
    for power, unit in ((5, "P"), (4, "T"), (3, "G"), (2, "M")):
        if number >= 1000**power:
            return f"{number / 1000**power:.2f} {unit}"
    return f"{number:,.0f}"


def bytes_text(count: int) -> str:
    """Two digits behind the point, and a unit."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.2f} {unit}"
    return f"{count} B"
