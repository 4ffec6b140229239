"""OptCNN's published search results, rebuilt: search time, layers, and the strategy of VGG-16.

    python benchmarks/optcnn.py                       # all tables, in Markdown
    python benchmarks/optcnn.py --models lenet,vgg16 --json

Seconds are CPU seconds of this process for one search, description and capture excluded, compiled
code loaded. Steps are simulated on four P100 with NVLink (`flexflow-p100:4`), 32 images a GPU.

Published: Jia, Lin, Qi, Aiken, ICML 2018, "Exploring Hidden Dimensions in Parallelizing
Convolutional Neural Networks".
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.graph import Graph
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.machine.topology import Cluster
from apportion.search import Problem
from apportion.search.baselines.data import data
from apportion.search.baselines.single import single
from apportion.search.layers.optcnn import minimise
from apportion.search.layers.summed_seconds import LayerGrids, SummedSeconds
from apportion.search.tables.eliminate import Energy
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Strategy

CLUSTER = "flexflow-p100:4"
PUBLISHED = {  # layers, seconds of depth-first search, seconds of OptCNN
    "lenet": ("6", "5.6 s", 0.01),
    "alexnet": ("11", "2.1 h", 0.02),
    "vgg16": ("21", "> 24 h", 0.1),
    "inception-v3": ("102", "> 24 h", 0.4),
}
VGG_GROUPS = (2, 2, 3, 3, 3)  # convolutions
SLOWER = (1, 2, 4, 8, 16, 32)
FOREVER = float("inf")


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    ops: int
    layers: int
    grids: int
    left: int
    search_seconds: float
    summed_seconds: float
    step_seconds: float
    data_seconds: float
    single_seconds: float
    exact: bool


def main() -> None:
    compile_at_once()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(PUBLISHED))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    unknown = set(asked.models.split(",")) - PUBLISHED.keys()
    if unknown:
        parser.error(f"no published results for {', '.join(sorted(unknown))}")
    graphs = {model: captured(f"{model}:batch=128") for model in asked.models.split(",")}
    measure("warm", captured("lenet:tiny"))
    rows = []
    for model, graph in graphs.items():
        rows.append(measure(model, graph))
        print(f"{model}: {rows[-1].search_seconds:.2f} s", file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(table(rows))
    if "vgg16" in graphs:
        print(f"\n{strategies(graphs['vgg16'])}\n\n{prices(graphs['vgg16'])}")
        print(f"\n{links(graphs['vgg16'])}")


def captured(spec: str) -> Graph:
    it = zoo.load(spec, meta=True)
    return capture(it.step, it.model, it.optimizer, it.batch).graph


def given(graph: Graph, on: Cluster | None = None) -> Problem:
    on = on or cluster(CLUSTER)
    return Problem(Space(graph), on, default_cost(on))


def measure(model: str, graph: Graph) -> Row:
    """Searches once."""
    problem = given(graph)
    gc.collect()  # what capture left
    began = time.process_time()
    costs = SummedSeconds(problem)
    found = minimise(costs, costs.energy, FOREVER, 0)
    strategy = costs.strategy(found.rows)
    seconds = time.process_time() - began
    return Row(
        model, len(graph.ops), len(costs.layers), max(costs.energy.sizes),
        left_after_reduction(costs.energy), seconds, found.seconds, step(problem, strategy),
        step(problem, data(problem).strategy), step(problem, single(problem).strategy),
        found.exact,
    )  # fmt: skip


def step(problem: Problem, strategy: Strategy) -> float:
    tasks = lower(problem.space, strategy, problem.devices)
    return simulate(tasks, problem.cluster, problem.cost).step_seconds


def left_after_reduction(energy: Energy) -> int:
    """Layers left when every layer between two others is eliminated, and parallel edges joined, as
    long as there are any."""
    near: dict[int, set[int]] = {k: set() for k in range(len(energy.sizes))}
    for a, b in energy.pairs:
        near[a].add(b)
        near[b].add(a)
    while between := [k for k, some in near.items() if len(some) == 2]:
        a, b = near.pop(between[0])
        near[a].discard(between[0])
        near[b].discard(between[0])
        near[a].add(b)
        near[b].add(a)
    return len(near)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | operators | layers (paper) | grids | left after reduction (paper) | search, CPU"
        " s (paper; its depth-first) | summed ms | simulated ms | data | single |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        layers, slow, fast = PUBLISHED[r.model]
        lines.append(
            f"| {r.model} | {r.ops:,} | {r.layers} ({layers}) | {r.grids} | {r.left} (2) | "
            f"{r.search_seconds:.2f} ({fast}; {slow}) | {1e3 * r.summed_seconds:.3f} | "
            f"{1e3 * r.step_seconds:.3f} | {1e3 * r.data_seconds:.3f} | "
            f"{1e3 * r.single_seconds:.3f} |"
        )
    return "\n".join(lines)


# VGG-16


def strategies(graph: Graph) -> str:
    """What is found, under either costs, beside the published strategy."""
    columns = [published(SummedSeconds(given(graph), paper=True))]
    for paper in (True, False):
        costs = SummedSeconds(given(graph), paper=paper)
        columns.append((costs, minimise(costs, costs.energy, FOREVER, 0).rows))
    lines = ["| layers | published | the paper's costs | ours |", "|---|---|---|---|"]
    for name, members in vgg_layers().items():
        cells = [
            ", ".join(dict.fromkeys(cut(costs, k, rows[k]) for k in members))
            for costs, rows in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def vgg_layers() -> dict[str, list[int]]:
    found, at = {}, 0
    for group, count in enumerate(VGG_GROUPS):
        found[f"convolutions of group {group + 1}, and pooling"] = list(range(at, at + count + 1))
        at += count + 1
    names = ("dense 1", "dense 2", "dense 3", "softmax")
    return found | {name: [at + k] for k, name in enumerate(names)}


NAMES = {"i": "n", "i0": "n", "j": "c", "o": "c", "i1": "c"}


def cut(costs: SummedSeconds, layer: int, row: int) -> str:
    """A grid in the paper's words."""
    labels, grids = costs.layers[layer].labels, costs.grids[layer]
    window = any(label.name in ("n", "o") for label in labels)
    names = {"i0": "h", "i1": "w", "o": "c"} if window else {**NAMES, "i2": "h", "i3": "w"}
    parts = [
        f"{names.get(label.name, label.name)}={degree}"
        for label, degree in zip(labels, grids.degrees[row].tolist(), strict=True)
        if degree > 1
    ]
    used = int(grids.used[row].sum())
    return f"{{{', '.join(parts)}}}" if parts else f"whole on {used}"


