"""Does every method's plan train the model? Plans of all methods against the single device.

    python benchmarks/check_methods.py --jobs 4 --out r.json              on 4 processes each
    python benchmarks/check_methods.py --in-process --devices 3,4,6       all ranks in one process
    python benchmarks/check_methods.py --out r.json --done r.json         what failed or is open

Methods that count seconds leave tiny steps on one device; with `--free-links` they cut them.

As `apportion run MODEL:tiny --procs 4 --method M --check --steps 2 --no-calibrate` for every model
of the zoo and every method but `random`, with models, processes and the eager run shared: the split
run is in float64, which is what decides there. Where processes talk, the bytes that they send must
be those of the plan. The table says `equal`, by how much losses differ where it is not,
`unsuitable` or `failed`; sentences follow. Ends with 1 if anything failed or differs, and with 3 if
the time was up before all was done.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from apportion import zoo
from apportion.capture.capture import (
    capture,
)
from apportion.capture.optimizer import (
    setting_value,
)
from apportion.capture.program import (
    Program,
    batch_leaves,
    state_tensor,
)
from apportion.capture.reference import (
    capture_as,
    eager_steps,
)
from apportion.capture.widen import widened
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.rank import Rank, run_together
from apportion.files import write_atomic
from apportion.machine.cluster import (
    cluster,
)
from apportion.machine.topology import (
    Cluster,
)
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.check_run import PER_STEP, distance, gather_copies
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource
from apportion.run.training import TrainingRequest, TrainingResult, losses_of, vary
from apportion.search import METHODS, UnsuitableMethod

STEPS, SEED = 2, 0
GRACE = 5.0  # seconds before the time is up in which plans under way are dropped
EQUAL, DIFFERENT, UNSUITABLE, FAILED = "equal", "different", "unsuitable", "failed"


@dataclass(frozen=True)
class Case:
    """One plan to be checked."""

    model: str
    devices: int
    method: str


@dataclass(frozen=True)
class Row:
    """What came of one plan: `difference` of losses; of the worst state relative to its largest
    element, which is next to nothing where gradients are truly zero."""

    model: str
    devices: int
    method: str
    verdict: str
    difference: float = 0.0
    state_difference: float = 0.0
    sentence: str = ""
    plan_seconds: float = 0.0
    run_seconds: float = 0.0

    @property
    def case(self) -> Case:
        return Case(self.model, self.devices, self.method)


@dataclass(frozen=True)
class How:
    """How plans are made and run."""

    in_process: bool
    free_links: bool
    budget: float
    timeout: float


# One model


@dataclass(frozen=True)
class Subject:
    """A model as it is planned, the same in float64, and what plain PyTorch makes of that."""

    spec: str
    program: Program
    exact: Program
    losses: list[float]
    state: dict[int, torch.Tensor]


def load(spec: str) -> Subject:
    it = zoo.load(spec, SEED)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    exact = capture_as(program, torch.float64)
    batches = [vary(exact.batch, SEED, step) for step in range(STEPS)]
    return Subject(spec, program, exact, *eager_steps(exact, batches, SEED))


def check(
    subject: Subject, case: Case, how: How, run: Callable[[Plan], list[TrainingResult]]
) -> Row:
    """One plan, made and run; whatever goes wrong is in the Row."""
    began = time.perf_counter()
    row = Row(case.model, case.devices, case.method, FAILED)
    try:
        where = machine(case.devices, how.free_links)
        made = make_plan(subject.program, where, case.method, how.budget)
    except UnsuitableMethod as why:
        return replace(row, verdict=UNSUITABLE, sentence=str(why))
    except Exception as error:
        return replace(row, sentence=f"planning: {_told(error)}")
    row = replace(row, plan_seconds=round(time.perf_counter() - began, 3))
    began = time.perf_counter()
    try:
        graph = subject.exact.graph
        exact = replace(made, graph=graph if how.in_process else widened(graph))  # as ranks do
        row = _judged(row, subject, exact, run(exact))
    except Exception as error:
        row = replace(row, sentence=f"running: {_told(error)}")
    return replace(row, run_seconds=round(time.perf_counter() - began, 3))


def machine(devices: int, free_links: bool) -> Cluster:
    """Processes on this machine, on request planned for as if messages took no time."""
    here = cluster(f"local:{devices}")
    if not free_links:
        return here
    links = tuple(replace(link, bandwidth=1e18, latency=0.0) for link in here.links)
    return replace(here, links=links)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _judged(row: Row, subject: Subject, made: Plan, ranks: list[TrainingResult]) -> Row:
    rate = max(float(group["lr"]) for group in subject.exact.optimizer.param_groups)
    split = gather_copies(made.space, made.tasks, ranks)
    slack = PER_STEP * rate * STEPS
    losses = losses_of(ranks)
    found = distance(subject.exact, losses, split, subject.losses, subject.state, slack)
    state = found.max_rel_param_diff
    row = replace(row, difference=found.max_abs_loss_diff, state_difference=state)
    if not found.equal:
        told = f"{found.worst or 'a state'} differs by {state:.1e} of its largest element"
        return replace(row, verdict=DIFFERENT, sentence=told)
    sent = sum(rank.sent_bytes for rank in ranks)
    if sent != STEPS * made.tasks.bytes_moved:
        told = f"sent {sent} B in {STEPS} steps of {made.tasks.bytes_moved} B"
        return replace(row, verdict=DIFFERENT, sentence=told)
    return replace(row, verdict=EQUAL)


def together(subject: Subject, made: Plan) -> list[TrainingResult]:
    """All ranks in this process, answering as processes would."""
    program, devices = subject.exact, len(made.cluster.devices)
    executable = Executable(made.space, made.strategy, made.tasks)
    ranks = [Rank(executable, device) for device in range(devices)]
    for rank in ranks:
        rank.load(lambda v: state_tensor(program, v))
    losses: list[float | None] = []
    for step in range(STEPS):
        leaves = batch_leaves(program, vary(program.batch, SEED, step))
        for rank in ranks:
            rank.feed(leaves.__getitem__)
        settings = lambda e: setting_value(program.optimizer, e)  # noqa: E731
        loss = run_together(ranks, Context(SEED, step, settings, program.graph.bodies))
        losses.append(None if loss is None else float(loss))
    moved = STEPS * made.tasks.bytes_moved  # counted only where processes talk
    states = [[(s, t.numpy()) for s, (_, t) in rank.state().items()] for rank in ranks]
    return [
        TrainingResult(losses, [], [], moved if device == 0 else 0, None, state, [])
        for device, state in enumerate(states)
    ]


class Processes:
    """Pools that outlive a plan, one for each number of devices; begun anew after a failure."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.pools: dict[int, ProcessPool] = {}

    def run(self, spec: str, made: Plan) -> list[TrainingResult]:
        devices = len(made.cluster.devices)
        if devices not in self.pools:
            self.pools[devices] = ProcessPool(devices, self.timeout)
        source = StepSource(made.graph, spec, SEED)
        job = TrainingRequest(source, made.strategy, devices, STEPS, SEED, double=True, state=True)
        try:
            return self.pools[devices].train(job)
        except BaseException:
            self.pools.pop(devices).close()
            raise

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


