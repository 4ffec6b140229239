"""How good tofu's partitions of the Tofu paper's 21 models are, on 8 devices, with proofs.

Per model: bytes moved by each partition algorithm, all lowered and counted alike, without a memory
limit; the first cut into two against a proven bound; all three levels against the best joint
solution found by `exact` and against its bound. Batches are those that the paper names, or lie
between.

    python benchmarks/certify.py --jobs 2 --budget 60 --out docs/certificates.md
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CLUSTER = "p2.8xlarge"
OTHERS = ("allrow-greedy", "spartan", "equalchop", "icml18", "data", "fsdp")
BATCHES = {50: (128, 64, 64, 32), 101: (64, 32, 32, 16), 152: (32, 16, 16, 8)}
MODELS = {
    **{
        f"WResNet-{depth}-{width}": f"wresnet:depth={depth},width={width},batch={batch}"
        for depth, batches in BATCHES.items()
        for width, batch in zip((4, 6, 8, 10), batches, strict=True)
    },
    **{
        f"RNN-{layers}-{k}K": f"rnn:layers={layers},hidden={k * 1024},batch={batch}"
        for layers in (6, 8, 10)
        for k in (4, 6, 8)
        for batch in [128 if (layers, k) == (10, 8) else 512]
    },
}  # fmt: skip


def measure(job: tuple[str, float]) -> dict[str, Any]:
    """All figures of one model."""
    from apportion import zoo
    from apportion.capture.capture import capture
    from apportion.describe import ops
    from apportion.machine.cluster import cluster
    from apportion.machine.cost_model import default_cost
    from apportion.search import METHODS, Problem
    from apportion.search.levels.exact import certify_levels, solve_jointly, untie_loops
    from apportion.search.levels.levels import recurse
    from apportion.search.levels.tofu import bytes_moved, partition, sites_of
    from apportion.split.space import Space
    from apportion.work_clock import work_seconds

    assert ops
    name, budget = job
    it = zoo.load(MODELS[name], 0, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm).graph
    place = cluster(CLUSTER)
    began = time.process_time()
    problem = Problem(Space(graph), place, default_cost(place))
    found = METHODS["tofu"](problem)
    seconds = time.process_time() - began
    moved = {"tofu": bytes_moved(problem, found.strategy)}
    for other in OTHERS:
        moved[other] = bytes_moved(problem, METHODS[other](problem).strategy)
    levels = partition(problem)
    now = work_seconds()
    two = certify_levels(recurse(sites_of(levels.sites.space), (2,)), now + budget / 3)
    joint = solve_jointly(untie_loops(levels), work_seconds() + budget)
    best = min(joint.levels.bytes_moved, levels.bytes_moved)
    return {
        "name": name,
        "ops": len(graph.ops),
        "seconds": seconds,
        "moved": moved,
        "two": (two.value, two.gap),
        "levels": levels.bytes_moved,
        "best": best,
        "bound": min(joint.bound, best),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """What was measured, as markdown."""
    lines = [
        "| model | operators | CPU s | tofu GB | "
        + " | ".join(OTHERS)
        + " | first cut GB | gap to "
        "its bound | levels GB | best joint found | gap to it | gap to the joint bound |",
        "|---" * (9 + len(OTHERS) + 1) + "|",
    ]
    for row in rows:
        moved = row["moved"]
        others = " | ".join(f"x{moved[other] / moved['tofu']:.2f}" for other in OTHERS)
        lines.append(
            f"| {row['name']} | {row['ops']:,} | {row['seconds']:.2f} | "
            f"{moved['tofu'] / 1e9:.3f} | {others} | "
            f"{row['two'][0] / 1e9:.4f} | {row['two'][1]:.1e} | "
            f"{row['levels'] / 1e9:.3f} | {row['best'] / 1e9:.3f} | "
            f"{row['levels'] / row['best'] - 1:.2%} | {row['levels'] / row['bound'] - 1:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="such as RNN-6-4K")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each joint search")
    parser.add_argument("--out", type=Path, help="a markdown file to write")
    given = parser.parse_args()
    jobs = [(name, given.budget) for name in given.models.split(",")]
    rows = []
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for row in pool.map(measure, jobs):
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
    text = table(rows)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
