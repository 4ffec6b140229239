"""Relays between hosts that have several ranks each: what they gain over direct messages.

    sudo python benchmarks/relays.py                                 three cables, five minutes
    sudo python benchmarks/relays.py --rates 25e6 --seconds 10 --write docs/limited-link.md

Two network namespaces stand for hosts with two ranks each; a token bucket at either end of the
cable between them lets so many bytes per second out. A model trains by data parallelism: plans for
this cluster, once with direct exchanges and once with those that the planner chooses, both as they
are posted and with steps that overlap, and DistributedDataParallel, whose gloo sends in a ring. All
live in the same four processes and take turns. A step's time is that of the slowest rank; given is
the lower quartile of the rounds. Four ranks share this machine's cores, so that what they compute
takes longer than on hosts of their own; the cable is the kernel's. Needs what
benchmarks/namespaces.py needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from limited_link import LOW, SEED, _await, _captured, _own_cache, hosts
from namespaces import INTERFACE, Machine, cabled, limit, sent_bytes, why_not
from torch.nn.parallel import DistributedDataParallel
from torch_parallel import Train, fused, loaded, own_samples, trainer
from two_ranks import before_others, cable

import apportion as ap
from apportion.plan.candidates import PlanCosts
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.runner import Runner

HOSTS, EACH = 2, 2
RANKS = HOSTS * EACH
MODEL = "mlp:layers=4,width=1024,batch=256"
RATES = (12.5e6, 25e6, 62.5e6, 125e6)
LATENCY, SECONDS, LEAST_ROUNDS, STEPS, LIMIT = 30e-6, 20.0, 3, 2, 900.0
PORT = 29500
DDP = "DDP"


@dataclass(frozen=True)
class Contender:
    """A plan for a cable, in a file; or DDP, which has none."""

    name: str
    file: str = ""
    how: str = ""
    predicted: float = 0.0


@dataclass(frozen=True)
class Row:
    """A contender over a cable: seconds of a step, bytes that leave a host in it."""

    rate: float
    name: str
    how: str
    predicted: float
    measured: float
    sent: int


# In the namespaces


def rank(model: str, cables: Sequence[dict[str, Any]], seconds: float) -> list[Any]:
    """What one rank measures: by cable and contender (seconds of every round, bytes sent)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program = _captured(model)
    found = []
    for where in cables:
        trains = {each["name"]: _train(program, model, each) for each in where["contenders"]}
        if dist.get_rank() % EACH == 0:
            limit(cable(where["rate"]))
        dist.barrier()
        found.append(_take_turns(trains, program, seconds))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _train(program: Any, model: str, each: dict[str, Any]) -> Train | Runner:
    if each["file"]:
        return ap.distribute(program, Plan.load(each["file"]), compile="generated")
    it, names = loaded(model, SEED)
    optimizer = fused(it.optimizer, names, it.model)
    copy = DistributedDataParallel(it.model, gradient_as_bucket_view=True)
    return trainer(it.step, copy, optimizer, own_samples(it.batch))


