"""What planning costs, beside what it cost at the last release.

    python benchmarks/ledger.py                   every command, cold and warm, beside the kept rows
    python benchmarks/ledger.py --only llama      some of them
    python benchmarks/ledger.py --suite           the tests instead: `make quick` and `make test`
    python benchmarks/ledger.py --keep            write the rows down: once for each release
    python benchmarks/ledger.py --package DIR     the package of another checkout, side by side

Every command runs twice, as a user would start it, in a copy of the package that no other command
has touched. The first run is cold: neither bytecode nor compiled loops are there, as on a fresh
machine. The second is warm. Seconds are processor seconds of all processes, so that a second
command on the machine changes little; those of the suite are by the clock. The figure is the
step that the plan predicts: if it differs, the plans do.

Kept rows are benchmarks/ledger.jsonl; each has the commit and the day that it is from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).with_suffix(".jsonl")
OUT = "OUT"  # in a command: the file that the plan is saved to

GPT = "gpt2:layers=12,width=1024,heads=16,vocab=32000,seq=1024,batch=128"
LLAMA = "llama:layers=32,width=4096,heads=32,kv_heads=8,seq=8192,batch=64"
HF = "hf:llama,num_hidden_layers=8 --batch 8 --seq 2048 --precision bf16-mixed"

COMMANDS = {
    "first plan": f"plan gpt2:tiny --cluster 4xh100 --out {OUT}",
    "README's first plan": f"plan {HF} --cluster 8xh100 --out {OUT}",
    "GPT on 64": f"plan {GPT} --cluster 8x8xh100 --method tofu --out {OUT}",
    "Llama 8B on 64": f"plan {LLAMA} --cluster 8x8xh100 --method tofu --memory-limit none "
    f"--out {OUT}",
    "Llama 8B by fsdp": f"plan {LLAMA} --cluster 8x8xh100 --method fsdp --out {OUT}",
    "WResNet-152-10": "plan wresnet:depth=152,width=10,batch=8 --cluster p2.8xlarge --method tofu "
    f"--memory-limit none --out {OUT}",
    "RNN-10-8K": "plan rnn:layers=10,hidden=8192,batch=128 --cluster p2.8xlarge --method tofu "
    f"--memory-limit none --out {OUT}",
    "ResNet-50 by optcnn": f"plan resnet50 --cluster 8xh100 --method optcnn --out {OUT}",
    "within half the memory": "plan gpt2:layers=6,width=512,heads=8,vocab=8000,seq=256,batch=32 "
    f"--cluster 1xh100 --memory-limit 1GB --out {OUT}",
    "compare": "compare gpt2:tiny --cluster 8xh100 --methods data,fsdp,tofu,optcnn",
    "place": "place gnmt:tiny --cluster gdp-p100:4 --method m-etf",
    "show": "show inception-v3:batch=64",
    "first run": "run gpt2:tiny --procs 2 --method data --check",
}
"""What is measured: names of rows, and the words after `apportion`."""

SUITE = ("make quick", "make test")


@dataclass(frozen=True)
class Row:
    """What a command cost: `cold` and `warm` seconds, bytes at the peak of its largest process, and
    the seconds of a step that its plan predicts (None: it makes no plan, or was not measured)."""

    name: str
    command: str
    cold: float | None
    warm: float | None
    peak_bytes: int | None
    step_seconds: float | None
    commit: str
    date: str


class Failed(Exception):
    """A command of the ledger that did not end well."""


# Measuring


def measured(name: str, command: str, package: Path, commit: str) -> Row:
    """A command cold and then warm, in a copy of the package of its own."""
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        fresh = Path(folder) / "fresh"
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package / "apportion", fresh / "apportion", ignore=leave)
        plan = Path(folder) / "plan.json"
        words = [str(plan) if word == OUT else word for word in command.split()]
        cold, _ = _run(words, fresh)
        warm, peak = _run(words, fresh)
        predicted = json.loads(plan.read_text())["predicted"] if plan.exists() else {}
    step = predicted.get("step_seconds")
    return Row(name, command, round(cold, 2), round(warm, 2), peak, step, commit, _today())


def _run(words: list[str], fresh: Path) -> tuple[float, int]:
    """Processor seconds of a command and all of its processes, and bytes of the largest one."""
    own = {"PYTHONPATH": str(fresh), "APPORTION_CACHE": str(fresh.parent / "cache")}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NUMBA_"))}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from apportion.cli.main import main; main()", *words],
            cwd=fresh.parent, env=environment | own, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace").splitlines()
    if process.returncode:
        last = said[-1] if said else "nothing was said"
        raise Failed(f"apportion {' '.join(words)} ended with {process.returncode}: {last}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def suite(package: Path, commit: str) -> Iterator[Row]:
    """Seconds by the clock of the tests, as the checkout has been left: with what is compiled."""
    for command in SUITE:
        began = time.perf_counter()
        done = subprocess.run(command.split(), cwd=package, capture_output=True, text=True)
        took = round(time.perf_counter() - began, 1)
        if done.returncode:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise Failed(f"{command} ended with {done.returncode}: {''.join(last)}")
        yield Row(command, command, None, took, None, None, commit, _today())


def commit_of(package: Path) -> str:
    """The commit of a checkout, with a + if files have been changed since."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "apportion")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


