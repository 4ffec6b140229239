"""Captures models and writes them as placement problems, one file each, for the other scripts.

    python benchmarks/placement_problems.py --out DIR [--set train,seen] [--jobs 2]

A problem is a model on a cluster: DIR/SET/MODEL@CLUSTER[@rules].npz. The sets:

    train    what `policy` is trained on
    seen     other sizes of families that it is trained on, on clusters that it is not trained on
    unseen   families that it is not trained on, on clusters that it is not trained on
    gdp      the twelve rows of GDP's table
    large    one step of more than 50,000 operators
    placeto  the six rows of Placeto's table, by the rules of its simulator and by ours
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

TRAIN_CLUSTERS = ("gdp-p100:2", "gdp-p100:4", "gdp-p100:8", "placeto-k80:4", "4xv100", "4xtitanx")
TEST_CLUSTERS = ("flexflow-p100:4", "8xa100", "mixed-a100-v100")

TRAIN = (
    "gnmt:layers=2,source=10,target=10", "gnmt:layers=4,source=8,target=8",
    "gnmt:layers=4,source=12,target=12,hidden=512", "gnmt:layers=8,source=6,target=6",
    "gnmt:layers=2,source=20,target=16,batch=64",
    "nmt:source=10,target=10", "nmt:source=16,target=12,hidden=512",
    "nmt:layers=4,source=8,target=8",
    "nmt:source=20,target=20", "rnnlm:steps=20", "rnnlm:steps=40,hidden=1024",
    "rnnlm:layers=4,steps=16", "rnn:steps=16", "rnn:layers=8,steps=10,hidden=2048",
    "rnntc:steps=20", "rnntc:steps=12,hidden=2048", "deepspeech:frames=40",
    "inception-v3", "inception-v3:batch=16", "inception-v3:image=149,batch=128",
    "resnet50", "resnet50:batch=128", "resnet101:batch=16", "wresnet", "vgg16",
    "transformer-xl:layers=4", "transformer-xl:layers=8,batch=16",
    "transformer-xl:layers=6,width=1024",
    "gpt2:layers=6", "gpt2", "bert:layers=6", "alexnet",
)  # fmt: skip
SEEN = (
    "gnmt:layers=4,source=16,target=16", "gnmt:layers=6,source=10,target=10,batch=64",
    "nmt:source=24,target=24", "nmt:layers=3,source=14,target=14,batch=128",
    "rnnlm:layers=3,steps=30", "inception-v3:batch=32", "transformer-xl:layers=10,batch=24",
)  # fmt: skip
UNSEEN = (
    "amoebanet:layers=12", "amoebanet:layers=18,batch=32", "wavenet", "wavenet:stacks=4,layers=36",
    "nasnet-a:cells=4,batch=16", "transformer-moe:layers=4",
)  # fmt: skip
GDP = (
    ("rnnlm:layers=2", 2), ("rnnlm:layers=4", 4), ("gnmt:layers=2", 2), ("gnmt:layers=4", 4),
    ("gnmt:layers=8", 8), ("transformer-xl:layers=2", 2), ("transformer-xl:layers=4", 4),
    ("transformer-xl:layers=8", 8), ("inception-v3", 2), ("amoebanet", 4),
    ("wavenet:stacks=2,layers=18", 2), ("wavenet:stacks=4,layers=36", 4),
)  # fmt: skip
LARGE = "gnmt:source=68,target=68"
PLACETO = ("inception-v3:batch=64", "nmt:source=20,target=20,batch=128", "nasnet-a:batch=32")


def wanted(names: list[str]) -> dict[str, list[tuple[str, str, str]]]:
    """For every model the (set, cluster, rules) it is needed for."""
    found: dict[str, list[tuple[str, str, str]]] = {}

    def add(kind: str, model: str, cluster: str, rules: str = "cluster") -> None:
        if kind in names:
            found.setdefault(model, []).append((kind, cluster, rules))

    for k, model in enumerate(TRAIN):
        for j in range(3):
            add("train", model, TRAIN_CLUSTERS[(k + 2 * j) % len(TRAIN_CLUSTERS)])
    for model in SEEN:
        for cluster in TEST_CLUSTERS:
            add("seen", model, cluster)
    for model in UNSEEN:
        for cluster in TEST_CLUSTERS:
            add("unseen", model, cluster)
    for model, devices in GDP:
        add("gdp", model, f"gdp-p100:{devices}")
    add("large", LARGE, "gdp-p100:8")
    for model in PLACETO:
        for devices in (2, 4):
            for rules in ("placeto", "cluster"):
                add("placeto", model, f"placeto-k80:{devices}", rules)
    return found


def make(model: str, uses: list[tuple[str, str, str]], out: Path) -> str:
    """Capture one model and write its problems."""
    import torch

    from apportion import zoo
    from apportion.capture import capture
    from apportion.machine import cluster, default_cost
    from apportion.place.imports.captured import captured_problem
    from apportion.place.problem_file import save_problem
    from apportion.split import Space

    torch.set_num_threads(1)
    began = time.perf_counter()
    it = zoo.load(model, 0, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    space = Space(program.graph)
    units = 0
    for kind, place, rules in uses:
        machine = cluster(place)
        name = f"{model}@{place}" + ("@placeto" if rules == "placeto" else "")
        problem = captured_problem(space, machine, default_cost(machine), rules=rules, name=name)
        (out / kind).mkdir(parents=True, exist_ok=True)
        save_problem(out / kind / f"{name.replace('/', '_')}.npz", problem)
        units = problem.units
    seconds = time.perf_counter() - began
    ops = len(program.graph.ops)
    return f"{model}: {ops} ops, {units} units, {len(uses)} problems, {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", default="train,seen,unseen,gdp,placeto")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--models", default="", help="only models that contain one of these words")
    args = parser.parse_args()
    words = args.models.split(",")
    jobs = {
        model: uses
        for model, uses in wanted(args.set.split(",")).items()
        if any(word in model for word in words)
    }
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        running = {pool.submit(make, model, uses, args.out): model for model, uses in jobs.items()}
        for done in as_completed(running):
            try:
                print(done.result(), flush=True)
            except Exception as error:
                print(f"{running[done]}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
