"""What each kind of move buys flexflow: the same walks without it, and with it alone.

    python benchmarks/moves.py                                # the table
    python benchmarks/moves.py --models lenet@flexflow-p100:4 --seconds 20 --seeds 3 --jobs 2

One walk from data parallelism per seed, of equal processor time; what is reported is the best step
found, as a multiple of data parallelism's, the mean over seeds. `op`, `layer` and `cell` alone are
what a search does whose unit is an operator, a layer, or the step of a module (FlexFlow's operators
are of the last kind).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.data import data
from apportion.search.problem import Problem
from apportion.search.walks.metropolis import Chain
from apportion.search.walks.moves import KINDS
from apportion.search.walks.simulated_walk import SimulatedWalk
from apportion.split.space import Space

MODELS = (
    "lenet@flexflow-p100:4",
    "rnnlm:steps=10,batch=256@flexflow-p100:4",
    "nmt:steps=10,batch=256@flexflow-k80:4",
    "inception-v3:batch=256@flexflow-p100:4",
    "gpt2:layers=4,batch=16@2x4xa100",
)


def sets() -> dict[str, dict[str, int]]:
    """Which kinds of moves are drawn, by name."""
    found = {"all": dict(KINDS)}
    found |= {f"without {k}": {n: w for n, w in KINDS.items() if n != k} for k in KINDS}
    found |= {f"{k} alone": {k: 1} for k in ("op", "group", "layer", "cell", "edge")}
    return found


def walk(model: str, name: str, seconds: float, seed: int) -> dict[str, object]:
    """The best step of one walk."""
    spec, _, where = model.partition("@")
    them = cluster(where)
    it = zoo.load(spec, 0)
    space = Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)
    problem = Problem(space, them, default_cost(them))
    steps = SimulatedWalk(problem, space, data(problem).strategy, sets()[name])
    chain = Chain(steps, Random(seed))
    first, began = chain.best, time.process_time()
    while time.process_time() - began < seconds:
        chain.step()
    return {
        "model": model, "kinds": name, "seed": seed, "data": first, "best": chain.best,
        "proposals": chain.proposals, "accepted": chain.accepted, "drawn": steps.drawn,
    }  # fmt: skip


def table(rows: list[dict[str, object]]) -> str:
    """Rows of kinds, columns of models."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    lines = ["| moves | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for name in sets():
        cells = []
        for model in models:
            mine = [r for r in rows if (r["model"], r["kinds"]) == (model, name)]
            ratios = [float(str(r["best"])) / float(str(r["data"])) for r in mine]
            many = statistics.mean(int(str(r["proposals"])) for r in mine) if mine else 0
            cells.append(f"{statistics.mean(ratios):.3f} ({many:,.0f})" if mine else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    compile_at_once()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", default=";".join(MODELS), help="spec@cluster, ; between them")
    parser.add_argument("--seconds", type=float, default=30.0, help="processor time of a walk")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", help="a file for the rows, JSON lines")
    given = parser.parse_args()
    cells = [
        (model, name, given.seconds, seed)
        for model in given.models.split(";")
        for name in sets()
        for seed in range(given.seeds)
    ]
    rows = []
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(walk, *cell) for cell in cells]:
            rows.append(done.result())
            print(f"{len(rows)} of {len(cells)}", file=sys.stderr, flush=True)
    if given.out:
        with open(given.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))


if __name__ == "__main__":
    main()
