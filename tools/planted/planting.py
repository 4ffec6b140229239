"""How modules of the package are loaded while tools/planted_faults.py looks at the tests.

Two environment variables say what is wanted, so that it reaches every process of a test:

    PLANTED_FAULT    a file {"path", "begin", "end", "text"}: that module is loaded with the
                     bytes from begin to end replaced
    PLANTED_REACHED  a folder: every module is loaded with a mark at the start of every block, and
                     marks that are passed are set in a file there that all processes share

A block is a run of statements of a function up to the end of the next compound one: where its first
statement is reached, so are the others, unless an error ends it. Bodies of compiled functions
cannot be marked; a call of one marks its first block, and `Blocks.calls` says what it calls. What
is handed to Numba directly has no marks: it is of the block in which it is defined.
"""

from __future__ import annotations

import ast
import builtins
import json
import marshal
import mmap
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "apportion"
COMPOUND = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match, ast.FunctionDef,
    ast.ClassDef,
)  # fmt: skip
COMPILED = {"compiled", "compiled_part", "inlined"}
UNMARKED = {"loops/plain_kernel_parts.py"}  # Numba compiles these as they stand


@dataclass(frozen=True)
class Block:
    """Lines of a function; `compiled` is the function's name, if it is compiled."""

    first: int
    last: int
    compiled: str = ""


def mark(tree: ast.Module, base: int) -> list[Block]:
    """Put a mark before every block of every function, numbered from `base`; returns the blocks."""
    found: list[Block] = []

    def visit_body(body: list[ast.stmt], compiled: str) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        start = 0
        if body and _is_docstring(body[0]):
            made.append(body[0])
            start = 1
        while start < len(body):
            end = start
            while end < len(body) - 1 and not isinstance(body[end], COMPOUND):
                end += 1
            lines = body[start].lineno, body[end].end_lineno or body[end].lineno
            if not compiled:
                made.append(_mark(base + len(found), lines[0]))
            found.append(Block(*lines, compiled))
            for statement in body[start : end + 1]:
                visit_statement(statement, compiled)
                made.append(statement)
            start = end + 1
        return made

    def visit_statement(node: ast.stmt, compiled: str) -> None:
        if isinstance(node, ast.FunctionDef) and not _is_given_to_numba(node):
            compiled = compiled or (node.name if _is_compiled(node) else "")
            node.body = visit_body(node.body, compiled)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                visit_statement(statement, compiled)
        elif not isinstance(node, ast.FunctionDef):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if inner:
                    setattr(node, name, visit_body(inner, compiled))
            for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                part.body = visit_body(part.body, compiled)

    def visit_module(body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.If | ast.Try | ast.With):
                for name in ("body", "orelse", "finalbody"):
                    visit_module(getattr(statement, name, []))
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                visit_statement(statement, "")

    visit_module(tree.body)
    ast.fix_missing_locations(tree)
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_compiled(node: ast.FunctionDef) -> bool:
    names = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(isinstance(name, ast.Name) and name.id in COMPILED for name in names)


def _is_given_to_numba(node: ast.FunctionDef) -> bool:
    names = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(isinstance(name, ast.Attribute) and name.attr == "njit" for name in names)


def _mark(number: int, line: int) -> ast.stmt:
    made = ast.parse(f"_reached_[{number}] = 1").body[0]
    for node in ast.walk(made):
        node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
    return made


