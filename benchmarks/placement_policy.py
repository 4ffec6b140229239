"""What `policy` is worth on models and clusters that it never saw.

    python benchmarks/placement_policy.py --problems DIR --out figures.json [--policy FILE]
        [--jobs 2] [--seconds 60] [--devices 0] [--coarse 100] [--match TEXT] [--seeds 1]

DIR is what benchmarks/placement_problems.py makes: seen/ has other sizes of the families of
training, unseen/ families that training never saw. Every problem is placed as it is, fine, and
grouped into --coarse units. Compared are, each in one process of its own thread:

    heuristics      the best of single, expert, blocks, m-topo, list-schedule, m-etf and m-sct
    heuristics + 1  one second of local search from there
    reference       --seconds of local search from there
    policy          the best of what the policy proposes (greedy and samples), zero-shot
    policy + 1      one second of local search from there
    both + 1        one second from the better of policy and heuristics: what `policy` does

Figures are relative to the reference. FILE is written after every problem; what it has already is
not done again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HEURISTICS = ("single", "expert", "blocks", "m-topo", "list-schedule", "m-etf", "m-sct")
SEARCH = "local-search"
COLUMNS = ("greedy", "policy", "policy_1", "heuristics", "heuristics_1", "both_1")


def measure(case: tuple[str, int, int, int], seconds: float, policy: str | None) -> dict[str, Any]:
    """The figures of one problem."""
    from apportion.columns import compile_at_once
    from apportion.learn.varied_problem import some_devices
    from apportion.place import (
        PLACERS,
        StepObjective,
        coarsen,
        load_network,
        load_problem,
    )
    from apportion.place.policy.policy import proposals
    from apportion.place.policy.policy_network import shipped_network

    compile_at_once()
    path, devices, coarse, seed = case
    problem = load_problem(Path(path))
    if devices:
        problem = some_devices(problem, range(min(devices, len(problem.devices))))
    if coarse:
        problem = coarsen(problem, coarse)[0]
    network = shipped_network() if policy is None else load_network(Path(policy))
    objective = StepObjective(problem)
    for warm in (0.01, 0.0):  # compiles
        PLACERS[SEARCH](objective, budget=warm)
        PLACERS["list-schedule"](objective)
    next(iter(proposals(objective, network)))
    found: dict[str, Any] = {
        "problem": problem.name, "devices": len(problem.devices), "units": problem.units,
        "coarse": coarse, "seed": seed, "split": Path(path).parent.name,
    }  # fmt: skip
    scores, best = {}, None
    for name in HEURISTICS:
        try:
            place = PLACERS[name](objective, budget=10.0, seed=seed).placement
        except ValueError:
            continue
        scores[name] = objective.score(place)
        if best is None or scores[name] < objective.score(best):
            best = place
    found["scores"] = scores
    found["heuristics"] = objective.score(best)

    def searched(start: Any, budget: float) -> float:
        made = PLACERS[SEARCH](objective, budget=budget, seed=seed, starts=[start])
        return objective.score(made.placement)

    began = time.perf_counter()
    own = list(proposals(objective, network, seed=seed))
    own_best = min(own, key=objective.score)
    found["policy_seconds"] = time.perf_counter() - began
    found["greedy"], found["policy"] = objective.score(own[0]), objective.score(own_best)
    found["policy_1"] = searched(own_best, 1.0)
    found["heuristics_1"] = searched(best, 1.0)
    better = "policy_1" if found["policy"] < found["heuristics"] else "heuristics_1"
    found["both_1"] = found[better]  # what the placer does: the search begins at the better one
    before = objective.evaluations
    found["reference"] = searched(best, seconds)
    found["reference_evaluations"] = objective.evaluations - before
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Geometric means, relative to the reference."""
    import numpy as np

    lines = ["| graphs | number | " + " | ".join(COLUMNS) + " |", "|---" * 8 + "|"]
    for kind in ("fine", "coarse"):
        for split in ("seen", "unseen", "all"):
            some = [
                row for row in rows
                if bool(row["coarse"]) == (kind == "coarse") and split in (row["split"], "all")
                and (kind == "coarse" or row["units"] >= 400)
            ]  # fmt: skip
            if some:
                means = [
                    float(np.exp(np.mean([np.log(row[c] / row["reference"]) for row in some])))
                    for c in COLUMNS
                ]
                shown = " | ".join(f"{mean:.3f}" for mean in means)
                lines.append(f"| {kind}, {split} | {len(some)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--devices", default="0", help="counts, such as 2,4; 0: all there are")
    parser.add_argument("--coarse", type=int, default=100, help="0: fine only")
    parser.add_argument("--match", default="")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(row["case"], row["wanted"], row["coarse"], row["seed"]) for row in rows}
    cases = [
        (str(path), int(devices), coarse, seed)
        for split in ("seen", "unseen")
        for path in sorted((options.problems / split).glob("*.npz"))
        for devices in options.devices.split(",")
        for coarse in ((0, options.coarse) if options.coarse else (0,))
        for seed in range(options.seeds)
        if options.match in path.name and (path.name, int(devices), coarse, seed) not in done
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        waits = {
            pool.submit(measure, case, options.seconds, options.policy): case for case in cases
        }
        for wait in as_completed(waits):
            case = waits[wait]
            row = {"case": Path(case[0]).name, "wanted": case[1], **wait.result()}
            rows.append(row)
            options.out.write_text(json.dumps(rows, indent=1))
            shown = {k: f"{row[k] / row['reference']:.3f}" for k in COLUMNS}
            print(row["case"], row["devices"], row["coarse"] or "fine", shown, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
