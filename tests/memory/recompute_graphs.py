"""Small steps to choose recomputed operators for: chains, a block, and Graphs drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import torch
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.graph import FORWARD, Graph
from apportion.lower.runnable import runnable
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.memory.choose_recompute import RecomputeOutcome
from apportion.memory.recompute import recompute
from apportion.memory.step_model import StepModel, step_model
from apportion.run.one_process import undivided
from apportion.simulate.simulate import simulate
from apportion.split.space import Space

WIDTH = 8
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "exp": torch.exp, "relu": torch.relu, "gelu": nn.functional.gelu
}  # fmt: skip


class Drawn(nn.Module):
    """Linear layers, sums, products and pointwise operators that read one of the latest results."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        rng, widths = Random(seed), [WIDTH]
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)])
        self.steps: list[tuple[str, int, int]] = []
        for _ in range(count):
            kind = rng.choice(("linear", "linear", "add", "mul", *POINTWISE))
            source = rng.randrange(max(0, len(widths) - 3), len(widths))
            other, width = -1, widths[source]
            if kind == "linear":
                other, width = len(self.layers), rng.choice((4, 8, 16, 32))
                self.layers.append(nn.Linear(widths[source], width, bias=False))
            elif kind in ("add", "mul"):
                other = rng.choice([k for k, w in enumerate(widths) if w == width])
            self.steps.append((kind, source, other))
            widths.append(width)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.layers[0](x)]
        for kind, source, other in self.steps:
            one = found[source]
            if kind == "linear":
                found.append(self.layers[other](one))
            elif kind in ("add", "mul"):
                found.append(one + found[other] if kind == "add" else one * found[other])
            else:
                found.append(POINTWISE[kind](one))
        return torch.stack([one.mean() for one in found[-2:]])


def graph_of(model: nn.Module, rows: int) -> Graph:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).sum()
        return found

    with torch.device("meta"):
        model = model.to_empty(device="meta")
        batch = torch.empty(rows, WIDTH)
    return capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch).graph


@cache
def drawn_graph(seed: int) -> Graph:
    """Host-bound if its rows are few, device-bound if many."""
    rng = Random(seed)
    return graph_of(Drawn(seed, rng.randrange(3, 9)), rng.choice((4096, 1 << 20)))


@cache
def chain_graph(layers: int) -> Graph:
    """A chain in which activations are far larger than parameters."""
    model = nn.Sequential()
    for _ in range(layers):
        model.append(nn.Linear(WIDTH, WIDTH, bias=False))
        model.append(nn.Tanh())
    return graph_of(model, 1 << 20)


def forward_ops(graph: Graph) -> list[int]:
    return [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]


@cache
def modelled(graph: Graph, name: str = "1xh100") -> StepModel:
    here = cluster(name)
    space, cost = Space(graph), default_cost(here)
    tasks = runnable(space, undivided(graph), 1)
    return step_model(space, tasks, simulate(tasks, here, cost), 0, here, cost)


def simulated(
    graph: Graph, limit: int = 0, name: str = "1xh100"
) -> Callable[..., RecomputeOutcome]:
    """What lowering and simulating a set gives."""
    here = cluster(name)

    def run(ops: frozenset[int]) -> RecomputeOutcome:
        made = recompute(graph, ops).graph
        tasks = runnable(Space(made), undivided(made), 1)
        line = simulate(tasks, here, default_cost(here))
        return RecomputeOutcome(line.peak_bytes[0] - limit, line.step_seconds)

    return run


def walked(model: StepModel, limit: int = 0) -> Callable[[frozenset[int]], RecomputeOutcome]:
    """What the model says of a set."""

    def run(ops: frozenset[int]) -> RecomputeOutcome:
        step = model.of(ops)
        return RecomputeOutcome(step.peak - limit, step.nanoseconds / 1e9)

    return run
