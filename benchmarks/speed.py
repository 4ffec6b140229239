"""How fast plans are beside what PyTorch offers: two processes of one thread each, step by step.

    python benchmarks/speed.py                              four models, five minutes
    python benchmarks/speed.py --models mlp --modes generated --rounds 20 --json speed.json
    sudo python benchmarks/speed.py --rate 125e6 --auto 30  over a cable of 1 Gbit/s, with auto
    python benchmarks/speed.py --quick                      a tiny model, to see that all of it runs

All contenders of a model live in the same two processes, and take turns: in every round each runs a
few steps, in another order each time, the first of them not counted. The processor's seconds of all
threads are added over the ranks; wall time goes from a barrier to the end of the slower rank. Given
are low quantiles (whatever disturbs a step makes it longer) and medians. A ratio is ours over the
faster of PyTorch's variants in the same run. Everybody trains from the same state on the same
batch, so losses must agree.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch_parallel import CONTENDERS, Unsuitable
from two_ranks import before_others, run_ranks

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.plan.plan import Plan
from apportion.run.runner import Runner

MODELS = {
    "gpt2 4x512": "gpt2:layers=4,width=512,heads=8,vocab=8192,seq=128,batch=8,dropout=0",
    "small gpt2": "gpt2:layers=4,width=256,heads=4,vocab=1000,seq=64,batch=8,dropout=0",
    "mlp 6x1024": "mlp:layers=6,width=1024,batch=128",
    "resnet50": "resnet50:image=64,batch=16",
}
TINY = {"tiny mlp": "mlp:layers=4,width=16,batch=8"}
RIVALS = {
    "data": ("ddp", "ddp-view"),
    "fsdp": ("fsdp2",),
    "fsdp-keep": ("fsdp2-keep",),
    "megatron": ("tensor",),
    "auto": ("ddp", "ddp-view", "fsdp2", "fsdp2-keep"),
}
MODES = ("none", "generated")
ROUNDS, BLOCK = 10, 3  # a block is one step that warms up and so many that count
LOW = 0.2
SEED, LIMIT = 0, 900.0
LOSS_STEPS = 3

# glibc's mallopt: large blocks come from the heap and stay there, instead of new pages every time.
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2


@dataclass(frozen=True)
class Row:
    """One contender: seconds of a step, low quantile and median; `cpu` over both ranks, of it
    `system` in the kernel; pages that were new to it; the losses of the first steps; the best
    ratio to its rivals, if it has some."""

    model: str
    contender: str
    cpu: float
    cpu_median: float
    wall: float
    wall_median: float
    system: float
    faults: float
    losses: list[float]
    rivals: list[str]
    cpu_ratio: float | None = None
    wall_ratio: float | None = None
    cpu_median_ratio: float | None = None
    wall_median_ratio: float | None = None


# In the ranks


def rank(
    spec: str, contenders: Sequence[str], files: dict[str, str], rounds: int, block: int
) -> dict[str, Any]:
    """What one rank measures of every contender: (cpu, wall, system, faults) of every step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program = captured(spec)
    trains = dict(_made(program, spec, contenders, files))
    losses = {name: [_mean(train()) for _ in range(LOSS_STEPS)] for name, train in trains.items()}
    figures: dict[str, list[list[float]]] = {name: [] for name in trains}
    order, shuffle = list(trains), random.Random(SEED)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            train = trains[name]
            dist.barrier()
            train()
            figures[name].append(_timed(train, block))
            if isinstance(train, PlannedSteps):
                train.runner.finish()
    dist.barrier()
    dist.destroy_process_group()
    return {"losses": losses, "figures": figures}


