"""Policies of communication beside each other and beside DDP, over cables from fast to slow.

    sudo python benchmarks/p3.py --models vgg19 --json vgg19.json         six cables, five minutes
    sudo python benchmarks/p3.py --models sockeye --ratios 1 2 --seconds 20
    sudo python benchmarks/p3.py --models tiny --seconds 1                to see that all of it runs
    python benchmarks/p3.py --read *.json --write docs/p3.md

The models are those of P3's evaluation, scaled down (p3_models.py). Two processes train each by
data parallelism, in network namespaces of their own, with a token bucket at either end of the cable
(`tc tbf`). The cables are so fast that a step's messages take 0.25 to 4 times as long as a rank
computes, and one is not limited. What is computed and what messages cost the processors is
calibrated first; every policy then plans for every cable, and the simulator predicts it.

All contenders of a model live in the same two processes and take turns: in every round each does
one step that does not count and a few that do, in another order each time. Policies that decided
the same are one contender. Those that tune slices and credits by measurement (bytescheduler, auto)
do so over each cable before. A step's time is that of the slower rank; given is the lower quartile
of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import p3_models
import torch
import torch.distributed as dist
from limited_link import LOW, PAYLOAD, SEED, _own_cache, hosts
from namespaces import limit, why_not
from p3_tables import (
    DDP,
    DDP_SMALL,
    Contender,
    Found,
    Point,
    Sweep,
    read_sweep,
    tables,
    write_tables,
)
from torch.nn.parallel import DistributedDataParallel
from torch_parallel import Train, fused, loaded, own_samples, trainer
from two_ranks import before_others, cable, run_ranks

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.execute.transport import MEASURED
from apportion.execute.wire import Pace
from apportion.plan.plan import Plan
from apportion.run.runner import Runner

POLICIES = ("none", "wfbp", "p3", "tictac", "bytescheduler", "auto")
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0)  # 0: a cable that is not limited
FREE = 1e10  # bytes/s of that
LATENCY = 30e-6
STEPS, LEAST_ROUNDS, SECONDS, LIMIT = 3, 3, 40.0, 900.0
LOSS_STEPS = 3


# In the namespaces


def rank(model: str, cables: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What one rank measures: (wall, cpu) of every round of every contender over every cable."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = p3_models.spec(model)
    program = captured(spec)
    trains: dict[str, Train | Runner] = {}
    for each in (one for c in cables for one in c["contenders"]):
        key = each["file"] or each["name"]
        if key not in trains:
            trains[key] = _train(program, spec, each["name"], each["file"])
    first = {c["name"]: c["file"] or c["name"] for c in cables[-1]["contenders"]}
    early = {
        key: [_mean(_step(trains[key], program)) for _ in range(LOSS_STEPS)]
        for key in dict.fromkeys(first.values())
    }
    losses = {name: early[key] for name, key in first.items()}
    figures: list[Any] = []
    tuned: list[dict[str, str]] = []
    for where in cables:
        limit(cable(where["rate"]))
        keys = {c["name"]: c["file"] or c["name"] for c in where["contenders"]}
        chosen = {key: _tuned(trains[key], program) for key in dict.fromkeys(keys.values())}
        tuned.append({name: chosen[key] for name, key in keys.items()})
        rounds = _take_turns({key: trains[key] for key in keys.values()}, program, seconds)
        figures.append({name: rounds[key] for name, key in keys.items()})
    dist.barrier()
    dist.destroy_process_group()
    return {"figures": figures, "losses": losses, "tuned": tuned}


def _tuned(train: Train | Runner, program: Program) -> str:
    """What a runner has measured to be quickest over this cable, in words; empty if the plan's."""
    if not isinstance(train, Runner):
        return ""
    worker = train.worker
    worker.measure_pace()
    while worker.search is not None:
        _step(train, program)
    train.finish()
    how, pace = worker.rank.executable.strategy.communication, worker.pace
    if pace is None or pace == Pace(how.slice_bytes, how.credit_bytes):
        return ""
    return str(replace(how, slice_bytes=pace.slice_bytes, credit_bytes=pace.credit_bytes))


def _train(program: Program, spec: str, name: str, file: str) -> Train | Runner:
    if file:
        return ap.distribute(program, Plan.load(file), compile="generated")
    it, names = loaded(spec, SEED)
    nbytes = sum(p.nbytes for p in it.model.parameters())
    bucket = {"bucket_cap_mb": nbytes / 8 / 2**20} if name == DDP_SMALL else {}
    optimizer = fused(it.optimizer, names, it.model)
    model = DistributedDataParallel(it.model, gradient_as_bucket_view=True, **bucket)
    return trainer(it.step, model, optimizer, own_samples(it.batch))


def _step(train: Train | Runner, program: Program) -> torch.Tensor:
    if not isinstance(train, Runner):
        return train()
    loss: torch.Tensor = train.step(program.batch)
    return loss


