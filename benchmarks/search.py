"""How long searches take and how good their plans are, against layers, operators and devices.

    python benchmarks/search.py --targets       the steps that papers and peers report times for
    python benchmarks/search.py --depth         one model with more and more layers
    python benchmarks/search.py --operators     several models
    python benchmarks/search.py --devices       4 to 1,024 devices, with quality against baselines
    python benchmarks/search.py --depth --devices --plot docs --json found.json

A time is the lowest of some repetitions, each in a process of its own, in processor seconds:
description and search of a step that was captured before. Compiled code is loaded from its cache,
which the first repetition fills. Each model is captured once.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from search_figures import Series, figure

REPETITIONS = 3
GIB = 1 << 30
GPT = "gpt2:layers={},width=1024,heads=16,vocab=32000,batch=128"

TARGETS = (
    ("WResNet-152-10", "wresnet:depth=152,width=10,batch=8", "p2.8xlarge", 8.3),
    ("RNN-10-8K", "rnn:layers=10,hidden=8192,batch=128", "p2.8xlarge", 66.6),
)
"""Steps of the Tofu paper, the cluster, and the seconds that its search is reported to take."""

PEERS = (
    ("GPT", (GPT.format(12),), 52.0),
    ("Llama-8B", ("llama:seq=8192,batch=64", "--memory-limit", "none"), 110.0),
)
"""What is planned end to end on 8 nodes of 8, and the seconds of autoparallel at batches of 16."""

LAYERS = (12, 24, 48, 96)
NODES = "8x8xh100"

OPERATORS = (
    "alexnet:batch=128",
    "vgg16:batch=128",
    "inception-v3:batch=64",
    "wresnet:depth=50,width=4,batch=32",
    "wresnet:depth=152,width=10,batch=8",
    "rnn:layers=4,hidden=8192,batch=512",
    "rnn:layers=10,hidden=8192,batch=128",
    GPT.format(12),
    GPT.format(48),
    "llama:seq=8192,batch=64",
)

SCALED = (
    "gpt2:layers=2,width=1024,heads=16,vocab=32000,batch=1024,dropout=0",
    "wresnet:depth=50,width=4,batch=1024",
)
"""Few layers: lowering and simulating a step on 1,024 devices takes memory for each of them."""

CLUSTERS = (
    *("4xh100", "6xh100", "8xh100", "2x6xh100", "2x8xh100", "3x8xh100"),
    *(f"{nodes}x8xh100" for nodes in (4, 8, 16, 32, 64, 128)),
)
BASELINES = ("data", "fsdp", "megatron", "equalchop")


# One measurement, in a process of its own


def one(path: str, where: str, method: str, simulated: bool) -> dict[str, Any]:
    """Searches for one captured step; with `simulated`, lowers and simulates what is found."""
    from apportion.graph import from_json
    from apportion.machine.cluster import cluster
    from apportion.machine.cost_model import default_cost
    from apportion.search import METHODS, Problem, UnsuitableMethod
    from apportion.split.space import Space

    graph = from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    on = cluster(where)
    cost = default_cost(on)
    found: dict[str, Any] = {"ops": len(graph.ops), "devices": len(on.devices)}
    gc.disable()  # as planning does
    began = time.process_time()
    space = Space(graph)
    try:
        result = METHODS[method](Problem(space, on, cost), budget=60.0, seed=0)
    except UnsuitableMethod as why:
        return {**found, "why": str(why)}
    found["seconds"] = time.process_time() - began
    gc.enable()
    if simulated:
        found |= _scored(result, space, on, cost)
    else:
        found["again_seconds"] = _again(path, on, cost, method)
    found["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def _again(path: str, on: Any, cost: Any, method: str) -> float:
    """The same once more in this process, compiled code being loaded, of the Graph read anew."""
    from apportion.graph import from_json
    from apportion.search import METHODS, Problem
    from apportion.split.space import Space

    graph = from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    gc.disable()
    began = time.process_time()
    METHODS[method](Problem(Space(graph), on, cost), budget=60.0, seed=0)
    took = time.process_time() - began
    gc.enable()
    return took


def _scored(result: Any, space: Any, on: Any, cost: Any) -> dict[str, Any]:
    from apportion.lower.lower import lower
    from apportion.simulate.simulate import simulate
    from apportion.split.strategy import space_of

    its = result.space or space_of(space.source, result.strategy, space)
    tasks = lower(its, result.strategy, len(on.devices))
    line = simulate(tasks, on, cost)
    return {
        "bytes_moved": int(tasks.bytes_moved),
        "tasks": len(tasks),
        "step_seconds": line.step_seconds,
    }


def apart(*options: str, limit: float | None = None, memory: int = 0) -> dict[str, Any]:
    """What this program finds in another process; `why` if that fails, takes longer than `limit`
    seconds or more than `memory` bytes."""
    bound = partial(resource.setrlimit, resource.RLIMIT_AS, (memory, memory)) if memory else None
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", *options],
            capture_output=True, text=True, timeout=limit, preexec_fn=bound,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"why": f"not done in {limit:.0f} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["no message"]
        return {"why": "too little memory" if "Memory" in done.stderr else last[-1][:80]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lowest(path: Path, where: str, method: str = "tofu") -> dict[str, Any]:
    """The fastest of some searches."""
    several = [apart(str(path), where, method) for _ in range(REPETITIONS)]
    return min(several, key=lambda row: row.get("seconds", float("inf")))


class Captured:
    """Models captured once each, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[str, Path] = {}

    def __call__(self, spec: str) -> Path:
        if spec not in self.paths:
            path = self.folder / f"{len(self.paths)}.json"
            path.write_text(json.dumps(_capture(spec)), encoding="utf-8")
            self.paths[spec] = path
        return self.paths[spec]


