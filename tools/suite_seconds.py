"""Where the seconds of the tests go.

    python tools/suite_seconds.py run ROWS.jsonl tests/plan -m "not slow"   pytest's words follow
    python tools/suite_seconds.py table ROWS.jsonl [--by file]              sums by room or file

Each test leaves a row: seconds by the clock, of processors (its own and those of processes that it
has waited for), of compiling loops, of capturing steps, and how many captures and processes it has
started. What is by the clock and of no processor was waited for, or another test had the core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn"}


@dataclass
class Costs:
    """Of a test, or of several: seconds, and counts."""

    clock: float = 0.0
    processor: float = 0.0
    compiling: float = 0.0
    capturing: float = 0.0
    captures: int = 0
    processes: int = 0
    tests: int = 0

    def add(self, other: Costs) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


# As a plugin of pytest

_so_far = Costs()


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@contextmanager
def _timed(name: str) -> Iterator[None]:
    began = time.process_time()
    try:
        yield
    finally:
        setattr(_so_far, name, getattr(_so_far, name) + time.process_time() - began)


def _watch_processes(event: str, given: tuple[Any, ...]) -> None:
    if event in STARTS:
        _so_far.processes += 1


def _watch_compiling() -> None:
    from numba.core import event

    class Compiling(event.Listener):  # type: ignore[misc]
        depth = 0
        block: Any = None

        def on_start(self, event: Any) -> None:
            self.depth += 1
            if self.depth == 1:
                self.block = _timed("compiling")
                self.block.__enter__()

        def on_end(self, event: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                self.block.__exit__(None, None, None)

    event.register("numba:compile", Compiling())


def _watch_captures() -> None:
    import_module("apportion.capture.capture")
    module: Any = sys.modules["apportion.capture.capture"]  # not the function of that name
    recorded = module.recorded_step

    def watched(*given: Any, **named: Any) -> Any:
        _so_far.captures += 1
        with _timed("capturing"):
            return recorded(*given, **named)

    module.recorded_step = watched


def pytest_configure(config: Any) -> None:
    if "SUITE_SECONDS" in os.environ:
        sys.addaudithook(_watch_processes)
        _watch_compiling()
        _watch_captures()


def pytest_runtest_protocol(item: Any, nextitem: Any) -> Generator[None, Any, Any]:
    global _so_far
    _so_far = Costs()
    began, used = time.perf_counter(), _processor_seconds()
    done = yield
    _so_far.clock, _so_far.tests = time.perf_counter() - began, 1
    _so_far.processor = _processor_seconds() - used
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    row = {"test": item.nodeid, "worker": worker, "began": time.time() - _so_far.clock}
    row |= {name: round(value, 3) for name, value in asdict(_so_far).items() if name != "tests"}
    with Path(os.environ["SUITE_SECONDS"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
    return done


if "SUITE_SECONDS" in os.environ:
    import pytest

    pytest_runtest_protocol = pytest.hookimpl(wrapper=True, tryfirst=True)(pytest_runtest_protocol)


# The command line


def _sums(path: Path, by: str) -> dict[str, Costs]:
    """Of each room, file or test."""
    sums: dict[str, Costs] = defaultdict(Costs)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        test = row.pop("test")
        file = test.split("::")[0].removeprefix("tests/")
        name = {"room": file.split("/")[0] if "/" in file else ".", "file": file, "test": test}[by]
        costs = Costs(**{k: v for k, v in row.items() if k in Costs.__annotations__}, tests=1)
        sums[name].add(costs)
        sums["all"].add(costs)
    return sums


def table(path: Path, by: str, beside: Path | None) -> str:
    """Sums by room, by file or by test, the most expensive first, and how many tests and seconds by
    the clock there were in other rows."""
    sums, other = _sums(path, by), _sums(beside, by) if beside else None
    head = ["", "tests", "clock", "processor", "compiling", "capturing", "captures", "processes"]
    more = ["tests then", "clock then"] if other else []
    lines = ["| " + " | ".join(head + more) + " |", "|---" * len(head + more) + "|"]
    for name, one in sorted(sums.items(), key=lambda item: -item[1].clock):
        cells = [name, *(round(getattr(one, column)) for column in head[1:])]
        if other:
            cells += [other[name].tests, round(other[name].clock)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    of = parser.add_subparsers(required=True, dest="what")
    one = of.add_parser("run")
    one.add_argument("rows", type=Path)
    one.add_argument("pytest", nargs=argparse.REMAINDER)
    two = of.add_parser("table")
    two.add_argument("rows", type=Path)
    two.add_argument("--by", choices=["room", "file", "test"], default="room")
    two.add_argument("--beside", type=Path, metavar="ROWS", help="of another run, for comparison")
    given = parser.parse_args()
    if given.what == "table":
        print(table(given.rows, given.by, given.beside))
        return 0
    path = os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]))
    own = {"SUITE_SECONDS": str(given.rows.resolve()), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "suite_seconds", *given.pytest]
    return subprocess.run(command, cwd=ROOT, env=os.environ | own).returncode


if __name__ == "__main__":
    raise SystemExit(main())
