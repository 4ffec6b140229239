"""How fast a step is simulated: tasks per second, and time against the number of tasks.

    python benchmarks/simulation.py                     the tables of docs/simulation.md
    python benchmarks/simulation.py --plot out.svg      and its figure
    python benchmarks/simulation.py --largest 10000 --without-models --json

Simulated are made-up steps on 64 devices (made_up.py) and steps that were lowered from models,
always with contention for links and with the memory of every device over time. A time is the lowest
of some repetitions, in processor seconds. Each size has a process of its own, for its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from made_up import made_up

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.lower.lower import lower
from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    COLLECTIVE,
    TRANSFER,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import CostModel, default_cost
from apportion.machine.topology import Cluster
from apportion.search import METHODS, Problem
from apportion.simulate.network import network
from apportion.simulate.schedule import schedule_compiled
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import SIMULATED, timeline
from apportion.split import strategy as strategies
from apportion.split.space import Space

MADE_UP_ON = "8x8xh100"
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
MODELS = (
    ("gpt2:tiny,batch=64", "8x8xh100", "data"),
    ("gpt2:layers=24,batch=64", "8x8xh100", "data"),
    ("gpt2:layers=24,batch=64", "8x8xh100", "fsdp"),
    ("inception-v3:batch=64", "flexflow-p100", "data"),
    ("nmt:batch=64", "flexflow-k80", "data"),
)
REPETITIONS = 7


def lowest(run: Callable[[], object]) -> float:
    """Processor seconds of the fastest of some runs; none of them is the first."""
    run()
    took = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        run()
        took.append(time.process_time() - began)
    return min(took)


def speeds(tasks: TaskGraph, on: Cluster) -> dict[str, Any]:
    """Seconds of the whole simulation and of its parts."""
    cost: CostModel = default_cost(on)
    net = network(tasks, on, cost)
    start, end = schedule_compiled(net)
    whole = lowest(lambda: simulate(tasks, on, cost))
    messages = int(((tasks.kind == TRANSFER) | (tasks.kind == COLLECTIVE)).sum())
    return {
        "tasks": len(tasks),
        "messages": messages,
        "hops": len(net.hop_link),
        "seconds": whole,
        "network_seconds": lowest(lambda: network(tasks, on, cost)),
        "schedule_seconds": lowest(lambda: schedule_compiled(net)),
        "timeline_seconds": lowest(lambda: timeline(tasks, start, end, source=SIMULATED)),
        "tasks_per_second": len(tasks) / whole,
    }


def of_size(count: int) -> dict[str, Any]:
    """A made-up step, and how much the peak memory of the process grew by simulating it."""
    on, small = cluster(MADE_UP_ON), made_up(1)
    simulate(small, on, default_cost(on))  # compiled code is loaded
    tasks = made_up(count)
    before = _peak_memory()
    simulate(tasks, on, default_cost(on))
    grown = _peak_memory() - before
    return {**speeds(tasks, on), "memory_growth_bytes": grown, "peak_memory_bytes": _peak_memory()}


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def of_model(spec: str, where: str, method: str) -> dict[str, Any]:
    """A step of a model under a method's strategy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that run unsplit
        it, on = zoo.load(spec), cluster(where)
        space = Space(capture(it.step, it.model, it.optimizer, it.batch).graph)
        strategy = METHODS[method](
            Problem(space, on, default_cost(on)), budget=30.0, seed=0
        ).strategy
    space = strategies.space_of(space.source, strategy)
    tasks = lower(space, strategy, len(on.devices))
    return {"model": spec, "cluster": where, "method": method, **speeds(tasks, on)}


def compilation() -> dict[str, float]:
    """Processor seconds of the first simulation of a process."""
    began = time.process_time()
    simulate(made_up(1), cluster(MADE_UP_ON), default_cost(cluster(MADE_UP_ON)))
    return {"seconds": time.process_time() - began}