def _capture(spec: str) -> Any:
    from apportion import zoo
    from apportion.capture.capture import capture
    from apportion.graph import to_json

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that run unsplit
        it = zoo.load(spec, 0, meta=True)
        return to_json(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)


# The parts


def targets(captured: Captured) -> list[dict[str, Any]]:
    """Searches that the paper reports times for, and plans end to end."""
    rows = [
        {"what": name, "cluster": where, "theirs": theirs, **lowest(captured(spec), where)}
        for name, spec, where, theirs in TARGETS
    ]
    for name, given, theirs in PEERS:
        took = min(_end_to_end(given) for _ in range(REPETITIONS))
        rows.append(
            {"what": f"{name}, end to end", "cluster": NODES, "theirs": theirs, "seconds": took}
        )
    return rows


def _end_to_end(given: Sequence[str]) -> float:
    """Processor seconds of `apportion plan` and its children."""
    program = "import sys; from apportion.cli.main import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        before = _children_seconds()
        subprocess.run(
            [sys.executable, "-c", program, "plan", *given, "--cluster", NODES, "--method", "tofu",
             "--json"],
            cwd=folder, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        return _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def depth(captured: Captured, layers: Sequence[int] = LAYERS) -> list[dict[str, Any]]:
    """One model with more and more layers, measured in turn."""
    paths = {count: captured(GPT.format(count)) for count in layers}
    best: dict[int, dict[str, Any]] = {}
    for _ in range(REPETITIONS):
        for count, path in paths.items():
            row = {"layers": count, **apart(str(path), NODES, "tofu")}
            known = best.setdefault(count, row)
            for key in ("seconds", "again_seconds"):
                known[key] = min(known[key], row[key])
    return list(best.values())


def operators(captured: Captured, models: Sequence[str] = OPERATORS) -> list[dict[str, Any]]:
    """Several models on 8 and 64 devices."""
    return [
        {"model": spec, "eight": lowest(captured(spec), "8xh100"), **lowest(captured(spec), NODES)}
        for spec in models
    ]


def devices(
    captured: Captured,
    models: Sequence[str] = SCALED,
    clusters: Sequence[str] = CLUSTERS,
    limit: float = 180.0,
    memory: int = 12 * GIB,
) -> list[dict[str, Any]]:
    """Every method on more and more devices; a method is given up on larger clusters once it has
    failed on one."""
    rows = []
    for spec in models:
        failed: dict[str, dict[str, Any]] = {}
        for where in clusters:
            found: dict[str, dict[str, Any]] = {}
            for method in ("tofu", *BASELINES):
                if method in failed:
                    continue
                given = (str(captured(spec)), where, method, "--simulate")
                found[method] = apart(*given, limit=limit, memory=memory)
                if "step_seconds" not in found[method] and len(where) > len("2x8xh100"):
                    failed[method] = found[method]
            rows.append({"model": spec, "cluster": where, "methods": found})
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


# Tables


def target_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| step | cluster | description and search, CPU s | reported elsewhere, s |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| {row['what']} | {row['cluster']} | {row['seconds']:.2f} | {row['theirs']:g} |"


def depth_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| layers | operators | CPU s | to the first | once more in the process | to the first |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = []
        for key in ("seconds", "again_seconds"):
            cells += [f"{row[key]:.2f}", f"{row[key] / rows[0][key]:.2f}"]
        yield f"| {row['layers']} | {row['ops']:,} | {' | '.join(cells)} |"


def operator_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| model | operators | CPU s, 8 devices | CPU s, 64 devices |"
    yield "|---|---|---|---|"
    for row in rows:
        times = f"{row['eight']['seconds']:.2f} | {row['seconds']:.2f}"
        yield f"| {row['model']} | {row['ops']:,} | {times} |"


def device_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    several = " | ".join(BASELINES)
    for spec in dict.fromkeys(row["model"] for row in rows):
        yield f"`{spec}`: GB moved, and ms of a step in simulation."
        yield ""
        yield f"| devices | CPU s of tofu | tofu | {several} | bytes, to the best | time, to it |"
        yield "|---|---" + "|---" * (len(BASELINES) + 3) + "|"
        for row in rows:
            if row["model"] == spec:
                yield _device_row(row["methods"])
        yield ""


def _device_row(found: dict[str, dict[str, Any]]) -> str:
    tofu = found.get("tofu", {})
    number = next((row["devices"] for row in found.values() if "devices" in row), 0)
    cells = " | ".join(_cell(found.get(method)) for method in ("tofu", *BASELINES))
    took = f"{tofu['seconds']:.2f}" if "seconds" in tofu else "-"
    ratios = [quality(found, key) for key in ("bytes_moved", "step_seconds")]
    ends = " | ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    return f"| {number:,} | {took} | {cells} | {ends} |"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "step_seconds" not in row:
        return "-"
    return f"{row['bytes_moved'] / 1e9:.4g}, {row['step_seconds'] * 1e3:.4g}"


def quality(found: dict[str, dict[str, Any]], key: str) -> float | None:
    """What tofu's plan has of something, as a share of the least of the baselines'."""
    others = [found[m][key] for m in BASELINES if key in found.get(m, {})]
    own = found.get("tofu", {}).get(key)
    return own / min(others) if own is not None and others and min(others) else None


# Figures


def figures(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """File names and what to write there."""
    by_operators: list[Series] = []
    for part, name in (("depth", "GPT by layers, 64 devices"), ("operators", "models, 64 devices")):
        points = sorted((row["ops"], row["seconds"]) for row in found.get(part, ()))
        if points:
            by_operators.append(Series(name, tuple(points), joined=part == "depth"))
    if by_operators:
        yield "search-operators.svg", figure("operators", "CPU s to search", by_operators)
    rows = found.get("devices", ())
    times, shares = [], []
    for spec in dict.fromkeys(row["model"] for row in rows):
        own = [row["methods"] for row in rows if row["model"] == spec]
        name = spec.partition(":")[0]
        times.append(Series(name, _points(own, lambda m: m.get("tofu", {}).get("seconds"))))
        for key, what in (("bytes_moved", "bytes"), ("step_seconds", "time")):
            shares.append(Series(f"{name}, {what}", _points(own, partial(quality, key=key))))
    if times:
        yield "search-devices.svg", figure("devices", "CPU s to search", times)
        yield (
            "search-quality.svg",
            figure("devices", "tofu's plan, to the best of the baselines", shares, level=1.0),
        )


def _points(several: list[dict[str, Any]], measure: Any) -> tuple[tuple[float, float], ...]:
    found = []
    for methods in several:
        number = next((row["devices"] for row in methods.values() if "devices" in row), None)
        amount = measure(methods)
        if number and amount:
            found.append((float(number), float(amount)))
    return tuple(sorted(found))


PARTS = {
    "targets": (targets, target_table),
    "depth": (depth, depth_table),
    "operators": (operators, operator_table),
    "devices": (devices, device_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--most", type=int, default=1024, help="devices of the largest cluster")
    parser.add_argument("--json", type=Path, help="a file for all figures; parts are added to it")
    parser.add_argument("--plot", type=Path, help="a folder for the figures")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(*asked.one, asked.simulate)))
        return
    found: dict[str, Any] = {}
    if asked.json and asked.json.exists():
        found = json.loads(asked.json.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        captured = Captured(Path(folder))
        for part, (measure, table) in PARTS.items():
            if not getattr(asked, part):
                continue
            given = {}
            if part == "devices":
                given = {"clusters": [w for w in CLUSTERS if _size(w) <= asked.most]}
            found[part] = measure(captured, **given)
            print(f"## {part}\n", *table(found[part]), sep="\n", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for name, text in figures(found) if asked.plot else ():
        (asked.plot / name).write_text(text, encoding="utf-8")


def _size(where: str) -> int:
    counts = [int(part) for part in where.split("x") if part.isdecimal()]
    return counts[0] * (counts[1] if len(counts) > 1 else 1)


if __name__ == "__main__":
    main()
