"""What saving costs: blocks of steps with and without a checkpoint, in turn, in one run.

    python benchmarks/saving.py

gpt2 of 4 layers and width 512 on two processes of one thread each, by data parallelism and by fsdp,
20 steps a block. A block that saves begins a checkpoint before its first step and ends when that is
on the disk. Time is that of the slower rank, and that of all cores; the ratio of a pair of blocks
counts, and the median of the pairs. Memory is the peak of a step beside which one is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import apportion as ap
from apportion import zoo

MODEL = "gpt2:layers=4,width=512,heads=8,vocab=8192,seq=128,batch=8,dropout=0"
STEPS, PAIRS, RANKS = 20, 5, 2
METHODS = ("data", "fsdp")


def rank(method: str, steps: int, pairs: int, folder: Path) -> None:
    """One rank: measures blocks, and rank 0 prints what they took."""
    torch.set_num_threads(1)
    it = zoo.load(MODEL, 0)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    runner = ap.distribute(program, method)
    for _ in range(3):
        runner.step(it.batch)
    rows = []
    for _ in range(pairs):
        plain = block(runner, it.batch, steps, None)
        rows.append((plain, block(runner, it.batch, steps, folder)))
    if runner.rank == 0:
        held = runner.stage()
        state = sum(path.stat().st_size for path in next(folder.glob("step-*")).iterdir())
        print(json.dumps({"rows": rows, "held": held, "bytes": state}), flush=True)


def block(runner: Any, batch: Any, steps: int, folder: Path | None) -> tuple[float, float, float]:
    """Wall seconds of the slower rank, CPU seconds of all, and what `save` itself held up."""
    dist.barrier()
    began, used, held = time.perf_counter(), time.process_time(), 0.0
    if folder is not None:
        runner.save(folder, keep=1)
        held = time.perf_counter() - began
    for _ in range(steps):
        float(runner.step(batch))
    if folder is not None:
        runner.saved()
    both = torch.tensor([time.perf_counter() - began, held, time.process_time() - used])
    most = both.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(both, dist.ReduceOp.SUM)
    return float(most[0]), float(both[2]), float(most[1])


def measured(method: str, steps: int, pairs: int) -> dict[str, Any]:
    """Runs both ranks; the figures of a method."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node",
            str(RANKS), __file__, "--method", method, "--steps", str(steps), "--pairs", str(pairs),
            "--folder", folder,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    rows = found["rows"]
    return {
        "method": method,
        "step_seconds": median(plain[0] for plain, _ in rows) / steps,
        "wall": median(saving[0] / plain[0] for plain, saving in rows),
        "cpu": median(saving[1] / plain[1] for plain, saving in rows),
        "held_seconds": median(saving[2] for _, saving in rows),
        "checkpoint_bytes": found["bytes"],
        "staged_bytes": found["held"],
        "pairs": [[saving[0] / plain[0], saving[1] / plain[1]] for plain, saving in rows],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    if given.folder is not None:
        rank(given.method, given.steps, given.pairs, given.folder)
        return 0
    for method in given.methods:
        row = measured(method, given.steps, given.pairs)
        print(json.dumps(row))
        print(
            f"{method}: a step {row['step_seconds'] * 1e3:.0f} ms; with a checkpoint of "
            f"{row['checkpoint_bytes'] / 1e6:.0f} MB every {given.steps} steps "
            f"{row['wall'] - 1:+.1%} wall, {row['cpu'] - 1:+.1%} CPU; save holds up "
            f"{row['held_seconds'] * 1e3:.0f} ms; {row['staged_bytes'] / 1e6:.0f} MB a rank"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
