"""Does any legal strategy run, and is it right? Random strategies against eager PyTorch.

    python benchmarks/fuzz.py                            1,000 strategies per model in one process
    python benchmarks/fuzz.py --processes 100            and 100 per model on real processes
    python benchmarks/fuzz.py --models mlp:tiny --count 50 --plant 50    and 50 planted errors
    python benchmarks/fuzz.py --count 0 --memory 125     125 memory plans per model in one process
    python benchmarks/fuzz.py --count 0 --relays 100     100 strategies per model through relays

Model and batch are drawn anew every 20 strategies, the batch changes from step to step, device
counts are 2, 3 and 4. A planted error changes one element of one transfer of one step; what is not
noticed is listed with where it went.

A memory plan is a random strategy, on one device to four, for the step in which operators come in
any order in half of the plans, some of the forward are computed again, some of its results lie on
the host for a while, some parameters lie there for good and are updated there or on the device, and
some are fetched again by the backward.

Through relays: strategies on 3 to 8 devices whose exchanges go between random groups of these, or
groups of groups; so do half of the memory plans on more than two devices.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import torch

from apportion import zoo
from apportion.capture.capture import (
    capture,
)
from apportion.capture.optimizer import (
    setting_value,
)
from apportion.capture.program import (
    Program,
    batch_leaves,
    state_tensor,
)
from apportion.capture.reference import (
    capture_as,
    eager_steps,
)
from apportion.capture.widen import widened
from apportion.describe.ops.host import HOST_KINDS
from apportion.describe.ops.update import HOST_UPDATE_KIND
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.rank import Corrupt, Rank, run_together
from apportion.graph import FORWARD, PARAMETER, Graph
from apportion.lower.task_graph import TaskGraph
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.memory.carry_strategy import carry_strategy
from apportion.memory.host_state import (
    DEVICE,
    HOST,
    HostState,
    host_state,
    parameters_on_host,
    readers_on_device,
)
from apportion.memory.offload import Offload
from apportion.memory.planned_graph import MemoryPlan, before_host, planned_graph
from apportion.memory.recompute import AGAIN
from apportion.memory.reorder import updates_early
from apportion.plan.plan import Plan, Prediction
from apportion.run.check_run import PER_STEP, Distance, compare_with_eager, distance, gather_copies
from apportion.run.planned_program import planned_bindings
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource
from apportion.run.training import TrainingRequest, TrainingResult, vary
from apportion.search.baselines.random_strategy import draw
from apportion.split.communication import HIERARCHICAL, Communication
from apportion.split.space import Space
from apportion.split.strategy import Strategy, verify_strategy

STEPS, PER_MODEL = 3, 20


@dataclass(frozen=True)
class Model:
    """A captured model in float64, and what plain PyTorch makes of it."""

    spec: str
    seed: int
    program: Program
    space: Space
    losses: list[float]
    state: dict[int, torch.Tensor]


def load(spec: str, seed: int, steps: int = STEPS) -> Model:
    it = zoo.load(spec, seed)
    made = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    program = capture_as(made, torch.float64)
    batches = [vary(program.batch, seed, step) for step in range(steps)]
    losses, state = eager_steps(program, batches, seed)
    return Model(spec, seed, program, Space(program.graph), losses, state)


def plan_of(model: Model, strategy: Strategy, devices: int) -> Plan:
    none = Prediction(0.0, (0,) * devices, 0, (0.0,) * devices)
    where = cluster(f"local:{devices}")
    cost, limits = default_cost(where), (0,) * devices
    plan = Plan(model.program.graph, where, strategy, "random", 0, 0.0, 0.0, none, limits, cost)
    plan.__dict__["space"] = model.space
    return plan


def together(
    model: Model, plan: Plan, corrupt: Corrupt | None = None, steps: int = STEPS
) -> list[TrainingResult]:
    """All ranks in this process, answering as processes would."""
    devices = len(plan.cluster.devices)
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    ranks = [Rank(executable, d, corrupt=corrupt) for d in range(devices)]
    program = model.program
    for rank in ranks:
        rank.load(lambda v: state_tensor(program, v))
    losses: list[float | None] = []
    for step in range(steps):
        leaves = batch_leaves(program, vary(program.batch, model.seed, step))
        for rank in ranks:
            rank.feed(leaves.__getitem__)
        context = Context(
            model.seed, step, lambda e: setting_value(program.optimizer, e), program.graph.bodies
        )
        loss = run_together(ranks, context)
        losses.append(None if loss is None else float(loss))
    return [
        TrainingResult(
            losses, [], [], 0, None, [(s, t.numpy()) for s, (_, t) in r.state().items()], []
        )
        for r in ranks
    ]


def judge(model: Model, plan: Plan, ranks: list[TrainingResult]) -> Distance:
    rate = max(float(g["lr"]) for g in model.program.optimizer.param_groups)
    split = gather_copies(model.space, plan.tasks, ranks)
    losses = [x for r in ranks for x in r.losses if x is not None][:STEPS]
    slack = PER_STEP * rate * STEPS
    return distance(model.program, losses, split, model.losses, model.state, slack)


def in_process(spec: str, count: int, first: int) -> dict[str, object]:
    wrong, worst, tasks, began = [], 0.0, 0, time.perf_counter()
    for seed in range(first, first + count):
        if seed % PER_MODEL == 0 or seed == first:
            model = load(spec, seed)
        devices = 2 + seed % 3
        plan = plan_of(model, draw(model.space, devices, Random(seed)), devices)
        found = judge(model, plan, together(model, plan))
        worst = max(worst, found.max_rel_param_diff)
        tasks += len(plan.tasks)
        if not found.equal:
            wrong.append(seed)
        progress(f"{spec}: {seed - first + 1} of {count}, {len(wrong)} wrong")
    seconds = time.perf_counter() - began
    return {
        "model": spec, "strategies": count, "wrong": wrong, "worst_relative": worst,
        "tasks": tasks, "seconds": round(seconds, 1),
    }  # fmt: skip


def drawn_relays(devices: int, rng: Random) -> Communication:
    """Any groups, and maybe groups of these."""
    count = rng.randint(2, max(2, devices // 2))
    level = tuple(rng.randrange(count) for _ in range(devices))
    halves = [(group, rng.randrange(2)) for group in level]
    finer = tuple(sorted(set(halves)).index(half) for half in halves)
    levels = rng.choice(((level,), (level, finer)))
    return Communication(algorithm=HIERARCHICAL, levels=levels)


def relayed_plans(spec: str, count: int, first: int) -> dict[str, object]:
    wrong, worst, relayed, began = [], 0.0, 0, time.perf_counter()
    for seed in range(first, first + count):
        if seed % PER_MODEL == 0 or seed == first:
            model = load(spec, seed)
        rng, devices = Random(seed), 3 + seed % 6
        strategy = draw(model.space, devices, rng)
        direct = plan_of(model, strategy, devices)
        strategy = replace(strategy, communication=drawn_relays(devices, rng))
        plan = plan_of(model, strategy, devices)
        found = judge(model, plan, together(model, plan))
        worst = max(worst, found.max_rel_param_diff)
        relayed += len(plan.tasks.slot_device) > len(direct.tasks.slot_device)
        if not found.equal:
            wrong.append(seed)
        progress(f"{spec}: {seed - first + 1} of {count} through relays, {len(wrong)} wrong")
    return {
        "model": spec, "strategies": count, "with relays": relayed, "wrong": wrong,
        "worst_relative": worst, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def drawn_states(graph: Graph, share: float, rng: Random) -> tuple[HostState, ...]:
    """Some parameters on the host, which come, leave and are updated anywhere."""
    count, found = len(graph.ops), []
    for value in parameters_on_host(graph):
        if rng.random() >= share:
            continue
        update = rng.choice((HOST, DEVICE)) if value in graph.after else "fixed"
        readers = readers_on_device(graph, value, update)
        first = [reader for reader in readers if rng.random() < 0.5]
        fetches = tuple((reader, rng.randrange(reader + 1)) for reader in first)
        places = (rng.randrange(count + 1) for _ in range(3))
        found.append(HostState(value, update, fetches, *places))
    return tuple(found)


def drawn_order(graph: Graph, rng: Random) -> tuple[int, ...]:
    """The operators in any order in which each comes after those that make what it reads."""
    left = [len({m[0] for v in op.inputs if (m := graph.producer[v])}) for op in graph.ops]
    ready, order = [op for op, count in enumerate(left) if not count], []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for reader in {op for v in graph.ops[order[-1]].outputs for op in graph.consumers[v]}:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return tuple(order)


def drawn_memory(graph: Graph, rng: Random) -> MemoryPlan:
    """Random decisions about memory."""
    kinds = {"captured": (), "early": updates_early(graph), "any": drawn_order(graph, rng)}
    order = kinds[rng.choice(("captured", "early", "any", "any"))]
    forward = [k for k, op in enumerate(graph.ops) if op.phase == FORWARD]
    share = rng.choice((0.0, 0.3, 0.7, 1.0))
    plan = MemoryPlan(order, tuple(op for op in forward if rng.random() < share))
    made = before_host(graph, plan)
    states = drawn_states(made.graph, rng.choice((0.0, 0.4, 0.8)), rng)
    count = len(made.then(host_state(made.graph, states)).graph.ops)
    share = rng.choice((0.0, 0.3, 0.7))
    kept = [value for op in forward for value in graph.ops[op].outputs]
    away = tuple(
        Offload(value, rng.randrange(count + 1), rng.randrange(count + 1))
        for value in kept
        if rng.random() < share
    )
    return replace(plan, host_state=states, offloaded=away)


def memory_plan(model: Model, devices: int, rng: Random) -> tuple[Model, Plan]:
    """A random strategy for the step with random decisions about memory, and the model whose step
    it is."""
    made = planned_graph(model.program.graph, drawn_memory(model.program.graph, rng))
    strategy = carry_strategy(draw(model.space, devices, rng), model.space, made)
    state = [v for v, value in enumerate(made.graph.values) if value.role == PARAMETER]
    refetched = tuple(v for v in state if rng.random() < 0.5)
    strategy = replace(strategy, refetched=refetched)
    if devices > 2 and rng.random() < 0.5:
        strategy = replace(strategy, communication=drawn_relays(devices, rng))
    space = Space(made.graph, strategy.digits, strategy.opening)
    verify_strategy(space, strategy, devices)
    bound = planned_bindings(model.program.bindings, made)
    program = replace(model.program, graph=made.graph, bindings=bound)
    changed = replace(model, program=program, space=space)
    return changed, plan_of(changed, strategy, devices)


def memory_plans(spec: str, count: int, first: int) -> dict[str, object]:
    wrong, worst, kinds, began = [], 0.0, Counter[str](), time.perf_counter()
    for seed in range(first, first + count):
        if seed % PER_MODEL == 0 or seed == first:
            model = load(spec, seed)
        rng, devices = Random(seed), 1 + seed % 4
        changed, plan = memory_plan(model, devices, rng)
        found = judge(changed, plan, together(changed, plan))
        worst = max(worst, found.max_rel_param_diff)
        kinds["recomputed"] += sum(op.name.endswith(AGAIN) for op in plan.graph.ops)
        kinds["copied"] += sum(op.kind in HOST_KINDS for op in plan.graph.ops)
        kinds["updated on the host"] += sum(op.kind == HOST_UPDATE_KIND for op in plan.graph.ops)
        kinds["refetched"] += len(plan.strategy.refetched)
        if not found.equal:
            wrong.append(seed)
        progress(f"{spec}: memory plan {seed - first + 1} of {count}, {len(wrong)} wrong")
    return {
        "model": spec, "plans": count, "wrong": wrong, "worst_relative": worst,
        **kinds, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def on_processes(spec: str, count: int, first: int) -> dict[str, object]:
    wrong, worst, bytes_wrong, began = [], 0.0, [], time.perf_counter()
    model = load(spec, first)
    for devices in (2, 3, 4):
        mine = [s for s in range(first, first + count) if 2 + s % 3 == devices]
        with ProcessPool(devices, 300.0) as pool:
            for seed in mine:
                plan = plan_of(model, draw(model.space, devices, Random(seed)), devices)
                source = StepSource(model.program.graph, spec, first)
                how = (plan.strategy, devices, STEPS, first)
                job = TrainingRequest(source, *how, double=True, state=True)
                ranks = pool.train(job)
                found = compare_with_eager(model.program, plan, ranks, STEPS, first)
                worst = max(worst, found.max_rel_param_diff)
                if not found.equal:
                    wrong.append(seed)
                run = replace(plan, graph=widened(plan.graph))  # as ranks do
                if sum(r.sent_bytes for r in ranks) != STEPS * run.tasks.bytes_moved:
                    bytes_wrong.append(seed)
                progress(f"{spec} on {devices} processes: strategy {seed}, {len(wrong)} wrong")
    return {
        "model": spec, "strategies": count, "wrong": wrong, "worst_relative": worst,
        "bytes_not_as_predicted": bytes_wrong, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def planted(spec: str, count: int, first: int) -> dict[str, object]:
    """One element of one transfer of the last step changed by 1e-3 (an integer by one, a bool
    turned).

    What is not noticed is tried again with a change of 1e3 and with not-a-number. An element that
    only not-a-number shows is multiplied by zero; one that even that does not show belongs to a
    replica from which no task leads to the loss or the state, or a mask selects it away.
    """
    fates, missed = Counter[str](), []
    for seed in range(first, first + count):
        if seed % PER_MODEL == 0 or seed == first:
            model = load(spec, seed)
        devices = 2 + seed % 3
        plan = plan_of(model, draw(model.space, devices, Random(seed)), devices)
        fate = "noticed"
        for change, name in (
            (1e-3, "noticed"),
            (1e3, "below the tolerance"),
            (float("nan"), "multiplied by zero"),
            (None, "selected away"),
        ):
            fate = name
            corrupt, where, read = plant(plan, Random(seed), change or 0.0)
            if change is None and not read:
                fate = "of a replica that nobody reads"
            if change is None or not judge(model, plan, together(model, plan, corrupt)).equal:
                break
        fates[fate] += 1
        if fate != "noticed":
            missed.append(f"{where}: {fate}")
        progress(f"{spec}: {seed - first + 1} of {count} planted, {len(missed)} not noticed")
    return {"model": spec, "planted": count, "fates": dict(fates), "missed": missed}


def plant(plan: Plan, rng: Random, change: float) -> tuple[Corrupt, str, bool]:
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    chosen = rng.choice(sorted(executable.packed))
    task, copy = executable.messages[chosen].task, rng.choice(executable.packed[chosen])
    element = rng.randrange(copy.nbytes // copy.dtype.itemsize)
    seen = Counter[int]()

    def corrupt(number: int, message: torch.Tensor) -> torch.Tensor:
        seen[number] += 1
        if number != chosen or seen[number] != STEPS:
            return message
        changed = message.clone()
        box = changed[copy.offset : copy.offset + copy.nbytes].view(copy.dtype)
        if copy.dtype.is_floating_point:
            box[element] += change
        elif copy.dtype == torch.bool:
            box[element] = ~box[element]
        else:
            box[element] = 0 if box[element] else 1
        return changed

    graph = plan.graph
    value = graph.values[executable.slots[copy.source].value]
    op = int(plan.tasks.op[task])
    reader = graph.ops[op].name if op < len(graph.ops) else "the end of the step"
    rows = [r for r, m in enumerate(plan.tasks.copy_message.tolist()) if m == task]
    live = live_slots(plan.tasks)
    read = any(int(plan.tasks.copy_target[r]) in live for r in rows)
    return corrupt, f"{value.name} ({value.dtype}) for {reader}", read


def live_slots(tasks: TaskGraph) -> set[int]:
    """Slots from which some chain of tasks leads to the loss or to state."""
    live = {s for s, last in enumerate(tasks.slot_last.tolist()) if last == len(tasks)}
    for task in range(len(tasks) - 1, -1, -1):
        made = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]].tolist()
        if live.intersection(made):
            live.update(tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist())
            live.update(tasks.copy_source[tasks.copy_task == task].tolist())
    return live


def progress(text: str) -> None:
    print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="mlp:tiny,gpt2:tiny,wresnet:tiny,rnn:tiny")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--plant", type=int, default=0)
    parser.add_argument("--memory", type=int, default=0, help="memory plans per model")
    parser.add_argument("--relays", type=int, default=0, help="strategies through relays per model")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = False
    for spec in split_models(options.models):
        for what, count in (
            (in_process, options.count),
            (on_processes, options.processes),
            (planted, options.plant),
            (memory_plans, options.memory),
            (relayed_plans, options.relays),
        ):
            if count:
                row = what(spec, count, options.first)
                print(f"\r{'':<78}\r", end="", file=sys.stderr)
                print(json.dumps({"what": what.__name__, **row}), flush=True)
                bad = bad or bool(row.get("wrong") or row.get("bytes_not_as_predicted"))
    return int(bad)


def split_models(text: str) -> list[str]:
    """`mlp:tiny,gpt2:tiny`: a comma before a model's name begins the next one; others belong to
    settings."""
    found: list[str] = []
    for piece in text.split(","):
        if "=" in piece and found:
            found[-1] += "," + piece
        else:
            found.append(piece)
    return found


if __name__ == "__main__":
    sys.exit(main())
