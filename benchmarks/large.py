"""A step of 100,000 operators on 64 devices: lowered and simulated, in how much time and memory.

python benchmarks/large.py                       # a deep GPT, data parallel, 8 nodes of 8 H100
python benchmarks/large.py --layers 100 --devices 16 --method tofu
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search import METHODS, Problem
from apportion.simulate.simulate import simulate
from apportion.split.space import Space

MODEL = "gpt2:layers={layers},width=64,heads=4,vocab=256,batch=64,seq=16,dropout=0"


def peak_gigabytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    compile_at_once()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--layers", type=int, default=1165)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--method", default="data")
    asked = parser.parse_args()
    found: dict[str, object] = {}
    began = time.perf_counter()

    def note(what: str) -> None:
        nonlocal began
        now = time.perf_counter()
        found[what] = round(now - began, 2)
        print(f"{what}: {now - began:.1f} s, peak {peak_gigabytes():.2f} GB", file=sys.stderr)
        began = time.perf_counter()

    it = zoo.load(asked.model.format(layers=asked.layers), 0)
    graph = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph
    found["ops"] = len(graph.ops)
    note("capture")
    space = Space(graph)
    note("describe")
    nodes = max(asked.devices // 8, 1)
    them = cluster(f"{nodes}x{asked.devices // nodes}xh100")
    problem = Problem(space, them, default_cost(them))
    strategy = METHODS[asked.method](problem, budget=60.0, seed=0).strategy
    note("search")
    tasks = lower(space, strategy, asked.devices)
    note("lower")
    line = simulate(tasks, them, default_cost(them))
    note("simulate")
    kinds = {row.name: int((tasks.kind == k).sum()) for k, row in enumerate(tasks.task_kinds.rows)}
    found |= {"tasks": len(tasks), **kinds, "step_seconds": line.step_seconds}
    found["peak_gigabytes"] = round(peak_gigabytes(), 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
