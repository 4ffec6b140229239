"""How long the server of `apportion serve` takes to answer a changed cut.

    python benchmarks/serve.py                          # gpt2, 12 layers, on 64 devices
    python benchmarks/serve.py --model llama:layers=4 --cluster 8xh100 --clicks 100

Opens a plan as the server does, and tries cuts of operators at random: the seconds that the server
spends on each list of cuts and on each tried cut. Of every five cuts that are tried the last is
kept, and in the end the plan is downloaded and read again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from apportion import zoo
from apportion.capture import capture
from apportion.machine import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.plan_file import read_plan
from apportion.serve.workbench import Workbench


def measured(bench: Workbench, plan: int, clicks: int, seed: int) -> dict[str, Any]:
    """Seconds of lists and of tried cuts."""
    rng, lists, tries = random.Random(seed), list[float](), list[float]()
    count = len(bench.ops(plan)["ops"])
    while len(tries) < clicks:
        op = rng.randrange(count)
        began = time.perf_counter()
        listed = bench.changes(plan, op)
        lists.append(time.perf_counter() - began)
        for _ in range(5 if listed["changes"] else 0):
            asked = {"op": op, "change": rng.randrange(len(listed["changes"]))}
            asked["version"] = listed["version"]
            began = time.perf_counter()
            bench.try_change(plan, asked)
            tries.append(time.perf_counter() - began)
        if listed["changes"]:
            bench.keep_change(plan, asked)
    return {"lists": figures(lists), "tries": figures(tries)}


def figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "of 100, 95 below": ordered[int(0.95 * (len(ordered) - 1))],
        "longest": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--cluster", default="8x8xh100")
    parser.add_argument("--method", default="megatron")
    parser.add_argument("--clicks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    it = zoo.load(options.model, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    plan = make_plan(program, cluster(options.cluster), options.method)
    bench = Workbench()
    try:
        began = time.perf_counter()
        number = bench.open("measured", plan)
        bench.ops(number)
        found = {"ready": time.perf_counter() - began}
        found |= measured(bench, number, options.clicks, options.seed)
        began = time.perf_counter()
        read_plan(bench.download(number))
        print(json.dumps(found | {"download": time.perf_counter() - began}, indent=1))
    finally:
        bench.close()


if __name__ == "__main__":
    main()
