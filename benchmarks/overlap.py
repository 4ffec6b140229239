"""Do messages travel while a rank computes? Data parallelism over a cable as slow as the compute.

    sudo python benchmarks/overlap.py
    sudo python benchmarks/overlap.py --model mlp:layers=8,width=768,batch=512 --rounds 12 --json

Two processes in network namespaces of their own. What each computes in a step is measured first,
without messages; then the cable between them is made just so slow that a step's messages take as
long. Rounds follow of the compute alone, its forward pass alone, the messages alone in one piece,
and of a few divided steps under each policy of communication. If all overlapped, a step would take
as long as the longer of the two. The gradients that are sent exist only after the forward pass, so
that within a step (wfbp) forward plus messages is a bound too; steps that overlap (p3) have none.
The simulator predicts both from costs that were calibrated on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from limited_link import LOW, PAYLOAD, SEED, _knock, _own_cache, hosts
from namespaces import limit, why_not
from two_ranks import before_others, cable, run_ranks

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.plan.plan import Plan
from apportion.run.runner import Runner

MODEL = "mlp:layers=6,width=1024,batch=512"
POLICIES = ("none", "wfbp", "p3", "auto")
ROUNDS, WARM, LIMIT, STEPS = 8, 3, 300.0, 4
FREE = 1e10  # bytes/s of a cable that does not limit


@dataclass(frozen=True)
class Overlap:
    """Seconds of a step and of its pieces, at a cable of `rate` bytes/s."""

    model: str
    mode: str
    rate: float
    bytes_each_way: int
    compute: float
    forward: float
    communication: float
    policy: str
    how: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The measured step over the longer of compute and communication."""
        return self.measured / max(self.compute, self.communication)

    @property
    def bound_ratio(self) -> float:
        """The measured step over what can overlap: messages begin after the forward pass."""
        return self.measured / max(self.compute, self.forward + self.communication)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


# In the namespaces


def rank(spec: str, file: str, mode: str, rounds: int, peers: list[str]) -> dict[str, Any]:
    """What one rank measures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    latency = _knock(peers)
    program = captured(spec)
    plan = Plan.load(file)
    nbytes = plan.tasks.bytes_moved // 2
    alone, half = _alone(spec, mode)
    out, into = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def exchange() -> None:
        works = [dist.irecv(into, 1 - dist.get_rank()), dist.isend(out, 1 - dist.get_rank())]
        for work in works:
            assert work is not None
            work.wait()

    def forward() -> None:
        half.step(half.model, half.batch)

    def steps(runner: Runner) -> float:
        runner.step(program.batch)
        began = time.perf_counter()
        for _ in range(STEPS):
            runner.step(program.batch)
        took = (time.perf_counter() - began) / STEPS
        runner.finish()
        return took

    pieces: dict[str, Callable[[], Any]] = {
        "compute": lambda: alone.step(half.batch),
        "forward": forward,
        "communication": exchange,
    }
    limit(cable(FREE))
    compute = [_timed(pieces["compute"]) for _ in range(WARM + 5)][WARM:]
    rate = nbytes / PAYLOAD / max_of(float(np.quantile(compute, LOW)))
    plan = replace(plan, cluster=hosts(rate, max_of(latency)))
    plans = {policy: plan.with_communication(policy) for policy in POLICIES}
    runners = {p: ap.distribute(program, made, compile=mode) for p, made in plans.items()}
    for runner in runners.values():
        steps(runner)
    limit(cable(rate))
    found: dict[str, list[float]] = {name: [] for name in (*pieces, *runners)}
    for _ in range(rounds):
        for name, piece in pieces.items():
            _timed(piece)
            found[name].append(_timed(piece))
        for name, runner in runners.items():
            dist.barrier()
            found[name].append(steps(runner))
    dist.barrier()
    dist.destroy_process_group()
    how = {p: str(made.strategy.communication) for p, made in plans.items()}
    predicted = {p: made.predicted.step_seconds for p, made in plans.items()}
    answer = {"rate": rate, "bytes": nbytes, "seconds": found}
    return answer | {"how": how, "predicted": predicted}


def max_of(number: float) -> float:
    """The largest of both ranks' numbers."""
    agreed = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return float(agreed)


def _alone(spec: str, mode: str) -> tuple[Runner, zoo.Loaded]:
    """The step on half of the batch, undivided: what a rank computes."""
    name, _, settings = spec.partition(":")
    halves = [
        f"batch={int(item.removeprefix('batch=')) // 2}" if item.startswith("batch=") else item
        for item in settings.split(",")
    ]
    it = zoo.load(f"{name}:{','.join(halves)}", SEED)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    made = ap.plan(program, ap.cluster("local:1"), "single", calibrate=False)
    executable = Executable(made.space, made.strategy, made.tasks)
    return Runner(program, worker(executable, 0, mode=mode)), it


def _timed(piece: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    piece()
    return time.perf_counter() - began


# Outside


def captured(spec: str) -> Program:
    """The step of a model of the zoo."""
    it = zoo.load(spec, SEED)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def measure(spec: str, mode: str, rounds: int) -> list[Overlap]:
    """Calibrates, measures and predicts; an Overlap for each policy."""
    program = captured(spec)
    with before_others(), _own_cache(), tempfile.TemporaryDirectory() as folder:
        plan = ap.plan(program, ap.cluster("local:2"), "data", seed=SEED, note=_note)
        file = str(Path(folder, "plan.json"))
        plan.save(file)
        command = [sys.executable, __file__, "--model", spec, "--mode", mode, "--plan", file]
        answers = run_ranks([*command, "--rounds", str(rounds)], LIMIT, FREE)
    seconds = {
        name: float(np.quantile(np.max([a["seconds"][name] for a in answers], axis=0), LOW))
        for name in answers[0]["seconds"]
    }
    one = answers[0]
    alone = (seconds["compute"], seconds["forward"], seconds["communication"])
    return [
        Overlap(
            spec, mode, one["rate"], one["bytes"], *alone, policy, one["how"][policy],
            seconds[policy], one["predicted"][policy],
        )
        for policy in POLICIES
    ]  # fmt: skip


def _note(text: str) -> None:
    print(f"overlap: {text}", file=sys.stderr, flush=True)


def show(found: Overlap, as_json: bool) -> None:
    """Prints what was found, in a table or as a line of JSON."""
    ratios = {name: getattr(found, name) for name in ("ratio", "bound_ratio", "error")}
    if as_json:
        print(json.dumps(asdict(found) | ratios))
        return
    how = f"{found.policy} ({found.how})"
    print(f"{found.model}, {found.mode}: {found.rate * 8e-6:.0f} Mbit/s, {how}")
    for name in ("compute", "forward", "communication", "measured", "predicted"):
        print(f"  {name:14}{getattr(found, name) * 1e3:8.1f} ms")
    print(f"  measured / max(compute, communication)            {found.ratio:.2f}")
    print(f"  measured / max(compute, forward + communication)  {found.bound_ratio:.2f}")
    print(f"  error of the prediction                           {found.error:+.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL, help="a spec with batch=")
    parser.add_argument("--mode", default="generated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out:
        peers = ["10.77.0.1", "10.77.0.2"]
        answer = rank(given.model, given.plan, given.mode, given.rounds, peers)
        given.out.write_text(json.dumps(answer), encoding="utf-8")
        return 0
    if reason := why_not():
        _note(reason)
        return 2
    for found in measure(given.model, given.mode, given.rounds):
        show(found, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
