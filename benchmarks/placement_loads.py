"""Throughput and latency of placements on published graphs, by every solver.

    python benchmarks/placement_loads.py [--data DIR] [--budget 60] [--only bert24] [--json FILE]
                                         [--objective throughput|latency] [--methods dp,milp]

DIR has the folders throughput-inputs/, latency-inputs/ and human-experts/ of
msr-fiddle/dnn-partitioning; by default the part of it that comes with the tests. Prints tables in
Markdown, with what the authors' program gives (recomputed) and the best that was known before.
Seconds are those of the whole run, of searches those until the best was found.

Every load is worked out again by the plain formula. A value must keep to the memory limit and must
not be below any bound that any solver proved; otherwise the script says so and exits with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from apportion.columns import compile_at_once
from apportion.place.imports.imported import imported_problem, with_expert
from apportion.place.imports.read_graph import read_graph, read_split_file
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import ThroughputObjective, device_loads, is_contiguous
from apportion.place.placement_problem import PlacementProblem
from apportion.place.placers import PLACERS

DATA = Path(__file__).parent.parent / "tests" / "data" / "dnn-partitioning"
# Of the authors' program: DP, DPL, PipeDream, expert, one accelerator, local search. Then the best
# unrestricted value known before. None: not known.
THROUGHPUT: dict[str, tuple[float | None, ...]] = {
    "LayerGraphs/bert24_inference": (17.7899, 17.7899, 17.7899, 20.084, 92.406, 17.7776, 17.7147),
    "LayerGraphs/bert24_training": (41.7458, 41.7458, 187.914, 49.4049, 217.813, 39.9432, 39.7895),
    "LayerGraphs/gnmt_inference": (32.9107, 33.0326, 33.0311, 46.2085, 182.563, 31.7827, 31.6873),
    "LayerGraphs/gnmt_training": (107.004, 107.004, 294.905, 137.154, 520.453, 90.9476, 88.6689),
    "LayerGraphs/resnet50_inference": (
        33.7747, 33.7747, 39.3981, 43.9183, 201.450, 35.8893, 33.4225,
    ),
    "LayerGraphs/resnet50_training": (78.6318, 78.6498, 83.6744, 112.108, 462.381, None, 77.7206),
    "LayerGraphs/inceptionv3_inference": (None, 51.5519, 60.417, 102.482, 310.969, None, None),
    "LayerGraphs/inceptionv3_training": (None, 123.930, 128.317, 213.654, 710.738, None, None),
    "OperatorGraphs/bert_l-3_inference": (
        27.9186, 27.9186, 37.4557, None, 49.3526, 27.5741, 21.9084,
    ),
    "OperatorGraphs/bert_l-3_training": (65.3031, 65.3031, 122.987, None, 122.987, None, 54.2075),
    "OperatorGraphs/bert_l-6_inference": (29.5795, 29.5795, 65.5647, None, 77.4615, None, None),
    "OperatorGraphs/bert_l-6_training": (72.865, 72.865, 192.917, None, 192.917, None, None),
    "OperatorGraphs/bert_l-12_inference": (147.478, 147.478, 642.78, None, 642.78, None, None),
    "OperatorGraphs/bert_L-12_training": (437.998, 437.998, 43510, None, 1891.74, None, None),
    "OperatorGraphs/resnet50_inference": (
        124.349, 124.349, 129.155, None, 325.132, None, 124.349,
    ),
    "OperatorGraphs/resnet50_training": (255.194, 255.194, 684.891, None, 684.891, None, None),
}  # fmt: skip
LATENCY = {  # of the authors' greedy program
    "LayerGraphs/bert24_inference": 100.219,
    "LayerGraphs/gnmt_inference": 268.5,
    "LayerGraphs/inceptionv3_inference": 2485.24,
    "LayerGraphs/resnet50_inference": 4197.06,
    "OperatorGraphs/bert_l-3_inference": 416.204,
    "OperatorGraphs/bert_l-6_inference": 494.135,
    "OperatorGraphs/bert_l-12_inference": 867.839,
    "OperatorGraphs/resnet50_inference": 839.536,
}
LOAD_METHODS = ("dp", "dpl", "pipedream", "expert", "single", "load-search", "milp")
LATENCY_METHODS = ("latency-greedy", "latency-search", "milp")
CONTIGUOUS = ("dp", "dpl", "pipedream")


@dataclass
class Row:
    """What one solver found on one input."""

    input: str
    method: str
    value: float
    bound: float | None
    feasible: bool
    contiguous: bool
    seconds: float
    best_after: float  # seconds
    evaluations: int
    notes: tuple[str, ...]


def measure(problem: PlacementProblem, name: str, method: str, latency: bool, budget: float) -> Row:
    """Runs one solver and judges what it found."""
    contiguous = method in CONTIGUOUS
    judge = LatencyObjective(problem) if latency else ThroughputObjective(problem, contiguous)
    began = time.perf_counter()
    found = PLACERS[method](judge, budget=budget, contiguous=contiguous)
    seconds = time.perf_counter() - began
    it = judge.evaluate(found.placement)
    best_after = found.curve[-1][0] if found.curve else seconds
    if not latency:
        plain = float(device_loads(problem, found.placement).sum(axis=1).max())
        assert abs(plain - it.value) <= 1e-6 * plain, (name, method, plain, it.value)
    return Row(
        name, method, it.value, found.lower_bound, it.feasible,
        is_contiguous(problem, found.placement), seconds, best_after, judge.evaluations,
        found.notes,
    )  # fmt: skip


def problem_of(data: Path, folder: str, name: str) -> PlacementProblem | None:
    """An input with its expert's split, if there is one."""
    path = data / folder / f"{name}.json"
    if not path.exists():
        return None
    problem = imported_problem(read_graph(path))
    for stem in (path.stem, path.stem.replace("training", "inference")):
        split = data / "human-experts" / f"{stem}_expert.json"
        if name.startswith("Layer") and folder.startswith("throughput") and split.exists():
            return with_expert(problem, read_split_file(split))
    return problem


