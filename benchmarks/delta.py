"""Delta simulation against full simulation, both with lowering, in one run.

    python benchmarks/delta.py                    # the table: six models, 4 to 64 devices
    python benchmarks/delta.py --models nmt --devices 16,64 --proposals 20
    python benchmarks/delta.py --edits 10000      # bit for bit: every edit against a full one
    python benchmarks/delta.py --walk 1000        # a random walk: single operators and groups

A proposal gives one operator another Choice, drawn at random: one axis cut into up to as many parts
as there are devices, on neighbouring devices from a random one on. It is kept if the step does not
become slower, else undone, as a search would. From time to time the same proposal is also lowered
and simulated from the beginning; the times must be equal.

A walk is what a search does: half of its proposals change one operator, half a group: a forward
operator with its backward ones and the updates of the parameters that it reads, all cut along one
class of axes and put on the same devices. They are accepted as Metropolis does. What a proposal
costs is measured in processor time.

FlexFlow (MLSys 2019) reports, for whole searches on 64 devices, 3.0 (AlexNet), 3.3 (ResNet), 6.9
(Inception), 3.0 (RNNTC), 3.6 (RNNLM) and 4.1 (NMT) times less time with delta than with full
simulation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import Ints, compile_at_once
from apportion.describe.errors import IllegalCut
from apportion.graph import FORWARD
from apportion.lower.lower import lower
from apportion.lower.task_kinds import (
    COLLECTIVE,
    TRANSFER,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search import METHODS, Problem
from apportion.search.baselines.random_strategy import draw
from apportion.simulate.delta.delta import Delta
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Choice, unsplit_choice

# FlexFlow's models, with a batch that 64 devices can share
MODELS = {
    "alexnet": "alexnet:batch=1024",
    "resnet101": "resnet101:batch=256",
    "inception-v3": "inception-v3:batch=256",
    "rnntc": "rnntc:batch=256",
    "rnnlm": "rnnlm:batch=256",
    "nmt": "nmt:batch=256",
}
DEVICES = (4, 8, 16, 32, 64)
CLUSTER = "flexflow-k80"


@dataclass(frozen=True)
class Row:
    """One model on one number of devices; milliseconds per proposal."""

    model: str
    devices: int
    ops: int
    tasks: int
    full: float
    full_simulation: float
    delta: float
    delta_simulation: float
    proposals: int
    kept: int

    @property
    def ratio(self) -> float:
        return self.full / self.delta

    @property
    def simulation_ratio(self) -> float:
        return self.full_simulation / self.delta_simulation


class Timed(Delta):
    """Delta that says how long the simulation alone took."""

    settling = 0.0

    def _reschedule(self, ops: Ints, blocks: Ints, limit: int) -> bool:
        began = time.process_time()
        settled = super()._reschedule(ops, blocks, limit)
        self.settling += time.process_time() - began
        return settled


def loaded(spec: str) -> Space:
    it = zoo.load(spec, 0)
    return Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)


def propose(space: Space, devices: int, rng: Random) -> tuple[int, Choice]:
    """An Op and another Choice for it."""
    while True:
        op = rng.randrange(len(space.graph.ops))
        choice = _axis_choice(space, op, devices, rng)
        if choice is not None:
            return op, choice


def measure(model: str, spec: str, devices: int, proposals: int, fulls: int, seed: int) -> Row:
    """Full and delta interleaved; every full simulation also checks the delta before it."""
    space, rng = loaded(spec), Random(seed)
    them = cluster(f"{CLUSTER}:{devices}")
    cost = default_cost(them)
    strategy = METHODS["data"](Problem(space, them, cost), budget=0.0, seed=0).strategy
    live = Timed(space, strategy, them, cost)
    best, kept = live.step_ns, 0
    full, full_simulation, delta, delta_simulation = [], [], [], []
    every = max(proposals // fulls, 1)
    for number in range(proposals):
        op, choice = propose(space, devices, rng)
        live.settling, began = 0.0, time.perf_counter()
        now = live.change({op: choice})
        changed = time.perf_counter() - began
        alone = live.settling
        if number % every == 0:
            began = time.perf_counter()
            tasks = lower(space, live.strategy, devices)
            lowered = time.perf_counter()
            line = simulate(tasks, them, cost)
            ended = time.perf_counter()
            full.append(ended - began)
            full_simulation.append(ended - lowered)
            start, end = live.times()
            same = np.array_equal(start, line.start_ns) and np.array_equal(end, line.end_ns)
            assert same, f"{model} on {devices}: delta and full differ"
        began = time.perf_counter()
        if now <= best:
            live.keep()
            best, kept = now, kept + 1
        else:
            live.undo()
        delta.append(changed + time.perf_counter() - began)
        delta_simulation.append(alone)
    milliseconds = [1e3 * statistics.mean(x) for x in (full, full_simulation, delta)]
    return Row(
        model, devices, len(space.graph.ops), len(tasks), *milliseconds,
        1e3 * statistics.mean(delta_simulation), proposals, kept,
    )  # fmt: skip


# Walks


@dataclass(frozen=True)
class Walk:
    """A random walk; milliseconds of processor time per proposal."""

    model: str
    devices: int
    temperature: float
    single: float
    group: float
    schedule: float
    accepted: int
    given_up: int
    proposals: int
    messages: int


def groups(space: Space) -> list[list[int]]:
    """Every forward Op with its backward Ops and the updates of what it reads."""
    ops = space.graph.ops
    backward: dict[int, list[int]] = {}
    updates: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        if op.forward is not None:
            backward.setdefault(op.forward, []).append(index)
        if op.parameter is not None:
            updates.setdefault(op.parameter, []).append(index)
    return [
        [index, *backward.get(index, ()),
         *(u for v in dict.fromkeys(op.inputs) for u in updates.get(v, ()))]
        for index, op in enumerate(ops) if op.phase == FORWARD
    ]  # fmt: skip


def propose_group(
    space: Space, among: list[list[int]], devices: int, rng: Random
) -> dict[int, Choice]:
    """A group cut along one class of axes, on neighbouring devices; whole there where it cannot."""
    while True:
        group = rng.choice(among)
        op, choice = group[0], _axis_choice(space, group[0], devices, rng)
        if choice is None:
            continue
        where = choice.devices
        wanted = {
            axis.group
            for axis, parts in zip(space.axes(op), choice.parts, strict=True)
            if parts > 1
        }
        return {each: _cut_alike(space, each, wanted, where) for each in group}


def _axis_choice(space: Space, op: int, devices: int, rng: Random) -> Choice | None:
    """One axis cut into up to as many parts as there are devices, on neighbouring ones."""
    axes = [k for k, able in enumerate(space.cuttable(op)) if able]
    first = rng.randrange(devices)
    if not axes or rng.random() < 0.1:
        return unsplit_choice(space, op, [first])
    axis = rng.choice(axes)
    count = rng.randint(2, min(devices, space.axes(op)[axis].extent))
    parts = tuple(count if k == axis else 1 for k in range(len(space.axes(op))))
    try:
        space.split(op, parts)
    except IllegalCut:
        return None
    return Choice(parts, tuple((first + k) % devices for k in range(count)))


def _cut_alike(space: Space, op: int, wanted: set[int], where: tuple[int, ...]) -> Choice:
    axes = space.axes(op)
    for k, axis in enumerate(axes):
        parts = tuple(len(where) if j == k else 1 for j in range(len(axes)))
        if axis.group in wanted and space.cuttable(op)[k] and axis.extent >= len(where):
            try:
                space.split(op, parts)
            except IllegalCut:
                continue
            return Choice(parts, where)
    return unsplit_choice(space, op, where)


def walk(
    model: str, spec: str, devices: int, proposals: int, temperature: float, seed: int
) -> Walk:
    """Proposals from data parallelism on; the temperature is a share of the step."""
    space, rng = loaded(spec), Random(seed)
    them = cluster(f"{CLUSTER}:{devices}")
    cost = default_cost(them)
    strategy = METHODS["data"](Problem(space, them, cost), budget=0.0, seed=0).strategy
    live, among = Timed(space, strategy, them, cost), groups(space)
    spent: dict[str, list[float]] = {"single": [], "group": []}
    accepted = given_up = 0
    warm = max(proposals // 10, 20)
    for number in range(proposals + warm):
        if number == warm:
            spent, live.settling, accepted, given_up = {"single": [], "group": []}, 0.0, 0, 0
        kind = rng.choice(("single", "group"))
        chosen = (
            dict([propose(space, devices, rng)]) if kind == "single"
            else propose_group(space, among, devices, rng)
        )  # fmt: skip
        limit = int(live.step_ns * (1 - temperature * math.log(1 - rng.random())))
        began = time.process_time()
        if live.change(chosen, limit=limit) <= limit:
            live.keep()
            accepted += 1
        else:
            given_up += live.bounded
            live.undo()
        spent[kind].append(time.process_time() - began)
    single, group = (1e3 * statistics.mean(spent[kind]) for kind in ("single", "group"))
    messages = int((np.isin(live.tasks().kind, (TRANSFER, COLLECTIVE))).sum())
    return Walk(
        model, devices, temperature, single, group, 1e3 * live.settling / proposals, accepted,
        given_up, proposals, messages,
    )  # fmt: skip


def walks(rows: list[Walk]) -> str:
    """The walks in Markdown."""
    lines = [
        "| model | devices | temperature | single, ms | group, ms | of which schedule, ms | "
        "accepted | given up | messages at the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.devices} | {r.temperature:g} | {r.single:.2f} | {r.group:.2f} | "
        f"{r.schedule:.2f} | {r.accepted / r.proposals:.0%} | {r.given_up / r.proposals:.0%} | "
        f"{r.messages:,} |"
        for r in rows
    ]
    return "\n".join(lines)


# Bit for bit


class Tangle(nn.Module):
    """A network drawn at random: every layer reads one or two earlier values."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.width = rng.choice((6, 8, 12))
        self.plan = [
            (rng.choice(("linear", "relu", "add", "mul", "softmax", "mix", "norm")),
             rng.randrange(k + 1), rng.randrange(k + 1)) for k in range(rng.randint(4, 12))
        ]  # fmt: skip
        many = sum(what == "linear" for what, _, _ in self.plan)
        self.linears = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(many + 1))

    def forward(self, x: Tensor) -> Tensor:
        values, used = [self.linears[0](x)], 1
        for what, a, b in self.plan:
            left, right = values[a], values[b]
            if what == "linear":
                left = self.linears[used](left)
                used += 1
            elif what == "mix":
                left = left @ (right.T @ right)
            elif what in ("add", "mul"):
                left = left + right if what == "add" else left * right
            elif what == "norm":
                left = nn.functional.layer_norm(left, (self.width,))
            else:
                left = left.relu() if what == "relu" else left.softmax(-1)
            values.append(left)
        return sum(values[1:], values[0])


