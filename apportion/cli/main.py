"""The command line. Exit status: 0 success, 1 the work failed, 2 the request was wrong.

Results go to stdout, everything else to stderr; with `--json` stdout is exactly one JSON object.
Commands import what they need when they are called, because torch takes seconds and `--help`
should not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table

from apportion.quantity import size_limit
from apportion.search import METHODS, help_text
from apportion.show import (
    answer,
    comparison_facts,
    note,
    plan_facts,
    run_facts,
    say,
    stdout_kept,
    step_facts,
    tables,
    warnings_noted,
    why_facts,
)
from apportion.version import VERSION

if TYPE_CHECKING:
    from apportion.capture import Program
    from apportion.machine import Cluster
    from apportion.plan import Plan

app = typer.Typer(
    name="apportion",
    help="Divides a PyTorch training step written for one device over many.",
    epilog="A first try: apportion run gpt2:tiny --procs 4 --method data --check",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    gc.set_threshold(100_000, 50, 50)  # torch alone is a million objects to look through
    code = status(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()  # the end of the process need not look through them either
    sys.exit(code)


def status(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit status; mistakes become one line on stderr."""
    try:
        code = app(list(arguments) or ["--help"], prog_name="apportion", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except ValueError as error:
        return _complain(str(error), 2)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.filename:  # a file that the request names
            return _complain(f"{error.filename}: {error.strerror}.", 2)
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        return _complain("Interrupted.", 130)
    return int(code or 0)


# Arguments and options that several commands share

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A zoo model (gpt2, mlp:tiny, gpt2:layers=4,batch=8) or FILE.py:FUNCTION.",
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="C",
        help="A preset, a TOML file, local:N, or a count such as 8xh100.",
    ),
]
METHOD_NAMES = ", ".join(("auto", *METHODS))
Method = Annotated[
    str, typer.Option("--method", metavar="M", help=f"How to search: {METHOD_NAMES}.")
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget", metavar="S", min=0.0, help="Seconds that it, or each method, may take."
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="What a device may hold: 16GB, 512MiB, or none for no limit. Default: its memory.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", min=0, help="Of the model, its batch and the search.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Procs = Annotated[
    int | None, typer.Option("--procs", metavar="N", min=1, help="N local processes (2).")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate/--no-calibrate", help="On local:N, measure what is not known.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto too.")
]
Measure = Annotated[
    int | None,
    typer.Option(
        "--measure",
        metavar="K",
        min=1,
        help="On local:N, run the K best plans for a few steps and keep the really fastest.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A file written by plan --out.")]


def _version(wanted: bool) -> None:
    if wanted:
        say(f"apportion {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Print the version."),
    ] = False,
) -> None:
    pass


# Looking around


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Show this one and its settings.")
    ] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Capture each model to count its operators: a minute.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the zoo's models with their sources and, at default settings, their parameters.

    Example: apportion models gpt2
    """
    from apportion import zoo

    known = zoo.known()
    if name is not None:
        names = [model.name for model in known]
        known = tuple(model for model in known if model.name == name)
        if not known:
            raise ValueError(f"Unknown model {name!r}; known are {', '.join(names)}.")
    sizes: dict[str, dict[str, int]] = {}
    for number, model in enumerate(known, start=1):
        parameters = zoo.load(model.name, meta=True).model.parameters()
        sizes[model.name] = {"parameters": sum(p.numel() for p in parameters)}
        if ops:
            note(f"capturing {model.name}, {number} of {len(known)}")
            sizes[model.name]["operators"] = len(_capture(model.name, seed=0).graph.ops)
    facts = {"models": [asdict(model) | sizes[model.name] for model in known]}
    shown: list[Table | str] = [tables.models(known, sizes)]
    answer(as_json, facts, shown if name is None else [*shown, *map(tables.settings, known)])


@app.command()
def show(
    model: Model,
    ops: Annotated[bool, typer.Option("--ops", help="Print every operator as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Capture a model and show its training step: what it does, and how that can be cut.

    Example: apportion show gpt2:tiny
    """
    from apportion.split import Space

    with stdout_kept(as_json):
        space = Space(_capture(model, seed=0).graph)
        kinds = tables.inventory(space)
    shown: list[Table | str] = [
        tables.summary(model, space.graph, kinds),
        tables.operators_by_kind(kinds, space.undescribed),
    ]
    answer(as_json, step_facts(model, space, kinds), [*shown, *([str(space.graph)] if ops else [])])


