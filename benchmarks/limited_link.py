"""Is the step time over a slow cable predicted? Two processes in network namespaces of their own.

    sudo python benchmarks/limited_link.py                         100 Mbit/s and 1 Gbit/s
    sudo python benchmarks/limited_link.py --rates 12.5e6 --methods tofu data --json

What the processes compute and what messages cost them is calibrated on this machine, where messages
do not leave it. A cluster file puts the processes on two hosts and says how fast the cable between
them is, and so every plan is predicted. Then each rank lives in a namespace of its own; a veth pair
joins them, and a token bucket at each end (`tc tbf`) lets so many bytes per second out. All plans
run at all rates in turn. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from namespaces import INTERFACE, Cable, Machine, cabled, limit, why_not

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.machine.topology import Cluster
from apportion.plan.plan import Plan
from apportion.run.runner import Runner

MODEL = "mlp:layers=4,width=768,batch=128"
METHODS = ("tofu", "data", "random")
RATES = (12.5e6, 125e6)
ROUNDS, SEED = 5, 0
LOW = 0.25  # quantile over the rounds: whatever disturbs a step makes it longer
LIMIT = 300.0  # seconds for all measured steps
PORT, KNOCKS = 29500, 25
PRIORITY = 10  # of real-time processes

# Of a full Ethernet frame: 1,500 bytes of IP packet and 14 of header pass the bucket, of which TCP
# with time stamps leaves 1,448 to messages. In an exchange the other direction's acknowledgements
# pass it too: 66 bytes for every two frames.
PAYLOAD = 1448 / (1514 + 66 / 2)
BURST_SECONDS = 0.25e-3  # what the bucket lets through at once, at least two frames
FRAMES = 2 * 1514

CLUSTER = """
name = "two hosts on a cable of {rate:g} bytes/s"
communication_on_device = true

[[switch]]
name = "cable"

[[switch]]
name = "host"
parent = "cable"
count = 2
uplink = {{bandwidth = {bandwidth}, latency = {latency}}}
host = {{memory_bytes = "4 GB", bandwidth = "8 GB/s", latency = 0}}
provenance = "a token bucket of {rate:g} bytes/s less headers; half of the time to connect"

[[device]]
name = "process"
kind = "cpu"
on = "host"
count = {each}
memory_bytes = "4 GB"
memory_bandwidth = "8 GB/s"
launch_seconds = "5 us"
flops = {{float64 = 15e9, float32 = 30e9, float16 = 30e9}}
port = {{bandwidth = "8 GB/s", latency = 0}}
provenance = "assumed, and not used: costs are measured"
"""


@dataclass(frozen=True)
class Row:
    """One plan over one cable; seconds are of a step, bytes of all its messages."""

    model: str
    method: str
    rate: float
    bytes_moved: int
    sent_bytes: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Run:
    """Seconds that the cable needs for nothing; seconds and bytes of a step, per rate and plan."""

    latency: float
    seconds: list[list[float]]
    sent: list[list[int]]


# In the namespaces


def rank(
    model: str, files: Sequence[str], rates: Sequence[float], rounds: int, peers: Sequence[str]
) -> dict[str, Any]:
    """What one rank does and measures: the cable, then all plans at all rates, in turn."""
    torch.set_num_threads(1)
    program = _captured(model)
    dist.init_process_group("gloo")
    latency = _knock(peers)
    runners = [ap.distribute(program, Plan.load(file)) for file in files]
    seconds: list[list[list[float]]] = [[[] for _ in files] for _ in rates]
    sent = [[0 for _ in files] for _ in rates]
    for _ in range(rounds):
        for r, rate in enumerate(rates):
            limit(Cable(rate, burst(rate)))
            for p, runner in enumerate(runners):
                _step(runner, program.batch)  # the transport finds the new rate
                took, sent[r][p] = _step(runner, program.batch)
                seconds[r][p].append(took)
    dist.barrier()
    dist.destroy_process_group()
    return {"latency": latency, "seconds": seconds, "sent": sent}


def _captured(model: str) -> Program:
    it = zoo.load(model, SEED)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def _knock(peers: Sequence[str]) -> float:
    """Half of the seconds that a connection to the other rank takes to be made."""
    me = dist.get_rank()
    with socket.create_server((peers[me], PORT + 1 + me), backlog=KNOCKS):
        dist.barrier()
        seconds = []
        for _ in range(KNOCKS):
            began = time.perf_counter()
            with socket.create_connection((peers[1 - me], PORT + 2 - me)):
                seconds.append((time.perf_counter() - began) / 2)
        dist.barrier()
    return median(seconds)


def _step(runner: Runner, batch: Any) -> tuple[float, int]:
    """One step together with the other rank: seconds and bytes sent."""
    sent = runner.worker.sent_bytes
    dist.barrier()
    began = time.perf_counter()
    runner.step(batch)
    return time.perf_counter() - began, runner.worker.sent_bytes - sent


def burst(rate: float) -> int:
    """Bytes that the bucket lets through at once."""
    return max(FRAMES, round(rate * BURST_SECONDS))


# Outside


def run(
    model: str, plans: Sequence[Plan], rates: Sequence[float], rounds: int, seconds: float
) -> Run:
    """Both ranks over a cable; RuntimeError if one fails or the time is over."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        machines = stack.enter_context(cabled(Cable(rates[0], burst(rates[0]))))
        files = [str(Path(folder, f"{number}.json")) for number in range(len(plans))]
        for plan, file in zip(plans, files, strict=True):
            plan.save(file)
        command = [
            sys.executable, __file__, "--model", model, "--rounds", str(rounds),
            "--rates", *map(str, rates), "--plans", *files,
            "--peers", *(machine.address for machine in machines),
        ]  # fmt: skip
        outs = [Path(folder, f"rank{number}") for number in range(len(machines))]
        started = []
        for number, (machine, out) in enumerate(zip(machines, outs, strict=True)):
            started.append(
                _start(machine, number, machines[0].address, [*command, "--out", str(out)])
            )
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        _await(started, seconds)
        return _joined([json.loads(out.read_text(encoding="utf-8")) for out in outs])


