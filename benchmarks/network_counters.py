"""Are the bytes that a plan says it moves those that the kernel sees? The loopback's own counter.

    sudo python benchmarks/network_counters.py                       2 and 3 processes, four methods
    sudo python benchmarks/network_counters.py --model gpt2:tiny --json

Processes run in a network namespace of their own, where nothing else sends. A run of one step and
one of several are counted; the difference is what the further steps sent. Beside the messages the
kernel counts headers of TCP and IP, acknowledgements and gloo's own framing; what processes send
around a step that moves nothing is counted first and taken off. Needs Linux, root and `ip`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from namespaces import alone, sent_bytes, why_not

from apportion import zoo
from apportion.capture.capture import capture
from apportion.lower.lower import lower
from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    TRANSFER,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource, source_of_model
from apportion.run.training import TrainingRequest
from apportion.search import METHODS, Problem
from apportion.split.space import Space
from apportion.split.strategy import Strategy, space_of

MODEL = "mlp:layers=4,width=512,batch=64"
PLANS = ("data", "fsdp", "tofu", "random")
STEPS, SEED = 5, 0
TRIES = 3
LIMIT = 200.0  # seconds for each number of processes


@dataclass(frozen=True)
class Count:
    """Of one step: bytes and messages of the plan, and bytes that the kernel counted."""

    method: str
    processes: int
    bytes_moved: int
    messages: int
    counted: float

    @property
    def overhead(self) -> float:
        """What the kernel counted beyond the messages, relative to them."""
        return self.counted / self.bytes_moved - 1


def count(model: str, processes: int, methods: Sequence[str], steps: int) -> Iterator[Count]:
    """Counts one method after the other, here: only where nothing else sends."""
    it = zoo.load(model, SEED)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    graph, source = program.graph, source_of_model(program, model, SEED)
    machine = cluster(f"local:{processes}")
    problem = Problem(Space(graph), machine, default_cost(machine))
    with ProcessPool(processes, LIMIT) as pool:
        idle = _counted(pool, source, METHODS["single"](problem, seed=SEED).strategy, steps)
        for method in methods:
            strategy = METHODS[method](problem, seed=SEED).strategy
            tasks = lower(space_of(graph, strategy), strategy, processes)
            found = _counted(pool, source, strategy, steps) - idle
            yield Count(method, processes, tasks.bytes_moved, _messages(tasks), found)


def _counted(pool: ProcessPool, source: StepSource, strategy: Strategy, steps: int) -> float:
    """Bytes per step that the kernel counted. The least of several runs: where a receiver is not
    given a core for long, TCP sends again what has arrived already."""
    one, several = (
        min(_sent(pool, source, strategy, number) for _ in range(TRIES))
        for number in (1, 1 + steps)
    )
    return (several - one) / steps


def _sent(pool: ProcessPool, source: StepSource, strategy: Strategy, steps: int) -> int:
    """Bytes that the kernel counted during a run of so many steps."""
    before = sent_bytes("lo")
    pool.train(TrainingRequest(source, strategy, len(pool.pipes), steps, SEED))
    return sent_bytes("lo") - before


def _messages(tasks: TaskGraph) -> int:
    sizes = [len(tasks.groups[group]) for group in tasks.group.tolist() if group >= 0]
    return int((tasks.kind == TRANSFER).sum()) + sum(size * (size - 1) for size in sizes)


def counts(model: str, processes: int, methods: Sequence[str], steps: int) -> list[Count]:
    """The same in a namespace of its own; RuntimeError if it fails or the time is over."""
    command = [
        sys.executable, __file__, "--inside", "--model", model, "--steps", str(steps),
        "--processes", str(processes), "--methods", *methods,
    ]  # fmt: skip
    with alone() as machine, machine.start(command, stdout=subprocess.PIPE) as process:
        try:
            out, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"counting did not end within {LIMIT:g} s") from None
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"counting ended with status {process.returncode}")
    return [Count(**row) for row in json.loads(out)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--methods", nargs="+", help="those that suit the number of processes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["APPORTION_TRANSPORT"] = "gloo"  # what the kernel counts goes over the loopback
    if not given.inside and (reason := why_not()):
        print(f"network_counters: {reason}", file=sys.stderr)
        return 2
    rows: list[Count] = []
    for processes in given.processes:
        power = processes & (processes - 1) == 0  # tofu cuts in halves
        methods = given.methods or [m for m in PLANS if power or m != "tofu"]
        verb = count if given.inside else counts
        rows += verb(given.model, processes, methods, given.steps)
    if given.json or given.inside:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{'plan':8}{'processes':>10}{'messages':>10}{'bytes moved':>13}{'counted':>13}{'':>8}")
    for row in rows:
        print(
            f"{row.method:8}{row.processes:10}{row.messages:10}{row.bytes_moved:13}"
            f"{row.counted:13.0f}{row.overhead:+8.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
