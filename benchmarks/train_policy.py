"""Trains `policy` on files of problems (benchmarks/policy_problems.py makes them).

    python benchmarks/train_policy.py --problems DIR --out FILE [--resume FILE] [--budget 540]
                                      [--jobs 16] [--seed 0] [--rate 1e-3] [--entropy 0.005]

Prints a line of the curve every few seconds. FILE is the policy, and beside it is the state that
--resume goes on from; both are written every half minute. A --resume that is not there begins
anew.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--match", default="", help="only files whose name contains this")
    parser.add_argument("--budget", type=float, default=540)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--entropy", type=float, default=0.005)
    parser.add_argument("--improving", type=int, default=1500)
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--label-seconds", type=float)
    parser.add_argument("--every", type=float, default=10, help="seconds between lines")
    options = parser.parse_args()
    import torch

    from apportion.columns import compile_at_once
    from apportion.learn import PolicyTraining, TrainingProgress, train_policy

    torch.set_num_threads(1)
    compile_at_once()
    problems = [p for p in sorted(options.problems.glob("**/*.npz")) if options.match in p.name]
    print(f"{len(problems)} problems", flush=True)
    latest = [0.0]

    def report(at: TrainingProgress) -> None:
        now = time.perf_counter()
        if now - latest[0] >= options.every:
            latest[0] = now
            shown = ", ".join(f"{name} {value:.4f}" for name, value in at.figures.items())
            print(f"{at.phase} {at.seconds:7.1f} s {at.updates:6d} updates: {shown}", flush=True)

    training = PolicyTraining(
        budget=options.budget, seed=options.seed, jobs=options.jobs, tasks=options.tasks,
        rate=options.rate, entropy=options.entropy, epochs=options.epochs,
        improving=options.improving, weight=options.weight, label_seconds=options.label_seconds,
    )  # fmt: skip
    resume = options.resume if options.resume and options.resume.exists() else None
    made = train_policy(problems, options.out, training, resume=resume, report=report)
    print(f"{made.facts['updates']} updates: {made.facts['figures']}")


if __name__ == "__main__":
    main()
