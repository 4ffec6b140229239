"""apportion divides a training step written for one device over many.

Public names are loaded when they are first used, so that planning from a file does not wait for
torch. Several carry the name of the module they come from; the class below keeps the function when
the module is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from apportion.version import VERSION

if TYPE_CHECKING:
    from apportion.capture import CaptureError, Program, capture
    from apportion.cluster import Cluster, cluster
    from apportion.findings import check_splits
    from apportion.graph import Graph
    from apportion.plan import Plan
    from apportion.planning import compare, plan
    from apportion.runner import Runner, distribute
    from apportion.tdl import ALL, Max, Min, Output, Prod, Sum, describe, f, opaque

__version__ = VERSION

_HOMES = {
    "capture": ("CaptureError", "Program", "capture"),
    "cluster": ("Cluster", "cluster"),
    "findings": ("check_splits",),
    "graph": ("Graph",),
    "plan": ("Plan",),
    "planning": ("compare", "plan"),
    "runner": ("Runner", "distribute"),
    "tdl": ("ALL", "Max", "Min", "Output", "Prod", "Sum", "describe", "f", "opaque"),
}

__all__ = [
    "ALL", "CaptureError", "Cluster", "Graph", "Max", "Min", "Output", "Plan", "Prod", "Program",
    "Runner", "Sum", "capture", "check_splits", "cluster", "compare", "describe", "distribute", "f",
    "opaque", "plan",
]  # fmt: skip


def _property(home: str, name: str) -> property:
    def get(package: ModuleType) -> Any:
        return getattr(import_module(f"apportion.{home}"), name)

    def keep(package: ModuleType, value: Any) -> None:
        """Importing a module sets it as an attribute of its package; the public name stays."""

    return property(get, keep)


class _Package(ModuleType):
    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *__all__]


for _home, _names in _HOMES.items():
    for _name in _names:
        setattr(_Package, _name, _property(_home, _name))
sys.modules[__name__].__class__ = _Package
