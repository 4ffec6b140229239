"""FlexFlow's evaluation (MLSys 2019), rebuilt in simulation on its two clusters.

    python benchmarks/flexflow.py --out rows.jsonl --jobs 16 --minutes 9
    python benchmarks/flexflow.py --out rows.jsonl --done rows.jsonl --jobs 16     what is open
    python benchmarks/flexflow.py --models nmt --machines k80 --devices 64 --search-seconds 300
    python benchmarks/flexflow.py --done rows.jsonl --measure '' --page docs/flexflow.md

Six models on 4, 8 and 16 P100 and on 4 to 64 K80, the batch growing with the devices: 64 samples
for each, 256 for AlexNet. Every plan is lowered and simulated alike. One process has one model on
one number of devices; each result is a line of JSON, written when it is there.

    step_seconds    one simulated step
    bytes_moved     what leaves a device, by whatever collective
    task_seconds    sum over all devices of what computing takes, copies not counted
    search_seconds  CPU seconds of this search, capture and description not counted

flexflow begins with what the others found, besides what it finds by itself. `proposals` is no
method: it times a walk of flexflow's proposals from data parallelism on, by delta and, for a sample
of them, by lowering and simulating the whole step; both must give equal times. The first half of
the walk is not counted: much is worked out once and known from then on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from flexflow_figures import page, tables

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.files import write_atomic
from apportion.graph import PARAMETER
from apportion.lower.lower import lower
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search import METHODS, Problem, UnsuitableMethod
from apportion.search.walks.metropolis import Chain
from apportion.search.walks.simulated_walk import SimulatedWalk
from apportion.simulate.durations import nanoseconds
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Strategy, space_of

# The words of NMT are those of FlexFlow's published simulator
MODELS = {
    "alexnet": ("alexnet", 256),
    "inception-v3": ("inception-v3", 64),
    "resnet101": ("resnet101", 64),
    "rnntc": ("rnntc", 64),
    "rnnlm": ("rnnlm", 64),
    "nmt": ("nmt:vocab=32000", 64),
}
MACHINES = {"p100": (1, 4, 8, 16), "k80": (1, 4, 8, 16, 32, 64)}
STARTS = ("data", "expert", "optcnn", "tofu")
COLUMNS = ("single", *STARTS, "flexflow", "proposals")
GRACE = 5.0  # seconds before the time is up in which what is under way is dropped

Row = dict[str, Any]
Key = tuple[str, str, int, str]


@dataclass(frozen=True)
class Cell:
    """One model on some of the devices of a cluster, and what is to be measured there."""

    model: str
    machine: str
    devices: int
    methods: tuple[str, ...]

    @property
    def batch(self) -> int:
        return MODELS[self.model][1] * self.devices

    @property
    def spec(self) -> str:
        name = MODELS[self.model][0]
        return f"{name}{',' if ':' in name else ':'}batch={self.batch}"


@dataclass(frozen=True)
class How:
    """Seconds that a search may take, proposals that are timed, how many of them both ways."""

    search_seconds: float
    proposals: int
    fulls: int
    seed: int = 0


def key(row: Mapping[str, Any]) -> Key:
    return row["model"], row["machine"], row["devices"], row["method"]


# One cell


def rows_of(cell: Cell, how: How) -> Iterator[Row]:
    """What each method finds, one after the other."""
    began = time.process_time()
    it = zoo.load(cell.spec, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph
    space = Space(graph)
    where = cluster(f"flexflow-{cell.machine}:{cell.devices}")
    problem = Problem(space, where, default_cost(where))
    same = {
        "model": cell.model,
        "machine": cell.machine,
        "devices": cell.devices,
        "batch": cell.batch,
        "ops": len(graph.ops),
        "weight_bytes": sum(
            value.nbytes
            for value, maker in zip(graph.values, graph.producer, strict=True)
            if maker is None and value.role == PARAMETER
        ),
        "capture_seconds": round(time.process_time() - began, 2),
    }
    starts: list[tuple[Strategy, Space]] = []
    for method in cell.methods:
        own = timed(problem, how) if method == "proposals" else None
        yield same | {"method": method} | (own or measured(problem, method, how, starts))


def measured(problem: Problem, method: str, how: How, starts: list[tuple[Strategy, Space]]) -> Row:
    """A method's Row without what all of a cell have in common; `why` there is nothing. What may be
    a start is added to `starts`."""
    more = {"starts": tuple(starts)} if method == "flexflow" else {}
    began = _cpu_seconds()
    try:
        found = METHODS[method](problem, budget=how.search_seconds, seed=how.seed, **more)
    except UnsuitableMethod as why:
        return {"why": str(why)}
    searched = _cpu_seconds() - began
    space = found.space or space_of(problem.space.source, found.strategy, problem.space)
    if method in STARTS:
        starts.append((found.strategy, space))
    return {
        **simulated(problem, found.strategy, space),
        "search_seconds": round(searched, 3),
        "notes": list(found.notes),
        "figures": dict(found.figures),
        "curve": [list(point) for point in found.curve],
    }


def _cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(os.times()[:4])


def simulated(problem: Problem, strategy: Strategy, space: Space) -> Row:
    """A Strategy lowered and simulated."""
    tasks = lower(space, strategy, problem.devices)
    line = simulate(tasks, problem.cluster, problem.cost)
    computing = nanoseconds(tasks, problem.cluster, problem.cost)[tasks.kind == COMPUTE]
    limits = (device.memory_bytes for device in problem.cluster.devices)
    return {
        "step_seconds": line.step_seconds,
        "bytes_moved": tasks.bytes_moved,
        "task_seconds": float(computing.sum()) / 1e9,
        "peak_bytes": max(line.peak_bytes),
        "fits": all(p <= m for p, m in zip(line.peak_bytes, limits, strict=True)),
        "tasks": len(tasks),
    }


# Proposals, by delta and by simulating the whole step


class Timed(SimulatedWalk):
    """A walk whose changes are timed; every so often the whole step is lowered and simulated
    too."""

    every = 1
    delta_seconds: list[float]
    full_seconds: list[float]

    def change(self, rng: Random, limit: float) -> float | None:
        began = time.process_time()
        cost = super().change(rng, limit)
        self.delta_seconds.append(time.process_time() - began)
        if cost is not None and len(self.delta_seconds) % self.every == 0:
            self._simulate()
        return cost

    def _simulate(self) -> None:
        delta, problem = self.delta, self.problem
        began = time.process_time()
        tasks = lower(self.space, delta.strategy, problem.devices)
        line = simulate(tasks, problem.cluster, problem.cost)
        self.full_seconds.append(time.process_time() - began)
        if delta.bounded:
            assert line.step_seconds >= delta.step_seconds, "a step within the limit was given up"
        else:
            assert line.step_seconds == delta.step_seconds, "delta and full differ"

    def keep(self) -> None:
        began = time.process_time()
        super().keep()
        self.delta_seconds[-1] += time.process_time() - began

    def undo(self) -> None:
        began = time.process_time()
        super().undo()
        self.delta_seconds[-1] += time.process_time() - began


def timed(problem: Problem, how: How) -> Row:
    """Milliseconds of a proposal both ways, in a walk that begins with data parallelism."""
    start = METHODS["data"](problem, budget=0.0, seed=how.seed).strategy
    walk = Timed(problem, problem.space, start)
    walk.every, walk.delta_seconds, walk.full_seconds = max(how.proposals // how.fulls, 1), [], []
    chain = Chain(walk, Random(how.seed))
    for counted in (False, True):
        if counted:
            walk.delta_seconds, walk.full_seconds = [], []
        while len(walk.delta_seconds) < how.proposals:
            chain.step()
    return {
        "proposals": chain.proposals,
        "accepted": chain.accepted,
        "full_ms": 1e3 * statistics.mean(walk.full_seconds or [math.nan]),
        "delta_ms": 1e3 * statistics.mean(walk.delta_seconds),
        "fulls": len(walk.full_seconds),
    }


# Processes, one for each cell


def work(pipe: Connection, cell: Cell, how: How, cores: Sequence[int]) -> None:
    """Sends the Rows of a cell, then None; or a sentence that says what went wrong."""
    os.sched_setaffinity(0, cores)
    warnings.simplefilter("ignore")
    try:
        for row in rows_of(cell, how):
            pipe.send(row)
        pipe.send(None)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")


def all_rows(cells: Sequence[Cell], how: How, jobs: int, seconds: float) -> Iterator[Row | str]:
    """Rows as they come until the time is up; sentences of what failed."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    todo, ends = list(cells), time.monotonic() + seconds
    busy: dict[Connection, tuple[Any, Cell, int]] = {}
    free = list(range(jobs))
    try:
        while (busy or todo) and time.monotonic() < ends:
            while todo and free:
                cell, number = todo.pop(0), free.pop(0)
                ours, theirs = context.Pipe()
                mine = cores[number % len(cores) :: jobs] or cores
                child = context.Process(target=work, args=(theirs, cell, how, mine))
                child.start()
                theirs.close()
                busy[ours] = (child, cell, number)
            for pipe in wait(list(busy), max(ends - time.monotonic(), 0)):
                assert isinstance(pipe, Connection)
                yield from _received(pipe, busy, free)
    finally:
        for child, _, _ in busy.values():
            child.kill()
            child.join()


