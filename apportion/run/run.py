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
from apportion.checkpoint import Resumed, StoredCheckpoint, bytes_beside_steps, load_live
from apportion.execute import Executable, mode_of, replica_notes
from apportion.machine import GENERATED, check_mode
from apportion.plan import Plan
from apportion.run.check import Check, eager_run, judged
from apportion.run.drift import drift_of, drift_sentence, drifted_ops
from apportion.run.one_process import SharedRun
from apportion.run.planned_program import planned_program
from apportion.run.pool import SharedPool
from apportion.run.reference_kernels import caveat
from apportion.run.stale_training import StaleRequest, StaleResult, batch_parts, mean_losses
from apportion.run.step_meter import ExpectedStep, expected_step
from apportion.run.step_source import source_of_model
from apportion.run.training import (
    SavingOrder,
    TrainingRequest,
    TrainingResult,
    losses_of,
    step_seconds,
)
from apportion.run.vary_batch import FREE
from apportion.search import NOT_THE_SAME
from apportion.simulate import ComparisonRow, Timeline, comparison, measured_timeline


@dataclass(frozen=True)
class Run:
    """What was measured: all steps, and in `timeline` the last one. `mode` is how segments ran,
    `notes` are on those that did not. The last ones are None unless the run was checked: `worst` is
    the tensor with the largest difference, `noise` what rounding alone makes of it, `float32` the
    differences in the precision that the step runs in, and `reason` why it is not equal.

    `first_step` is the number of the first step, more than 0 if it goes on from a checkpoint;
    `saved` the last checkpoint, or "", `save_seconds` the longest that a save held a step up, and
    `save_bytes` what each device holds for it beside its steps.
    """

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
    first_step: int = 0
    saved: str = ""
    save_seconds: float = 0.0
    save_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunOptions:
    """What is kept of a run and where it begins.

    saving   where checkpoints go; None: there are none
    resume   the checkpoint that it goes on from, or ""
    freedom  how freely batches are varied, at most
    metrics  where those of each step are written
    """

    saving: SavingOrder | None = None
    resume: str = ""
    freedom: int = FREE
    metrics: tuple[str, ...] = ()

    def asked_for(self, request: TrainingRequest) -> TrainingRequest:
        """A request with these options; a checkpoint keeps how freely batches are varied."""
        saving = self.saving
        if saving is not None:
            saving = replace(saving, others={**saving.others, FREEDOM: self.freedom})
        return replace(
            request, saving=saving, resume=self.resume, freedom=self.freedom, metrics=self.metrics
        )


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
    options: RunOptions | None = None,
) -> Run:
    """Runs a plan of the model `spec` on as many processes as it has devices. A plan for GPUs runs
    on those of this machine, if it has as many; with `share_gpu` all its processes run on the first
    one; all other plans run on the CPU.

    With `check` the trained model is compared with plain PyTorch's, and after every step all copies
    of the state with each other, bit for bit, unless a note says that they may differ.

    `program` is the step of the model with data, if it has been captured already; `processes` are
    those to run on, if there are some already; `mode` is how segments run, of execute/ladder.py.

    `options` say what is saved and where it begins; from a checkpoint, `program` has its state.

    Raises ValueError for a wrong request (a plan for another model), RuntimeError if a process
    fails.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps are nothing to run; give at least 1")
    if plan.staleness is not None and check:
        raise ValueError(f"there is nothing to check: {NOT_THE_SAME}; leave --check out")
    program = program or _load_program(spec, seed)
    divided = planned_program(program, plan)
    devices, place = len(plan.cluster.devices), place_of(plan, share_gpu)
    if plan.staleness is not None:
        if options is not None and (
            options.saving is not None or options.resume or options.metrics
        ):
            raise ValueError(
                "a run on stale parameters (ssp) takes no --save, --resume or --metrics; plan by "
                "another method"
            )
        with ExitStack() as stack:
            processes = processes or stack.enter_context(SharedPool(devices, timeout))
            return _run_stale(program, spec, plan, steps, seed, processes, timeout, note)
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    loose = replica_notes(executable, place != "cpu")
    source = source_of_model(divided, spec, seed)
    options, whole = options or RunOptions(), None
    if check:
        freedom, whole = eager_run(program, steps, seed, options.freedom)
        options = replace(options, freedom=freedom)
    beside = bytes_beside_steps(divided, executable, place) if options.saving is not None else ()
    request = TrainingRequest(
        source, plan.strategy, devices, steps, seed, state=check, profile=True, place=place,
        mode=check_mode(mode), replicas=check and not loose, expected=_expected(plan, place),
    )  # fmt: skip
    request = options.asked_for(request)
    with ExitStack() as stack:
        processes = processes or stack.enter_context(SharedPool(devices, timeout))
        if place == "cpu" and (why := caveat(plan.cost.tables.get("cpu"))):
            note(why)
        if place != "cpu":
            several = place == "cuda" and devices > 1
            note(f"running on {devices} GPUs" if several else "running on one GPU")
        elif not processes.running:
            note(f"starting {devices} processes")
        ranks = processes.pool().train(request, timeout)
        note(f"ran {steps} steps")
        measured = replace(
            _measured(plan, ranks, steps, beside),
            mode=mode_of(mode, place),
            notes=notes_of(ranks),
            first_step=program.steps_done,
        )
        if options.metrics and (said := _drift(plan, measured)):
            measured = replace(measured, notes=(*measured.notes, said))
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
            double = replace(request, double=True, profile=False, saving=None, metrics=())
            wide = replace(own, ranks=processes.pool().train(double, timeout))
    return _checked(measured, judged(program, whole, own, wide, seed, why))


def _run_stale(
    program: Program,
    spec: str,
    plan: Plan,
    steps: int,
    seed: int,
    processes: SharedPool,
    timeout: float,
    note: Callable[[str], None],
) -> Run:
    """Runs a plan whose ranks train on stale parameters."""
    assert plan.staleness is not None
    source = source_of_model(program, spec, seed)
    request = StaleRequest(source, batch_parts(program, plan), steps, seed, plan.staleness)
    note(f"training on parameters that may be {plan.staleness} steps old")
    ranks: list[StaleResult] = processes.pool().ask(request, timeout)
    per_step = tuple(max(row) for row in zip(*(r.seconds for r in ranks), strict=True))
    seconds = statistics.median(per_step[1:] or per_step)
    moved = sum(r.sent_bytes for r in ranks) // steps
    rows = (
        ComparisonRow("takes", "s", plan.predicted.step_seconds, seconds),
        ComparisonRow("moves", "B", float(plan.predicted.bytes_moved), float(moved)),
    )
    waited = max(r.waited_seconds for r in ranks) / steps
    notes = (
        NOT_THE_SAME,
        f"a rank waited {waited:.3g} s a step for parameters that were too old",
    )
    peaks = (0,) * len(ranks)
    losses = mean_losses(ranks)
    return Run(losses, seconds, per_step, peaks, moved, plan.timeline, rows, notes=notes)


FREEDOM = "batch_freedom"
"""Under which a checkpoint keeps how freely batches were varied."""


def resumed_program(program: Program, stored: StoredCheckpoint) -> tuple[Program, Resumed]:
    """The Program with its live model and optimizer as they are in a checkpoint, so that its next
    step is the one after it. Raises ValueError if that is of another model."""
    resumed = load_live(stored, program.live)
    return replace(program, steps_done=resumed.step), resumed


def _expected(plan: Plan, place: str) -> tuple[ExpectedStep | None, ...]:
    """What is predicted of each rank's step."""
    return tuple(expected_step(plan, rank, place) for rank in range(len(plan.cluster.devices)))


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
    model = zoo.load(spec, seed, meta=False)
    return capture(
        model.step, model.model, model.optimizer, model.batch, model.clip_norm, model.fixed
    )


def _measured(plan: Plan, ranks: list[TrainingResult], steps: int, beside: tuple[int, ...]) -> Run:
    per_step = tuple(step_seconds(ranks))
    seconds = statistics.median(per_step[1:] or per_step)
    peaks = tuple(r.peak_bytes or 0 for r in ranks)
    moved = sum(r.sent_bytes for r in ranks) // steps
    line = measured_timeline(plan.tasks, (r.spans for r in ranks))
    rows = comparison(plan.tasks, plan.timeline, line, seconds, peaks, moved, beside)
    run = Run(losses_of(ranks), seconds, per_step, peaks, moved, line, rows)
    held = max((max(rank.save_seconds, default=0.0) for rank in ranks), default=0.0)
    return replace(run, saved=ranks[0].saved, save_seconds=held, save_bytes=beside)


def _drift(plan: Plan, run: Run) -> str:
    """A sentence if steps take another time than predicted; else ""."""
    off = drift_of(run.measured_step_seconds, plan.predicted.step_seconds)
    if off is None:
        return ""
    ops = drifted_ops(plan.tasks, plan.space.graph, plan.timeline, run.timeline)
    return drift_sentence(off, run.measured_step_seconds, plan.predicted.step_seconds, ops)


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
