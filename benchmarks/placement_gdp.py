"""GDP's table: its twelve rows on gdp-p100, by GDP-one, GDP-batch and what they are compared to.

    python benchmarks/placement_gdp.py problems --dir DIR --jobs 2      # captures, once: DIR/*.npz
    python benchmarks/placement_gdp.py table    --dir DIR --jobs 16 [--seconds 240]
    python benchmarks/placement_gdp.py batch    --dir DIR --jobs 16 [--seconds 400]
    python benchmarks/placement_gdp.py holdout  --dir DIR --jobs 16 [--seconds 400]
    python benchmarks/placement_gdp.py report   --dir DIR               # markdown

Each part is a process of its own and leaves a file DIR/PART.json; a part whose file is there is not
done again, so that any stage can be stopped and gone on with. Nothing needs a network, and
`problems` may be run on another machine. Batches are trained on a GPU if there is one (`--device`).

table    single, expert, METIS, m-ETF, m-SCT at once; local search, HDP and GDP-one for `--seconds`
         (HDP and local search for a part of them), with their curves by simulated placements
batch    one policy for eleven graphs (without GNMT-8, as in GDP), with and without superposition
holdout  for every row a policy trained on the others (GNMT-8 is trained on by none: its graph is as
         large as the rest together): placed at once, and after 49 updates
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROWS = {
    "rnnlm-2": ("rnnlm:layers=2", 2),
    "rnnlm-4": ("rnnlm:layers=4", 4),
    "gnmt-2": ("gnmt:layers=2", 2),
    "gnmt-4": ("gnmt:layers=4", 4),
    "gnmt-8": ("gnmt:layers=8", 8),
    "transformer-xl-2": ("transformer-xl:layers=2", 2),
    "transformer-xl-4": ("transformer-xl:layers=4", 4),
    "transformer-xl-8": ("transformer-xl:layers=8", 8),
    "inception": ("inception-v3", 2),
    "amoebanet": ("amoebanet", 4),
    "wavenet-2x18": ("wavenet:stacks=2,layers=18", 2),
    "wavenet-4x36": ("wavenet:stacks=4,layers=36", 4),
}

# Seconds a step as published on P100 (arXiv 1910.01578): GDP-one, expert, METIS, HDP. None: out of
# memory. Its percentages do not re-derive; its seconds are what it measured.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "rnnlm-2": (0.234, 0.257, 0.355, 0.243),
    "rnnlm-4": (0.409, 0.480, None, 0.490),
    "gnmt-2": (0.301, 0.384, None, 0.376),
    "gnmt-4": (0.409, 0.469, None, 0.520),
    "gnmt-8": (0.649, 0.610, None, 0.693),
    "transformer-xl-2": (0.386, 0.473, None, 0.435),
    "transformer-xl-4": (0.580, 0.641, None, 0.621),
    "transformer-xl-8": (0.748, 0.813, None, 0.789),
    "inception": (0.405, 0.418, 0.423, 0.417),
    "amoebanet": (0.394, 0.440, 0.426, 0.418),
    "wavenet-2x18": (0.317, 0.376, None, 0.354),
    "wavenet-4x36": (0.659, 0.988, None, 0.721),
}
BATCH = tuple(name for name in ROWS if name != "gnmt-8")
AT_ONCE = ("single", "expert", "metis", "m-etf", "m-sct")
SEARCHES = {"local-search": 0.25, "hdp": 0.6, "gdp": 1.0}  # and their shares of --seconds
LARGE = 2000  # units
TUNING = 49  # updates of fine-tuning: fewer than 50

Part = tuple[Path, Callable[..., Any], tuple[Any, ...]]  # its file, and what writes it


# Problems


def make_problem(file: Path, name: str) -> None:
    """Capture a row's model and write its problem, with what an expert would choose."""
    import torch

    from apportion import zoo
    from apportion.capture import capture
    from apportion.machine import cluster, default_cost
    from apportion.place import captured_problem
    from apportion.place.problem_file import save_problem
    from apportion.search import with_layers_as_expert
    from apportion.split import Space

    torch.set_num_threads(1)
    spec, devices = ROWS[name]
    it = zoo.load(spec, 0, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm).graph
    machine = cluster(f"gdp-p100:{devices}")
    problem = captured_problem(Space(graph), machine, default_cost(machine), name=name)
    save_problem(file, with_layers_as_expert(problem, graph))