# Jobs: processes that check model after model


def job(pipe: Connection, cores: Sequence[int], how: How) -> None:
    """Answers lists of Cases of one model with Rows, then with None."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)  # tiny tensors: more would only wait for each other
    warnings.simplefilter("ignore")
    processes = Processes(how.timeout)
    try:
        while (cases := pipe.recv()) is not None:
            for row in rows_of(cases, how, processes):
                pipe.send(row)
            pipe.send(None)
    except (EOFError, ConnectionError):
        pass  # nobody waits for the answer any more
    finally:
        processes.close()


def rows_of(cases: Sequence[Case], how: How, processes: Processes) -> Iterator[Row]:
    try:
        subject = load(cases[0].model)
    except Exception as error:
        told = f"capturing: {_told(error)}"
        yield from (Row(c.model, c.devices, c.method, FAILED, sentence=told) for c in cases)
        return

    def run(made: Plan) -> list[TrainingResult]:
        return together(subject, made) if how.in_process else processes.run(subject.spec, made)

    for case in cases:
        yield check(subject, case, how, run)


def check_all(cases: Sequence[Case], how: How, jobs: int, seconds: float) -> Iterator[Row]:
    """Rows as they come, of one model after another in each job, until the time is up."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    todo = [list(same) for _, same in groupby(cases, lambda case: case.model)]
    pipes: dict[Connection, tuple[Any, list[Case]]] = {}
    ends = time.monotonic() + seconds
    try:
        for number in range(min(jobs, len(todo))):
            ours, theirs = context.Pipe()
            mine = cores[number % len(cores) :: jobs] or cores
            child = context.Process(target=job, args=(theirs, mine, how))
            child.start()
            theirs.close()
            pipes[ours] = (child, todo.pop(0))
            ours.send(pipes[ours][1])
        while pipes and (left := ends - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                yield from _received(pipe, pipes, todo)
    finally:
        for child, _ in pipes.values():
            child.kill()
            child.join()


def _received(
    pipe: Any, pipes: dict[Connection, tuple[Any, list[Case]]], todo: list[list[Case]]
) -> Iterator[Row]:
    """What a job says next; gives it the next model when it is done with one."""
    child, cases = pipes[pipe]
    try:
        row = pipe.recv()
    except (EOFError, ConnectionError):
        child.join()
        del pipes[pipe]
        for case in cases:
            told = f"the process ended with status {child.exitcode}"
            yield Row(case.model, case.devices, case.method, FAILED, sentence=told)
        return
    if row is not None:
        cases.remove(row.case)
        yield row
    elif todo:
        pipes[pipe] = (child, todo.pop(0))
        pipe.send(pipes[pipe][1])
    else:
        pipe.send(None)
        del pipes[pipe]
        child.join()


# The command


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    methods = ["auto", *(name for name in METHODS if name != "random")]
    names = [known.name for known in zoo.known()]
    parser.add_argument("--models", default=",".join(names), help="names of the zoo")
    parser.add_argument("--methods", default=",".join(methods))
    parser.add_argument("--devices", default="4", help="numbers of devices, such as 3,4,6")
    parser.add_argument("--in-process", action="store_true", help="all ranks in one process")
    parser.add_argument(
        "--free-links", action="store_true", help="plan as if messages cost nothing"
    )
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of each search")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of each run")
    parser.add_argument("--minutes", type=float, default=1e4, help="stop after these")
    parser.add_argument("--out", type=Path, help="JSON, written as results come")
    parser.add_argument("--done", type=Path, help="results of before: what they have is not redone")
    asked = parser.parse_args()
    if asked.jobs < 1:
        parser.error("--jobs must be at least 1")
    unknown = set(asked.methods.split(",")) - set(methods)
    if unknown:
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}")
    rows = _read(asked.done) if asked.done is not None else {}
    wanted = [
        Case(f"{model}:tiny", int(devices), method)
        for model in asked.models.split(",")
        for devices in asked.devices.split(",")
        for method in asked.methods.split(",")
    ]
    cases = [case for case in wanted if case not in rows]
    how = How(asked.in_process, asked.free_links, asked.budget, asked.timeout)
    seconds = max(0.0, 60 * asked.minutes - GRACE)
    for row in check_all(cases, how, asked.jobs, seconds):
        rows[row.case] = row
        if asked.out is not None:
            write_atomic(asked.out, json.dumps([asdict(row) for row in rows.values()], indent=1))
        told = f"{row.verdict} {row.difference:.1e} {row.sentence}".rstrip()
        print(f"{row.model} on {row.devices} by {row.method}: {told}", file=sys.stderr)
    print(table([rows[case] for case in wanted if case in rows]))
    missing = sum(case not in rows for case in wanted)
    if missing:
        print(f"{missing} of {len(wanted)} are still open: the time was up")
    bad = any(rows[case].verdict in (DIFFERENT, FAILED) for case in wanted if case in rows)
    return 1 if bad else 3 if missing else 0


