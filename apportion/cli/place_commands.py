"""The command that places: place.

Part of the room cli. A graph from a file or a model comes in, a placement is printed and saved.
Everything heavy is imported inside the command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from apportion.cli.options import AsJson, Budget, MemoryLimit, PolicyFile, Seed
from apportion.cli.place_model import model_problem
from apportion.cli.requests import check_outputs, complain, keep_result
from apportion.files import write_atomic
from apportion.quantity import parse_size_limit
from apportion.show import answer, note, stdout_kept, warnings_noted

if TYPE_CHECKING:
    from apportion.place import Judge, PlacementProblem

GRAPH_SUFFIXES = (".json", ".txt")

Source = Annotated[
    str,
    typer.Argument(
        metavar="INPUT", help="A file with a graph, or a MODEL: a zoo model or FILE.py:FUNCTION."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="F",
        help="fiddle, pipedream or doppler. Default: seen from what the file has in it.",
    ),
]
Accelerators = Annotated[
    int | None,
    typer.Option(
        "--devices",
        metavar="K",
        min=1,
        help="So many accelerators. Default: the file's, else 4. Of a model: local:K.",
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help="A preset, a TOML file, local:N, or a count such as 8xh100.",
    ),
]
ObjectiveName = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="O",
        help="step, throughput or latency. Default: step for models and doppler, throughput for "
        "fiddle and pipedream.",
    ),
]
Contiguous = Annotated[
    bool,
    typer.Option("--contiguous", help="Only placements that can be a pipeline (throughput)."),
]
PlacementMethod = Annotated[
    str, typer.Option("--method", metavar="M", help="How to search; listed below.")
]
ByHand = Annotated[
    Path | None,
    typer.Option(
        "--expert",
        metavar="FILE",
        help="A split of the input by hand, or an earlier --out: the method expert, and a start "
        "for others.",
    ),
]
Saved = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Save the placement as JSON.")
]
Exported = Annotated[
    Path | None,
    typer.Option(
        "--export", metavar="FILE", help="Write the input as a fiddle graph, and do not place it."
    ),
]


def place_command(
    source: Source,
    format: Format = None,
    devices: Accelerators = None,
    cluster: OnCluster = None,
    objective: ObjectiveName = None,
    contiguous: Contiguous = False,
    method: PlacementMethod = "auto",
    budget: Budget = 30.0,
    seed: Seed = 0,
    memory_limit: MemoryLimit = None,
    expert: ByHand = None,
    policy: PolicyFile = None,
    out: Saved = None,
    export: Exported = None,
    as_json: AsJson = False,
) -> None:
    """Say which device runs which operator, if nothing is cut.

    A file has its own times: the JSON of msr-fiddle/dnn-partitioning, a profile of
    PipeDream, or a graph of DOPPLER. A model is captured, and its operators take
    what the cost model says of the cluster.

    The objectives are never mixed: step is the time of one step, throughput the
    largest load of a device, which is the time per sample of a pipeline, latency
    the time of one sample. Values are in the file's own unit; models have seconds.

    If nothing fits into the memory limits, the nearest placement is shown with by
    how much it is over, and the exit status is 1. Ctrl-C ends the search with the
    best so far.

    Example: apportion place bert24_training.json --budget 10

    Example: apportion place inception-v3:tiny --cluster p2.8xlarge:4 --export inception.json
    """
    from apportion.place import place, read_split_file, with_expert, with_memory_limit
    from apportion.show import placed_tables, placement_facts, placement_progress

    limit = None if memory_limit is None else parse_size_limit(memory_limit)
    check_outputs(out, export, inputs=(Path(source), expert, policy))
    with stdout_kept(as_json), warnings_noted():
        problem, usual, judge = _problem(source, format, devices, cluster, seed)
        if limit is not None:
            problem = with_memory_limit(problem, limit)
        if expert is not None:
            problem = with_expert(problem, read_split_file(expert))
    if export is not None:
        _export(source, problem, export, as_json)
        return
    with stdout_kept(as_json), warnings_noted():
        starts = () if problem.expert is None else (problem.expert,)
        how = (objective or usual, method, budget, seed, contiguous)
        with placement_progress(not as_json, problem.time_unit) as told:
            found = place(problem, *how, told, starts, judge, policy)
        facts = placement_facts(source, found)
        lost = keep_result(lambda path: write_atomic(path, json.dumps(facts) + "\n"), out)
    answer(as_json, facts, placed_tables(source, found))
    complain([lost])
    raise typer.Exit(1 if lost or not found.evaluation.feasible else 0)


def _problem(
    source: str, format: str | None, devices: int | None, cluster: str | None, seed: int
) -> tuple[PlacementProblem, str, Judge | None]:
    """What is to be placed, its usual objective, and who judges a model's step in the end."""
    from apportion.machine import cluster as cluster_of
    from apportion.place import DOPPLER, STEP, THROUGHPUT, imported_problem, read_graph

    if devices is not None and cluster is not None:
        raise ValueError("Give --devices or --cluster, not both.")
    machine = None if cluster is None else cluster_of(cluster)
    path = Path(source)
    if format is None and not path.is_file() and path.suffix not in GRAPH_SUFFIXES:
        if machine is None and devices is None:
            raise ValueError(
                f"There is no file {source!r}; a model needs --cluster C, or --devices K for "
                "local:K."
            )
        problem, judge = model_problem(source, machine or cluster_of(f"local:{devices}"), seed)
        return problem, STEP, judge
    imported = read_graph(path, format)
    for text in imported.notes:
        note(f"note: {text}")
    usual = STEP if imported.format == DOPPLER else THROUGHPUT
    return imported_problem(imported, devices, machine), usual, None


def _export(source: str, problem: PlacementProblem, path: Path, as_json: bool) -> None:
    from apportion.place import fiddle_data

    graph = fiddle_data(problem)
    write_atomic(path, json.dumps(graph) + "\n")
    counts = {key: len(graph[key]) for key in ("nodes", "edges")}
    said = f"wrote {path}: {counts['nodes']:,} nodes, {counts['edges']:,} edges"
    answer(as_json, {"input": source, "export": str(path), **counts}, [said])
