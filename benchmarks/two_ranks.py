"""Two processes that run one script as the ranks of a process group, on this machine or a cable.

    answers = run_ranks([sys.executable, __file__, "--model", "mlp"], seconds=100)
    answers = run_ranks(command, seconds=100, rate=125e6)       over a cable of so many bytes/s

The script is given `--out FILE` and writes its answer there, as JSON. On a cable each rank lives in
a network namespace of its own (namespaces.py says what that needs).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from namespaces import INTERFACE, Cable, cabled

RANKS = 2
PORT = 29500
# What TCP hands the cable at once: 2.5 ms worth, within what Linux allows. Every segment costs the
# cores that are to compute meanwhile a timer's interrupt and two switches, which a network card
# that cuts segments itself would not.
SEGMENT_SECONDS, LEAST_SEGMENT, MOST_SEGMENT = 2.5e-3, 65_536, 262_144
BURST_SEGMENTS = (
    2.3  # of these pass the bucket at once; from a smaller one the kernel would cut them
)


def run_ranks(command: Sequence[str], seconds: float, rate: float | None = None) -> list[Any]:
    """What both ranks answer, each on a core of its own; RuntimeError if one fails or the time is
    over."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        outs = [Path(folder, f"rank{number}") for number in range(RANKS)]
        starts: list[Any] = [subprocess.Popen] * RANKS
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        if rate is not None:
            machines = stack.enter_context(cabled(cable(rate)))
            starts = [machine.start for machine in machines]
            settings = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": str(PORT)}
            settings["GLOO_SOCKET_IFNAME"] = INTERFACE
        started = []
        for number, out in enumerate(outs):
            environment = os.environ | settings | {
                "RANK": str(number), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            own = ["taskset", "-c", str(number % cores)] if cores >= RANKS else []
            started.append(starts[number]([*own, *command, "--out", str(out)], env=environment))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        _await(started, seconds)
        return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


@contextmanager
def before_others() -> Iterator[None]:
    """This process and those it starts get the cores before whatever else the machine does, if they
    may; among themselves they share them as usual, threads that carry messages too."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    _hurry(-20)
    try:
        yield
    finally:
        _hurry(before)


def _hurry(nice: int) -> None:
    """Linux compares sessions first, by a number of their own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")


def cable(rate: float) -> Cable:
    """A cable of so many bytes per second."""
    segment = min(max(round(rate * SEGMENT_SECONDS), LEAST_SEGMENT), MOST_SEGMENT)
    return Cable(rate, max(round(BURST_SEGMENTS * segment), round(rate * 1e-3)), segment=segment)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _await(started: Sequence[subprocess.Popen[Any]], seconds: float) -> None:
    """Waits for all; RuntimeError as soon as one fails, or when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        ended = [process.poll() for process in started]
        for number, status in enumerate(ended):
            if status:
                raise RuntimeError(f"rank {number} ended with status {status}")
        if None not in ended:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks did not end within {seconds:g} s")
        time.sleep(0.05)