def _take_turns(trains: dict[str, Any], program: Any, seconds: float) -> dict[str, Any]:
    rounds: dict[str, list[float]] = {name: [] for name in trains}
    sent: dict[str, list[int]] = {name: [] for name in trains}
    order, shuffle, began = list(trains), random.Random(SEED), time.perf_counter()
    while len(rounds[order[0]]) < LEAST_ROUNDS or _by_first(time.perf_counter() - began < seconds):
        shuffle.shuffle(order)
        for name in order:
            train = trains[name]
            step = train.step if isinstance(train, Runner) else lambda _, train=train: train()
            dist.barrier()
            before = sent_bytes(INTERFACE)
            step(program.batch)
            wall = time.perf_counter()
            for _ in range(STEPS):
                step(program.batch)
            rounds[name].append((time.perf_counter() - wall) / STEPS)
            if isinstance(train, Runner):
                train.finish()
            dist.barrier()
            sent[name].append((sent_bytes(INTERFACE) - before) // (STEPS + 1))
    return {name: (rounds[name], int(np.median(sent[name]))) for name in trains}


def _by_first(true: bool) -> bool:
    flag = torch.tensor([int(true)])
    dist.broadcast(flag, 0)
    return bool(flag.item())


# Outside


def compare(model: str, rates: Sequence[float], seconds: float) -> list[Row]:
    """Calibrates, plans, predicts and measures."""
    program = _captured(model)
    with before_others(), _own_cache(), tempfile.TemporaryDirectory() as folder:
        here = ap.plan(program, ap.cluster(f"local:{RANKS}"), "data", seed=SEED, note=_note)
        cables = []
        for rate in rates:
            contenders = [*_planned(program, here, rate, Path(folder)), Contender(DDP)]
            cables.append({"rate": rate, "contenders": [asdict(each) for each in contenders]})
        file = Path(folder, "cables")
        file.write_text(json.dumps(cables), encoding="utf-8")
        command = [
            sys.executable, __file__, "--model", model, "--seconds", str(seconds), "--cables",
            str(file),
        ]  # fmt: skip
        answers = _run(command, rates[0], Path(folder))
    return [
        _row(where["rate"], each, [answer[k][each["name"]] for answer in answers])
        for k, where in enumerate(cables)
        for each in where["contenders"]
    ]


def _planned(program: Any, here: Plan, rate: float, folder: Path) -> list[Contender]:
    """Direct exchanges and those that are chosen, without and with steps that overlap."""
    there, found = hosts(rate, LATENCY, EACH), []
    direct = replace(here, cluster=there)
    chosen = make_plan(
        program, there, "data", seed=SEED, costs=PlanCosts(here.cost), communication="wfbp"
    )
    for name, plan in (("direct", direct), ("chosen", chosen)):
        for policy in ("wfbp", "auto"):
            made = plan.with_communication(policy)
            file, how = folder / f"{rate:g}-{name}-{policy}.json", made.strategy.communication
            made.save(file)
            predicted = made.predicted.step_seconds
            _note(f"{rate * 8e-6:g} Mbit/s, {name}, {policy}: {predicted * 1e3:.0f} ms, {how}")
            found.append(Contender(f"{name}, {policy}", str(file), str(how), predicted))
    return found


def _run(command: Sequence[str], rate: float, folder: Path) -> list[Any]:
    with ExitStack() as stack:
        machines = stack.enter_context(cabled(cable(rate)))
        outs, started = [folder / f"rank{number}" for number in range(RANKS)], []
        for number, out in enumerate(outs):
            machine: Machine = machines[number // EACH]
            environment = os.environ | {
                "RANK": str(number), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(PORT),
                "LOCAL_RANK": str(number % EACH), "LOCAL_WORLD_SIZE": str(EACH),
                "MASTER_ADDR": machines[0].address, "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            started.append(machine.start([*command, "--out", str(out)], env=environment))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        _await(started, LIMIT)
        return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def _row(rate: float, each: dict[str, Any], answers: Sequence[Any]) -> Row:
    """The rounds of all ranks; bytes are counted by host, and both ranks of one see the same."""
    seconds = np.array([rounds for rounds, _ in answers]).max(axis=0)
    sent = max(nbytes for _, nbytes in answers)
    measured = float(np.quantile(seconds, LOW))
    return Row(rate, each["name"], each["how"], each["predicted"], measured, sent)


def table(rows: Sequence[Row]) -> str:
    """What was found, for the documentation."""
    lines = [
        "| cable, Mbit/s | exchanges | ms a step | predicted | MB that leave a host | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = f"{row.predicted * 1e3:.0f} ({row.predicted / row.measured - 1:+.1%})"
        lines.append(
            f"| {row.rate * 8e-6:g} | {row.name} | {row.measured * 1e3:.0f} | "
            f"{error if row.predicted else ''} | {row.sent / 1e6:.1f} | {row.how} |"
        )
    return "\n".join(lines)


def _write(text: str, page: Path) -> None:
    """Puts a table between its marks in a page."""
    begin, end = "<!-- measured: relays -->\n", "<!-- end of relays -->"
    before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    if not mark:
        raise ValueError(f"{page} has no {begin.strip()}")
    after = rest[rest.index(end) :]
    page.write_text(f"{before}{begin}{text}\n{after}", encoding="utf-8")


def _note(text: str) -> None:
    print(f"relays: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="bytes/s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of rounds for each cable")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("--write", type=Path, help="a page to write the table into")
    parser.add_argument("--cables", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out:
        cables = json.loads(given.cables.read_text(encoding="utf-8"))
        answer = rank(given.model, cables, given.seconds)
        given.out.write_text(json.dumps(answer), encoding="utf-8")
        return 0
    if reason := why_not():
        _note(reason)
        return 2
    rows = compare(given.model, given.rates, given.seconds)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    text = table(rows)
    print(text)
    if given.write:
        _write(text, given.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