def problem_of(folder: Path, name: str) -> Any:
    from apportion.place import load_problem

    return load_problem(folder / f"{name}.npz")


# Parts, each in a process of its own


def place_row(file: Path, folder: Path, name: str, method: str, seconds: float) -> None:
    """What a method finds for one row. A GPU that many processes share helps large graphs only."""
    large = problem_of(folder, name).units >= LARGE or (method == "hdp" and ROWS[name][1] >= 8)
    if not large:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ready(folder, name)
    from apportion.place import PLACERS, StepObjective

    objective = StepObjective(problem_of(folder, name))
    began = time.perf_counter()
    found = PLACERS[method](objective, budget=seconds)
    took, counted = time.perf_counter() - began, objective.evaluations
    judged = objective.evaluate(found.placement)
    keep(
        file,
        {
            "value": judged.value,
            "feasible": judged.feasible,
            "seconds": took,
            "evaluations": counted,
            "curve": [list(row) for row in found.curve],
            "figures": dict(found.figures),
        },
    )


def train_batch(
    file: Path, folder: Path, rows: list[str], superposition: bool, seconds: float, device: str
) -> None:
    """One policy for the eleven graphs: the best that training saw of each, and its own choice."""
    from apportion.learn.gdp import train_gdp
    from apportion.learn.gdp_file import save_gdp

    ready(folder, rows[0])
    names = [name for name in BATCH if name in rows]
    problems = [problem_of(folder, name) for name in names]
    policy = train_gdp(
        problems, budget=seconds, superposition=superposition, device=device, report=told(file)
    )
    save_gdp(file.with_suffix(".safetensors"), policy)
    results = {
        name: seen_and_chosen(policy, problem, search, device)
        for name, problem, search in zip(names, problems, policy.searches, strict=True)
    }
    keep(file, {"updates": policy.updates, "rows": results})


def hold_out(
    file: Path, folder: Path, rows: list[str], name: str, seconds: float, device: str
) -> None:
    """A policy trained on the other graphs, applied to this one, then tuned."""
    ready(folder, name)
    from apportion.learn.gdp import train_gdp
    from apportion.learn.gdp_file import save_gdp
    from apportion.learn.gdp_network import GdpShape

    others = [problem_of(folder, other) for other in BATCH if other in rows and other != name]
    shape = GdpShape(max(devices for _, devices in ROWS.values()))
    policy = train_gdp(others, budget=0.75 * seconds, shape=shape, device=device, report=told(file))
    save_gdp(file.with_suffix(".safetensors"), policy)
    problem = problem_of(folder, name)
    result = {"updates": policy.updates, "zero_shot": chosen(policy, problem, device)}
    keep(file.with_suffix(".partial"), result)
    began = time.perf_counter()
    tuned = train_gdp([problem], updates=TUNING, budget=0.25 * seconds, start=policy, device=device)
    result["tuned"] = seen_and_chosen(tuned, problem, tuned.searches[0], device)
    result["tuned"] |= {"updates": tuned.updates, "seconds": time.perf_counter() - began}
    keep(file, result)


def seen_and_chosen(policy: Any, problem: Any, search: Any, device: str) -> dict[str, Any]:
    """The best placement that training saw, and what the policy would choose now."""
    return {
        "value": search.value,
        "feasible": search.over == 0,
        "evaluations": search.used,
        "curve": [list(row) for row in search.curve],
        "chosen": chosen(policy, problem, device),
    }


def chosen(policy: Any, problem: Any, device: str) -> dict[str, Any]:
    from apportion.learn.gdp import apply_gdp
    from apportion.place import StepObjective

    began = time.perf_counter()
    judged = StepObjective(problem).evaluate(apply_gdp(policy, problem, device))
    seconds = time.perf_counter() - began
    return {"value": judged.value, "feasible": judged.feasible, "seconds": seconds}


