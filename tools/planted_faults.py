"""Plants faults in the package and counts how many of them the tests notice.

    python tools/planted_faults.py reach WORK            run all tests: which reaches which lines?
    python tools/planted_faults.py run WORK OUT.jsonl    plant faults, one row for each
    python tools/planted_faults.py table OUT.jsonl ...   shares of rows, by room and by kind

A fault is one small change of one line: a comparison that is wrong, a term that is dropped, a
number off by one, two arguments swapped, a branch that is missing. They are drawn by a seed from
all functions of all rooms, in a way that gives another version of the package most of the same.
Left out are sentences of errors, assertions of our own, and numbers outside of functions: those are
settings.

For every fault the tests that reach its block are run until one fails: first those of `make quick`,
then the others, of each first the tests of the fault's own room, the quickest first. A test of
processes that fails is run once more without the fault, and if it fails then as well, that says
nothing. Tests of one fault have `--seconds` in all; a row says if that was too little to run them
all. A run that hangs has noticed the fault.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
HOOK = Path(__file__).resolve().parent / "planted"
sys.path.insert(0, str(HOOK))
import planting  # noqa: E402

PACKAGE = planting.PACKAGE
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
CHUNKS = (10, 60, 400)  # tests that are collected at once; then all others
AT_LEAST = 4  # faults of a room
SUITE = (  # as in the Makefile
    "tests -n 2 --dist worksteal",
    "tests/dist -n 2 --dist loadfile",
)


# Drawing


@dataclass(frozen=True)
class Fault:
    """Bytes `begin` to `end` of a file of the package replaced by a text."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    begin: int
    end: int

    @property
    def room(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else "root"


OTHER: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
COMPARISON, TERM, NUMBER, SWAPPED, BRANCH = (
    "wrong comparison", "dropped term", "off by one", "swapped arguments", "missing branch",
)  # fmt: skip


class Candidates(ast.NodeVisitor):
    """All faults that one file could have."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Fault] = []
        self.depth = 0
        self.visit(ast.parse(source))

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        begin, end = self.span(node)
        return self.source[begin:end].decode()

    def add(self, kind: str, node: ast.expr, after: str) -> None:
        if self.depth:
            begin, end = self.span(node)
            before = self.text(node)
            self.found.append(Fault(self.path, node.lineno, kind, before, after, begin, end))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        for statement in node.body:  # neither defaults nor annotations
            self.visit(statement)
        self.depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self.text(node.left), self.text(node.comparators[0])
            self.add(COMPARISON, node, f"({left}) {OTHER[type(node.ops[0])]} ({right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and not _is_text(node):
            self.add(TERM, node, f"({self.text(node.left)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        self.add(TERM, node, f"({word.join(f'({self.text(v)})' for v in node.values[:-1])})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add(NUMBER, node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        names = [self.text(a) for a in node.args if isinstance(a, ast.Name | ast.Attribute)]
        kind_of = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
        if not kind_of and len(names) == len(node.args) and len(set(names[:2])) == 2:
            named = [f"{k.arg}=" * bool(k.arg) + self.text(k.value) for k in node.keywords if k.arg]
            named += [f"**{self.text(k.value)}" for k in node.keywords if not k.arg]
            words = ", ".join([names[1], names[0], *names[2:], *named])
            self.add(SWAPPED, node, f"{self.text(node.func)}({words})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        checking = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not checking:
            self.add(BRANCH, node.test, f"({self.text(node.test)}) and False")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(BRANCH, node.test, "False")
        self.generic_visit(node)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def draw(count: int, seed: int) -> list[Fault]:
    """So many faults: every room has its share by its size, every kind the same share of a room."""
    rooms: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name in planting.UNMARKED:
            continue
        for fault in Candidates(name, path.read_bytes()).found:
            rooms[fault.room][fault.kind].append(fault)
    sizes = {room: sum(map(len, kinds.values())) for room, kinds in rooms.items()}
    drawn = []
    for room, kinds in sorted(rooms.items()):
        wanted = max(AT_LEAST, round(count * sizes[room] / sum(sizes.values())))
        rows = [sorted(of, key=lambda one: _lot(one, seed)) for _, of in sorted(kinds.items())]
        turns = [row[k] for k in range(wanted) for row in rows if k < len(row)]
        drawn += turns[:wanted]
    return drawn


def _lot(fault: Fault, seed: int) -> str:
    """Where a fault stands in the order of drawing: the same wherever its lines have moved to."""
    return hashlib.sha256(f"{seed} {_words(fault)}".encode()).hexdigest()


def _words(fault: Fault) -> str:
    """A fault's name, wherever its line has moved to."""
    return f"{fault.path} {fault.kind} {fault.before}"


# Which test reaches what


@dataclass(frozen=True)
class Test:
    name: str
    seconds: float
    passed: bool
    slow: bool
    reached: np.ndarray


def reach(work: Path, pytest_words: Sequence[str]) -> int:
    """Run the tests with every block marked; leaves a row for each test in the folder."""
    work.mkdir(parents=True, exist_ok=True)
    for path in work.glob("tests-*.jsonl"):
        path.unlink()
    shutil.rmtree(work / "code", ignore_errors=True)
    blocks = planting.Blocks.of_package()
    facts = {
        "bases": {name: first for name, (first, _) in blocks.files.items()},
        "starts": {name: found[0] for name, found in blocks.compiled().items()},
        "count": blocks.count,
    }
    (work / "blocks.json").write_text(json.dumps(facts))
    environment = _environment() | {"PLANTED_REACHED": str(work)}
    environment.pop("PLANTED_MARKS", None)
    command = [*PYTEST, "-p", "note_reached", "--timeout", "1200"]
    status = 0
    for words in pytest_words:
        done = subprocess.run([*command, *shlex.split(words)], cwd=ROOT, env=environment)
        status = max(status, done.returncode)
    return status


def _environment() -> dict[str, str]:
    words = [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, words)),
        "OMP_NUM_THREADS": "1",
    }


