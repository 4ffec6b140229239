"""Makes further problems that `policy` is trained on, one file each.

    python benchmarks/policy_problems.py DIR [--match TEXT]

Beside the set `train` of benchmarks/placement_problems.py: other sizes of the same families on
eight devices, by the rules of Placeto's simulator and by those of a cluster, and each of them once
more in COARSE groups. Files that are there are left as they are.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

CLUSTERS = (("placeto-k80", "placeto"), ("gdp-p100", "cluster"))
COARSE = 100
MODELS = (
    "gnmt:layers=2,source=8,target=8",
    "nmt:source=10,target=10",
    "rnnlm:steps=20",
    "inception-v3",
    "gnmt:layers=3,source=6,target=6,batch=64",
    "transformer-xl:layers=6",
    "rnnlm:layers=4,steps=10,hidden=1024",
    "nmt:layers=4,source=6,target=6",
    "gpt2",
    "resnet101",
    "rnntc:layers=3,steps=12",
    "gnmt:layers=4,source=8,target=6",
    "deepspeech:frames=40",
    "bert:layers=12,batch=8",
    "nmt:source=24,target=16,hidden=512",
    "inception-v3:blocks35=2,blocks17=6,blocks8=3,batch=16",
    "transformer-xl:layers=12,batch=8",
    "rnn:steps=12",
    "gnmt:layers=6,source=4,target=4",
)


def file_of(folder: Path, model: str, cluster: str) -> Path:
    text = f"{model}@{cluster}".replace(":", "_").replace(",", "_").replace("=", "")
    return folder / f"{text}.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", default="", help="only models whose name contains this")
    options = parser.parse_args()
    import torch

    from apportion.cli.requests import capture_without_data
    from apportion.machine import cluster, default_cost
    from apportion.place import captured_problem, coarsen, save_problem
    from apportion.split import Space

    torch.set_num_threads(1)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        missing = [it for it in CLUSTERS if not file_of(folder, model, it[0]).exists()]
        if options.match not in model or not missing:
            continue
        began = time.perf_counter()
        space = Space(capture_without_data(model, 0).graph)
        for name, rules in missing:
            place = cluster(name)
            cost = default_cost(place)
            problem = captured_problem(space, place, cost, rules=rules, name=f"{model}@{name}")
            save_problem(file_of(folder, model, name), problem)
            made = coarsen(problem, COARSE)[0]
            save_problem(file_of(folder, f"coarse_{model}", name), made)
        seconds = time.perf_counter() - began
        print(f"{model}: {problem.units} units, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