def tangle(seed: int) -> Space:
    """A step of a random network."""
    rng = Random(seed)
    torch.manual_seed(seed)
    model = Tangle(rng)
    batch = torch.randn(rng.choice((5, 8, 12)), model.width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=rng.choice((0.0, 0.9)))
    step = lambda net, x: net(x).square().mean()  # noqa: E731
    return Space(capture(step, model, optimizer, batch).graph)


REAL = {  # edits in a row
    "mlp:tiny": 200, "rnn:tiny": 40, "gpt2:tiny": 25, "wresnet:tiny": 25, "inception-v3:tiny": 10,
    "nmt:tiny": 10,
}  # fmt: skip
MACHINES = (
    "4xh100", "2x2xk80", "p2.8xlarge", "local:3", "4xh200", "mixed-a100-v100", "flexflow-k80:12",
)  # fmt: skip


def edits(count: int, seed: int) -> None:
    """Random edits of random strategies, every one compared with a full simulation."""
    done: Counter[str] = Counter()
    spaces = {spec: loaded(spec) for spec in REAL}
    turn = seed
    while done.total() < count:
        rng = Random(turn)
        them = cluster(MACHINES[turn % len(MACHINES)])
        spec = list(REAL)[turn // 2 % len(REAL)] if turn % 2 else "random"
        space, many = (spaces[spec], REAL[spec]) if turn % 2 else (tangle(turn), 100)
        devices = len(them.devices)
        live = Delta(space, draw(space, devices, rng), them, default_cost(them))
        for _ in range(many):
            _edit(live, space, devices, rng)
        done[spec] += many
        turn += 1
        print(f"{done.total()} edits, equal ({spec}, {them.name})", file=sys.stderr, flush=True)
    print(json.dumps({"edits": done.total(), "different": 0, "of": done}))


def _edit(live: Delta, space: Space, devices: int, rng: Random) -> None:
    drawn = dict(propose(space, devices, rng) for _ in range(rng.choice((1, 1, 1, 2, 5))))
    live.change(drawn)
    tasks = lower(space, live.strategy, devices)
    line = simulate(tasks, live.cluster, live.cost)
    start, end = live.times()
    assert np.array_equal(start, line.start_ns) and np.array_equal(end, line.end_ns), drawn
    if rng.random() < 0.5:
        live.keep()
        return
    before = live.before
    assert before is not None
    live.undo()
    assert live.step_ns == before.step


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| model | devices | ops | tasks | full, ms | delta, ms | ratio | simulation alone: full, "
        "ms | delta, ms | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.devices} | {r.ops:,} | {r.tasks:,} | {r.full:,.0f} | {r.delta:.1f} | "
        f"{r.ratio:.0f} | {r.full_simulation:.1f} | {r.delta_simulation:.1f} | "
        f"{r.simulation_ratio:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    compile_at_once()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)))
    parser.add_argument("--proposals", type=int, default=40)
    parser.add_argument("--fulls", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edits", type=int, default=0)
    parser.add_argument("--walk", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.edits:
        edits(asked.edits, asked.seed)
        return
    if asked.walk:
        walked = [
            walk(model, MODELS.get(model, model), int(devices), asked.walk, asked.temperature,
                 asked.seed)
            for devices in asked.devices.split(",") for model in asked.models.split(",")
        ]  # fmt: skip
        print(json.dumps([asdict(r) for r in walked]) if asked.json else walks(walked))
        return
    rows = []
    for devices in map(int, asked.devices.split(",")):
        for model in asked.models.split(","):
            row = measure(model, MODELS[model], devices, asked.proposals, asked.fulls, asked.seed)
            rows.append(row)
            print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    ratio = math.exp(statistics.mean(math.log(row.ratio) for row in rows))
    alone = math.exp(statistics.mean(math.log(row.simulation_ratio) for row in rows))
    if asked.json:
        found = [asdict(r) | {"ratio": r.ratio} for r in rows]
        print(json.dumps({"rows": found, "ratio": ratio, "simulation_ratio": alone}))
    else:
        print(table(rows))
        print(f"\ngeometric mean {ratio:.1f}; of simulation alone {alone:.1f}")


if __name__ == "__main__":
    main()