def _received(
    pipe: Connection, busy: dict[Connection, tuple[Any, Cell, int]], free: list[int]
) -> Iterator[Row | str]:
    child, cell, number = busy[pipe]
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        child.join()
        answer = f"the process ended with status {child.exitcode}"
    if isinstance(answer, dict):
        yield answer
        return
    child.join()
    del busy[pipe]
    free.append(number)
    if answer is not None:
        yield f"{cell.model} on {cell.devices} {cell.machine}: {answer}"


# The command


def never_worse(rows: Sequence[Row]) -> list[str]:
    """Sentences for every cell in which flexflow is slower than something it began with."""
    found = {key(row): row for row in rows if "step_seconds" in row}
    return [
        f"{model} on {devices} {machine}: flexflow takes {row['step_seconds']:.6g} s, {start} "
        f"{found[model, machine, devices, start]['step_seconds']:.6g} s"
        for (model, machine, devices, method), row in found.items()
        if method == "flexflow"
        for start in STARTS
        if (model, machine, devices, start) in found
        and row["step_seconds"] > found[model, machine, devices, start]["step_seconds"]
    ]


def cells_of(asked: argparse.Namespace, done: Mapping[Key, Row]) -> list[Cell]:
    """What is to be measured and not done, the largest first."""
    found = []
    for machine in asked.machines.split(","):
        for devices in MACHINES[machine]:
            if asked.devices and devices not in map(int, asked.devices.split(",")):
                continue
            for model in asked.models.split(","):
                methods = [
                    method
                    for method in asked.measure.split(",")
                    if method and (method == "single") == (devices == 1)
                    if (model, machine, devices, method) not in done
                ]
                if "flexflow" in methods:  # its starts are not in the rows
                    methods = [m for m in _known() if m in (*methods, *STARTS)]
                if methods:
                    found.append(Cell(model, machine, devices, tuple(methods)))
    return sorted(found, key=lambda cell: -cell.devices)


