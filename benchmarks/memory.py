"""Recomputation under a limit: published methods, a mixed-integer programme and our planner.

    python benchmarks/memory.py [--only vgg16] [--shares 0,0.5] [--solve 60] [--write PAGE]

Every method is given one device and a limit between the lowest peak that our planner finds (share
0) and the peak of a step in which nothing is recomputed (share 1). What it chooses is lowered and
simulated, so that step time and peak of all rows come from one simulator. Rotor, which counts bytes
by links, is asked with a dozen limits from 0.9 to 1.1 of the real one, the knapsack with a dozen
numbers of bytes to keep, and Chen's greedy method with a dozen segment sizes; the best is taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.columns import compile_at_once
from apportion.machine.cluster import cluster
from apportion.memory.budget_knapsack import budget_knapsack
from apportion.memory.carry_strategy import carry_strategy
from apportion.memory.checkmate import checkmate
from apportion.memory.chen import chen_greedy, chen_root
from apportion.memory.choose_by_model import choose_by_model, lowest_peak
from apportion.memory.choose_recompute import RecomputeOutcome, choose_recompute
from apportion.memory.recompute import recompute
from apportion.memory.recompute_costs import ForwardMemory
from apportion.memory.rotor import rotor
from apportion.memory.step_model import StepModel, step_model
from apportion.plan.auto import choose
from apportion.plan.candidates import Candidate, DefaultCosts, PlanRequest, scored
from apportion.split.space import Space
from apportion.zoo import load

BEGIN, END = "<!-- measured: recomputation -->", "<!-- end -->"
MODELS = ("vgg16", "unet", "gpt2:layers=1", "gpt2:layers=2")
SHARES = (0.75, 0.5, 0.25, 0.1, 0.0)
KEPT = 12  # numbers of bytes to keep that methods are asked with


class UNet(nn.Module):
    """Four levels with a path beside each, no norms."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        sizes = [width << k for k in range(levels)]
        self.down = nn.ModuleList([_pair(a, b) for a, b in zip([3, *sizes], sizes, strict=False)])
        self.rise = nn.ModuleList(
            [nn.ConvTranspose2d(2 * b, b, 2, 2) for b in reversed(sizes[:-1])]
        )
        self.up = nn.ModuleList([_pair(2 * b, b) for b in reversed(sizes[:-1])])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for k, down in enumerate(self.down):
            x = down(x if k == 0 else nn.functional.max_pool2d(x, 2))
            beside.append(x)
        for rise, up, other in zip(self.rise, self.up, reversed(beside[:-1]), strict=True):
            x = up(torch.cat([rise(x), other], 1))
        found: Tensor = self.last(x)
        return found


def _pair(before: int, after: int) -> nn.Module:
    first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


def program_of(spec: str) -> Program:
    if spec != "unet":
        loaded = load(spec, meta=True)
        return capture(loaded.step, loaded.model, loaded.optimizer, loaded.batch)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with torch.device("meta"):
        model = UNet()
        batch = torch.empty(16, 3, 256, 256), torch.empty(16, 256, 256, dtype=torch.long)
    return capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch)


@dataclass(frozen=True)
class Row:
    """A method's set under a limit: times are shares of the step that recomputes nothing."""

    method: str
    step: float | None
    peak: float
    over: int
    seconds: float
    note: str = ""