# Rows that are kept, and the table


def kept(path: Path = KEPT) -> dict[str, Row]:
    """The latest kept row of each command."""
    if not path.exists():
        return {}
    rows = (Row(**json.loads(line)) for line in path.read_text().splitlines())
    return {row.name: row for row in rows}


def keep(rows: Iterable[Row], path: Path = KEPT) -> None:
    """Add rows to the kept ones."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


HEAD = f"{'':24} {'cold, s':>16} {'warm, s':>16} {'peak, MB':>14}  predicted step"


def line(row: Row, last: Row | None) -> str:
    """A row of the table, with what the kept row says in brackets."""
    other = last if last is not None and last.command == row.command else None

    def beside(now: float | None, before: float | None, digits: int) -> str:
        if now is None:
            return ""
        return f"{now:.{digits}f} ({'-' if before is None else f'{before:.{digits}f}'})"

    def megabytes(one: Row | None) -> float | None:
        return None if one is None or one.peak_bytes is None else one.peak_bytes / 1e6

    cold = beside(row.cold, other and other.cold, 1)
    warm = beside(row.warm, other and other.warm, 1)
    peak = beside(megabytes(row), megabytes(other), 0)
    return f"{row.name:24} {cold:>16} {warm:>16} {peak:>14}  {_steps(row, other)}".rstrip()


def _steps(row: Row, last: Row | None) -> str:
    """What the plan predicts, and whether it is what the kept one did."""
    if row.step_seconds is None:
        return ""
    said = f"{row.step_seconds:.6g} s"
    if last is None or last.step_seconds is None or last.step_seconds == row.step_seconds:
        return said
    return f"{said}, not {last.step_seconds:.6g} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this")
    parser.add_argument("--suite", action="store_true", help="time the tests, nothing else")
    parser.add_argument("--keep", action="store_true", help="add the rows to the kept ones")
    parser.add_argument("--package", type=Path, default=ROOT, metavar="DIR", help="a checkout")
    given = parser.parse_args()
    names = [name for name in COMMANDS if given.only.lower() in name.lower()]
    if not names:
        parser.error(f"no row has {given.only!r} in its name; there are {', '.join(COMMANDS)}")
    if not (given.package / "apportion").is_dir():
        parser.error(f"{given.package} is no checkout: it has no folder apportion")
    last, rows = kept(), []
    days = sorted({f"{row.commit} of {row.date}" for row in last.values()})
    print(f"In brackets: kept rows, of {', '.join(days) or 'none yet'}\n{HEAD}", flush=True)
    commit = commit_of(given.package)
    found = suite(given.package, commit) if given.suite else (
        measured(name, COMMANDS[name], given.package, commit) for name in names
    )  # fmt: skip
    try:
        for row in found:
            print(line(row, last.get(row.name)), flush=True)
            rows.append(row)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    finally:
        if given.keep:
            keep(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
