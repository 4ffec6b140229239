"""Placeto's experiments: its table at equal numbers of simulated placements, and generalisation.

    python benchmarks/placement_placeto.py problems --dir DIR --jobs 16   # captures: DIR/*.npz
    python benchmarks/placement_placeto.py table    --dir DIR --jobs 16 [--evaluations 20000]
    python benchmarks/placement_placeto.py train    --dir DIR --jobs 16 --train-seconds 400
    python benchmarks/placement_placeto.py test     --dir DIR --jobs 16
    python benchmarks/placement_placeto.py report   --dir DIR             # markdown

Each part is a process of its own and leaves a file in DIR: JSON, or a policy. A part whose file is
there is not done again, so that any stage can be stopped and gone on with; `--seconds` starts no
further part after so many. Nothing needs a network, and `problems` may be run on another machine.

Table: Inception-V3, NMT and NASNet in 128 groups on 2 and 4 K80, by the rules of Placeto's
simulator and by ours. Generalisation: the three families of learn/families.py, re-created, not
Placeto's own; policies are trained on the training graphs of a family, or on both other families,
and tried on the graphs of it that are held out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

PAPER_MODELS = {
    "inception-v3": "inception-v3:batch=64",
    "nmt": "nmt:source=20,target=20,batch=128",
    "nasnet": "nasnet-a:batch=32",
}
GROUPS = 128
RULES = ("placeto", "cluster")
FAMILY_DEVICES = 4
AT_ONCE = ("single", "expert", "scotch", "metis", "list-schedule")
BY_COUNTS = (
    "random", "colocrl", "placeto", "placeto as published", "restarts", "local-search"
)  # fmt: skip
MARKS = (100, 300, 1_000, 3_000, 5_000, 20_000)
TUNING = 50  # updates of fine-tuning

# Seconds a step, and simulated placements, as published (Addanki et al., NeurIPS 2019).
PUBLISHED = {
    ("inception-v3", 2): "expert 1.28, Scotch 1.54, RNN 1.17 (7.8K), Placeto 1.18 (1.6K)",
    ("inception-v3", 4): "expert 1.15, Scotch 1.74, RNN 1.19 (35.8K), Placeto 1.13 (5.8K)",
    ("nmt", 2): "expert OOM, Scotch OOM, RNN 2.35 (73K), Placeto 2.32 (20.4K)",
    ("nmt", 4): "expert OOM, Scotch OOM, RNN 3.15 (51.7K), Placeto 2.63 (94K)",
    ("nasnet", 2): "expert 0.86, Scotch 1.28, RNN 0.89 (16.3K), Placeto 0.86 (3.5K)",
    ("nasnet", 4): "expert 0.84, Scotch 1.22, RNN 0.76 (37K), Placeto 0.74 (29K)",
}

Part = tuple[Path, Callable[..., Any], tuple[Any, ...]]  # its file, and what writes it


# Problems


def table_file(folder: Path, model: str, devices: int, rules: str) -> Path:
    return folder / f"table-{model}-{devices}-{rules}.npz"


def family_file(folder: Path, spec: str) -> Path:
    return folder / f"family-{plain(spec)}.npz"


def plain(name: str) -> str:
    """A name that any file can have."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


def make_problems(uses: list[tuple[Path, int, str]], spec: str, groups: int) -> None:
    """Capture a model once, and write a coarse problem for each (file, devices, rules)."""
    from apportion import zoo
    from apportion.capture import capture
    from apportion.machine import cluster, default_cost
    from apportion.place import captured_problem, coarsen
    from apportion.place.problem_file import save_problem
    from apportion.search import with_layers_as_expert
    from apportion.split import Space

    it = zoo.load(spec, 0, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm).graph
    space = Space(graph)
    for file, devices, rules in uses:
        machine = cluster(f"placeto-k80:{devices}")
        cost = default_cost(machine)
        fine = captured_problem(space, machine, cost, rules=rules, name=f"{spec}@{devices}@{rules}")
        fine = with_layers_as_expert(fine, graph)
        coarse, which = coarsen(fine, groups)
        share = np.zeros((coarse.units, devices))
        if fine.expert is not None:
            np.add.at(share, (which, fine.expert), fine.unit_seconds.mean(axis=1))
            coarse = replace(coarse, expert=share.argmax(axis=1))
        save_problem(file, coarse)


def problem_parts(folder: Path) -> list[Part]:
    from apportion.learn.families import FAMILY_NAMES, graph_family

    parts: list[Part] = []
    for model, spec in PAPER_MODELS.items():
        uses = [(table_file(folder, model, k, rules), k, rules) for k in (2, 4) for rules in RULES]
        parts.append((uses[-1][0], make_problems, (uses, spec, GROUPS)))
    for name in FAMILY_NAMES:
        family = graph_family(name)
        for spec in family.specs:
            file = family_file(folder, spec)
            use = [(file, FAMILY_DEVICES, "placeto")]
            parts.append((file, make_problems, (use, spec, family.groups)))
    return parts