def main() -> int:
    compile_at_once()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--devices", default="", help="such as 16,64; all unless given")
    parser.add_argument("--measure", default=",".join(_known()), help="methods, and proposals")
    parser.add_argument("--search-seconds", type=float, default=60.0, help="of each search")
    parser.add_argument("--proposals", type=int, default=300, help="timed by delta")
    parser.add_argument("--fulls", type=int, default=8, help="of them also simulated whole")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--minutes", type=float, default=1e4, help="stop after these")
    parser.add_argument("--done", type=Path, action="append", default=[], help="rows of before")
    parser.add_argument("--out", type=Path, help="rows, those of before first")
    parser.add_argument("--page", type=Path, help="a Markdown file whose tables are made anew")
    asked = parser.parse_args()
    _refuse(parser, asked)
    rows = {key(row): row for path in asked.done for row in read(path)}
    if asked.out is not None:
        write_atomic(asked.out, "".join(map(_line, rows.values())))
    how = How(asked.search_seconds, asked.proposals, asked.fulls, asked.seed)
    cells = cells_of(asked, rows)
    failed = []
    for row in all_rows(cells, how, asked.jobs, max(60 * asked.minutes - GRACE, 0.0)):
        if isinstance(row, str):
            failed.append(row)
            print(row, file=sys.stderr, flush=True)
            continue
        rows[key(row)] = row
        print(_told(row), file=sys.stderr, flush=True)
        if asked.out is not None:
            with asked.out.open("a") as file:
                file.write(_line(row))
    found = tables(list(rows.values()))
    if asked.page is not None:
        write_atomic(asked.page, page(asked.page.read_text(), found))
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in found.items()))
    worse = never_worse(list(rows.values()))
    print("\n".join([*failed, *worse]))
    missing = len(cells_of(asked, rows))
    if missing:
        print(f"{missing} cells are still open")
    return 1 if failed or worse else 3 if missing else 0


def _refuse(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    for name, known in (("models", MODELS), ("machines", MACHINES), ("measure", _known())):
        for item in filter(None, getattr(asked, name).split(",")):
            if item not in known:
                parser.error(f"--{name}: {item!r} is none of {', '.join(known)}")
    if asked.jobs < 1:
        parser.error("--jobs must be at least 1")


def _known() -> list[str]:
    return [method for method in COLUMNS if method in METHODS or method == "proposals"]


def read(path: Path) -> list[Row]:
    """Rows, as far as they were written; none if there is no such file."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _told(row: Row) -> str:
    name = f"{row['model']} on {row['devices']} {row['machine']}, {row['method']}"
    if "why" in row:
        return f"{name}: {row['why']}"
    if row["method"] == "proposals":
        return f"{name}: full {row['full_ms']:.1f} ms, delta {row['delta_ms']:.2f} ms"
    return (
        f"{name}: {row['step_seconds']:.4f} s, {row['bytes_moved'] / 1e9:.2f} GB, tasks "
        f"{row['task_seconds']:.2f} s, found in {row['search_seconds']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
