"""A step under a limit: published methods, mixed-integer programmes and our planners.

    python benchmarks/memory.py [--only vgg16] [--shares 0,0.5] [--solve 60] [--write PAGE]

Every method is given one device and a limit between the lowest peak that our planner finds (share
0) and the peak of a step in which nothing is recomputed (share 1). What it chooses is lowered and
simulated, so that step time and peak of all rows come from one simulator. Rotor, which counts bytes
by links, is asked with a dozen limits from 0.9 to 1.1 of the real one, the knapsack with a dozen
numbers of bytes to keep, and Chen's greedy method with a dozen segment sizes; the best is taken.
Capuchin is asked to free more and more until what it decides fits, and TensorFlowMem with three
sizes of chunks and with one, two or three of its passes. Orders hold the same whatever the limit.
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
from apportion.machine.host_links import host_link
from apportion.memory.budget_knapsack import budget_knapsack
from apportion.memory.capuchin import capuchin
from apportion.memory.checkmate import checkmate
from apportion.memory.chen import chen_greedy, chen_root
from apportion.memory.choose_by_model import choose_by_model, lowest_peak
from apportion.memory.choose_memory import views_of
from apportion.memory.choose_recompute import RecomputeOutcome, choose_recompute
from apportion.memory.least_peak_order import least_peak_order
from apportion.memory.level_order import level_order
from apportion.memory.low_order import low_order
from apportion.memory.order_model import OrderModel, order_model
from apportion.memory.planned_graph import MemoryPlan
from apportion.memory.recompute import recompute
from apportion.memory.recompute_costs import ForwardMemory
from apportion.memory.reorder import updates_early
from apportion.memory.rewritten_graph import RewrittenGraph
from apportion.memory.rotor import rotor
from apportion.memory.step_model import StepModel, step_model
from apportion.memory.tensorflowmem import partition, tensorflowmem
from apportion.memory.time_offloads import HostWay, time_offloads
from apportion.plan.auto import choose
from apportion.plan.candidates import Candidate, DefaultCosts, PlanRequest
from apportion.plan.make_plan import make_plan
from apportion.plan.planned_memory import with_memory
from apportion.split.space import Space
from apportion.zoo import load

BEGIN, END = "<!-- measured: recomputation -->", "<!-- end -->"
MODELS = ("vgg16", "unet", "gpt2:layers=1", "gpt2:layers=2")
SHARES = (0.75, 0.5, 0.25, 0.1, 0.0)
KEPT = 12  # numbers of bytes to keep that methods are asked with
WANTED = (1.0, 1.3, 1.7, 2.2, 3.0, 10.0)  # of what is over, that Capuchin is asked to free
CHUNKS = (16, 64, 256)  # of the peak, what chunks of TensorFlowMem make
PASSES = ((False, False), (True, False), (True, True))  # it offloads, it places on the host


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
        self.orders: OrderModel = order_model(self.model, *where, 0, self.start.space.origins)
        self.low = low_order(self.program.graph, self.orders)
        self.way = HostWay(host_link(self.cluster, 0))
        self.known: dict[MemoryPlan, Candidate] = {MemoryPlan(): self.start}

    def planned(self, plan: MemoryPlan) -> Candidate:
        if plan not in self.known:
            self.known[plan] = with_memory(self.request, self.start, plan)
        return self.known[plan]

    def simulated(self, ops: frozenset[int]) -> Candidate:
        made = recompute(self.program.graph, ops)
        return self.planned(MemoryPlan(recomputed=_repeats(made)))

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
        yield from self._on_host(limit)

    def order_rows(self) -> Iterator[Row]:
        """What orders alone do, whatever the limit."""
        graph, orders = self.program.graph, self.orders
        methods: dict[str, Callable[[], list[int]]] = {
            "updates early": lambda: orders.order_of(updates_early(graph)),
            "levels": lambda: level_order(orders),
            "lpmf": lambda: least_peak_order(orders),
            "ours, order only": lambda: low_order(graph, orders),
        }
        for name, method in methods.items():
            began = time.process_time()
            order = method()
            took = time.process_time() - began
            yield self._planned_row(name, MemoryPlan(orders.ops(order)), 1 << 62, took)

    def _on_host(self, limit: int) -> Iterator[Row]:
        """Methods that use the host's memory."""
        for name, recomputes in (("swaps", False), ("capuchin", True)):
            began = time.process_time()
            plan = self._swapped(limit, recomputes)
            yield self._planned_row(name, plan, limit, time.process_time() - began)
        began = time.process_time()
        plan, note = self._tensorflowmem(limit)
        took = time.process_time() - began
        yield replace(self._planned_row("tensorflowmem", plan, limit, took), note=note)
        began = time.process_time()
        ways = {"recompute": "auto", "offload": "auto", "host_state": "auto"}
        made = make_plan(self.program, self.cluster, "single", 1.0, limit, **ways)  # type: ignore[arg-type]
        took = time.process_time() - began
        line, base = made.predicted, self.start.timeline
        over = max(line.peak_bytes[0] - limit, 0)
        peak = line.peak_bytes[0] / base.peak_bytes[0]
        yield Row("ours, host too", line.step_seconds / base.step_seconds, peak, over, took)

    def _swapped(self, limit: int, recomputes: bool) -> MemoryPlan:
        graph, costs = self.program.graph, self.model.costs
        over = self.start.timeline.peak_bytes[0] - limit
        plan = MemoryPlan()
        for share in WANTED:
            found = capuchin(self.model, self.way, int(share * over), recomputes)
            again = recompute(graph, found.ops | views_of(graph, costs, found.values))
            away = time_offloads(again, costs, self.way, found.values)
            plan = MemoryPlan(recomputed=_repeats(again), offloaded=away)
            if self.planned(plan).timeline.peak_bytes[0] <= limit:
                break
        return plan

    def _tensorflowmem(self, limit: int) -> tuple[MemoryPlan, str]:
        peak, plans = self.start.timeline.peak_bytes[0], dict[MemoryPlan, str]()
        for share in CHUNKS:
            parts = partition(self.orders, self.low, peak // share)
            for how in PASSES:
                plan = tensorflowmem(self.model, self.orders, self.way, limit, parts, *how)
                plans[plan] = ("order", "offload", "placement")[sum(how)]

        def rank(plan: MemoryPlan) -> tuple[bool, float]:
            line = self.planned(plan).timeline
            return RecomputeOutcome(line.peak_bytes[0] - limit, line.step_seconds).rank

        best = min(plans, key=rank)
        return best, plans[best]

    def _row(self, name: str, ops: frozenset[int] | None, limit: int, seconds: float) -> Row:
        made = None if ops is None else recompute(self.program.graph, ops)
        plan = None if made is None else MemoryPlan(recomputed=_repeats(made))
        return self._planned_row(name, plan, limit, seconds)

    def _planned_row(self, name: str, plan: MemoryPlan | None, limit: int, seconds: float) -> Row:
        if plan is None:
            return Row(name, None, 0.0, 0, seconds)
        line, base = self.planned(plan).timeline, self.start.timeline
        peak = line.peak_bytes[0]
        step = line.step_seconds / base.step_seconds
        return Row(name, step, peak / base.peak_bytes[0], max(peak - limit, 0), seconds)


def _repeats(made: RewrittenGraph) -> tuple[int, ...]:
    return tuple(sorted({made.origins[op] for op in made.repeats}))


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
    for row in bench.order_rows():
        yield _line("any", row)
    most, least = line.peak_bytes[0], lowest_peak(bench.model).step.peak
    for share in shares:
        limit = int(least + share * (most - least))
        for row in bench.rows(limit):
            yield _line(f"{limit / most:.3f}", row)


def _line(limit: str, row: Row) -> str:
    step = "none found" if row.step is None else f"{row.step:.3f}"
    over = f"{row.over / 1e6:.0f}" if row.over else ""
    peak = "" if row.step is None else f"{row.peak:.3f}"
    return f"| {limit} | {row.method} | {step} | {peak} | {over} | {row.seconds:.2f} | {row.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="one model; nothing is written")
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
    if asked.write is not None and not asked.only:
        before, _, rest = asked.write.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        body = "\n".join(lines)
        asked.write.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
    main()
