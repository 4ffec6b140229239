"""run_tables: a function on several processes of this machine that share tables.

Part of the room run. A function and settings come in; processes are started, each joins the others
and calls the function with its TableStore; what each returns goes out.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from apportion.execute import peer_errors
from apportion.run.pool import TIMEOUT, ProcessPool
from apportion.run.process import PoolProcess
from apportion.servers import GlooMessages, StoreSettings, TableStore, settings

SCRIPT = "apportion_script"  # what the user's script is called where it is imported


@dataclass(frozen=True)
class TableRequest:
    """What every process does: `function` of a module, or of the script `file`."""

    module: str
    file: str
    function: str
    arguments: tuple[Any, ...]
    settings: StoreSettings

    def __call__(self, process: PoolProcess) -> Any:
        with peer_errors():
            group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        messages = GlooMessages(process.rank, dist.get_world_size(), group)
        store = TableStore(messages, self.settings)
        answer = self._function()(store, *self.arguments)
        store.close()
        return answer

    def _function(self) -> Callable[..., Any]:
        if not self.file:
            module = importlib.import_module(self.module)
        else:
            spec = importlib.util.spec_from_file_location(SCRIPT, self.file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[SCRIPT] = module
            spec.loader.exec_module(module)
        found: Callable[..., Any] = getattr(module, self.function)
        return found


def run_tables(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    timeout: float = TIMEOUT,
    **how: Any,
) -> list[Any]:
    """Runs function(store, *arguments) on so many processes of this machine; returns what each
    returned. `how` is that of `tables.join`: staleness, bandwidth, priority. Raises RuntimeError,
    naming the process, if one fails, and ValueError for a function that other processes cannot
    find: it has to be defined by its name in a module or in the script."""
    file = ""
    if function.__module__ == "__main__":
        file = str(getattr(sys.modules["__main__"], "__file__", ""))
    nested = "." in getattr(function, "__qualname__", ".")
    if nested or (function.__module__ == "__main__" and not file):
        raise ValueError(
            f"{getattr(function, '__name__', function)} cannot be found by other processes; define "
            "it at the top of a file"
        )
    wanted = settings(**how)
    request = TableRequest(function.__module__, file, function.__name__, arguments, wanted)
    with ProcessPool(processes, timeout) as pool:
        answers: list[Any] = pool.ask(request)
        return answers