def _take_turns(
    contenders: dict[str, Train | Runner], program: Program, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Rounds for so long, and a few in any case."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    order, shuffle, began = list(contenders), random.Random(SEED), time.perf_counter()
    while len(found[order[0]]) < LEAST_ROUNDS or _by_first(time.perf_counter() - began < seconds):
        shuffle.shuffle(order)
        for name in order:
            train = contenders[name]
            dist.barrier()
            _step(train, program)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                _step(train, program)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            found[name].append((wall / STEPS, cpu / STEPS))
            if isinstance(train, Runner):
                train.finish()
    return found


def _by_first(true: bool) -> bool:
    """What the first rank says."""
    flag = torch.tensor([int(true)])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _mean(loss: torch.Tensor) -> float:
    """The loss over both ranks: of their samples, or twice that of all samples."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


# Outside


def captured(spec: str) -> Program:
    """The step of a model."""
    it = zoo.load(spec, SEED)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def sweep(
    model: str, ratios: Sequence[float], policies: Sequence[str], seconds: float, carrier: str
) -> Sweep:
    """Calibrates, plans, predicts and measures one model."""
    program = captured(p3_models.spec(model))
    with before_others(), _own_cache(), tempfile.TemporaryDirectory() as folder:
        os.environ["APPORTION_TRANSPORT"] = carrier
        began = time.perf_counter()
        plan = ap.plan(program, ap.cluster("local:2"), "data", seed=SEED, note=_note)
        calibration = time.perf_counter() - began
        messages = plan.tasks.bytes_moved // 2
        free = replace(plan, cluster=hosts(FREE, LATENCY)).simulate()
        compute = free.predicted.step_seconds
        _note(f"{model}: {compute * 1e3:.0f} ms, {messages / 1e6:.1f} MB from each rank a step")
        rates = [messages / PAYLOAD / (r * compute) if r else FREE for r in ratios]
        cables = []
        for rate in rates:
            contenders = [_planned(plan, rate, policy, Path(folder)) for policy in policies]
            contenders += [Contender(name) for name in (DDP, DDP_SMALL)]
            cables.append({"rate": rate, "contenders": [asdict(each) for each in contenders]})
        file = Path(folder, "cables")
        file.write_text(json.dumps(cables), encoding="utf-8")
        command = [sys.executable, __file__, "--models", model, "--cables", str(file)]
        _note(f"{model}: measuring")
        answers = run_ranks([*command, "--seconds", str(seconds)], LIMIT, FREE)
    return Sweep(
        model, f"{_processor()}, 2 cores, torch {torch.__version__.partition('+')[0]}",
        datetime.now(UTC).strftime("%Y-%m-%d"), p3_models.BATCH[model],
        sum(p.numel() for p in program.model.parameters()), messages, compute, calibration,
        answers[0]["losses"],
        [
            Point(ratio, rate, [_joined(c, answers, k) for c in where["contenders"]])
            for k, (ratio, rate, where) in enumerate(zip(ratios, rates, cables, strict=True))
        ],
    )  # fmt: skip


def _planned(plan: Plan, rate: float, policy: str, folder: Path) -> Contender:
    """The plan with a policy for a cable; a file for each decision."""
    began = time.perf_counter()
    made = replace(plan, cluster=hosts(rate, LATENCY)).with_communication(policy)
    took = time.perf_counter() - began
    how = made.strategy.communication
    decided = hash(replace(how, policy="")), how.overlaps and policy in MEASURED
    file = folder / f"{abs(hash(decided))}.json"
    if not file.exists():
        made.save(file)
    _note(f"{rate * 8e-6:.0f} Mbit/s, {policy}: {made.predicted.step_seconds * 1e3:.0f} ms, {how}")
    return Contender(policy, str(how), str(file), took, made.predicted.step_seconds)


def _joined(contender: dict[str, Any], answers: Sequence[Any], k: int) -> Found:
    """A contender's rounds of both ranks."""
    rounds = np.array([answer["figures"][k][contender["name"]] for answer in answers])
    contender |= {"how": answers[0]["tuned"][k][contender["name"]] or contender["how"]}
    wall, cpu = rounds[:, :, 0].max(axis=0), rounds[:, :, 1].sum(axis=0)
    low = [float(np.quantile(x, LOW)) for x in (wall, cpu)]
    return Found(
        Contender(**contender | {"file": ""}), low[0], float(np.median(wall)), low[1], wall.tolist()
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        named = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _note(text: str) -> None:
    print(f"p3: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(p3_models.PUBLISHED))
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), help="0: no limit")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each cable")
    parser.add_argument("--carrier", choices=("wire", "gloo"), default="wire")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="what was found before")
    parser.add_argument("--write", type=Path, help="a page to put the tables into")
    parser.add_argument("--cables", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.out:
        cables = json.loads(given.cables.read_text(encoding="utf-8"))
        answer = rank(given.models[0], cables, given.seconds)
        given.out.write_text(json.dumps(answer), encoding="utf-8")
        return 0
    found = [read_sweep(one) for f in given.read for one in json.loads(f.read_text())]
    if not given.read:
        if reason := why_not():
            _note(reason)
            return 2
        for model in given.models:
            found.append(sweep(model, given.ratios, given.policies, given.seconds, given.carrier))
            if given.json:
                given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    print("\n".join(tables(found)))
    if given.write:
        write_tables(given.write, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