def _made(
    program: Program, spec: str, contenders: Sequence[str], files: dict[str, str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in contenders:
        if name in CONTENDERS:
            try:
                yield name, CONTENDERS[name](spec, SEED)
            except Unsuitable as why:
                _note(f"{name} is left out: {why}")
        else:
            method, _, mode = name.partition(" ")
            yield name, _ours(program, files[method], mode)


def _ours(program: Program, file: str, mode: str) -> Callable[[], Any]:
    known = "compile" in inspect.signature(ap.distribute).parameters
    how: dict[str, Any] = {"compile": mode} if known else {}
    return PlannedSteps(ap.distribute(program, Plan.load(file), **how), program.batch)


@dataclass(frozen=True)
class PlannedSteps:
    """Steps by a plan of ours."""

    runner: Runner
    batch: Any

    def __call__(self) -> Any:
        return self.runner.step(self.batch)


def _mean(loss: torch.Tensor) -> float:
    """The loss over both ranks: of their samples, or twice that of all samples."""
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def _timed(train: Callable[[], Any], steps: int) -> list[float]:
    """Of so many steps in a row, without a barrier that would hide what one leaves to the next; per
    step."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    used, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        train()
    used, wall = time.process_time() - used, time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    found = [used, wall, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt]
    return [figure / steps for figure in found]


def keep_memory() -> None:
    """Has glibc keep what it frees, for this process."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(TOP_PAD, 64 << 20)


# Outside


def captured(spec: str) -> Program:
    """The step of a model of the zoo."""
    it = zoo.load(spec, SEED)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def compare(name: str, spec: str, given: argparse.Namespace) -> list[Row]:
    """All contenders on one model."""
    program = captured(spec)
    plans = {}
    for method in given.methods:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plans[method] = ap.plan(program, ap.cluster("local:2"), method, calibrate=False)
    if given.auto:
        plans["auto"] = _auto(program, given.rate, given.auto, given.communication)
        policy = plans["auto"].strategy.communication
        _note(f"{name}: auto chose {plans['auto'].method}, {policy}")
    contenders = [*given.torch, *(f"{method} {mode}" for method in plans for mode in given.modes)]
    with tempfile.TemporaryDirectory() as folder:
        files = {method: str(Path(folder, f"{method}.json")) for method in plans}
        for method, plan in plans.items():
            plan.save(files[method])
        command = [sys.executable, __file__, "--spec", spec, "--rounds", str(given.rounds)]
        command += ["--block", str(given.block), "--plans", json.dumps(files)]
        command += ["--contenders", *contenders, *(["--keep-memory"] * given.keep_memory)]
        with before_others() if given.first else nullcontext():
            answers = run_ranks(command, LIMIT, given.rate)
    return rows(name, answers)


def _auto(program: Program, rate: float | None, budget: float, communication: str) -> Plan:
    """The plan of `auto` with costs that are measured here, for this machine or the cable."""
    here = ap.cluster("local:2")
    if rate is None:
        return ap.plan(program, here, budget=budget, note=_note)
    from limited_link import _own_cache, hosts

    from apportion.plan.make_plan import make_plan
    from apportion.run.calibrate import Calibrator
    from apportion.run.cost_cache import BUDGET
    from apportion.run.step_source import source_of

    with (
        before_others(), _own_cache(), Calibrator(source_of(program), here, BUDGET, _note) as costs,
    ):  # fmt: skip
        where, how = hosts(rate, 30e-6), communication
        return make_plan(program, where, budget=budget, seed=SEED, costs=costs, communication=how)


def rows(model: str, answers: Sequence[Any]) -> list[Row]:
    """The rows of a model, with their ratios."""
    found: dict[str, Row] = {}
    for name in answers[0]["figures"]:
        steps = np.array([answer["figures"][name] for answer in answers])
        cpu, system, faults = (steps[:, :, k].sum(axis=0) for k in (0, 2, 3))
        wall = steps[:, :, 1].max(axis=0)
        low = [float(np.quantile(x, LOW)) for x in (cpu, wall)]
        mid = [float(np.median(x)) for x in (cpu, wall, system, faults)]
        found[name] = Row(
            model, name, low[0], mid[0], low[1], mid[1], mid[2], mid[3],
            answers[0]["losses"][name],
            [r for r in RIVALS.get(name.partition(" ")[0], ()) if r in answers[0]["figures"]],
        )  # fmt: skip
    return [_compared(row, [found[rival] for rival in row.rivals]) for row in found.values()]


def _compared(row: Row, rivals: Sequence[Row]) -> Row:
    if not rivals:
        return row
    ratios = {
        f"{key}_ratio": getattr(row, key) / min(getattr(rival, key) for rival in rivals)
        for key in ("cpu", "wall", "cpu_median", "wall_median")
    }
    return Row(**{**asdict(row), **ratios})


def table(found: Sequence[Row]) -> Iterator[str]:
    """The rows in Markdown."""
    yield (
        "| model | contender | CPU ms | median | wall ms | median | kernel ms | page faults | "
        "loss | CPU ratio | median | wall ratio | median |"
    )
    yield "|---" * 13 + "|"
    for r in found:
        times = (r.cpu, r.cpu_median, r.wall, r.wall_median, r.system)
        ratios = (r.cpu_ratio, r.cpu_median_ratio, r.wall_ratio, r.wall_median_ratio)
        cells = [
            r.model, r.contender, *(f"{x * 1e3:.1f}" for x in times), f"{r.faults:.0f}",
            f"{r.losses[-1]:.6f}", *("" if x is None else f"{x:.2f}" for x in ratios),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _note(text: str) -> None:
    print(f"speed: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names or specs")
    parser.add_argument("--methods", nargs="*", default=["data", "fsdp", "fsdp-keep", "megatron"])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--torch", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--block", type=int, default=BLOCK, help="steps that count in a round")
    parser.add_argument("--rate", type=float, help="bytes/s of a cable; needs root")
    parser.add_argument("--auto", type=float, default=0.0, help="seconds for auto's plan as well")
    parser.add_argument("--communication", default="auto", help="of auto's plan over a cable")
    parser.add_argument("--keep-memory", action="store_true", help="glibc keeps what it frees")
    parser.add_argument("--first", action="store_true", help="ranks before all else; needs root")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    parser.add_argument("--contenders", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--plans", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.keep_memory:
        keep_memory()
    if given.out:
        warnings.simplefilter("ignore")
        answer = rank(given.spec, given.contenders, given.plans, given.rounds, given.block)
        given.out.write_text(json.dumps(answer), encoding="utf-8")
        return 0
    if given.quick:
        given.models, given.rounds, given.block = list(TINY), 1, 1
    found: list[Row] = []
    for name in given.models:
        found += compare(name, (MODELS | TINY).get(name, name), given)
        print("\n".join(list(table([r for r in found if r.model == name]))), flush=True)
        if given.json:
            given.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