# One method on one problem


def place(problem: Any, method: str, evaluations: int, seed: int, **more: Any) -> dict[str, Any]:
    """What a method finds: its best score, the curve, seconds."""
    from apportion.place import PLACERS, StepObjective

    objective = StepObjective(problem)
    began = time.perf_counter()
    if method == "random":
        curve, value = random_curve(objective, evaluations, seed)
        return {"value": value, "curve": curve, "evaluations": evaluations,
                "seconds": time.perf_counter() - began}  # fmt: skip
    if method == "placeto as published":
        from apportion.learn.placeto_policy import PlacetoSettings

        method, more = "placeto", {"settings": PlacetoSettings()}
    if method in BY_COUNTS:
        found = function_of(method)(objective, evaluations=evaluations, seed=seed, **more)
    else:
        found = PLACERS[method](objective, budget=10.0, seed=seed)
    seconds, counted = time.perf_counter() - began, objective.evaluations
    judged = objective.evaluate(found.placement)
    return {
        "value": judged.value,
        "feasible": judged.feasible,
        "curve": [[count, score] for _, count, score in found.curve],
        "evaluations": counted,
        "seconds": seconds,
    }


def function_of(method: str) -> Callable[..., Any]:
    from apportion.place import PLACERS

    where = PLACERS[method].place
    module, _, name = str(where).partition(":")
    found: Callable[..., Any] = getattr(import_module(f"apportion.{module}"), name)
    return found


def random_curve(objective: Any, evaluations: int, seed: int) -> tuple[list[Any], float]:
    """The best of so many placements at random."""
    rng = np.random.default_rng(seed)
    allowed = objective.problem.columns.allowed
    best, curve = np.inf, []
    for count in range(1, evaluations + 1):
        chance = np.where(allowed, rng.random(allowed.shape), -1.0)
        score = objective.score(chance.argmax(axis=1))
        if score < best:
            best = score
            curve.append([count, score])
    return curve, float(best)


def write(file: Path, found: dict[str, Any]) -> None:
    from apportion.files import write_atomic

    write_atomic(file, json.dumps(found))


# The table


def table_part(file: Path, problem_file: Path, method: str, evaluations: int, seed: int) -> None:
    from apportion.place import load_problem

    write(file, place(load_problem(problem_file), method, evaluations, seed))


def result_file(
    folder: Path, model: str, devices: int, rules: str, method: str, evaluations: int, seed: int
) -> Path:
    name = f"table-{model}-{devices}-{rules}-{plain(method)}-{evaluations}-{seed}.json"
    return folder / name


def table_parts(folder: Path, evaluations: int, seeds: int) -> list[Part]:
    parts: list[Part] = []
    for model in PAPER_MODELS:
        for devices in (2, 4):
            for rules in RULES:
                problem = table_file(folder, model, devices, rules)
                for method in (*BY_COUNTS, *AT_ONCE):
                    for seed in range(seeds if method in BY_COUNTS else 1):
                        file = result_file(folder, model, devices, rules, method, evaluations, seed)
                        parts.append((file, table_part, (file, problem, method, evaluations, seed)))
    slow = {"colocrl": 0, "placeto": 1}
    return sorted(parts, key=lambda part: slow.get(part[2][2], 2))


# Generalisation


def training_name(family: str, how: str) -> str:
    """Policies: "own" has learned from the family's training graphs, "others" from those of the
    two other families."""
    return f"trained-{how}-{family}"


def train_part(file: Path, problems: list[Path], kind: str, seconds: float, workers: int) -> None:
    """Train a policy for so many seconds."""
    from apportion.learn.colocrl import save_colocrl, train_colocrl
    from apportion.learn.placeto_policy import save_placeto
    from apportion.learn.placeto_training import train_placeto
    from apportion.place import load_problem

    them = [load_problem(path) for path in problems]
    if kind == "colocrl":
        save_colocrl(file, train_colocrl(them, budget=seconds))
        return
    curve: list[list[float]] = []

    def note(it: Any) -> None:
        curve.append([it.episodes, it.evaluations, it.seconds, it.last, it.best])

    policy = train_placeto(them, budget=seconds, workers=workers, report=note)
    write(file.with_suffix(".curve.json"), {"curve": curve})
    save_placeto(file, policy)


