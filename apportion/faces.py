"""The face of a room: the names that a package offers to others, loaded when they are first used.

A room's `__init__` lists what it offers as imports under `if TYPE_CHECKING:`, which type checkers
read, and calls `lazy_face(__name__)`, which reads the same lines. Nothing is imported until a name
is asked for, so that `apportion --help` does not wait for torch or Numba. Several rooms offer a
function with the name of the module it comes from; the function wins.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_face(package: str) -> None:
    """Let a package offer the names that it imports under `if TYPE_CHECKING:`."""
    module = sys.modules[package]
    homes = offered(Path(str(module.__file__)))
    names: dict[str, Any] = {name: _offer(*home, package) for name, home in homes.items()}
    names["__dir__"] = lambda self: sorted({*self.__dict__, *homes})
    module.__dict__["__all__"] = sorted(homes)
    module.__class__ = type("Face", (ModuleType,), names)


def offered(init: Path) -> dict[str, tuple[str, str]]:
    """The names that an `__init__.py` offers, each with its module and its name there."""
    (block,) = [node for node in ast.parse(init.read_text()).body if isinstance(node, ast.If)]
    return {
        alias.asname or alias.name: (str(line.module), alias.name)
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }


def _offer(home: str, name: str, package: str) -> property:
    def load(face: ModuleType) -> Any:
        if home == package:  # a module of the room
            return import_module(f"{package}.{name}")
        return getattr(import_module(home), name)

    def keep(face: ModuleType, value: Any) -> None:
        """Importing a module sets it as an attribute of its package; the offered name stays."""

    return property(load, keep)