def ready(folder: Path, name: str) -> None:
    """One thread, as many parts run beside each other as there are cores; and compiled loops are
    loaded before anything is timed."""
    import numpy as np
    import torch

    from apportion.columns import compile_at_once
    from apportion.place import StepObjective

    torch.set_num_threads(1)
    compile_at_once()
    objective = StepObjective(problem_of(folder, name))
    objective.evaluate(np.zeros(objective.problem.units, np.int64))
    objective.score(np.zeros(objective.problem.units, np.int64))


def told(file: Path) -> Callable[[Any], None]:
    """A report that writes a line now and then."""
    last = [time.perf_counter()]

    def report(progress: Any) -> None:
        if time.perf_counter() - last[0] > 30:
            last[0] = time.perf_counter()
            print(f"{file.stem}: {progress.evaluations} {progress.best:.4f}", flush=True)

    return report


def keep(file: Path, result: dict[str, Any]) -> None:
    from apportion.files import write_atomic

    write_atomic(file, json.dumps(result))


# Stages


def parts_of(stage: str, folder: Path, rows: list[str], seconds: float, device: str) -> list[Part]:
    """What a stage does, the longest first."""
    if stage == "problems":
        return [
            (file, make_problem, (file, name)) for name in rows for file in [folder / f"{name}.npz"]
        ]
    if stage == "batch":
        return [
            (file, train_batch, (file, folder, rows, on, seconds, device))
            for on in (True, False)
            for file in [folder / f"batch-{'with' if on else 'without'}.json"]
        ]
    if stage == "holdout":
        return [
            (file, hold_out, (file, folder, rows, name, seconds, device))
            for name in rows
            for file in [folder / f"holdout-{name}.json"]
        ]
    methods = {**dict.fromkeys(AT_ONCE, 0.25), **SEARCHES}
    order = sorted(methods, key=lambda method: -methods[method])
    return [
        (file, place_row, (file, folder, name, method, seconds * methods[method]))
        for method in order
        for name in rows
        for file in [folder / f"table-{name}-{method}.json"]
    ]


def run_parts(parts: Iterable[Part], jobs: int) -> None:
    """All parts whose files are not there."""
    left = [part for part in parts if not part[0].exists()]
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(part[1], *part[2]): part[0].stem for part in left}
        for done in as_completed(running):
            try:
                done.result()
                print(f"{running[done]}: done", flush=True)
            except Exception as error:
                print(f"{running[done]}: {error}", file=sys.stderr, flush=True)


def warm_up(folder: Path, rows: list[str]) -> None:
    """Compile what parts need once, before as many processes do so as there are cores."""
    from apportion.place import PLACERS, StepObjective

    smallest = min(rows, key=lambda name: problem_of(folder, name).units)
    ready(folder, smallest)
    for method in (*AT_ONCE, "local-search"):
        try:
            PLACERS[method](StepObjective(problem_of(folder, smallest)), budget=1.0)
        except ValueError as error:
            print(f"{method}: {error}", file=sys.stderr, flush=True)


# Report


def found(folder: Path, stem: str) -> dict[str, Any] | None:
    file = folder / f"{stem}.json"
    return json.loads(file.read_text()) if file.exists() else None


def shown(result: dict[str, Any] | None) -> str:
    """Seconds a step; OOM where it does not fit."""
    if result is None:
        return "-"
    return f"{result['value']:.4f}" if result["feasible"] else "OOM"


def at_count(result: dict[str, Any] | None, count: int) -> float | None:
    """The best of a curve after so many simulated placements."""
    if result is None:
        return None
    values = [value for _, used, value in result["curve"] if used <= count]
    return min(values, default=None)


def published(value: float | None) -> str:
    return "OOM" if value is None else f"{value:.3f}"


def print_report(folder: Path) -> None:
    """Tables of whatever has been measured."""
    table = {
        name: {m: found(folder, f"table-{name}-{m}") for m in (*AT_ONCE, *SEARCHES)}
        for name in ROWS
    }
    batch = {on: found(folder, f"batch-{on}") for on in ("with", "without")}
    of_batch = {
        on: {name: it["rows"].get(name) if it else None for name in ROWS}
        for on, it in batch.items()
    }
    print_table(table, of_batch["with"])
    print_equal_counts(table, of_batch["with"])
    print_batch(table, of_batch, batch)
    print_holdout(folder, table)


