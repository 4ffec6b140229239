"""What `apportion plan` answers without an option, for models and clusters that people ask about.

    python benchmarks/default_plans.py                  every pair, a row for each as it is known
    python benchmarks/default_plans.py --only 8xh100    some of them
    python benchmarks/default_plans.py --keep           rows go to docs/results/default_plans.jsonl
    python benchmarks/default_plans.py table            those rows as a table, and what follows

Each pair is planned as a user would, in a process of its own. Two things must hold. Where the plan
does not fit, no combination of the options about memory fits either: all of them are tried then,
with the methods that spare memory. And no fitting row of the plan's own table is faster than the
plan. Seconds are processor seconds of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results" / "default_plans.jsonl"

LARGE = {  # models that are tight on these clusters: --batch, --seq and the clusters
    "meta-llama/Llama-3.2-1B": (1, 4096, "1xrtx4090 2xrtx4090 1xa10g"),
    "meta-llama/Llama-3.2-3B": (2, 4096, "2xrtx4090 4xl40s 1xh100"),
    "meta-llama/Llama-3.1-8B": (16, 8192, "8xh100 8xh200"),
    "mistralai/Mistral-7B-v0.1": (8, 4096, "8xa100-40 4xh100"),
    "meta-llama/Llama-2-7b-hf": (4, 4096, "4xa100 2xh100"),
    "meta-llama/Llama-2-13b-hf": (8, 4096, "8xa100-40"),
    "mistralai/Mixtral-8x7B-v0.1": (32, 4096, "32xh100"),
    "Qwen/Qwen2.5-1.5B": (1, 4096, "1xrtx4090"),
    "google/gemma-2-2b": (4, 4096, "1xh100"),
    "facebook/opt-1.3b": (8, 2048, "2xrtx3090"),
    "microsoft/phi-2": (2, 2048, "2xrtx4090 1xl40s"),
    "openai-community/gpt2-xl": (8, 1024, "1xrtx3090 4xv100"),
    "openai-community/gpt2": (8, 1024, "1xt4"),
    "google-bert/bert-large-uncased": (32, 512, "1xt4 2xt4"),
    "google-t5/t5-large": (16, 512, "1xrtx3090"),
    "google/vit-large-patch16-224": (256, None, "1xa100"),
    "resnet50": (4096, None, "4xv100"),
    "resnet50:image=224": (1024, None, "1xh100 2xrtx4090"),
    "meta-llama/Llama-3.1-70B": (8, 4096, "8xh100"),
}
SMALL = (  # models that fit: is the best row of the table taken?
    "gpt2:tiny", "gpt2", "llama:layers=4", "bert:tiny", "wresnet:tiny", "resnet50:batch=64",
    "vgg16:batch=64", "alexnet:batch=128", "transformer-xl:tiny", "inception-v3:batch=32",
)  # fmt: skip
SMALL_CLUSTERS = ("4xh100", "8xv100", "2x4xa100")
IN_FLOAT32 = ("resnet",)  # of the large ones; others are planned in mixed precision
RECOMPUTE, OFFLOAD = ("none", "auto", "full"), ("none", "full")
HOST_STATE = ("none", "auto", "host")
MAIN = "from apportion.cli.main import main; main()"
SPARING = {True: ("single",), False: ("fsdp", "tofu")}


@dataclass(frozen=True)
class Row:
    """What was answered. `fits_with` are options with which something fits where the plan does not,
    `faster` rows of its table that fit and are faster than it."""

    model: str
    options: str
    cluster: str
    method: str
    fits: bool
    step_seconds: float
    peak_bytes: int
    cpu_seconds: float
    fits_with: tuple[str, ...]
    faster: tuple[str, ...]
    commit: str
    date: str


def pairs() -> Iterator[tuple[str, str, str]]:
    """Models, their options, and clusters."""
    for model, (batch, seq, clusters) in LARGE.items():
        words = [f"--batch {batch}", f"--seq {seq}" if seq else ""]
        words.append("" if model.startswith(IN_FLOAT32) else "--precision bf16-mixed")
        for cluster in clusters.split():
            yield model, " ".join(filter(None, words)), cluster
    yield from ((model, "", cluster) for model, cluster in product(SMALL, SMALL_CLUSTERS))


def answered(model: str, options: str, cluster: str, commit: str) -> Row:
    """The row of a pair."""
    found, seconds = _planned(f"{model} {options} --cluster {cluster}")
    step = found["step_seconds"]
    best = [row for row in found["tried"] if row["fits"] and row["step_seconds"] < step]
    ways = () if found["feasible"] else tuple(_ways(model, options, cluster))
    return Row(
        model, options, cluster, found["method"], found["feasible"], step,
        max(found["peak_bytes"]), round(seconds, 1), ways,
        tuple(row["method"] for row in best), commit, datetime.now(UTC).date().isoformat(),
    )  # fmt: skip


def _ways(model: str, options: str, cluster: str) -> Iterator[str]:
    """The combinations of options with which something fits."""
    alone = cluster.startswith("1x")
    for way in product(SPARING[alone], RECOMPUTE, OFFLOAD, HOST_STATE):
        words = "--method {} --recompute {} --offload {} --host-state {}".format(*way)
        found, _ = _planned(f"{model} {options} --cluster {cluster} --budget 5 {words}")
        if found["feasible"]:
            yield words


def _planned(words: str) -> tuple[dict[str, object], float]:
    """What a plan says as JSON, and the processor seconds of the command."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "plan", *words.split(), "--json"],
            stdout=out, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    if process.returncode not in (0, 1) or not text:
        raise SystemExit(f"apportion plan {words} ended with {process.returncode}")
    return json.loads(text), used.ru_utime + used.ru_stime


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown, and what follows from them."""
    lines = [
        "| model | options | cluster | plan | step | peak | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plan = row.method if row.fits else "**does not fit**"
        lines.append(
            f"| {row.model} | {row.options} | {row.cluster} | {plan} | {row.step_seconds:.3g} s | "
            f"{row.peak_bytes / 1e9:.1f} GB | {row.cpu_seconds:.0f} |"
        )
    missed = [row for row in rows if row.fits_with]
    slower = [row for row in rows if row.faster]
    over = [row for row in rows if not row.fits]
    lines += [
        "",
        f"Of {len(rows)} pairs {len(rows) - len(over)} fit. Of the other {len(over)}, options "
        f"about memory would make {len(missed)} fit. In {len(slower)} a fitting row of the table "
        "is faster than the plan.",
    ]
    return "\n".join(lines)


def rows_of(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["measure", "table"], default="measure")
    parser.add_argument("--only", default="", help="pairs whose model or cluster contains this")
    parser.add_argument("--keep", action="store_true", help=f"write to {KEPT.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.what == "table":
        print(table(rows_of(KEPT)))
        return
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        git, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    known = {(r.model, r.options, r.cluster): r for r in rows_of(KEPT)} if KEPT.exists() else {}
    for pair in pairs():
        if asked.only not in " ".join(pair):
            continue
        row = answered(*pair, commit)
        print(json.dumps(asdict(row)), flush=True)
        known[pair] = row
        if asked.keep:
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text("".join(json.dumps(asdict(r)) + "\n" for r in known.values()))


if __name__ == "__main__":
    main()