def _start(
    machine: Machine, number: int, master: str, command: Sequence[str]
) -> subprocess.Popen[str]:
    environment = dict(
        os.environ, RANK=str(number), WORLD_SIZE="2", MASTER_ADDR=master, MASTER_PORT=str(PORT),
        GLOO_SOCKET_IFNAME=INTERFACE, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR",
    )  # fmt: skip
    return machine.start(command, env=environment)


def _await(started: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    """Waits for all; RuntimeError as soon as one fails, or when the time is over."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in started):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks did not end within {seconds:g} s")
        _check(started)
        time.sleep(0.05)
    _check(started)


def _check(started: Sequence[subprocess.Popen[str]]) -> None:
    for number, process in enumerate(started):
        if process.returncode:
            raise RuntimeError(f"rank {number} ended with status {process.returncode}")


def _joined(answers: Sequence[dict[str, Any]]) -> Run:
    """A step ends when the last rank does."""
    seconds = np.array([answer["seconds"] for answer in answers]).max(axis=0)
    sent = np.array([answer["sent"] for answer in answers]).sum(axis=0)
    low = np.quantile(seconds, LOW, axis=-1)
    return Run(max(answer["latency"] for answer in answers), low.tolist(), sent.tolist())


def hosts(rate: float, latency: float, each: int = 1) -> Cluster:
    """The Cluster that a cable of this rate makes of two hosts with so many processes each, by way
    of a file."""
    text = CLUSTER.format(rate=rate, bandwidth=rate * PAYLOAD, latency=latency / 2, each=each)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cable.toml")
        file.write_text(text, encoding="utf-8")
        return ap.cluster(str(file))


def compare(
    model: str, methods: Sequence[str], rates: Sequence[float], rounds: int, seconds: float
) -> list[Row]:
    """Calibrates, measures and predicts every method at every rate."""
    program = _captured(model)
    with _before_others(), _own_cache():
        here = ap.cluster("local:2")
        plans = [ap.plan(program, here, method=method, seed=SEED, note=_note) for method in methods]
        done = run(model, plans, rates, rounds, seconds)
    rows = []
    for r, rate in enumerate(rates):
        there = hosts(rate, done.latency)
        for p, plan in enumerate(plans):
            guess = replace(plan, cluster=there).simulate().predicted
            measured = done.seconds[r][p]
            rows.append(
                Row(model, plan.method, rate, guess.bytes_moved, done.sent[r][p],
                    guess.step_seconds, measured)
            )  # fmt: skip
    return rows


@contextmanager
def _before_others() -> Iterator[None]:
    """This process and those it starts run before whatever else the machine does, if they may."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def _own_cache() -> Iterator[None]:
    """Measurements that were made under other conditions stay out, and these do not get in.
    Messages go through sockets, as over a cable."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"APPORTION_CACHE": folder, "APPORTION_TRANSPORT": "wire"}
        try:
            yield
        finally:
            for name in ("APPORTION_CACHE", "APPORTION_TRANSPORT"):
                del os.environ[name]
                os.environ |= {name: before[name]} if name in before else {}


def _note(text: str) -> None:
    print(f"limited_link: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="bytes/s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each plan and rate")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for measured steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plans", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--peers", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out:
        answer = rank(given.model, given.plans, given.rates, given.rounds, given.peers)
        given.out.write_text(json.dumps(answer), encoding="utf-8")
        return 0
    if reason := why_not():
        _note(reason)
        return 2
    rows = compare(given.model, given.methods, given.rates, given.rounds, given.limit)
    if given.json:
        print(json.dumps([{**asdict(row), "error": row.error} for row in rows]))
        return 0
    print(f"{'plan':8}{'Mbit/s':>8}{'MB moved':>10}{'predicted':>11}{'measured':>10}{'error':>8}")
    for row in rows:
        print(
            f"{row.method:8}{row.rate * 8e-6:8g}{row.bytes_moved / 1e6:10.2f}"
            f"{row.predicted * 1e3:8.1f} ms{row.measured * 1e3:7.1f} ms{row.error:8.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
