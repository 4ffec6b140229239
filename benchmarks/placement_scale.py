"""How long placers take on large graphs: m-ETF on 100,000 operators, others on 50,000.

    python benchmarks/placement_scale.py [--nodes 100000] [--devices 8] [--placers m-etf,m-topo]
    python benchmarks/placement_scale.py --problem FILE --placers policy,gdp --budget 60

The graph is made up: layers of operators, each reading one to three earlier ones, with a backward
pass that mirrors the forward pass and moves with it. Each device may hold 1.3 times the mean of
the memory. Compiling is not measured: a small graph is placed first. FILE is a captured step that
benchmarks/placement_problems.py has written.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

from apportion.columns import compile_at_once, offsets
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)
from apportion.place.placers import PLACERS
from apportion.place.problem_file import load_problem


def links(
    devices: int, *, pace: float = 1.0, once: int = 0, live: int = 0, hold: int = 0, lag: float = 0
) -> PlacementLinks:
    """Every device has one outgoing link, over which it sends to all others."""
    start = [0]
    link: list[int] = []
    for a in range(devices):
        for b in range(devices):
            if a != b:
                link.append(a)
            start.append(len(link))
    off = np.full((devices, devices), float(lag))
    np.fill_diagonal(off, 0.0)
    return PlacementLinks(
        0, once, live, hold, hold, devices, np.array(start), np.array(link, np.int64),
        np.full(len(link), pace), off, np.zeros((devices, devices)), 0,
    )  # fmt: skip


def layered(
    nodes: int, devices: int, seed: int = 0, *, width: int = 50, train: bool = True,
    tight: float | None = 1.3, unequal: bool = False, **rules: float,
) -> PlacementProblem:  # fmt: skip
    """A random layered graph; with `train` half of the nodes are backward nodes that mirror the
    forward ones and share their units. `tight`: limits of so much more than the mean of memory."""
    rng = np.random.default_rng(seed)
    forward = nodes // 2 if train else nodes
    source, target = [], []
    for node in range(1, forward):
        low = max(0, node - 2 * width)
        for parent in {int(p) for p in rng.integers(low, node, int(rng.integers(1, 4)))}:
            source.append(parent)
            target.append(node)
    one, two = np.array(source, np.int64), np.array(target, np.int64)
    n = forward * (2 if train else 1)
    if train:
        last = n - 1
        mirror_one, mirror_two = last - two, last - one
        own = np.arange(forward)
        one, two = (
            np.concatenate([one, mirror_one, own]),
            np.concatenate([two, mirror_two, last - own]),
        )
    pairs = np.unique(np.stack([one, two], axis=1), axis=0)
    unit = np.concatenate([np.arange(forward), np.arange(forward)[::-1]])[:n]
    took = rng.integers(10, 1000, n)
    speed = 1 + np.arange(devices) % 2 if unequal else np.ones(devices)
    duration = np.rint(took[:, None] * speed[None, :]).astype(np.int64)
    nbytes = rng.integers(1, 400, n)
    resident = np.where(np.arange(n) < forward, rng.integers(1, 1000, n), 0)
    columns = PlacementColumns(
        unit.astype(np.int64), duration, (np.arange(n) >= forward).astype(np.int64), resident,
        np.arange(n), nbytes, nbytes.astype(np.float64), np.arange(n + 1),
        offsets(np.bincount(pairs[:, 0], minlength=n)), pairs[:, 1].copy(),
        np.ones((forward, devices), np.bool_),
    )  # fmt: skip
    total = resident.sum() + (nbytes[:forward].sum() if rules.get("live") else 0)
    limit = None if tight is None else int(total / devices * tight)
    return PlacementProblem(
        "layered", tuple(f"n{i}" for i in range(n)), ("",) * n, columns,
        links(devices, **rules),  # type: ignore[arg-type]
        tuple(PlacementDevice(f"d{i}", "gpu", limit) for i in range(devices)), 1.0, "s",
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Prints a row for each placer; 1 if one is over a memory limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--placers", default="single,m-topo,blocks,m-etf,m-sct,list-schedule")
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--problem", type=Path, help="a captured step instead of a made-up graph")
    parser.add_argument(
        "--unequal", action="store_true", help="every second device is half as fast"
    )
    chosen = parser.parse_args(arguments)
    compile_at_once()
    rules = {"unequal": chosen.unequal, "live": 1}
    small = layered(200, chosen.devices, **rules)
    if chosen.problem is None:
        large = layered(chosen.nodes, chosen.devices, **rules)
    else:
        large = load_problem(chosen.problem)
    print(f"{len(large.node_names)} nodes, {large.units} units, {len(large.devices)} devices")
    print(f"{'placer':15s} {'seconds':>8s} {'processor':>9s} {'step':>12s}  fits  evaluations")
    over = 0
    for name in chosen.placers.split(","):
        PLACERS[name](StepObjective(small), budget=2.0)
        objective = StepObjective(large)
        began, cpu = time.perf_counter(), time.process_time()
        result = PLACERS[name](objective, budget=chosen.budget)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        count = objective.evaluations
        judged = objective.evaluate(result.placement)
        over += not judged.feasible and name != "single"
        print(
            f"{name:15s} {took:8.2f} {cpu:9.2f} {judged.value:12.6g}  "
            f"{'yes' if judged.feasible else 'no':4s}  {count:4d}  {'; '.join(result.notes)}"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
