"""The command run: a few training steps on real processes, beside what was predicted.

Part of the room cli. The model is loaded and captured once, and one pool of processes serves the
measurements of planning, the run and its check. Everything heavy is imported inside the command.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.options import (
    METHOD_NAMES,
    AsJson,
    BatchSize,
    Calibrate,
    Check,
    CommunicationPolicy,
    CompileMode,
    Fast,
    Measure,
    MemoryLimit,
    Model,
    Offload,
    PolicyFile,
    Precision,
    Procs,
    Recompute,
    Seed,
    SequenceLength,
    ShareGpu,
    Trace,
)
from apportion.cli.requests import check_folders, sized
from apportion.quantity import parse_size_limit
from apportion.show import (
    answer,
    note,
    plan_facts,
    run_facts,
    say,
    stdout_kept,
    tables,
    warnings_noted,
)

PLANNING_SECONDS = 30.0
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", min=1.0, help="Give up after this long.")
]


def _tell(texts: Iterable[str]) -> None:
    for text in texts:
        note(text)


def _check_unplanned(*given: object) -> None:
    """Raises ValueError if an option says how to plan what is planned already."""
    if any(one not in (None, "none", "wfbp") for one in given):
        raise ValueError(
            "Give either --plan, or --procs, --method, --measure, --policy, --memory-limit, "
            "--recompute, --offload and --communication, not both."
        )


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
    memory_limit: MemoryLimit = None,
    recompute: Recompute = "none",
    offload: Offload = "none",
    seed: Seed = 0,
    batch: BatchSize = None,
    seq: SequenceLength = None,
    precision: Precision = None,
    check: Check = False,
    timeout: Timeout = 600.0,
    trace: Trace = None,
    calibrate: Calibrate = True,
    measure: Measure = None,
    policy: PolicyFile = None,
    communication: CommunicationPolicy = "wfbp",
    compile_mode: CompileMode = None,
    fast: Fast = False,
    share_gpu: ShareGpu = False,
    as_json: AsJson = False,
) -> None:
    """Train a few steps on real processes and set what was measured beside what was predicted.

    Example: apportion run gpt2:tiny --procs 4 --method data --check
    """
    from apportion import zoo
    from apportion.capture import capture
    from apportion.machine import check_mode, cluster
    from apportion.plan import Plan, warn_unsplit, with_model
    from apportion.run import SharedPool, check_shared_gpu, source_of_model
    from apportion.run import plan as make_plan
    from apportion.run import run as run_plan
    from apportion.show import progress
    from apportion.show import trace as write_trace

    if plan is not None:
        given = (procs, method, measure, policy, memory_limit, recompute, offload)
        _check_unplanned(*given, communication)
    mode = check_mode(_mode(compile_mode, fast))
    limit = None if memory_limit is None else parse_size_limit(memory_limit)
    check_folders(trace)
    if share_gpu:
        check_shared_gpu()
    with stdout_kept(as_json), warnings_noted():
        model = sized(model, batch, seq, precision)
        it = zoo.load(model, seed)  # its file may describe operators of its own
        _tell(it.notes)
        saved = None if plan is None else Plan.load(plan)
        place = cluster(f"local:{procs or 2}") if saved is None else saved.cluster
        program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
        _tell(program.notes)
        with SharedPool(len(place.devices), timeout) as processes:
            if saved is None:
                source = source_of_model(program, model, seed)
                with progress(wanted=not as_json) as told:
                    how = (limit, seed, calibrate, note, source, told, measure, processes, policy)
                    asked = (program, place, method or "auto", PLANNING_SECONDS, *how)
                    more = ("", recompute, offload, communication)
                    made = with_model(make_plan(*asked, None, "generated", *more), model)
            else:
                made = saved
                warn_unsplit(made.space)
            for table in () if as_json else tables.expected(made):
                say(table)
            there = (program, processes, mode, share_gpu)
            done = run_plan(model, made, steps, seed, check, timeout, note, *there)
        if trace is not None:
            write_trace(done.timeline, made.tasks, made.space.graph, trace)
    answer(as_json, plan_facts(made) | run_facts(done), tables.measured(made, done))
    raise typer.Exit(1 if done.equal is False else 0)
