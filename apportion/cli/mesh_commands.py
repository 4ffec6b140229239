"""The commands that speak PyTorch's own language of parallelism: export and import.

Part of the room cli. A saved plan becomes a program of plain PyTorch and a layout; a layout becomes
a plan. Everything heavy is imported inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.options import (
    Accumulate,
    AsJson,
    BatchSize,
    Calibrate,
    ClusterName,
    Compile,
    CostsFile,
    MemoryLimit,
    Model,
    PlanFile,
    PlanOut,
    Precision,
    Seed,
    SequenceLength,
)
from apportion.cli.requests import (
    capture_without_data,
    check_outputs,
    complain,
    keep_result,
    note_slow_halves,
    sized,
)
from apportion.files import write_atomic
from apportion.quantity import parse_size_limit
from apportion.show import (
    answer,
    note,
    plan_facts,
    plan_tables,
    stdout_kept,
    warnings_noted,
    why_facts,
)


def export_command(
    plan: PlanFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.py", help="The program to write, for torchrun."),
    ] = None,
    layout: Annotated[
        Path | None,
        typer.Option("--layout", metavar="FILE.json", help="Mesh and placements, as import reads."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Where the plan does not name its own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as a program of plain PyTorch: FSDP2 on a device mesh.

    The program shards the parameters as the plan does (fully_shard, or
    DistributedDataParallel where nothing is sharded), checkpoints the modules that the
    plan computes again, and trains with the plan's losses. --layout writes the device
    mesh and the placement of every parameter, tensor parallelism included.

    What cannot be said so is refused, with the operator that cannot; the status is 1. Plans
    that compute whole modules again come from --recompute modules.

    Example: apportion export p.json -o train.py && torchrun --nproc-per-node 4 train.py

    Example: apportion export p.json --layout layout.json
    """
    from apportion.mesh import check_program, layout_of_plan, layout_text, program_text
    from apportion.mesh import program_notes as notes_of
    from apportion.plan import Plan

    if out is None and layout is None:
        raise ValueError("say what to write: a program with --out, a layout with --layout")
    check_outputs(out, layout, inputs=(plan,))
    with stdout_kept(as_json):
        made = Plan.load(plan)
        name = model or made.model
        if not name:
            raise ValueError(f"{plan} does not say of which model it is; give it with --model")
        program = capture_without_data(name, made.seed)
        try:
            found = layout_of_plan(program.graph, made)
            if out is not None:
                check_program(program, made, found)
        except ValueError as refusal:
            complain([f"this plan cannot be exported: {refusal}"])
            raise typer.Exit(1) from None
        if layout is not None:
            write_atomic(layout, layout_text(found))
        notes: tuple[str, ...] = ()
        if out is not None:
            notes = notes_of(program, made, found)
            write_atomic(out, program_text(program, made, found, name, str(out)))
    sizes = {"replicate": found.replicate, "shard": found.shard, "tensor": found.tensor}
    facts = {
        "model": name, "mesh": sizes, "checkpoint": list(found.checkpoint), "notes": list(notes),
        "program": str(out or ""), "layout": str(layout or ""),
    }  # fmt: skip
    written = " and ".join(str(path) for path in (out, layout) if path is not None)
    answer(as_json, facts, [f"{written}: {found}"])
    for text in notes:
        note(text)


def import_command(
    model: Model,
    layout: Annotated[
        Path,
        typer.Argument(metavar="LAYOUT", help="A layout (JSON) or a torchtitan job (TOML)."),
    ],
    cluster: ClusterName,
    memory_limit: MemoryLimit = None,
    seed: Seed = 0,
    batch: BatchSize = None,
    seq: SequenceLength = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    out: PlanOut = None,
    calibrate: Calibrate = True,
    costs: CostsFile = None,
    compile: Compile = "generated",
    as_json: AsJson = False,
) -> None:
    """What a layout that you have would cost here: FSDP, tensor parallelism, or both.

    The layout says the device mesh and, if you like, placements and checkpointed
    modules; docs/export.md has the few lines of the file. The result is a plan as any
    other: compare it, explain it, run it.

    Example: apportion import llama:layers=8 mine.json --cluster 8xh100 --out mine-plan.json

    Example: apportion import llama job.toml --cluster 8x8xh100
    """
    from apportion.machine import cluster as cluster_of
    from apportion.mesh import load_layout, plan_layout
    from apportion.plan import with_model
    from apportion.run import planning_costs, source_of_model

    limit = None if memory_limit is None else parse_size_limit(memory_limit)
    check_outputs(out, inputs=(layout, costs))
    with stdout_kept(as_json), warnings_noted():
        place = cluster_of(cluster)
        given = load_layout(layout, len(place.devices))
        model = sized(model, batch, seq, precision, accumulate)
        program = capture_without_data(model, seed)
        note_slow_halves(program, place)
        how = (calibrate, note, source_of_model(program, model, seed), costs, compile)
        with planning_costs(program, place, *how) as prices:
            made = with_model(plan_layout(program, place, given, limit, prices), model)
        lost = [keep_result(made.save, out)]
    answer(as_json, plan_facts(made) | why_facts(made), plan_tables.planned(made))
    complain(lost)
    raise typer.Exit(1 if any(lost) or not made.feasible else 0)
