"""Imports inside the package go one way: rooms in data order, and only through their faces."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from apportion.faces import offered

PACKAGE = Path(__file__).parent.parent / "apportion"

# Modules beside the rooms; each may import those before it, and every room may import all of them.
ROOT = [
    "version", "faces", "checked", "graph", "files", "quantity", "without_dynamo", "work_clock",
    "collector", "columns", "catalogue", "free_memory", "process_start",
]  # fmt: skip

# A room may import the rooms before it, and only what their `__init__` offers.
ROOMS = [
    "zoo", "capture", "describe", "split", "machine", "lower", "simulate", "memory", "place",
    "learn", "search", "execute", "checkpoint", "verify", "servers", "plan", "mesh", "run",
    "adapters", "loops", "show", "serve", "cli",
]  # fmt: skip

# Rooms whose face users import: `import apportion.loops as loops`. They offer what users ask.
PUBLIC = ["loops"]

# Modules beside the rooms that offer what rooms have under another name; nobody here imports them.
NAMES = ["tables"]

# Rooms that plan: they work where torch is not installed.
WITHOUT_TORCH = [
    "describe", "split", "machine", "lower", "simulate", "memory", "place", "search",
]  # fmt: skip

# Imports against the order. Each is inside a function, and runs when that is called.
FORWARD = {
    ("apportion.plan.plan", "apportion.show"): "Plan.report and Plan.trace",
    ("apportion.plan.plan", "apportion.plan.plan_file"): "Plan.save and Plan.load",
    ("apportion.plan.plan", "apportion.plan.explain"): "Plan.explain",
    ("apportion.plan.plan", "apportion.plan.explanation"): "the type of what Plan.explain returns",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def room(name: str) -> str:
    """The room of a module, or the module itself if it is in none; the package itself is ''."""
    return name.split(".")[1] if "." in name else ""


@cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """What a file imports of this package, anywhere in it: the module, and the name or ''."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import"
            if str(node.module).split(".")[0] == "apportion":
                yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] == "apportion")


KNOWN = {dotted(path) for path in modules()}


def module_of(module: str, name: str) -> str:
    """The module that an import loads."""
    whole = f"{module}.{name}"
    return whole if whole in KNOWN else module


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_rooms_import_earlier_rooms_through_their_faces(path: Path) -> None:
    here = dotted(path)
    places = [*ROOT, *ROOMS, *NAMES, ""]
    assert room(here) in places, f"{here} has no place in ROOT or ROOMS; give it one"
    for module, name in imports(path):
        there = module_of(module, name)
        if room(there) == room(here) or any((here, m) in FORWARD for m in (module, there)):
            continue
        assert places.index(room(there)) < places.index(room(here)), f"{here} imports {there}"
        if room(there) in ROOMS and room(there) != "zoo":
            assert module == f"apportion.{room(there)}", f"{here} imports {module}, not its face"
            face = offered(PACKAGE / room(there) / "__init__.py")
            assert name in face, f"{here} imports {name}, which {module} does not offer"


def test_faces_offer_only_what_others_import() -> None:
    asked = {(module, name) for path in modules() for module, name in imports(path)
             if room(dotted(path)) != room(module)}  # fmt: skip
    for name in [room for room in ROOMS[1:] if room not in PUBLIC]:
        face = offered(PACKAGE / name / "__init__.py")
        spare = [it for it in face if (f"apportion.{name}", it) not in asked]
        assert not spare, f"nobody outside {name} imports {', '.join(spare)}"


def test_no_module_imports_itself_through_others() -> None:
    edges = {
        dotted(path): {
            module_of(module, name) for module, name in imports(path)
            if room(module) == room(dotted(path)) and (dotted(path), module) not in FORWARD
        }
        for path in modules() if path.name != "__init__.py" or path.parent.parent != PACKAGE
    }  # fmt: skip
    while leaves := [name for name, needs in edges.items() if not needs & edges.keys() - {name}]:
        for name in leaves:
            del edges[name]
    assert not edges, f"these modules import each other in a circle: {', '.join(edges)}"


def test_rooms_are_folders_and_say_what_they_are() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ROOMS)
    for name in ROOMS:
        doc = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or ""
        assert doc.startswith(f"{name}: "), f"{name}/__init__.py does not begin with its name"
        for word in ("In: ", "Out: ", "Read "):
            assert word in doc, f"{name}/__init__.py does not say {word!r}"


@pytest.mark.slow
def test_planning_rooms_load_no_torch() -> None:
    names = [
        dotted(path) for name in WITHOUT_TORCH for path in sorted((PACKAGE / name).rglob("*.py"))
    ]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name + " loads torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
