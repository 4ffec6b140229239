"""Is a step the same whatever the order of its messages, and does nobody wait forever?

    python benchmarks/check_policies.py                       10,000 schedules, 300 on processes
    python benchmarks/check_policies.py --schedules 500 --processes 0

Random strategies of small models on 2, 3 and 4 devices under random policies of communication, half
of those on 3 and 4 with relays between random groups of devices.

*Schedules* are checked without tensors: every rank does what it has to (rank_steps.py,
late_work.py), messages arrive whenever they like, and who goes on next is drawn. A rank may do late
work as soon as it can or as late as it must. It is an error if nobody can go on before all have
ended, or if a buffer is used before it is free.

On *processes* the same plans train in float64, over sockets, and are compared with plain PyTorch:
losses, parameters and optimizer state, and the bytes sent with those predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from fuzz import STEPS, Model, drawn_relays, load, plan_of, progress

from apportion.capture.widen import widened
from apportion.execute.executable import Executable
from apportion.execute.late_work import OPENS, SENDS, LateNode, LateSchedule, late_schedule
from apportion.execute.rank_steps import Exchange, Post, Wait, rank_steps
from apportion.lower.runnable import runnable
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource
from apportion.run.training import TrainingRequest
from apportion.search.baselines.random_strategy import draw
from apportion.split.communication import MADE, NEED, NONE, P3, RANKED, WFBP, Communication
from apportion.split.strategy import Strategy

MODELS = ("mlp:tiny", "rnn:tiny", "gpt2:tiny", "wresnet:tiny")
PER_MODEL = 25  # plans of a model whose state and batch are the same
PER_PLAN = 25  # schedules


def random_policy(rng: Random, parameters: int) -> Communication:
    """Any decisions that a policy could come to."""
    policy = rng.choice((NONE, WFBP, P3, P3, P3, P3))
    if policy == NONE:
        return Communication(NONE, held=True)
    if policy == WFBP:
        order = rng.choice((MADE, NEED))
        return Communication(WFBP, order=order, slice_bytes=rng.choice((0, 1 << 10)))
    order = rng.choice((MADE, NEED, RANKED))
    ranking = tuple(rng.sample(range(parameters), parameters)) if order == RANKED else ()
    sizes = rng.choice((0, 512, 1 << 12)), rng.choice((0, 1 << 13, 1 << 16))
    return Communication(P3, True, False, order, *sizes, ranking)


def random_plan(model: Model, devices: int, rng: Random) -> Strategy:
    """A random strategy, or data parallelism with updates by owners, under a random policy."""
    strategy = draw(model.space, devices, rng)
    if rng.random() < 0.3:
        from apportion.machine.cluster import cluster
        from apportion.machine.cost_model import default_cost
        from apportion.search import METHODS, Problem

        machine = cluster(f"local:{devices}")
        problem = Problem(model.space, machine, default_cost(machine))
        strategy = METHODS[rng.choice(("data", "zero2", "fsdp"))](problem).strategy
    how = random_policy(rng, len(model.space.graph.values))
    if devices > 2 and rng.random() < 0.5:
        relays = drawn_relays(devices, rng)
        how = replace(how, algorithm=relays.algorithm, levels=relays.levels)
    return replace(strategy, communication=how)


# Without tensors


@dataclass
class AbstractRank:
    """How far a rank has come.

    step, at  the training step at hand, and how many of its steps that are not late are done
    left      by training step: late nodes that are not done, by number
    open_     by training step and position: exchanges under way
    eager     how likely it does late work before it has to
    """

    device: int
    schedule: LateSchedule
    eager: float
    step: int = 0
    at: int = 0
    left: dict[int, dict[int, LateNode]] = field(default_factory=dict)
    open_: dict[tuple[int, int], Exchange] = field(default_factory=dict)


class Schedules:
    """Ranks that go on by chance. `opened` and `sent` are messages by training step and number;
    `busy`: buffers of messages that are in use, by rank and number."""

    def __init__(self, executable: Executable, devices: int, steps: int, rng: Random) -> None:
        self.executable, self.steps, self.rng = executable, steps, rng
        self.opened, self.sent = set[tuple[int, int]](), set[tuple[int, int]]()
        self.busy = set[tuple[int, int]]()
        self.ranks = [
            AbstractRank(d, _schedule(executable, d), rng.choice((0.0, 0.5, 1.0)))
            for d in range(devices)
        ]

    def run(self) -> list[AbstractRank]:
        """Lets ranks go on until nobody can; those that have not ended."""
        while able := [rank for rank in self.ranks if self._can_go_on(rank)]:
            self._go_on(self.rng.choice(able))
        return [rank for rank in self.ranks if rank.step <= self.steps]

    def _has_ended(self, step: int, exchange: Exchange) -> bool:
        numbers = [number for number, _ in (*exchange.sends, *exchange.receives)]
        return all((step, n) in self.opened and (step, n) in self.sent for n in numbers)

    def _can_go_on(self, rank: AbstractRank) -> bool:
        return rank.step <= self.steps and (
            self._blocked_by(rank) is None or (rank.eager > 0 and bool(self._ready(rank)))
        )

    def _due(self, rank: AbstractRank) -> tuple[int, int] | None:
        """The node of the step before that has to be done next."""
        main, before = rank.schedule.main, rank.left.get(rank.step - 1, {})
        ended = rank.step == self.steps or rank.at >= len(main) or rank.at >= rank.schedule.clears
        count = len(rank.schedule.nodes) if ended else rank.schedule.due[rank.at]
        number = next(iter(before), count)
        return (rank.step - 1, number) if number < count else None

    def _blocked_by(self, rank: AbstractRank) -> tuple[int, Exchange] | None:
        """The exchange that has to end before a rank goes on at its place in the order."""
        due = self._due(rank)
        if due is not None:
            step, number = due
            waits = [x for x in rank.left[step][number].waits if (step, x.position) in rank.open_]
            return next(((step, x) for x in waits if not self._has_ended(step, x)), None)
        clears = rank.step == self.steps or rank.at == rank.schedule.clears
        if clears:
            for (step, _), exchange in rank.open_.items():
                if step < rank.step and not self._has_ended(step, exchange):
                    return step, exchange
        if rank.step < self.steps and rank.at < len(rank.schedule.main):
            step_ = rank.schedule.main[rank.at]
            if (
                isinstance(step_, Wait)
                and (rank.step, step_.exchange.position) in rank.open_
                and not self._has_ended(rank.step, step_.exchange)
            ):
                return rank.step, step_.exchange
        return None

    def _ready(self, rank: AbstractRank) -> list[tuple[int, int]]:
        found = []
        for step, left in rank.left.items():
            for number, node in left.items():
                own = step == rank.step and node.after > rank.at
                if own or any(before in left for before in node.needs):
                    continue
                flights = [(step, x.position) in rank.open_ for x in node.waits]
                if all(flights) and all(self._has_ended(step, x) for x in node.waits):
                    found.append((step, number))
        return found

    def _go_on(self, rank: AbstractRank) -> None:
        ready = self._ready(rank)
        blocked = self._blocked_by(rank) is not None
        if ready and (blocked or self.rng.random() < rank.eager):
            self._do(rank, *self.rng.choice(ready))
        elif (due := self._due(rank)) is not None:
            self._do(rank, *due)
        else:
            self._advance(rank)

    def _advance(self, rank: AbstractRank) -> None:
        if rank.step == self.steps or rank.at == rank.schedule.clears:
            for key in [key for key in rank.open_ if key[0] < rank.step]:
                self._end(rank, key)
        if rank.step == self.steps:
            rank.step += 1
            return
        if rank.at == len(rank.schedule.main):
            self._begin_next(rank)
            return
        if rank.at == 0:
            rank.left[rank.step] = dict(enumerate(rank.schedule.nodes))
        step = rank.schedule.main[rank.at]
        if isinstance(step, Post):
            self._open(rank, rank.step, step.exchange)
            self._send(rank, rank.step, step.exchange)
        elif isinstance(step, Wait) and (rank.step, step.exchange.position) in rank.open_:
            self._end(rank, (rank.step, step.exchange.position))
        rank.at += 1
        if rank.at == len(rank.schedule.main) and rank.schedule.clears < rank.at:
            self._begin_next(rank)

    def _begin_next(self, rank: AbstractRank) -> None:
        assert not rank.left.get(rank.step - 1), "late work is left when the next step is over"
        rank.left.pop(rank.step - 1, None)
        rank.step, rank.at = rank.step + 1, 0

    def _do(self, rank: AbstractRank, step: int, number: int) -> None:
        node = rank.left[step].pop(number)
        for exchange in node.waits:
            if (step, exchange.position) in rank.open_:
                self._end(rank, (step, exchange.position))
        if node.does == OPENS and node.exchange is not None:
            self._open(rank, step, node.exchange)
        elif node.does == SENDS and node.exchange is not None:
            self._send(rank, step, node.exchange)

    def _open(self, rank: AbstractRank, step: int, exchange: Exchange) -> None:
        rank.open_[step, exchange.position] = exchange
        for number, _ in exchange.receives:
            assert (rank.device, number) not in self.busy, "a buffer is used before it is free"
            self.busy.add((rank.device, number))
            self.opened.add((step, number))

    def _send(self, rank: AbstractRank, step: int, exchange: Exchange) -> None:
        rank.open_[step, exchange.position] = exchange
        for number, _ in exchange.sends:
            assert (~rank.device, number) not in self.busy, "a buffer is used before it is free"
            self.busy.add((~rank.device, number))
            self.sent.add((step, number))

    def _end(self, rank: AbstractRank, key: tuple[int, int]) -> None:
        exchange = rank.open_.pop(key)
        for number, _ in exchange.receives:
            self.busy.discard((rank.device, number))
        for number, _ in exchange.sends:
            self.busy.discard((~rank.device, number))


def _schedule(executable: Executable, device: int) -> LateSchedule:
    steps = rank_steps(executable, device)
    if executable.tasks.late_start >= 0:
        return late_schedule(executable, steps)
    return LateSchedule(steps, (), (0,) * len(steps), len(steps))


def check_schedules(count: int, first: int = 0) -> dict[str, Any]:
    """So many random schedules; the seeds of plans in which somebody waits forever."""
    stuck, overlapped, began = list[int](), 0, time.perf_counter()
    plans = -(-count // PER_PLAN)
    models = [load(spec, first) for spec in MODELS]
    for seed in range(first, first + plans):
        rng, devices = Random(seed), 2 + seed % 3
        model = models[seed % len(models)]
        strategy = random_plan(model, devices, rng)
        executable = Executable(model.space, strategy, runnable(model.space, strategy, devices))
        overlapped += executable.tasks.late_start >= 0
        for _ in range(PER_PLAN):
            if Schedules(executable, devices, 3, rng).run():
                stuck.append(seed)
        progress(f"{(seed - first + 1) * PER_PLAN} of {count} schedules, {len(stuck)} stuck")
    return {
        "schedules": plans * PER_PLAN, "plans": plans, "with steps that overlap": overlapped,
        "stuck": stuck, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


# On processes


def check_on_processes(count: int, first: int = 0) -> dict[str, Any]:
    """So many random plans on real processes, compared with plain PyTorch."""
    wrong, bytes_wrong, worst, began = list[int](), list[int](), 0.0, time.perf_counter()
    policies = Counter[str]()
    os.environ["APPORTION_TRANSPORT"] = "wire"  # as between machines
    for devices in (2, 3, 4):
        mine = [s for s in range(first, first + count) if 2 + s % 3 == devices]
        with ProcessPool(devices, 300.0) as pool:
            for k, seed in enumerate(mine):
                if k % PER_MODEL == 0:
                    spec = MODELS[(k // PER_MODEL + devices) % len(MODELS)]
                    model = load(spec, first)
                plan = plan_of(model, random_plan(model, devices, Random(seed)), devices)
                source = StepSource(model.program.graph, spec, first)
                how = (plan.strategy, devices, STEPS, first)
                ranks = pool.train(TrainingRequest(source, *how, double=True, state=True))
                found = compare_with_eager(model.program, plan, ranks, STEPS, first)
                worst = max(worst, found.max_rel_param_diff)
                wrong += [] if found.equal else [seed]
                run = replace(plan, graph=widened(plan.graph))  # as ranks do
                moved = STEPS * run.tasks.bytes_moved
                bytes_wrong += [] if sum(r.sent_bytes for r in ranks) == moved else [seed]
                policies[_kind(plan.strategy.communication, run.tasks.late_start)] += 1
                progress(f"{spec} on {devices} processes: plan {seed}, {len(wrong)} wrong")
    return {
        "plans": count, "wrong": wrong, "worst_relative": worst, "policies": dict(policies),
        "bytes_not_as_predicted": bytes_wrong, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def _kind(how: Communication, late_start: int) -> str:
    if how.overlaps:
        return f"overlapping, {how.order}" if late_start >= 0 else "nothing to overlap"
    return how.policy


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = False
    for check, count in (
        (check_schedules, given.schedules),
        (check_on_processes, given.processes),
    ):
        if count:
            found = check(count, given.first)
            print(f"\r{json.dumps(found)}", flush=True)
            bad |= any(found.get(key) for key in ("stuck", "wrong", "bytes_not_as_predicted"))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