def train_parts(folder: Path, seconds: float, jobs: int) -> list[Part]:
    from apportion.learn.families import FAMILY_NAMES, graph_family

    parts: list[Part] = []
    workers = max(1, (jobs - len(FAMILY_NAMES)) // (2 * len(FAMILY_NAMES)))
    for how in ("own", "others"):
        for name in FAMILY_NAMES:
            families = [name] if how == "own" else [f for f in FAMILY_NAMES if f != name]
            specs = [spec for family in families for spec in graph_family(family).train]
            problems = [family_file(folder, spec) for spec in specs]
            for kind in ("placeto", "colocrl") if how == "own" else ("placeto",):
                file = folder / f"{training_name(name, how)}-{kind}.safetensors"
                parts.append((file, train_part, (file, problems, kind, seconds, workers)))
    return parts


def test_part(file: Path, problem_file: Path, how: str, policy: Path | None) -> None:
    """One held-out graph, one way to place it."""
    from apportion.learn.colocrl import apply_colocrl, load_colocrl
    from apportion.learn.placeto import apply_placeto
    from apportion.learn.placeto_policy import load_placeto
    from apportion.place import StepObjective, load_problem

    problem = load_problem(problem_file)
    most = tuning_evaluations(problem.units)
    began = time.perf_counter()
    if how.startswith("zero-shot"):
        assert policy is not None
        if how.endswith("colocrl"):
            found = apply_colocrl(load_colocrl(policy), problem)
        else:
            found = apply_placeto(load_placeto(policy), problem)
        count = 1 if how.endswith("colocrl") else problem.units + 1
        write(file, {"value": StepObjective(problem).evaluate(found.placement).value,
                     "evaluations": count, "seconds": time.perf_counter() - began})  # fmt: skip
    elif how.startswith("fine-tuned"):
        assert policy is not None
        write(file, place(problem, "placeto", most, 0, policy=load_placeto(policy)))
    elif how == "random once":
        write(file, place(problem, "random", problem.units + 1, 0))
    else:
        write(file, place(problem, how.split()[0], most, 0))


def tuning_evaluations(groups: int) -> int:
    """Simulated placements of so many updates, and of the greedy episode after them."""
    from apportion.learn.placeto_policy import PlacetoSettings

    return (TUNING * PlacetoSettings().parallel + 1) * (groups + 1)


WAYS = {
    "zero-shot": "own-placeto",
    "zero-shot, family held out": "others-placeto",
    "fine-tuned": "own-placeto",
    "fine-tuned, family held out": "others-placeto",
    "placeto from scratch": None,
    "zero-shot colocrl": "own-colocrl",
    "colocrl from scratch": None,
    "random once": None,
    "random": None,
    "local-search": None,
    "single": None,
    "expert": None,
}


def test_parts(folder: Path) -> list[Part]:
    from apportion.learn.families import FAMILY_NAMES, graph_family

    parts: list[Part] = []
    for how, trained in WAYS.items():
        for name in FAMILY_NAMES:
            policy = None
            if trained is not None:
                taught, kind = trained.split("-")
                policy = folder / f"{training_name(name, taught)}-{kind}.safetensors"
                if not policy.exists():
                    continue
            for spec in graph_family(name).test:
                file = folder / f"test-{name}-{plain(spec)}-{plain(how)}.json"
                parts.append((file, test_part, (file, family_file(folder, spec), how, policy)))
    return parts


# Running


def run(part: Part, deadline: float) -> str | None:
    """Do a part in this process, unless it is too late."""
    import torch

    from apportion.columns import compile_at_once

    if time.time() > deadline:
        return None
    torch.set_num_threads(1)
    compile_at_once()
    began = time.perf_counter()
    file, function, arguments = part
    function(*arguments)
    return f"{file.name}: {time.perf_counter() - began:.0f} s"


def run_all(parts: Iterable[Part], jobs: int, seconds: float) -> None:
    """Do all parts whose file is missing."""
    missing = [part for part in parts if not part[0].exists()]
    deadline = time.time() + seconds
    print(f"{len(missing)} parts to do", flush=True)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = {pool.submit(run, part, deadline): part[0] for part in missing}
        for done in as_completed(running):
            try:
                if said := done.result():
                    print(said, flush=True)
            except Exception as error:
                print(f"{running[done].name}: {error!r}", file=sys.stderr, flush=True)


# Report


def read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


def best_after(found: dict[str, Any], count: int) -> float:
    """The best score after so many simulated placements."""
    scores = [score for at, score in found["curve"] if at <= count]
    return min(scores, default=np.inf)


def reached(found: dict[str, Any], target: float) -> str:
    """After how many placements a score was reached."""
    counts = [at for at, score in found["curve"] if score <= target]
    return f"{counts[0]:,}" if counts else "never"


def print_table(folder: Path, evaluations: int, seeds: int) -> None:
    marks = [mark for mark in MARKS if mark <= evaluations]
    for rules in RULES:
        print(f"\n### {rules} rules\n")
        print("| model | devices | " + " | ".join(AT_ONCE) + " | placements | "
              + " | ".join(BY_COUNTS) + " |")  # fmt: skip
        print("|---" * (3 + len(AT_ONCE) + len(BY_COUNTS)) + "|")
        for model in PAPER_MODELS:
            for devices in (2, 4):
                its = partial(result_file, folder, model, devices, rules)
                at_once = [read(its(m, evaluations, 0)) for m in AT_ONCE]
                runs = {m: [found for seed in range(seeds)
                            if (found := read(its(m, evaluations, seed)))]
                        for m in BY_COUNTS}  # fmt: skip
                if not any(runs.values()):
                    continue
                for mark in marks:
                    means = [
                        f"{np.mean([best_after(r, mark) for r in runs[m]]):.4f}" if runs[m] else "-"
                        for m in BY_COUNTS
                    ]
                    print(f"| {model} | {devices} | " + " | ".join(map(shown, at_once))
                          + f" | {mark:,} | " + " | ".join(means) + " |")  # fmt: skip
                print(
                    f"| published | | {PUBLISHED[model, devices]} |"
                    + " |" * (len(AT_ONCE) + len(BY_COUNTS))
                )
    print_samples(folder, evaluations, seeds)


def shown(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['value']:.4f}" + ("" if found.get("feasible", True) else " (over memory)")


def print_samples(folder: Path, evaluations: int, seeds: int) -> None:
    """After how many placements the others are as good as ColocRL in the end."""
    print("\n### Simulated placements until ColocRL's best is reached\n")
    print("| model | devices | rules | seed | ColocRL's best | " + " | ".join(BY_COUNTS) + " |")
    print("|---" * (5 + len(BY_COUNTS)) + "|")
    for model in PAPER_MODELS:
        for devices in (2, 4):
            for rules in RULES:
                for seed in range(seeds):
                    its = partial(result_file, folder, model, devices, rules)
                    runs = {m: read(its(m, evaluations, seed)) for m in BY_COUNTS}
                    if runs["colocrl"] is None:
                        continue
                    target = best_after(runs["colocrl"], evaluations)
                    counts = [reached(r, target) if (r := runs[m]) else "-" for m in BY_COUNTS]
                    print(f"| {model} | {devices} | {rules} | {seed} | {target:.4f} | "
                          + " | ".join(counts) + " |")  # fmt: skip


def print_generalisation(folder: Path) -> None:
    from apportion.learn.families import FAMILY_NAMES, graph_family

    print("\n### Unseen graphs: step time over the best known of each graph, by rank (the CDF)\n")
    quantiles = (0, 25, 50, 75, 100)
    print("| family | way | graphs | " + " | ".join(f"{q}%" for q in quantiles)
          + " | geometric mean | placements |")  # fmt: skip
    print("|---" * (5 + len(quantiles)) + "|")
    cdf: dict[str, dict[str, list[float]]] = {}
    for name in FAMILY_NAMES:
        found = {
            (how, spec): read(folder / f"test-{name}-{plain(spec)}-{plain(how)}.json")
            for how in WAYS
            for spec in graph_family(name).test
        }
        for how in WAYS:
            ratios, counts = [], []
            for spec in graph_family(name).test:
                if it := found[how, spec]:
                    every = [f["value"] for h in WAYS if (f := found[h, spec])]
                    ratios.append(it["value"] / min(every))
                    counts.append(it["evaluations"])
            if ratios:
                cdf.setdefault(name, {})[how] = sorted(ratios)
                row = " | ".join(f"{np.percentile(ratios, q):.3f}" for q in quantiles)
                mean = np.exp(np.mean(np.log(ratios)))
                print(f"| {name} | {how} | {len(ratios)} | {row} | {mean:.3f} | "
                      f"{int(np.mean(counts)):,} |")  # fmt: skip
    write(folder / "generalisation.json", cdf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("problems", "table", "train", "test", "report"))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--train-seconds", type=float, default=400.0)
    parser.add_argument("--evaluations", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="parts whose file's name contains this")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.stage == "report":
        print_table(args.dir, args.evaluations, args.seeds)
        print_generalisation(args.dir)
        return
    parts = {
        "problems": lambda: problem_parts(args.dir),
        "table": lambda: table_parts(args.dir, args.evaluations, args.seeds),
        "train": lambda: train_parts(args.dir, args.train_seconds, args.jobs),
        "test": lambda: test_parts(args.dir),
    }[args.stage]()
    run_all([part for part in parts if args.only in part[0].name], args.jobs, args.seconds)


if __name__ == "__main__":
    main()
