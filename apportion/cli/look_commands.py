"""The commands that look around: models, show, clusters and ops.

Part of the room cli. Everything heavy is imported inside the commands.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from apportion.cli.options import AsJson, Model
from apportion.cli.requests import (
    capture_without_data,
    check_outputs,
    complain,
    keep_result,
)
from apportion.show import answer, note, stdout_kept, step_facts, tables


def models_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Show this one and its settings.")
    ] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Capture each model to count its operators: a minute.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the zoo's models with their sources and, at default settings, their parameters, and the
    published models whose shapes are built in.

    Example: apportion models gpt2
    """
    from apportion.catalogue import known_models, open_model, open_models

    known, published = known_models(), open_models()
    if name is not None:
        chosen = tuple(model for model in known if model.name == name)
        found = None if chosen else open_model(name)
        if not chosen and found is None:
            raise ValueError(_unknown_model(name))
        known, published = chosen, (found,) if found is not None else ()
    sizes: dict[str, dict[str, int]] = {}
    for number, model in enumerate(known, start=1):
        sizes[model.name] = {"parameters": model.parameters}
        if ops:
            note(f"capturing {model.name}, {number} of {len(known)}")
            sizes[model.name]["operators"] = len(capture_without_data(model.name, seed=0).graph.ops)
    facts = {
        "models": [asdict(model) | sizes[model.name] for model in known],
        "published": [asdict(model) for model in published],
    }
    shown: list[Table | str] = [tables.models(known, sizes)] if known else []
    if name is None:
        shown += [tables.open_models(published), tables.OPEN_MODELS_HINT]
    else:
        shown += [*map(tables.settings, known), *map(tables.open_model, published)]
    answer(as_json, facts, shown)


def _unknown_model(name: str) -> str:
    from apportion.catalogue import known_models, near_open_models

    near = ", ".join(near_open_models(name))
    names = ", ".join(model.name for model in known_models())
    return (
        f"Unknown model {name!r}{near and '; near are '}{near}; known are {names}, and the "
        "published ones that `apportion models` lists."
    )


def show_command(
    model: Model,
    ops: Annotated[bool, typer.Option("--ops", help="Print every operator as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Capture a model and show its training step: what it does, and how that can be cut.

    Example: apportion show gpt2:tiny
    """
    from apportion.split import Space

    with stdout_kept(as_json):
        space = Space(capture_without_data(model, seed=0).graph)
        kinds = tables.inventory(space)
    shown: list[Table | str] = [
        tables.summary(model, space.graph, kinds),
        tables.operators_by_kind(kinds, space.undescribed),
    ]
    answer(as_json, step_facts(model, space, kinds), [*shown, *([str(space.graph)] if ops else [])])


def clusters_command(
    name: Annotated[str | None, typer.Argument(metavar="[C]", help="Show this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the clusters known by name, or show one; a file is checked.

    Example: apportion clusters 8xh100
    """
    from apportion.machine import cluster, known_clusters
    from apportion.show import cluster_tables

    if name is None:
        answer(
            as_json, {"clusters": dict(known_clusters())}, cluster_tables.listed(known_clusters())
        )
        return
    place = cluster(name)
    answer(as_json, cluster_tables.facts(place), cluster_tables.described(place))


def ops_command(
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check every split against its kernel, and search for more."),
    ] = False,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="NAME", help="Only these: aten.mm, or aten.mm.default."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Verify the operators of this step instead."),
    ] = None,
    share: Annotated[
        str, typer.Option("--share", help="Calls to verify: tune, report (the other half), or all.")
    ] = "all",
    every: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Only every N-th call.")
    ] = 1,
    blind: Annotated[
        bool, typer.Option("--blind/--no-blind", help="Search for splits that were not derived.")
    ] = True,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, help="Processes; 0: one per core.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PAGE", help="Write the result as Markdown.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the operators that have a description, and so can be split; or verify them.

    With --verify, calls from PyTorch's operator database and of our own run whole and in pieces.

    Example: apportion ops --verify --op aten.mm
    """
    from apportion.describe import DESCRIPTIONS, REASONS  # registers descriptions
    from apportion.describe import ops as ops

    names = tuple(name.replace("::", ".") for name in op or ())
    if not verify:
        chosen = {k: d for k, d in DESCRIPTIONS.items() if not names or k.startswith(names)}
        if not chosen:
            raise ValueError(f"No operator described begins with {' or '.join(names)}.")
        facts = [{"operator": k, "where": d.where} for k, d in chosen.items()]
        answer(as_json, {"operators": facts, "unsplit": REASONS}, [tables.operators(chosen)])
        return
    from apportion.files import write_atomic
    from apportion.verify import survey as coverage

    check_outputs(out)
    request = coverage.SurveyRequest(
        names, share, blind=blind, every=every, models=tuple(model or ())
    )
    with stdout_kept(as_json):
        summary = coverage.verified(request, workers, note)
    lost = keep_result(lambda path: write_atomic(path, coverage.page(summary)), out)
    answer(as_json, summary.json(), [tables.coverage(summary), *summary.lines()])
    complain([lost])
    if lost or summary.total.wrong or summary.total.raised:
        raise typer.Exit(1)
