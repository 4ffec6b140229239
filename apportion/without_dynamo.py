"""torch's compiler, left unloaded until somebody compiles. zoo/ and capture/ load faster so.

Optimizers, dispatch modes and reference kernels ask the compiler to keep away from them when they
are first called, and for that alone torch loads all of it: more than a second. Here its package
stands in `sys.modules` unexecuted: it answers that one request and shows its settings. Whatever
else is asked of it, a submodule too, executes the package first, in place; then the functions that
made the request make it again, to the real package.

This replaces a module of torch for the whole process, on purpose: torch offers no setting for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # where torch keeps the answer, on the function that asked
_NEEDED = ("__path__", "__all__")


class _UnloadedPackage(ModuleType):
    """The package as it is before it is executed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _NEEDED:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load(self)
        return getattr(self, name)


def leave_unloaded() -> None:
    """Lets torch run without its compiler, unless that is loaded already."""
    spec = None if _NAME in sys.modules else find_spec(_NAME)
    if spec is None:
        return
    package = module_from_spec(spec)
    requests: list[Any] = []

    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        requests.append(function)
        return function

    sys.modules[_NAME] = package
    import_module(f"{_NAME}.config")
    package.__dict__.update(disable=disable, _requests=requests)
    del package.__dict__["__path__"]
    package.__class__ = _UnloadedPackage
    torch._dynamo = package


def _load(package: ModuleType) -> None:
    spec = package.__spec__
    assert spec is not None and spec.loader is not None
    before = dict(package.__dict__)
    package.__class__ = ModuleType
    package.__dict__["__path__"] = spec.submodule_search_locations
    del package.__dict__["disable"]
    for function in package.__dict__.pop("_requests"):
        function.__dict__.pop(_MARK, None)
    try:
        spec.loader.exec_module(package)
    except BaseException:  # no place for its caches, say: torch goes on without its compiler
        package.__dict__.clear()
        package.__dict__.update(before)
        package.__class__ = _UnloadedPackage
        raise
