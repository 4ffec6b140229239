"""How deep a GPT trains on a GPU with a small part of its memory: all contenders in one run.

    python benchmarks/memory_depth.py measure --job "run --layers 170 --plan p170.json" \\
        --job "peer --kind fsdp2 --layers 170" --out runs.jsonl
    python benchmarks/memory_depth.py page runs.jsonl --write docs/memory-h200.md

Every job is a process of memory_gpu.py. All begin together and warm up beside each other; when all
are ready, or dead, they are measured one after the other while the rest sleeps. `page` puts a table
and a figure into a page: milliseconds a layer, and beside them what each part of the machine is
busy for by the plan, of which a step takes at least the longest.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from search_figures import Series, figure

WARMING = 0.75  # of the seconds for all, after which whoever is ready is measured
WORKER = Path(__file__).with_name("memory_gpu.py")
NAMES = {
    "checkpoint": "checkpoint of each block and part of the loss",
    "budget": "blocks compiled with torch's activation memory budget (0.1)",
    "stream": "saved tensors in pinned memory, by a stream",
    "fsdp2": "FSDP2, state on the host, checkpoints",
    "eager": "plain PyTorch",
}
LANES = {"compute": "computing", "from host": "copies from the host", "to host": "copies to it",
         "host work": "updates on the host"}  # fmt: skip


def measure(jobs: Sequence[str], out: Path, limit: float) -> None:
    """Runs all jobs, measured one after the other."""
    began, environment = time.monotonic(), {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        turns = [Path(folder, str(number)) for number in range(len(jobs))]
        running = []
        for turn, job in zip(turns, jobs, strict=True):
            turn.mkdir()
            command = [sys.executable, str(WORKER), *shlex.split(job), "--turn", str(turn)]
            with (turn / "log").open("w") as log:
                command += ["--out", str(out)]
                running.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                )  # fmt: skip
        try:
            while not all(
                (turn / "ready").exists() or one.poll() is not None
                for turn, one in zip(turns, running, strict=True)
            ):
                if time.monotonic() - began > WARMING * limit:
                    break
                time.sleep(0.2)
            for job, turn, one in zip(jobs, turns, running, strict=True):
                _measured(job, turn, one, limit - (time.monotonic() - began))
                _note(f"{job}: after {time.monotonic() - began:.0f} s")
        finally:
            for one in running:
                one.kill()


def _measured(job: str, turn: Path, one: subprocess.Popen[bytes], limit: float) -> None:
    if not (turn / "ready").exists() and one.poll() is None:
        _note(f"{job}: not ready in time")
        one.kill()
        return
    (turn / "go").touch()
    try:
        code = one.wait(max(limit, 30.0))
    except subprocess.TimeoutExpired:
        _note(f"{job}: not done in time")
        one.kill()
        return
    if code:
        told = (turn / "log").read_text(errors="replace").strip().splitlines()
        _note(f"{job}: failed, {' / '.join(told[-3:])[:500]}")


def _note(text: str) -> None:
    print(f"memory_depth: {text}", file=sys.stderr, flush=True)


# The page


def page(found: Sequence[dict[str, Any]], svg: str) -> Iterator[str]:
    """A table of all jobs, one of what each part of the machine is busy for, and the figure."""
    lanes = {each["plan"]: each for each in found if each["what"] == "lanes"}
    ours = [each for each in found if each["what"] == "apportion"]
    yield (
        "| | layers | ms a layer, steps in a row | predicted | on the host, GiB | "
        "peak, GiB: predicted | reserved | allocated |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for each in sorted(ours, key=lambda one: one["layers"]):
        yield (
            f"| apportion | {each['layers']} | **{each['ms_layer']:.2f}** ({_runs(each)}) | "
            f"{each['predicted_ms_layer']:.2f} ({_share(each)}) | {each['host_gib']:.1f} | "
            f"{each['predicted_gib']:.2f} | {max(each['reserved_gib']):.2f} | "
            f"{max(each['allocated_gib']):.2f} |"
        )
    for each in found:
        if each["what"] in NAMES and "layers" in each:
            if each.get("out_of_memory"):
                yield f"| {NAMES[each['what']]} | {each['layers']} | out of memory | | | | | |"
                continue
            yield (
                f"| {NAMES[each['what']]} | {each['layers']} | {each['ms_layer']:.2f} "
                f"({_runs(each)}) | | | | {max(each['reserved_gib']):.2f} | "
                f"{max(each['allocated_gib']):.2f} |"
            )
    yield ""
    yield f"![milliseconds a layer by depth]({svg})"
    yield ""
    yield "Busy in one step, milliseconds, measured beside predicted:"
    yield ""
    yield f"| layers | {' | '.join(LANES.values())} |"
    yield "|---|" + "---|" * len(LANES)
    for each in sorted(ours, key=lambda one: one["layers"]):
        row = lanes.get(each["plan"])
        if row is not None:
            cells = [
                f"{row['measured'].get(lane, 0.0):.0f}, {row['predicted'].get(lane, 0.0):.0f}"
                for lane in LANES
            ]
            yield f"| {each['layers']} | {' | '.join(cells)} |"


def _runs(each: dict[str, Any]) -> str:
    return ", ".join(f"{ms / each['layers']:.2f}" for ms in each["runs_ms"])


def _share(each: dict[str, Any]) -> str:
    return f"{each['predicted_ms_layer'] / each['ms_layer'] - 1:+.1%}"


def plot(found: Sequence[dict[str, Any]]) -> str:
    """Milliseconds a layer by depth: measured, predicted, peers, and what bounds a step."""
    ours = sorted((e for e in found if e["what"] == "apportion"), key=lambda one: one["layers"])
    lanes = {each["plan"]: each["predicted"] for each in found if each["what"] == "lanes"}
    several = [
        Series("apportion", tuple((e["layers"], e["ms_layer"]) for e in ours)),
        Series("predicted", tuple((e["layers"], e["predicted_ms_layer"]) for e in ours)),
    ]
    for lane, name in LANES.items():
        points = tuple(
            (e["layers"], lanes[e["plan"]][lane] / e["layers"])
            for e in ours
            if lanes.get(e["plan"], {}).get(lane)
        )
        if points:
            several.append(Series(f"busy by the plan: {name}", points))
    for kind in NAMES:
        points = tuple(
            (e["layers"], e["ms_layer"]) for e in found if e["what"] == kind and "ms_layer" in e
        )
        if points:
            several.append(Series(kind, points, joined=False))
    return figure("layers", "ms a layer", several)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("measure", "page"))
    parser.add_argument("read", nargs="*", type=Path, help="what was measured")
    parser.add_argument("--job", action="append", default=[], help="arguments of memory_gpu.py")
    parser.add_argument("--out", type=Path, default=Path("runs.jsonl"))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.job, given.out, given.limit)
        return
    found = [json.loads(line) for path in given.read for line in path.read_text().splitlines()]
    lines = "\n".join(page(found, "memory-depth.svg"))
    print(lines)
    if given.write is not None:
        given.write.with_name("memory-depth.svg").write_text(plot(found))
        begin, end = "<!-- measured: depth -->", "<!-- end of depth -->"
        before, _, rest = given.write.read_text().partition(begin)
        given.write.write_text(f"{before}{begin}\n{lines}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