def _read(path: Path) -> dict[Case, Row]:
    if not path.exists():
        return {}
    rows = (Row(**fields) for fields in json.loads(path.read_text()))
    return {row.case: row for row in rows if row.verdict in (EQUAL, UNSUITABLE)}


def table(rows: Sequence[Row]) -> str:
    """Models by methods in Markdown, then a sentence for all that is not equal."""
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = [f"| model | devices | {' | '.join(methods)} |", "|" + "---|" * (2 + len(methods))]
    for (model, devices), same in groupby(rows, lambda row: (row.model, row.devices)):
        found = {row.method: _cell(row) for row in same}
        cells = " | ".join(found.get(method, "") for method in methods)
        lines.append(f"| {model} | {devices} | {cells} |")
    lines += [
        f"{row.model} on {row.devices} by {row.method}: {row.verdict}: {row.sentence}"
        for row in rows
        if row.verdict != EQUAL
    ]
    largest = max((row.difference for row in rows if row.verdict == EQUAL), default=0.0)
    equal = sum(row.verdict == EQUAL for row in rows)
    lines.append(f"{equal} of {len(rows)} equal; largest difference of their losses {largest:.1e}")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return f"{row.difference:.1e}" if row.verdict == DIFFERENT else row.verdict


if __name__ == "__main__":
    sys.exit(main())
