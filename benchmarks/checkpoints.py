"""Saved by four ranks under one plan, gone on with by two, three and six under others.

    python benchmarks/checkpoints.py --random 2
    python benchmarks/checkpoints.py --models gpt2:tiny --plans tofu recompute

Every model trains two steps in float64 on four devices, all ranks in this process, and is saved as
processes save it. Then the checkpoint is loaded

- on 2, 3 and 6 devices under another kind of plan each, whose state was filled with nonsense;
- into one plain PyTorch model and optimizer;

and trains two steps more. Losses, parameters, buffers and optimizer state must be those of plain
PyTorch that was never interrupted. At last plain PyTorch is saved after two steps, and goes on
divided. Plans are by methods, random ones, and data parallelism whose backward recomputes all it
can (`recompute`), whose activations lie on the host (`offload`), or whose state lies there and is
updated there (`host`) or on the device (`fetched`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from checkpoint_runs import SEED, RanksHere, batches, close

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.random_rules import CounterRandom
from apportion.capture.reference import eager_steps
from apportion.capture.wide_mode import computing_wide
from apportion.capture.widen import widened
from apportion.checkpoint.plain_model import load_checkpoint, save_checkpoint
from apportion.checkpoint.stored import open_checkpoint
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.planned_program import planned_program
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy

MODELS = ("gpt2:tiny", "resnet50:tiny", "nmt:tiny", "transformer-moe:tiny")
PLANS = ("data", "fsdp", "tofu", "random", "recompute", "offload", "host", "fetched")
OTHERS = (2, 3, 6)
BEFORE, AFTER = 2, 2
BUDGET = 2.0


@dataclass(frozen=True)
class Division:
    """A plan's Program, in float64, and its strategy."""

    program: Program
    strategy: Strategy


def captured(spec: str, seed: int = SEED) -> Program:
    it = zoo.load(spec, seed)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)


def divided(program: Program, kind: str, devices: int, seed: int) -> Division:
    """A step divided by a plan of that kind."""
    wide = replace(program, graph=widened(program.graph))
    if kind == "random":
        return Division(wide, draw(Space(wide.graph), devices, Random(seed)))
    where = cluster(f"local:{devices}")
    memory: dict[str, dict[str, Any]] = {
        "recompute": {"recompute": "full"}, "offload": {"offload": "full"},
        "host": {"host_state": "host"}, "fetched": {"host_state": "device"},
    }  # fmt: skip
    method = "data" if kind in memory else kind
    plan = make_plan(program, where, method, BUDGET, **memory.get(kind, {}))
    made = planned_program(program, plan)
    return Division(replace(made, graph=widened(made.graph)), plan.strategy)


def failures(spec: str, kinds: Sequence[str], randoms: int) -> Iterator[tuple[str, str]]:
    """(what was tried, what is wrong with it or "") for one model."""
    program = captured(spec)
    data = batches(program, 0, BEFORE + AFTER)
    expected, ends = eager_steps(program, data, SEED, wide=True)
    drawn = [kind for kind in kinds for _ in range(randoms if kind == "random" else 1)]
    for number, kind in enumerate(drawn):
        made = divided(program, kind, 4, number)
        with tempfile.TemporaryDirectory() as folder:
            four = RanksHere(made.program, made.strategy, 4)
            four.train(data[:BEFORE])
            path = four.save(Path(folder))
            for devices in OTHERS:
                other = drawn[(number + devices) % len(drawn)]
                name = f"{spec}: {kind} on 4, then {other} on {devices}"
                yield name, _gone_on(program, other, devices, number, path, expected, ends)
            yield f"{spec}: {kind} on 4, then plain", _plain(spec, path, expected, ends)
    yield f"{spec}: plain, then tofu on 3", _from_plain(spec, expected, ends)


def _gone_on(
    program: Program, kind: str, devices: int, seed: int, path: Path, expected: Any, ends: Any
) -> str:
    made = divided(program, kind, devices, seed)
    ranks = RanksHere(made.program, made.strategy, devices)
    for rank in ranks.ranks:
        for tensor in rank.tensors.values():
            tensor.fill_(7)
    notes = ranks.load(open_checkpoint(path))
    if notes:
        return f"notes {notes}"
    losses = ranks.train(batches(program, BEFORE, AFTER))
    last = ranks.whole()
    state = {
        ranks.states[0].values[v].key: t for v, t in ends.items() if v in ranks.states[0].values
    }
    return _compared(losses, expected[BEFORE:], last, state)


def _compared(losses: Any, expected: Any, found: Any, true: Any) -> str:
    for step, (one, other) in enumerate(zip(losses, expected, strict=True)):
        if not abs(one - other) <= 1e-9 * abs(other):
            return f"loss {step}: {one} instead of {other}"
    for key, tensor in true.items():
        if not close(found[key], tensor):
            return f"{key} differs"
    return ""


def _plain(spec: str, path: Path, expected: Any, ends: Any) -> str:
    """Plain PyTorch in float64 goes on from a divided run's checkpoint."""
    it = zoo.load(spec, SEED + 1)
    program = captured(spec, SEED + 1)
    model, optimizer = it.model.double(), it.optimizer
    resumed = load_checkpoint(path, model, optimizer)
    plain = replace(program, model=model, optimizer=optimizer, step=it.step)
    plain = replace(plain, steps_done=resumed.step)
    data = batches(captured(spec), BEFORE, AFTER)
    losses, last = eager_steps(plain, data, SEED, wide=True)
    names = {v: (b.name, b.state) for v, b in plain.bindings.items()}
    found = {f"{names[v]}": t for v, t in last.items()}
    return _compared(losses, expected[BEFORE:], found, {f"{names[v]}": t for v, t in ends.items()})


def _from_plain(spec: str, expected: Any, ends: Any) -> str:
    """A divided run goes on from plain PyTorch's."""
    program = captured(spec)
    it = zoo.load(spec, SEED)
    model = it.model.double()
    data = batches(program, 0, BEFORE)
    with torch.enable_grad():
        for number, batch in enumerate(data):
            wide = zoo_double(batch)
            with CounterRandom(SEED, number), computing_wide(torch.float32):
                it.optimizer.zero_grad()
                it.step(model, wide).backward()
                if it.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), it.clip_norm)
                it.optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(folder, model, it.optimizer, step=BEFORE, seed=SEED)
        return _gone_on(program, "tofu", 3, 0, path, expected, ends)


def zoo_double(batch: Any) -> Any:
    from apportion.capture.batch_tree import map_tensors

    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--random", type=int, default=1, help="random plans for each model")
    given = parser.parse_args()
    wrong = right = 0
    for spec in given.models:
        began = time.monotonic()
        for name, why in failures(spec, given.plans, given.random):
            right, wrong = right + (not why), wrong + bool(why)
            print(f"{name}: {why or 'equal'}", flush=True)
        print(f"{spec}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"{right} equal, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