@dataclass(frozen=True)
class Blocks:
    """All blocks of the package: of each file, the number of its first one and what they are."""

    files: dict[str, tuple[int, list[Block]]]
    count: int
    calls: dict[str, list[str]]  # of compiled functions: the compiled functions that they name

    @classmethod
    def of_package(cls) -> Blocks:
        files: dict[str, tuple[int, list[Block]]] = {}
        count, named = 0, {}
        for path in sorted(PACKAGE.rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and _is_compiled(node):
                    inside = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
                    named[node.name] = set(inside) | named.get(node.name, set())
            name = str(path.relative_to(PACKAGE))
            found = [] if name in UNMARKED else mark(tree, count)
            files[name] = count, found
            count += len(found)
        calls = {name: sorted(inside & named.keys()) for name, inside in named.items()}
        return cls(files, count, calls)

    def compiled(self) -> dict[str, list[int]]:
        """The blocks of every compiled function, by its name."""
        found: dict[str, list[int]] = {}
        for first, blocks in self.files.values():
            for number, block in enumerate(blocks, first):
                if block.compiled:
                    found.setdefault(block.compiled, []).append(number)
        return found

    def at(self, path: str, line: int) -> int | None:
        """The smallest block that holds a line."""
        first, blocks = self.files[path]
        holding = [
            (block.last - block.first, -number)
            for number, block in enumerate(blocks, first)
            if block.first <= line <= block.last
        ]
        return -min(holding)[1] if holding else None


# Loading


class Finder:
    """Finds modules of the package as Python would, and has them loaded by `Loader`."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "apportion":
            return None
        for finder in sys.meta_path:
            spec = None if finder is Finder else finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec.loader) is SourceFileLoader:
                    spec.loader = Loader(spec.loader.name, spec.loader.path)
                return spec
        return None


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        path = Path(self.path).resolve()
        if not path.is_relative_to(PACKAGE):
            return super().get_code(fullname)
        if FAULT is not None and FAULT["path"] == str(path.relative_to(PACKAGE)):
            text = path.read_bytes()
            text = text[: FAULT["begin"]] + FAULT["text"].encode() + text[FAULT["end"] :]
            return compile(text, self.path, "exec", dont_inherit=True)
        if REACHED is not None:
            return _marked(path, self.path)
        return super().get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if REACHED is not None and module.__name__ == "apportion.columns":
            _watch_compiled(module)


def _marked(path: Path, shown: str) -> CodeType:
    """A module with its marks; compiled once for all processes."""
    assert REACHED is not None
    name = str(path.relative_to(PACKAGE))
    kept = REACHED / "code" / name.replace("/", "__")
    if kept.exists():
        return marshal.loads(kept.read_bytes())  # type: ignore[no-any-return]
    tree = ast.parse(path.read_text())
    if name not in UNMARKED:
        mark(tree, BASES[name])
    code = compile(tree, shown, "exec", dont_inherit=True)
    kept.parent.mkdir(exist_ok=True)
    aside = kept.with_suffix(f".{os.getpid()}")
    aside.write_bytes(marshal.dumps(code))
    aside.rename(kept)
    return code


def _watch_compiled(columns: ModuleType) -> None:
    """Mark compiled functions as they are called, in whatever form."""
    for kind in (columns.CompiledFunction, columns.CompiledPart):
        kind.__call__ = _marking(kind.__call__)


def _marking(call: Any) -> Any:
    def marked(self: Any, *given: Any) -> Any:
        number = STARTS.get(self.function.__name__)
        if number is not None:
            builtins._reached_[number] = 1  # type: ignore[attr-defined]
        return call(self, *given)

    return marked


def share(path: Path) -> None:
    """Set marks in this file from now on; processes that are started do so too."""
    if not path.exists():
        path.write_bytes(bytes(COUNT))
    with path.open("r+b") as file:
        builtins._reached_ = mmap.mmap(file.fileno(), COUNT)  # type: ignore[attr-defined]
    os.environ["PLANTED_MARKS"] = str(path)


FAULT: dict[str, Any] | None = None
REACHED: Path | None = None
BASES: dict[str, int] = {}
STARTS: dict[str, int] = {}
COUNT = 0


def install() -> None:
    """Do what the environment asks for."""
    global FAULT, REACHED, COUNT
    if "PLANTED_FAULT" in os.environ:
        FAULT = json.loads(Path(os.environ["PLANTED_FAULT"]).read_text())
    elif "PLANTED_REACHED" in os.environ:
        REACHED = Path(os.environ["PLANTED_REACHED"])
        facts = json.loads((REACHED / "blocks.json").read_text())
        BASES.update(facts["bases"])
        STARTS.update(facts["starts"])
        COUNT = facts["count"]
        share(Path(os.environ.get("PLANTED_MARKS", REACHED / "marks-main")))
    else:
        return
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