def _apart(*options: str, cache: str | None = None) -> Any:
    """What this program prints in another process with these options."""
    environment = dict(os.environ) | ({"NUMBA_CACHE_DIR": cache} if cache else {})
    done = subprocess.run(
        [sys.executable, __file__, *options], env=environment, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def exponent(rows: list[dict[str, Any]]) -> float:
    """Of the power of the number of tasks that time grows with, from 10 000 tasks on."""
    large = [row for row in rows if row["tasks"] >= 10_000] or rows
    if len(large) < 2:
        return float("nan")
    tasks, seconds = (np.log([row[key] for row in large]) for key in ("tasks", "seconds"))
    return float(np.polyfit(tasks, seconds, 1)[0])


# Tables

COLUMNS = "messages | simulated in ms | network | scheduling | memory over time | tasks per second"


def tables(found: dict[str, Any]) -> Iterator[str]:
    yield f"| tasks | {COLUMNS} | memory added |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found["made up"]:
        yield f"| {row['tasks']:,} | {_times(row)} | {row['memory_growth_bytes'] / 1e6:.0f} MB |"
    yield ""
    yield f"Time grows with the number of tasks to the power of {found['exponent']:.2f}."
    compiled = found["compilation"]
    yield (
        f"First simulation of a process: {compiled['first']:.1f} s to compile, "
        f"{compiled['cached']:.2f} s where compiled code is loaded."
    )
    if found["models"]:
        yield ""
        yield f"| step | tasks | {COLUMNS} |"
        yield "|---|---|---|---|---|---|---|---|"
    for row in found["models"]:
        name = f"{row['model']} on {row['cluster']}, {row['method']}"
        yield f"| {name} | {row['tasks']:,} | {_times(row)} |"


def _times(row: dict[str, Any]) -> str:
    parts = ("seconds", "network_seconds", "schedule_seconds", "timeline_seconds")
    times = " | ".join(f"{row[part] * 1e3:.2f}" for part in parts)
    return f"{row['messages']:,} | {times} | {row['tasks_per_second'] / 1e6:.1f} million"


# Figure

WIDTH, HEIGHT, MARGIN = 640, 400, 60
LOW, HIGH = (3.0, -4.0), (6.2, 0.0)  # decades of tasks and of seconds


def figure(rows: list[dict[str, Any]]) -> str:
    """Time against tasks, both by decades, as SVG; a line of exponent 1 goes through the last."""
    points = [_place(row["tasks"], row["seconds"]) for row in rows]
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f5fa8"/>' for x, y in points
    )
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    last = rows[-1]
    far = 10 ** LOW[0]
    (x1, y1), (x2, y2) = (
        _place(tasks, last["seconds"] * tasks / last["tasks"]) for tasks in (far, last["tasks"])
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(_grid())}'
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#999" '
        'stroke-dasharray="5 4"/>'
        f'<polyline points="{joined}" fill="none" stroke="#1f5fa8" stroke-width="2"/>{circles}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">tasks</text>'
        f'<text x="{MARGIN}" y="20">seconds to simulate, contention and memory included; '
        "dashed: in proportion</text></svg>\n"
    )


def _place(tasks: float, seconds: float) -> tuple[float, float]:
    across = (np.log10(tasks) - LOW[0]) / (HIGH[0] - LOW[0])
    up = (np.log10(seconds) - LOW[1]) / (HIGH[1] - LOW[1])
    return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)


def _grid() -> Iterator[str]:
    for decade in range(int(LOW[0]), int(HIGH[0]) + 1):
        x, y = _place(10**decade, 10 ** LOW[1])
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{MARGIN}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{10**decade:,}</text>'
    for decade in range(int(LOW[1]), int(HIGH[1]) + 1):
        x, y = _place(10 ** LOW[0], 10.0**decade)
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'


def measured(largest: int, models: bool) -> dict[str, Any]:
    """All figures."""
    sizes = [_apart("--size", str(size)) for size in SIZES if size <= largest]
    with tempfile.TemporaryDirectory() as empty:
        first, cached = (_apart("--first", cache=empty)["seconds"] for _ in range(2))
    return {
        "made up": sizes,
        "exponent": exponent(sizes),
        "compilation": {"first": first, "cached": cached},
        "models": [of_model(*each) for each in MODELS] if models else [],
    }


def main() -> None:
    compile_at_once()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="tasks of the largest step")
    parser.add_argument("--without-models", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size or options.first:
        print(json.dumps(compilation() if options.first else of_size(options.size)))
        return
    found = measured(options.largest, not options.without_models)
    if options.plot:
        options.plot.write_text(figure(found["made up"]), encoding="utf-8")
    print(json.dumps(found, indent=2) if options.json else "\n".join(tables(found)))


if __name__ == "__main__":
    main()
