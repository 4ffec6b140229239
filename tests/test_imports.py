"""Imports inside the package go one way: data order is reading order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "apportion"

# A module may import those of earlier lines and those to its left. A name stands for a module or a
# whole folder; inside a folder the modules are free among themselves, but must not form a circle.
ORDER = [
    *(
        "version",
        "graph",
        "compiler",
        "random",
        "trace",
        "rewrite",
        "decompose",
        "lift",
        "build",
        "optimizer",
        "capture",
    ),
    *(
        "interval",
        "extents",
        "tdl",
        "formula",
        "root",
        "restrict",
        "recipe",
        "segments",
        "opening",
        "atoms",
        "derive",
        "splits",
        "ops",
    ),
    *(
        "files",
        "quantity",
        "cluster_file",
        "cluster",
        "tasks",
        "collective",
        "wire",
        "cost_table",
        "cost_fit",
        "cost",
        "hops",
        "schedule",
        "slack",
        "placeto",
    ),
    *("strategy", "termwise", "flow", "fetch", "block", "stamp", "lower"),
    *(
        "footprint",
        "timeline",
        "perfetto",
        "chakra",
        "breakdown",
        "simulate",
        "stock",
        "flows",
        "draft",
        "price",
        "drafting",
        "held",
        "live",
        "resume",
        "delta",
    ),
    *("search", "alternatives"),
    *("kernels", "allocations", "execute", "storage", "check", "processes"),
    *("database", "disposable", "blind", "verify", "steps", "findings", "inputs"),
    *("zoo",),
    *("coverage",),
    *("report", "choose", "enough", "explanation", "explain", "plan"),
    *("runner", "worker", "pool", "rehearse", "calibrate", "calibrate_cuda", "trial"),
    *("planning", "run"),
    *("methods", "progress", "tables", "cluster_tables", "facts", "streams"),
    *("calibrate_command", "explain_command", "cli", "demo"),
    *("__init__",),
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def station(path: Path) -> str:
    """The name in ORDER that stands for a file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, anywhere in it, by dotted name."""
    known = {dotted(p) for p in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def internal(path: Path) -> list[str]:
    return [n for n in imports(path) if n == "apportion" or n.startswith("apportion.")]


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_one_way(path: Path) -> None:
    here = station(path)
    assert here in ORDER, f"{here} has no place in ORDER; give it one"
    for name in internal(path):
        there = name.split(".")[1] if "." in name else "__init__"
        assert there in ORDER, f"{path} imports {name}, which has no place in ORDER"
        assert there == here or ORDER.index(there) < ORDER.index(here), f"{here} imports {name}"


def test_no_module_imports_itself_through_others() -> None:
    edges = {dotted(path): set(internal(path)) for path in modules()}
    while leaves := [name for name, needs in edges.items() if not needs & edges.keys() - {name}]:
        for name in leaves:
            del edges[name]
    assert not edges, f"these modules import each other in a circle: {', '.join(edges)}"


def test_order_names_each_module_once() -> None:
    assert len(ORDER) == len(set(ORDER))
