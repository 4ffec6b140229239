"""The command run: a few training steps on real processes, beside what was predicted.

Part of the room cli. The model is loaded and captured once, and one pool of processes serves the
measurements of planning, the run and its check. Everything heavy is imported inside the command.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.options import (
    METHOD_NAMES,
    Accumulate,
    AsJson,
    BatchSize,
    Calibrate,
    Check,
    CommunicationOfRun,
    CompileMode,
    Fast,
    HostStateMode,
    KeepLast,
    Measure,
    MemoryLimit,
    Metrics,
    Model,
    Offload,
    PolicyFile,
    Precision,
    Procs,
    Recompute,
    Resume,
    ResumedSeed,
    SaveEvery,
    SaveFolder,
    SequenceLength,
    ShareGpu,
    Staleness,
    Trace,
)
from apportion.cli.requests import check_outputs, complain, keep_result, sized
from apportion.quantity import parse_size_limit
from apportion.show import (
    answer,
    note,
    plan_facts,
    plan_tables,
    run_facts,
    say,
    stdout_kept,
    warnings_noted,
)

if TYPE_CHECKING:
    from apportion.capture import Program
    from apportion.machine import Cluster
    from apportion.plan import Plan

PLANNING_SECONDS = 30.0
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", min=1.0, help="Give up after this long.")
]


def _tell(texts: Iterable[str]) -> None:
    for text in texts:
        note(text)


def _check_unplanned(*given: object) -> None:
    """Raises ValueError if an option says how to plan what is planned already."""
    if any(one is not None for one in given):
        raise ValueError(
            "Give either --plan, or --procs, --method, --measure, --policy, --memory-limit, "
            "--recompute, --offload, --host-state, --communication and --staleness, not both."
        )


def _saved(path: Path, procs: int | None) -> Plan:
    """The plan at a path; of a plan book the one for so many processes, or the largest."""
    from apportion.plan import Plan, book_sizes, planned_for

    if not path.is_dir():
        return Plan.load(path)
    sizes = book_sizes(path)
    found = planned_for(path, procs or max(sizes, default=0))
    if found is None:
        known = ", ".join(map(str, sizes)) or "nothing"
        raise ValueError(
            f"The plan book {path} has no plan for {procs} processes, but for {known}."
        )
    return found


def _captured(model: str, seed: int) -> Program:
    """The step of a model with data, and what there is to say about it."""
    from apportion import zoo
    from apportion.capture import capture

    it = zoo.load(model, seed, meta=False)  # its file may describe operators of its own
    _tell(it.notes)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
    _tell(program.notes)
    return program


def _planned(
    program: Program,
    model: str,
    place: Cluster,
    method: str,
    how: tuple[Any, ...],
    more: tuple[Any, ...],
    shows: bool,
) -> Plan:
    """A plan for processes of this machine, with its progress shown if it `shows`."""
    from apportion.plan import with_model
    from apportion.run import plan as make_plan
    from apportion.run import source_of_model
    from apportion.show import progress

    limit, seed, calibrate, measure, processes, policy = how
    source = source_of_model(program, model, seed)
    with progress(wanted=shows) as told:
        asked = (limit, seed, calibrate, note, source, told, measure, processes, policy)
        made = make_plan(
            program, place, method, PLANNING_SECONDS, *asked, None, "generated", "", *more
        )
    return with_model(made, model)


def _mode(compile_mode: str | None, fast: bool) -> str:
    """How ranks are compiled; raises ValueError if two options say so."""
    if fast and compile_mode not in (None, "auto"):
        raise ValueError(f"Give either --fast or --compile {compile_mode}, not both.")
    return compile_mode or ("auto" if fast else "generated")


def run_command(
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
    save: SaveFolder = None,
    save_every: SaveEvery = None,
    keep: KeepLast = 3,
    resume: Resume = None,
    metrics: Metrics = None,
    memory_limit: MemoryLimit = None,
    recompute: Recompute = None,
    offload: Offload = None,
    host_state: HostStateMode = None,
    seed: ResumedSeed = None,
    batch: BatchSize = None,
    seq: SequenceLength = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    check: Check = False,
    timeout: Timeout = 600.0,
    trace: Trace = None,
    calibrate: Calibrate = True,
    measure: Measure = None,
    policy: PolicyFile = None,
    communication: CommunicationOfRun = None,
    staleness: Staleness = None,
    compile_mode: CompileMode = None,
    fast: Fast = False,
    share_gpu: ShareGpu = False,
    as_json: AsJson = False,
) -> None:
    """Train a few steps on real processes and set what was measured beside what was predicted.

    Example: apportion run gpt2:tiny --procs 4 --method data --check

    Example: apportion run gpt2:tiny --procs 2 --method tofu --resume run/ --save run/
    """
    from apportion.cli.checkpoint_requests import checkpoint_request
    from apportion.machine import check_mode, cluster
    from apportion.plan import warn_unsplit
    from apportion.run import SharedPool, check_shared_gpu
    from apportion.run import run as run_plan
    from apportion.show import trace as write_trace

    if plan is not None:
        traded = (None if each == "none" else each for each in (recompute, offload, host_state))
        given = (method, measure, policy, memory_limit, *traded, communication, staleness)
        _check_unplanned(None if plan.is_dir() else procs, *given)
    mode = check_mode(_mode(compile_mode, fast))
    limit = None if memory_limit is None else parse_size_limit(memory_limit)
    check_outputs(trace, inputs=(plan, policy))
    if share_gpu:
        check_shared_gpu()
    with stdout_kept(as_json), warnings_noted():
        model = sized(model, batch, seq, precision, accumulate)
        kept = checkpoint_request(save, save_every, keep, resume, metrics, seed)
        program = _captured(model, kept.seed)
        saved = None if plan is None else _saved(plan, procs)
        place = cluster(f"local:{procs or 2}") if saved is None else saved.cluster
        program, options = kept.begin(program, model, _tell)
        with SharedPool(len(place.devices), timeout) as processes:
            if saved is None:
                how = (limit, kept.seed, calibrate, measure, processes, policy)
                more = (recompute, offload, communication or "auto", staleness, host_state)
                made = _planned(program, model, place, method or "auto", how, more, not as_json)
            else:
                made = saved
                warn_unsplit(made.space)
            for table in () if as_json else plan_tables.expected(made):
                say(table)
            there = (timeout, note, program, processes, mode, share_gpu, options)
            with kept.without_unfinished():
                done = run_plan(model, made, steps, kept.seed, check, *there)
        step = (done.timeline, made.tasks, made.space.graph)
        lost = keep_result(lambda path: write_trace(*step, path), trace)
    answer(as_json, plan_facts(made) | run_facts(done), plan_tables.measured(made, done))
    complain([lost])
    raise typer.Exit(1 if lost or done.equal is False else 0)
