"""The path of the module that runs, while a step is recorded.

Part of the room capture; record.py names the module of every call by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class ModulePaths(Protocol):
    """What has modules by their paths."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...


@contextmanager
def module_paths(running: list[str], model: ModulePaths | None) -> Iterator[None]:
    """Keeps the path of the module that runs at the end of `running`."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}

    def enter(module: torch.nn.Module, _: Any) -> None:
        outer = running[-1] if running else ""
        running.append(names.get(id(module), outer))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