def print_table(table: dict[str, Any], batch: dict[str, Any]) -> None:
    heads = (
        "GDP-one",
        "GDP-batch",
        *AT_ONCE,
        "HDP",
        "local search",
        "GDP's: one, expert, METIS, HDP",
    )
    print("\nSeconds a step, simulated\n\n| row | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for name, row in table.items():
        cells = [shown(row["gdp"]), shown(batch[name]), *(shown(row[m]) for m in AT_ONCE)]
        cells += [shown(row["hdp"]), shown(row["local-search"])]
        cells.append(", ".join(published(value) for value in PUBLISHED[name]))
        print(f"| {name} ({ROWS[name][1]}) | " + " | ".join(cells) + " |")
    print_gains(table)


def print_gains(table: dict[str, Any]) -> None:
    """Geometric means of how much longer the others' steps are than GDP-one's."""
    for method in (*AT_ONCE, "hdp", "local-search"):
        ratios = [
            row[method]["value"] / row["gdp"]["value"]
            for row in table.values()
            if row[method] and row["gdp"] and row[method]["feasible"] and row["gdp"]["feasible"]
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"\n{method} / GDP-one: {mean:.3f} (geometric mean of {len(ratios)} rows)")


def print_equal_counts(table: dict[str, Any], batch: dict[str, Any]) -> None:
    """All curves at the number of placements that HDP, GDP-batch and GDP-one came to."""
    print("\nAt equal numbers of simulated placements\n")
    print("| row | placements | of | GDP-one | GDP-batch | HDP | local search |")
    print("|---|---|---|---|---|---|---|")
    for name, row in table.items():
        each = {"GDP-one": row["gdp"], "GDP-batch": batch[name], "HDP": row["hdp"]}
        curves = (*each.values(), row["local-search"])
        for whose, result in each.items():
            if result:
                count = result["evaluations"]
                values = [at_count(it, count) for it in curves]
                cells = ["-" if value is None else f"{value:.4f}" for value in values]
                print(f"| {name} | {count} | {whose} | " + " | ".join(cells) + " |")


def print_batch(table: dict[str, Any], of_batch: dict[str, Any], batch: dict[str, Any]) -> None:
    updates = {on: it["updates"] if it else 0 for on, it in batch.items()}
    print(f"\nSuperposition: best seen and chosen ({updates['with']} updates with, ", end="")
    print(
        f"{updates['without']} without)\n\n| row | with | without | chosen with | chosen without |"
    )
    print("|---|---|---|---|---|")
    for name in BATCH:
        both = [of_batch[on][name] for on in ("with", "without")]
        cells = [shown(it) for it in both] + [shown(it and it["chosen"]) for it in both]
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_holdout(folder: Path, table: dict[str, Any]) -> None:
    print("\nHeld out: trained on the others\n")
    print("| row | zero-shot | tuned (updates) | from scratch | expert | HDP | single |")
    print("|---|---|---|---|---|---|---|")
    for name, row in table.items():
        if it := found(folder, f"holdout-{name}"):
            tuned = f"{shown(it['tuned'])} ({it['tuned']['updates']})"
            others = [shown(row[m]) for m in ("gdp", "expert", "hdp", "single")]
            print(f"| {name} | {shown(it['zero_shot'])} | {tuned} | " + " | ".join(others) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("problems", "table", "batch", "holdout", "report"))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--device", default="")
    args = parser.parse_args()
    rows = args.rows.split(",")
    if args.stage == "report":
        print_report(args.dir)
        return
    args.dir.mkdir(parents=True, exist_ok=True)
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.stage != "problems":
        warm_up(args.dir, rows)
    run_parts(parts_of(args.stage, args.dir, rows, args.seconds, device), args.jobs)
    if args.stage != "problems":
        print_report(args.dir)


if __name__ == "__main__":
    main()