def faults(rows: list[Row]) -> list[str]:
    """What must not be: a value below a bound, a solver's placement that does not fit."""
    found = []
    for row in rows:
        if not row.feasible and row.method not in ("single", "expert"):
            found.append(f"{row.input}: {row.method} does not fit")
        for other in rows:
            wide = other.method not in CONTIGUOUS or row.contiguous
            if other.input != row.input or not wide or other.bound is None or not row.feasible:
                continue
            if row.value < other.bound * (1 - 1e-9):
                found.append(f"{row.input}: {row.method} is below {other.method}'s bound")
    return found


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def table(rows: list[Row], latency: bool) -> str:
    """Markdown: a line for each input, its solvers beside what was known."""
    inputs = list(dict.fromkeys(row.input for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    reference = ["greedy, published"] if latency else ["DP, published", "best known before"]
    heads = ["input", *reference, *methods, "proven bound"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name in inputs:
        own = {row.method: row for row in rows if row.input == name}
        if latency:
            known: list[float | None] = [LATENCY.get(name)]
        else:
            known = (
                [THROUGHPUT[name][0], THROUGHPUT[name][-1]] if name in THROUGHPUT else [None] * 2
            )
        cells = [name, *(show(value) for value in known)]
        for method in methods:
            row = own.get(method)
            cells.append("-" if row is None else _cell(row))
        bounds = [
            r.bound for r in own.values() if r.bound is not None and r.method not in CONTIGUOUS
        ]
        cells.append(show(max(bounds, default=None)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    fits = "" if row.feasible else " (does not fit)"
    when = row.best_after if row.method.endswith("search") else row.seconds
    return f"{row.value:.6g}{fits}, {when:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--methods")
    parser.add_argument("--objective", choices=["throughput", "latency"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compile_at_once()
    everything: list[Row] = []
    wrong: list[str] = []
    for objective in ("throughput", "latency"):
        if args.objective not in (None, objective):
            continue
        latency = objective == "latency"
        methods = args.methods.split(",") if args.methods else (
            LATENCY_METHODS if latency else LOAD_METHODS
        )  # fmt: skip
        rows: list[Row] = []
        for name in LATENCY if latency else THROUGHPUT:
            problem = problem_of(args.data, f"{objective}-inputs", name)
            if problem is None or args.only not in name:
                continue
            if not rows:  # compiles what is not compiled yet
                for method in methods:
                    if method != "expert" or problem.expert is not None:
                        measure(problem, name, method, latency, 1.0)
            for method in methods:
                if method != "expert" or problem.expert is not None:
                    rows.append(measure(problem, name, method, latency, args.budget))
                    row = rows[-1]
                    print(
                        f"{name} {method}: {row.value:.6g}, bound {show(row.bound)}, "
                        f"{row.seconds:.1f} s, {row.evaluations} placements",
                        *row.notes, file=sys.stderr, flush=True,
                    )  # fmt: skip
        print(f"\n{objective}\n\n{table(rows, latency)}", flush=True)
        wrong += faults(rows)
        everything += rows
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in everything], indent=1))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