class Bench:
    """A step on one device, and what sets of its Ops make of it."""

    def __init__(self, spec: str, device: str, solve: float) -> None:
        self.program, self.cluster, self.solve = program_of(spec), cluster(device), solve
        self.request = PlanRequest(
            Space(self.program.graph), self.cluster, DefaultCosts(self.cluster), None
        )
        self.start = choose(self.request, "single", 1.0).best
        where = self.start.tasks, self.start.timeline
        self.model: StepModel = step_model(
            self.start.space, *where, 0, self.cluster, self.start.cost
        )
        self.known: dict[frozenset[int], Candidate] = {frozenset(): self.start}

    def simulated(self, ops: frozenset[int]) -> Candidate:
        if ops not in self.known:
            made = recompute(self.program.graph, ops)
            strategy = carry_strategy(self.start.found.strategy, self.request.space, made)
            found = replace(self.start.found, strategy=strategy, space=None, others=())
            again = replace(self.request, space=Space(made.graph))
            self.known[ops] = scored(again, "single", found, 0.0)
        return self.known[ops]

    def outcome(self, ops: frozenset[int], limit: int) -> RecomputeOutcome:
        line = self.simulated(ops).timeline
        return RecomputeOutcome(line.peak_bytes[0] - limit, line.step_seconds)

    def modelled(self, limit: int) -> Callable[[frozenset[int]], RecomputeOutcome]:
        def run(ops: frozenset[int]) -> RecomputeOutcome:
            step = self.model.of(ops)
            return RecomputeOutcome(step.peak - limit, step.nanoseconds / 1e9)

        return run

    def rows(self, limit: int) -> Iterator[Row]:
        graph, costs, run = self.program.graph, self.model.costs, self.modelled(limit)

        def simulate(ops: frozenset[int]) -> RecomputeOutcome:
            return self.outcome(ops, limit)

        kept, total = simulate(frozenset()), ForwardMemory(graph, costs).total
        methods: dict[str, Callable[[], frozenset[int] | None]] = {
            "chen, root": lambda: chen_root(graph, costs),
            "chen, greedy": lambda: chen_greedy(graph, costs, run),
            "rotor, one copy": lambda: _best(
                [rotor(self.model, limit * (9 * KEPT + 2 * k) // (10 * KEPT)) for k in range(KEPT)],
                run,
            ),
            "knapsack": lambda: _best(
                [budget_knapsack(graph, costs, total * k // KEPT) for k in range(1, KEPT + 1)], run
            ),
            "ours, estimates only": lambda: choose_recompute(graph, costs, kept, simulate).ops,
            "ours": lambda: choose_by_model(self.model, kept, simulate).ops,
        }
        for name, method in methods.items():
            began = time.process_time()
            yield self._row(name, method(), limit, time.process_time() - began)
        began = time.process_time()
        found = checkmate(self.model, limit, self.solve)
        base = self.start.timeline.step_seconds
        proven = "proven" if found.optimal else f"no set is below {1 + found.bound / base:.3f}"
        took = time.process_time() - began
        yield replace(self._row("milp", found.ops, limit, took), note=proven)

    def _row(self, name: str, ops: frozenset[int] | None, limit: int, seconds: float) -> Row:
        if ops is None:
            return Row(name, None, 0.0, 0, seconds)
        found, base = self.outcome(ops, limit), self.start.timeline
        peak = (found.over + limit) / base.peak_bytes[0]
        return Row(name, found.seconds / base.step_seconds, peak, max(found.over, 0), seconds)


def _best(
    sets: Iterable[frozenset[int] | None], run: Callable[[frozenset[int]], RecomputeOutcome]
) -> frozenset[int] | None:
    some = {ops for ops in sets if ops is not None}
    return min(some, key=lambda ops: run(ops).rank, default=None)


def table(spec: str, device: str, shares: list[float], solve: float) -> Iterator[str]:
    bench = Bench(spec, device, solve)
    line, units = bench.start.timeline, len(bench.model.units)
    ops = len(bench.program.graph.ops)
    yield (
        f"\n**{spec}** on {device}: {ops} operators, {units} of the forward make something; "
        f"{line.peak_bytes[0] / 1e9:.2f} GB and {line.step_seconds * 1e3:.1f} ms a step if "
        "nothing is recomputed.\n"
    )
    yield "| limit | method | step | peak | over, MB | CPU s | |"
    yield "|---|---|---|---|---|---|---|"
    most, least = line.peak_bytes[0], lowest_peak(bench.model).step.peak
    for share in shares:
        limit = int(least + share * (most - least))
        for row in bench.rows(limit):
            step = "none found" if row.step is None else f"{row.step:.3f}"
            over = f"{row.over / 1e6:.0f}" if row.over else ""
            yield (
                f"| {limit / most:.3f} | {row.method} | {step} | {row.peak:.3f} | {over} | "
                f"{row.seconds:.2f} | {row.note} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="one model")
    parser.add_argument("--device", default="1xh100")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--solve", type=float, default=60.0, help="seconds for the programme")
    parser.add_argument("--write", type=Path, help="a page to put the tables into")
    asked = parser.parse_args()
    compile_at_once()
    lines = []
    for spec in [asked.only] if asked.only else MODELS:
        shares = [float(share) for share in asked.shares.split(",")]
        for line in table(spec, asked.device, shares, asked.solve):
            print(line, flush=True)
            lines.append(line)
    if asked.write is not None:
        before, _, rest = asked.write.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        body = "\n".join(lines)
        asked.write.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
    main()