@app.command()
def clusters(
    name: Annotated[str | None, typer.Argument(metavar="[C]", help="Show this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the clusters known by name, or show one; a file is checked.

    Example: apportion clusters 8xh100
    """
    from apportion.machine import known
    from apportion.show import cluster_tables

    if name is None:
        answer(as_json, {"clusters": dict(known())}, cluster_tables.listed(known()))
        return
    place = _cluster(name)
    answer(as_json, cluster_tables.facts(place), cluster_tables.described(place))


@app.command()
def ops(
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
    from apportion.files import write_whole
    from apportion.verify import survey as coverage

    if out is not None and not out.parent.is_dir():
        raise ValueError(f"There is no folder {str(out.parent)!r} to write {out.name} into.")
    request = coverage.Request(names, share, blind=blind, every=every, models=tuple(model or ()))
    with stdout_kept(as_json):
        summary = coverage.verified(request, workers, note)
    if out is not None:
        write_whole(out, coverage.page(summary))
    answer(as_json, summary.json(), [tables.coverage(summary), *summary.lines()])
    if summary.total.wrong or summary.total.raised:
        raise typer.Exit(1)


# Planning


@app.command(epilog=f"Methods:\n\n{help_text()}")
def plan(
    model: Model,
    cluster: ClusterName,
    method: Method = "auto",
    budget: Budget = 30.0,
    memory_limit: MemoryLimit = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PLAN", help="Save the plan as JSON.")
    ] = None,
    trace: Trace = None,
    calibrate: Calibrate = True,
    measure: Measure = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Also prove how few bytes a plan must move.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search for a good way to divide a model over a cluster.

    Every plan is simulated. The method auto tries many methods, the baselines
    always and the others while --budget lasts, and keeps the fastest plan that
    fits into the memory of every device. Ctrl-C ends the search with the best
    plan so far.

    If nothing fits, the nearest plan is shown (and saved), with what is over the
    limit, what takes the space and how many such devices would do; the exit
    status is then 1.

    --measure runs the best plans for a few steps each, on local:N, keeps the one
    that is really the fastest, and shows predicted and measured of each.

    --certify proves, within --budget more seconds, how far the bytes that tofu's
    partition moves are from the fewest possible, and says for which space.

    Example: apportion plan gpt2:tiny --cluster local:4 --out p.json

    Example: apportion plan llama:layers=8 --cluster 8xh100 --method tofu --memory-limit 40GB
    """
    limit = None if memory_limit is None else size_limit(memory_limit)
    _check_folders(out, trace)
    with stdout_kept(as_json), warnings_noted():
        how = (budget, limit, seed, calibrate, measure, not as_json)
        made = _plan(model, _cluster(cluster), method, *how)
        if certify:
            from apportion.plan import with_certificate

            made = with_certificate(made, budget)
        if out is not None:
            made.save(out)
        if trace is not None:
            made.trace(trace)
    answer(as_json, plan_facts(made) | why_facts(made), tables.planned(made))
    raise typer.Exit(0 if made.feasible else 1)


@app.command(epilog=f"Methods:\n\n{help_text()}")
def compare(
    model: Model,
    cluster: ClusterName,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,...", help="All but auto, unless given."),
    ] = None,
    budget: Budget = 30.0,
    memory_limit: MemoryLimit = None,
    seed: Seed = 0,
    calibrate: Calibrate = True,
    as_json: AsJson = False,
) -> None:
    """Plan with several methods and set the results side by side, under one simulator.

    The table has what a step is predicted to cost, how long the search took, and
    the bound that a method has proven, with what it is a bound of. Methods that
    are not for the cluster or the step are left out with a note. Ctrl-C ends it
    with what is done so far.

    Example: apportion compare gpt2:tiny --cluster local:4 --methods auto,data,fsdp
    """
    from apportion.run import StepSource
    from apportion.run import compare as compare_methods
    from apportion.show import progress

    limit = None if memory_limit is None else size_limit(memory_limit)
    names = list(METHODS) if methods is None else [name.strip() for name in methods.split(",")]
    with stdout_kept(as_json), warnings_noted():
        place = _cluster(cluster)
        program = _capture(model, seed)
        source = StepSource(program.graph, model, seed)
        with progress(wanted=not as_json) as told:
            how = (budget, limit, seed, calibrate, note, source, told)
            plans = compare_methods(program, place, names, *how)
    plans = [replace(made, model=model) for made in plans]
    answer(as_json, comparison_facts(model, place.name, plans), tables.compared(plans))
    raise typer.Exit(0 if any(made.feasible for made in plans) else 1)


@app.command()
def calibrate(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL ...]")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="local:N; the same as --procs N.")
    ] = None,
    procs: Procs = None,
    budget: Budget = 60.0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Write the table as JSON too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what kernels, copies and messages cost on this machine, and keep it.

    Kernel calls are those of the models' steps, whole and divided in several ways.

    Example: apportion calibrate gpt2:tiny mlp:tiny --procs 2
    """
    from apportion.cli.calibrate_command import facts, measured, shown

    _check_folders(out)
    with stdout_kept(as_json), warnings_noted():
        table = measured(tuple(models or ()), cluster, procs, budget, device, seed, out, note)
    answer(as_json, facts(table), shown(table))


@app.command()
def simulate(
    plan: PlanFile,
    trace: Trace = None,
    chakra: Annotated[
        Path | None,
        typer.Option("--chakra", metavar="DIR", help="Write Chakra execution traces there too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a saved plan; neither the model nor a device is needed.

    Example: apportion simulate p.json --trace p.trace.json
    """
    from apportion.plan import Plan
    from apportion.show import export

    _check_folders(trace)
    with stdout_kept(as_json):
        made = Plan.load(plan).simulate()
        if trace is not None:
            made.trace(trace)
        if chakra is not None:
            paths = export(made.timeline, made.tasks, made.space.graph, chakra)
            note(f"wrote {paths[0]} to {paths[-1].name}")
    answer(as_json, plan_facts(made) | why_facts(made), tables.planned(made))


@app.command()
def report(
    plan: PlanFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PAGE", help="The page to write.")],
    trace: Trace = None,
) -> None:
    """Write a saved plan as one HTML page: timeline, memory, traffic, the choice of each operator.

    Example: apportion report p.json -o p.html --trace p.trace.json
    """
    from apportion.plan import Plan

    made = Plan.load(plan)
    made.report(out)
    say(f"wrote {out}")
    if trace is not None:
        made.trace(trace)
        say(f"wrote {trace}")


@app.command()
def explain(
    plan: PlanFile,
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator, its number, or a module.")],
    alternatives: Annotated[
        int, typer.Option("--alternatives", metavar="N", min=1, help="How many to show.")
    ] = 12,
    budget: Budget = 10.0,
    as_json: AsJson = False,
) -> None:
    """Say why an operator of a saved plan is divided as it is, and what else it would cost.

    Each alternative is simulated, for the operator alone and with its group (its backward
    operators and the updates of its parameters); of a module it is the heaviest operator.

    Example: apportion explain p.json blocks.0.attn.qkv
    """
    from apportion.cli.explain_command import explained

    with stdout_kept(as_json):
        facts, shown = explained(plan, op, alternatives, budget, not as_json)
    answer(as_json, facts, [shown])


# Running


@app.command()
def run(
    model: Model,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Run this saved plan.")
    ] = None,
    procs: Procs = None,
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="M", help=f"How to search: {METHOD_NAMES} (auto)."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=1, help="Training steps.")] = 3,
    seed: Seed = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with a single device, in float64.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1.0, help="Give up after this long.")
    ] = 600.0,
    trace: Trace = None,
    calibrate: Calibrate = True,
    measure: Measure = None,
    as_json: AsJson = False,
) -> None:
    """Train a few steps on real processes and set what was measured beside what was predicted.

    Example: apportion run gpt2:tiny --procs 4 --method data --check
    """
    from apportion import zoo
    from apportion.plan import Plan, warn_unsplit
    from apportion.run import run as run_plan
    from apportion.show import trace as write_trace

    if plan is not None and any(given is not None for given in (procs, method, measure)):
        raise ValueError("Give either --plan, or --procs, --method and --measure, not both.")
    _check_folders(trace)
    with stdout_kept(as_json), warnings_noted():
        if plan is not None:
            zoo.load(model, seed, meta=True)  # its file may describe operators of its own
            made = Plan.load(plan)
            warn_unsplit(made.space)
        else:
            place = _cluster(f"local:{procs or 2}")
            how = (30.0, None, seed, calibrate, measure, not as_json)
            made = _plan(model, place, method or "auto", *how)
        for table in () if as_json else tables.expected(made):
            say(table)
        done = run_plan(
            model, made, steps=steps, seed=seed, check=check, timeout=timeout, note=note
        )
        if trace is not None:
            write_trace(done.timeline, made.tasks, made.space.graph, trace)
    answer(as_json, plan_facts(made) | run_facts(done), tables.measured(made, done))
    raise typer.Exit(1 if done.equal is False else 0)


# From requests to our own types


def _capture(model: str, seed: int) -> Program:
    """The step of a model for planning: without data, so that models of any size can be planned."""
    from apportion import zoo
    from apportion.capture import capture

    it = zoo.load(model, seed, meta=True)
    return capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)


def _cluster(name: str) -> Cluster:
    from apportion.machine import cluster

    return cluster(name)


def _plan(
    model: str,
    cluster: Cluster,
    method: str,
    budget: float,
    limit: float | None,
    seed: int,
    calibrate: bool,
    measure: int | None,
    live: bool,
) -> Plan:
    from apportion.plan import with_model
    from apportion.run import StepSource, plan
    from apportion.show import progress

    program = _capture(model, seed)
    source = StepSource(program.graph, model, seed)
    with progress(wanted=live) as told:
        how = (budget, limit, seed, calibrate, note, source, told, measure)
        made = plan(program, cluster, method, *how)
    return with_model(made, model)


def _check_folders(*files: Path | None) -> None:
    """Before any work: ValueError unless all these files can be put where they are to go."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(
                f"There is no folder {str(file.absolute().parent)!r} to write {file.name} to."
            )


def _complain(text: str, code: int) -> int:
    note(f"apportion: {' '.join(text.split())}")
    return code