def tests_of(work: Path, blocks: planting.Blocks) -> list[Test]:
    """What `reach` has found; a test that has called a compiled function has reached what that
    calls."""
    compiled = blocks.compiled()
    closures = {name: _closure(name, blocks.calls) for name in compiled}
    found = []
    for path in sorted(work.glob("tests-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            packed = np.frombuffer(zlib.decompress(base64.b64decode(row["reached"])), np.uint8)
            bits = np.unpackbits(packed)[: blocks.count].astype(bool)
            for name, numbers in compiled.items():
                if bits[numbers[0]]:
                    for called in closures[name]:
                        bits[compiled[called]] = True
            found.append(
                Test(row["test"], row["seconds"], row["passed"], row["slow"], np.packbits(bits))
            )
    return found


def _closure(name: str, calls: dict[str, list[str]]) -> set[str]:
    seen, left = {name}, [name]
    while left:
        for called in calls.get(left.pop(), ()):
            if called not in seen:
                seen.add(called)
                left.append(called)
    return seen


# Running


@dataclass(frozen=True)
class Row:
    """What became of a fault: `noticed` by "quick", by "test", or by neither; by which test; how
    many tests reach it, and how many of them were run."""

    fault: Fault
    noticed: str
    by: str
    reached: int
    ran: int
    seconds: float
    seed: int
    commit: str
    date: str


def run(
    work: Path, out: Path, count: int, seed: int, seconds: float, workers: int, hints: list[Path]
) -> None:
    """Plant every fault that the file has no row for yet. Of tests that are equally slow the one is
    run first that has noticed the fault in rows of `hints`, which are another version's."""
    blocks = planting.Blocks.of_package()
    tests = [test for test in tests_of(work, blocks) if test.passed]
    faults = draw(count, seed)
    noticed = {_words(row.fault): row.by for row in rows_of(hints)}
    known = {_key(row.fault) for row in rows_of([out])} if out.exists() else set()
    left = [fault for fault in faults if _key(fault) not in known]
    print(f"{len(faults)} faults, {len(left)} of them to plant; {len(tests)} tests", flush=True)
    _preload()
    _check_runs(min((t for t in tests if not t.slow), key=lambda t: t.seconds), faults[0])
    commit = _git("rev-parse", "--short=10", "HEAD")
    date = datetime.now(UTC).date().isoformat()

    def one(fault: Fault) -> Row:
        block = blocks.at(fault.path, fault.line)
        reaching = [] if block is None else [
            t for t in tests if t.reached[block >> 3] >> (7 - (block & 7)) & 1
        ]  # fmt: skip
        own = f"tests/{fault.room}/"
        first = noticed.get(_words(fault))

        def turn(test: Test) -> tuple[bool, bool, bool, float]:
            return test.slow, test.name != first, not test.name.startswith(own), test.seconds

        order = sorted(reaching, key=turn)
        found = _plant(fault, order, seconds)
        return Row(fault, *found, seed, commit, date)

    with ThreadPoolExecutor(workers) as pool, out.open("a") as file:
        for row in pool.map(one, left):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            said = row.noticed or "not noticed"
            print(f"{row.fault.path}:{row.fault.line} {row.fault.kind}: {said} {row.by} "
                  f"({row.ran} of {row.reached}, {row.seconds:.0f} s)", flush=True)  # fmt: skip


def _check_runs(test: Test, fault: Fault) -> None:
    """A run without a fault must pass, or nothing that fails says anything."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        if failed := _pytest(Path(name), [test.name], 60.0, None, fault):
            log = (Path(name) / "log").read_text()
            raise SystemExit(f"{test.name} without a fault: {failed}\n{log[-3000:]}")


def _key(fault: Fault) -> tuple[str, int, int, str]:
    return fault.path, fault.begin, fault.end, fault.after


def _plant(fault: Fault, tests: list[Test], seconds: float) -> tuple[str, str, int, int, float]:
    """How a fault was noticed, by which test, how many reach it, how many were run, and how long
    that took."""
    began, ran = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        planted = folder / "fault.json"
        planted.write_text(json.dumps({**asdict(fault)} | {"text": fault.after}))
        for chunk in _chunks(tests):
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                break
            by = _first_failing(folder, planted, chunk, left, fault)
            ran += len(chunk)
            if by:
                slow = next((t.slow for t in chunk if t.name == by), chunk[0].slow)
                kind = "test" if slow else "quick"
                return kind, by, len(tests), ran, round(time.monotonic() - began, 1)
    return "", "", len(tests), ran, round(time.monotonic() - began, 1)


def _chunks(tests: list[Test]) -> Iterator[list[Test]]:
    for slow in (False, True):
        of = [test for test in tests if test.slow == slow]
        at = 0
        for size in (*CHUNKS, len(of)):
            if of[at : at + size]:
                yield of[at : at + size]
            at += size


def _first_failing(
    folder: Path, planted: Path, tests: list[Test], left: float, fault: Fault
) -> str:
    """The first of some tests that fails with the fault, and passes without; "" if none does."""
    names = [test.name for test in tests]
    while names:
        failed = _pytest(folder, names, left, planted, fault)
        if not failed or not failed.startswith("tests/dist"):
            return failed
        if not _pytest(folder, [failed], left, None, fault):
            return failed
        names = names[names.index(failed) + 1 :]
    return ""


def _pytest(folder: Path, names: list[str], left: float, planted: Path | None, fault: Fault) -> str:
    """The first of some tests that fails; "a run that hangs" if the time of hanging is over."""
    (folder / "tests.json").write_text(json.dumps(names))
    failed = folder / "failed"
    failed.unlink(missing_ok=True)
    environment = _environment() | {
        "PLANTED_TESTS": str(folder / "tests.json"),
        "PLANTED_FAILED": str(failed),
        "NUMBA_CACHE_DIR": "",
    }
    if planted is not None:
        environment["PLANTED_FAULT"] = str(planted)
        if b"compiled" in (PACKAGE / fault.path).read_bytes():
            environment["NUMBA_CACHE_DIR"] = str(folder / "numba")
    if not environment["NUMBA_CACHE_DIR"]:
        del environment["NUMBA_CACHE_DIR"]
    files = sorted({name.split("::")[0] for name in names if (ROOT / name.split("::")[0]).exists()})
    if not files:
        return ""
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "run_chosen", "--timeout", "200"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *files]  # hypothesis is loaded
    with (folder / "log").open("wb") as log:
        child = _forked(words, environment, log.fileno())
        hangs = time.monotonic() + left + 240
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < hangs:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if ended[0] == 0:
            os.waitpid(child, 0)
            return "a run that hangs"
    if failed.exists():
        return failed.read_text()
    status = os.waitstatus_to_exitcode(ended[1])
    if status not in (0, 5):  # 5: no test was collected
        return "a run that ends"
    return ""


def _preload() -> None:
    """Load what every run needs, once."""
    os.environ["OMP_NUM_THREADS"] = "1"  # which torch reads when it is loaded
    import hypothesis  # noqa: F401
    import numba  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch.distributed
    import torch.fx.experimental.proxy_tensor  # noqa: F401


def _forked(words: list[str], environment: dict[str, str], log: int) -> int:
    """A process that runs pytest, with all that is loaded here."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(ROOT)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [str(HOOK), str(ROOT)]
        sys.argv = ["pytest", *words]
        planting.install()
        import pytest

        status = int(pytest.main(words))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


# The table


def rows_of(paths: Iterable[Path]) -> list[Row]:
    found = []
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.append(Row(Fault(**row.pop("fault")), **row))
    return found


def table(rows: list[Row]) -> str:
    """Shares of the faults that are noticed, by room, by kind and in all."""
    lines = ["| | planted | by `make quick` | by `make test` |", "|---|---|---|---|"]
    first = rows[0]
    for of in ("room", "kind"):
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            groups[getattr(row.fault, of)].append(row)
        lines += [_line(name, group) for name, group in sorted(groups.items())]
    lines.append(_line("**all**", rows))
    short = sum(not row.noticed and row.ran < row.reached for row in rows)
    lines.append(
        f"\nSeed {first.seed}, {first.commit}, {first.date}. Of those not noticed, "
        f"{sum(not row.reached for row in rows)} are in lines that no test reaches, and of {short} "
        "not all tests were run."
    )
    return "\n".join(lines)


def _line(name: str, rows: list[Row]) -> str:
    by = Counter(row.noticed for row in rows)
    quick, test = by["quick"], by["quick"] + by["test"]
    return f"| {name} | {len(rows)} | {quick / len(rows):.0%} | {test / len(rows):.0%} |"


# The command line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    of = parser.add_subparsers(required=True, dest="what")
    one = of.add_parser("reach")
    one.add_argument("work", type=Path)
    two = of.add_parser("run")
    two.add_argument("work", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--faults", type=int, default=240)
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--seconds", type=float, default=600.0)
    two.add_argument("--workers", type=int, default=2)
    two.add_argument("--hints", type=Path, nargs="*", default=[], help="rows of another version")
    three = of.add_parser("table")
    three.add_argument("rows", type=Path, nargs="+")
    given = parser.parse_args()
    if given.what == "reach":
        return reach(given.work.resolve(), SUITE)
    if given.what == "run":
        how = (given.faults, given.seed, given.seconds, given.workers, given.hints)
        run(given.work.resolve(), given.out, *how)
    else:
        print(table(rows_of(given.rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
