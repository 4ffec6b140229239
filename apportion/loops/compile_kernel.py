"""A kernel's text becomes a function, compiled by Numba.

Part of the room loops. The text is kept in a file named by its hash, in the user's cache folder, so
that what Numba makes of it is kept beside it and other processes load it. What Numba cannot compile
is refused with the line of the body.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from apportion.files import write_atomic
from apportion.loops.kernel_text import OWN, KernelText
from apportion.loops.loop_body import LoopBody, LoopError

Kernel = Callable[..., None]


def compile_kernel(text: KernelText) -> Kernel:
    """The kernel of a text; it is compiled when it is called, for the types of its arguments."""
    kernel: Kernel = compile_text(text.text)
    return kernel


def interpreted_kernel(text: KernelText) -> Kernel:
    """The same in plain Python: slow at once, where compiling would take longer than the loop."""
    return _interpreted(text.text)


@lru_cache(maxsize=64)
def _interpreted(text: str) -> Kernel:
    space: dict[str, Any] = {}
    plain = text.replace("loops.kernel_parts import", "loops.plain_kernel_parts import")
    exec(compile(plain, "<kernel>", "exec"), space)
    kernel: Kernel = np.errstate(all="ignore")(space[f"{OWN}tile"])
    return kernel


@lru_cache(maxsize=64)
def compile_text(text: str) -> Any:
    """The function of a module's text, compiled when it is called."""
    import numba

    module = _kept_module(text)
    function = getattr(module, f"{OWN}tile")
    kept = module.__spec__ is not None
    return numba.njit(cache=kept, nogil=True, error_model="numpy")(function)


def _kept_module(text: str) -> ModuleType:
    """The module of a text: from its file in the cache folder, or without one if there can be
    none."""
    name = f"apportion_tile_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    path = cache_folder() / f"{name}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            write_atomic(path, text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where Numba looks for what it has kept
        spec.loader.exec_module(module)
    except (OSError, ValueError):
        module = ModuleType(name)
        exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module


def cache_folder() -> Path:
    """Where the texts of kernels are kept: under APPORTION_CACHE, or the user's cache folder."""
    folder = os.environ.get("APPORTION_CACHE")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = os.path.join(base, "apportion")
    return Path(folder) / "loops"


def refusal(body: LoopBody, text: KernelText, message: str) -> LoopError:
    """The error about a kernel that Numba cannot compile, with the line of the body."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
    named = r"tile_\w+(?:\.py)?>?(?:\"?, line | \(|:)(\d+)"
    places = [int(found) for found in re.findall(named, plain)]
    lines = [text.lines[place - 1] for place in places if 0 < place <= len(text.lines)]
    line = next((each for each in reversed(lines) if each), body.first_line)
    return body.error(
        line,
        f"this cannot be compiled: {_reason(plain)}; use numbers, parts of arrays, functions of "
        "numpy and math, and functions of your own that do the same",
    )


def _reason(message: str) -> str:
    """What Numba complains of, in one line."""
    lines = [line.strip(" -.\t") for line in message.splitlines()]
    noise = (
        "Failed in",
        "During:",
        "File",
        "There are",
        "Overload",
        ">>>",
        "Enable",
        "^",
        "<source",
    )
    said = [line for line in lines if line and not line.startswith(noise)]
    first = said[0] if said else "Numba does not say why"
    return first.replace(OWN, "")[:200]
