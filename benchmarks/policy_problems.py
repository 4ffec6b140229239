"""Makes the problems that `policy` is trained and tested on, one file each.

    python benchmarks/policy_problems.py DIR [--only train|seen|unseen] [--match TEXT]

Captured steps of the zoo, one unit for a forward operator, on several clusters: DIR/train,
DIR/seen (other sizes of the families of training, other clusters) and DIR/unseen (families that
training never saw). Of those for training there is a second file of COARSE units each. Files that
are there are left as they are.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

TRAIN_CLUSTERS = (
    ("placeto-k80", "placeto"),
    ("gdp-p100", "cluster"),
    ("mixed-a100-v100", "cluster"),
)
TEST_CLUSTERS = (
    ("placeto-k80", "placeto"),
    ("flexflow-p100", "cluster"),
    ("p2.8xlarge", "cluster"),
)

COARSE = 100
MODELS = {
    "train": (
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
    ),
    "seen": (
        "gnmt:layers=4,source=10,target=10",
        "nmt:source=20,target=20",
        "rnnlm:layers=3,steps=30",
        "inception-v3:blocks35=4,blocks17=5,batch=32",
        "transformer-xl:layers=9,batch=16",
        "gnmt:layers=8,source=5,target=5",
    ),
    "unseen": (
        "amoebanet:layers=6",
        "wavenet:stacks=4,layers=36",
        "nasnet-a:cells=2",
        "transformer-moe:layers=12,experts=8",
        "amoebanet:layers=12,batch=32",
        "wavenet:stacks=3,layers=48,batch=4",
    ),
}


def file_of(folder: Path, model: str, cluster: str) -> Path:
    text = f"{model}@{cluster}".replace(":", "_").replace(",", "_").replace("=", "")
    return folder / f"{text}.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=sorted(MODELS))
    parser.add_argument("--match", default="", help="only models whose name contains this")
    options = parser.parse_args()
    import torch

    from apportion.cli.requests import capture_without_data
    from apportion.machine import cluster, default_cost
    from apportion.place import captured_problem, coarsen, save_problem
    from apportion.split import Space

    torch.set_num_threads(1)
    for split, models in MODELS.items():
        if options.only not in (None, split):
            continue
        folder = options.folder / split
        folder.mkdir(parents=True, exist_ok=True)
        for model in models:
            clusters = TRAIN_CLUSTERS if split == "train" else TEST_CLUSTERS
            missing = [it for it in clusters if not file_of(folder, model, it[0]).exists()]
            if options.match not in model or not missing:
                continue
            began = time.perf_counter()
            space = Space(capture_without_data(model, 0).graph)
            for name, rules in missing:
                place = cluster(name)
                problem = captured_problem(
                    space, place, default_cost(place), rules=rules, name=f"{model}@{name}"
                )
                save_problem(file_of(folder, model, name), problem)
                if split == "train":
                    made = coarsen(problem, COARSE)[0]
                    save_problem(file_of(folder, f"coarse_{model}", name), made)
            seconds = time.perf_counter() - began
            print(f"{split} {model}: {problem.units} units, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