def published(costs: SummedSeconds) -> tuple[SummedSeconds, list[int]]:
    """The published strategy as rows of grids."""
    wanted = [[4, 1, 1, 1]] * 14 + [[1, 2, 2, 1]] * 3 + [[1, 1, 2, 2], [1, 4], [1, 4], [1, 2], [1]]
    pools = (2, 5, 9, 13)
    rows = [
        row_of(grids, [4, 1, 1, 1] if layer in pools else degrees)
        for layer, (grids, degrees) in enumerate(zip(costs.grids, wanted, strict=True))
    ]
    return costs, rows


def row_of(grids: LayerGrids, degrees: Sequence[int]) -> int:
    return grids.degrees.tolist().index(list(degrees))


def prices(graph: Graph) -> str:
    """What each difference from the published strategy is worth: it alone put into the optimum."""
    lines = [
        "| put into the optimum | the paper's costs, ms more | ours |",
        "|---|---|---|",
    ]
    cases = {"group 5 {h=2, w=2}": [14, 15, 16, 17], "dense 3 {c=2}": [20], "softmax on 1": [21],
             "dense 3 {c=2}, softmax on 1": [20, 21], "all of it": list(range(22))}  # fmt: skip
    cells: dict[str, list[str]] = {name: [] for name in cases}
    for paper in (True, False):
        costs = SummedSeconds(given(graph), paper=paper)
        best = minimise(costs, costs.energy, FOREVER, 0)
        _, theirs = published(costs)
        for name, layers in cases.items():
            rows = [theirs[k] if k in layers else row for k, row in enumerate(best.rows)]
            more = costs.energy.value(rows) - best.seconds
            cells[name].append(f"{1e3 * more:.3f}")
    lines += [f"| {name} | {' | '.join(some)} |" for name, some in cells.items()]
    return "\n".join(lines)


def links(graph: Graph) -> str:
    """The strategy where links are slower."""
    lines = ["| GB/s of a GPU's links | group 5 | dense 1 | dense 2 | dense 3 | softmax |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for factor in SLOWER:
        on = cluster(CLUSTER)
        slower = tuple(replace(link, bandwidth=link.bandwidth / factor) for link in on.links)
        costs = SummedSeconds(given(graph, replace(on, links=slower)), paper=True)
        rows = minimise(costs, costs.energy, FOREVER, 0).rows
        names = vgg_layers()
        picked = [
            "convolutions of group 5, and pooling",
            "dense 1",
            "dense 2",
            "dense 3",
            "softmax",
        ]
        cells = [", ".join(dict.fromkeys(cut(costs, k, rows[k]) for k in names[p])) for p in picked]
        speed = min(slower[k].bandwidth for k in on.routes[0][1]) / 1e9
        lines.append(f"| {speed:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
