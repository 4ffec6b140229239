"""Orders of small steps: how near the lowest peak of all orders are those that are quickly made?

    python benchmarks/orders.py [--count 40] [--solve 60] [--write PAGE]

Steps are drawn: linear layers, sums, products and pointwise operators, each of which reads one of
the latest results or any earlier one, so that much is ready at a time; forward, backward and
updates are ordered as one. Activations are far larger than parameters, since what updates wait for
is another matter (memory/order_model.py). Each order's peak is that of the model, which is what
simulation gives; the programme (memory/olla_order.py) gives the lowest there is where it ends in
time, else a bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.graph import Graph
from apportion.machine.cluster import cluster
from apportion.memory.least_peak_order import least_peak_order
from apportion.memory.level_order import level_order
from apportion.memory.low_order import low_order
from apportion.memory.olla_order import olla_order
from apportion.memory.order_model import OrderModel, order_model
from apportion.memory.reorder import updates_early
from apportion.memory.step_model import step_model
from apportion.plan.auto import choose
from apportion.plan.candidates import DefaultCosts, PlanRequest
from apportion.split.space import Space

BEGIN, END = "<!-- measured: orders -->", "<!-- end of orders -->"
WIDTHS, ROWS = (4, 8, 16, 32), 1 << 20
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "exp": torch.exp, "relu": torch.relu, "gelu": nn.functional.gelu
}  # fmt: skip


class Branches(nn.Module):
    """A drawn network whose operators read any result before them."""

    def __init__(self, rng: Random, count: int) -> None:
        super().__init__()
        widths = [WIDTHS[1]]
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, int, int]] = []
        for _ in range(count):
            kind = rng.choice(("linear", "linear", "add", *POINTWISE))
            source = rng.randrange(len(widths))
            other, width = -1, widths[source]
            if kind == "linear":
                other, width = len(self.layers), rng.choice(WIDTHS)
                self.layers.append(nn.Linear(widths[source], width, bias=False))
            elif kind == "add":
                other = rng.choice([k for k, w in enumerate(widths) if w == width])
            self.steps.append((kind, source, other))
            widths.append(width)

    def forward(self, x: Tensor) -> Tensor:
        found, read = [x], set()
        for kind, source, other in self.steps:
            read |= {source, other if kind == "add" else source}
            if kind == "linear":
                found.append(self.layers[other](found[source]))
            elif kind == "add":
                found.append(found[source] + found[other])
            else:
                found.append(POINTWISE[kind](found[source]))
        ends = [one.mean() for k, one in enumerate(found) if k not in read]
        return torch.stack(ends).sum()


def drawn_step(seed: int) -> Graph:
    rng = Random(seed)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch)
        return found

    with torch.device("meta"):
        model, batch = Branches(rng, rng.randrange(4, 10)), torch.empty(ROWS, WIDTHS[1])
    made = torch.optim.SGD(model.parameters(), lr=0.1) if list(model.parameters()) else None
    return capture(step, model, made, batch).graph if made is not None else drawn_step(seed + 10**6)


def ordered(graph: Graph) -> OrderModel:
    where = cluster("1xh100")
    request = PlanRequest(Space(graph), where, DefaultCosts(where), None)
    start = choose(request, "single", 1.0).best
    step = step_model(start.space, start.tasks, start.timeline, 0, where, start.cost)
    return order_model(step, start.tasks, start.timeline, 0, start.space.origins)


def table(count: int, solve: float) -> list[str]:
    names = ("as captured", "updates early", "levels", "lpmf", "ours", "olla")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    seconds = dict.fromkeys(names, 0.0)
    proven, units = 0, []
    for seed in range(count):
        graph = drawn_step(seed)
        orders = ordered(graph)
        methods: dict[str, Callable[[], list[int]]] = {
            "as captured": lambda o=orders: o.order_of(()),
            "updates early": lambda o=orders, g=graph: o.order_of(updates_early(g)),
            "levels": lambda o=orders: level_order(o),
            "lpmf": lambda o=orders: least_peak_order(o),
            "ours": lambda o=orders, g=graph: low_order(g, o),
        }
        peaks = {}
        for name, method in methods.items():
            began = time.process_time()
            peaks[name] = orders.peak(method())
            seconds[name] += time.process_time() - began
        began = time.process_time()
        best = olla_order(orders, solve, min(peaks.values()))
        seconds["olla"] += time.process_time() - began
        units.append(len(orders.units))
        print(f"{seed}: {len(orders.units)} units, {best.optimal=}", flush=True)
        if not best.optimal or best.order is None:
            continue
        proven += 1
        peaks["olla"] = orders.peak(best.order)
        for name in names:
            ratios[name].append(peaks[name] / peaks["olla"])
    lines = [
        f"{count} steps of {min(units)} to {max(units)} units; {proven} were solved to the end in "
        f"{solve:.0f} s, and these are compared.\n",
        "| order | as low as the lowest | peak, mean | largest | CPU s a step |",
        "|---|---|---|---|---|",
    ]
    for name, some in ratios.items():
        equal = sum(one <= 1 + 1e-6 for one in some)
        lines.append(
            f"| {name} | {equal} of {proven} | {sum(some) / max(proven, 1):.3f} | "
            f"{max(some, default=0.0):.3f} | {seconds[name] / count:.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--solve", type=float, default=60.0, help="seconds for each programme")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    asked = parser.parse_args()
    compile_at_once()
    lines = table(asked.count, asked.solve)
    print("\n".join(lines))
    if asked.write is not None:
        before, _, rest = asked.write.read_text().partition(BEGIN)
        body, after = "\n".join(lines), rest.partition(END)[2]
        asked.write.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
    main()
