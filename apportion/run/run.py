"""run: a Plan on real processes, measured, and on request compared with a single device.

Part of the room run. A model's specification and a Plan come in, a Run goes out: losses, what was
measured beside what was predicted, and the verdict of the check. The step is captured once here.
The processes of the pool load the model too but run the Graph that was captured here; for a check
they run it widened as well. One pool serves planning, the run and its check.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion import zoo
from apportion.capture import Program, capture, widened
from apportion.execute import Executable, mode_of, replica_notes
from apportion.machine import GENERATED, check_mode
from apportion.plan import Plan
from apportion.run.check import Check, eager_run, judged
from apportion.run.one_process import SharedRun
from apportion.run.planned_program import planned_program
from apportion.run.pool import SharedPool
from apportion.run.reference_kernels import caveat
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest, TrainingResult, losses_of, step_seconds
from apportion.run.vary_batch import FREE
from apportion.simulate import ComparisonRow, Timeline, comparison, measured_timeline


@dataclass(frozen=True)
class Run:
    """What was measured: all steps, and in `timeline` the last one. `mode` is how segments ran,
    `notes` are on those that did not. The last ones are None unless the run was checked: `worst` is
    the tensor with the largest difference, `noise` what rounding alone makes of it, `float32` the
    differences in the precision that the step runs in, and `reason` why it is not equal."""

    losses: list[float]
    measured_step_seconds: float
    measured_steps: tuple[float, ...]
    measured_peak_bytes: tuple[int, ...]
    measured_bytes_moved: int
    timeline: Timeline
    comparison: tuple[ComparisonRow, ...]
    mode: str = GENERATED
    notes: tuple[str, ...] = ()
    max_abs_loss_diff: float | None = None
    max_rel_param_diff: float | None = None
    equal: bool | None = None
    float32: dict[str, Any] | None = None
    worst: str | None = None
    noise: float | None = None
    reason: str | None = None


def run(
    spec: str,
    plan: Plan,
    steps: int = 3,
    seed: int = 0,
    check: bool = False,
    timeout: float = 600.0,
    note: Callable[[str], None] = lambda text: None,
    program: Program | None = None,
    processes: SharedPool | None = None,
    mode: str = GENERATED,
    share_gpu: bool = False,
) -> Run:
    """Runs a plan of the model `spec` on as many processes as it has devices. A plan for GPUs runs
    on those of this machine, if it has as many; with `share_gpu` all its processes run on the first
    one; all other plans run on the CPU.

    With `check` the trained model is compared with plain PyTorch's, and after every step all copies
    of the state with each other, bit for bit, unless a note says that they may differ.

    `program` is the step of the model with data, if it has been captured already; `processes` are
    those to run on, if there are some already; `mode` is how segments run, of execute/ladder.py.

    Raises ValueError for a wrong request (a plan for another model), RuntimeError if a process
    fails.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps are nothing to run; give at least 1")
    program = program or _load_program(spec, seed)
    divided = planned_program(program, plan)
    devices, place = len(plan.cluster.devices), place_of(plan, share_gpu)
    loose = replica_notes(Executable(plan.space, plan.strategy, plan.tasks), place != "cpu")
    source = source_of_model(divided, spec, seed)
    freedom, whole = eager_run(program, steps, seed) if check else (FREE, None)
    request = TrainingRequest(
        source, plan.strategy, devices, steps, seed, state=check, profile=True, place=place,
        mode=check_mode(mode), replicas=check and not loose, freedom=freedom,
    )  # fmt: skip
    with ExitStack() as stack:
        processes = processes or stack.enter_context(SharedPool(devices, timeout))
        if place == "cpu" and (why := caveat(plan.cost.tables.get("cpu"))):
            note(why)
        if place != "cpu":
            note(
                f"running on {devices} GPUs"
                if place == "cuda" and devices > 1
                else "running on one GPU"
            )
        elif not processes.running:
            note(f"starting {devices} processes")
        ranks = processes.pool().train(request, timeout)
        note(f"ran {steps} steps")
        measured = replace(
            _measured(plan, ranks, steps),
            mode=mode_of(mode, place),
            notes=notes_of(ranks),
        )
        if whole is None:
            return measured
        own = SharedRun(plan.space, plan.tasks, ranks, plan.strategy)
        note("checking in float64")
        wide, why = None, ""
        try:
            widened(program.graph)
        except ValueError as error:
            why = str(error)
        else:
            double = replace(request, double=True, profile=False)
            wide = replace(own, ranks=processes.pool().train(double, timeout))
    return _checked(measured, judged(program, whole, own, wide, seed, why))


def notes_of(ranks: Iterable[TrainingResult]) -> tuple[str, ...]:
    """What all ranks have to say, each thing once."""
    return tuple(dict.fromkeys(note for rank in ranks for note in rank.notes))


def place_of(plan: Plan, share_gpu: bool = False) -> str:
    """The device that torch runs a plan on here: `cuda`, each process on a GPU of its own, if it is
    for GPUs and there are as many; `cuda:0` for all if they are to share it; else `cpu`. Raises
    ValueError if there is no GPU to share."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if share_gpu:
        check_shared_gpu()
        return "cuda:0"
    wanted = len(plan.cluster.devices)
    gpus = all(device.kind != "cpu" for device in plan.cluster.devices)
    return "cuda" if gpus and count >= wanted else "cpu"


def check_shared_gpu() -> None:
    """Raises ValueError if there is no GPU that processes could share."""
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU to share here: torch sees none")


def _load_program(spec: str, seed: int) -> Program:
    """The step of a model with data, captured."""
    model = zoo.load(spec, seed)
    return capture(
        model.step, model.model, model.optimizer, model.batch, model.clip_norm, model.fixed
    )


def _measured(plan: Plan, ranks: list[TrainingResult], steps: int) -> Run:
    per_step = tuple(step_seconds(ranks))
    seconds = statistics.median(per_step[1:] or per_step)
    peaks = tuple(r.peak_bytes or 0 for r in ranks)
    moved = sum(r.sent_bytes for r in ranks) // steps
    line = measured_timeline(plan.tasks, (r.spans for r in ranks))
    rows = comparison(plan.tasks, plan.timeline, line, seconds, peaks, moved)
    return Run(losses_of(ranks), seconds, per_step, peaks, moved, line, rows)


def _checked(measured: Run, found: Check) -> Run:
    return replace(
        measured,
        notes=(*measured.notes, *found.notes),
        max_abs_loss_diff=found.max_abs_loss_diff,
        max_rel_param_diff=found.max_rel_param_diff,
        equal=found.equal,
        float32={
            "max_abs_loss_diff": found.own.max_abs_loss_diff,
            "max_rel_param_diff": found.own.max_rel_param_diff,
            "worst": found.own.worst,
        },
        worst=found.worst,
        noise=found.noise,
        reason=found.reason,
    )
