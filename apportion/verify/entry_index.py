"""Which operators each entry of PyTorch's operator database calls.

Part of the room verify. Names of operators come in, the entries that call them go out: to verify
one operator by walking all entries takes minutes. entry_operators.json is written by
tools/entry_operators.py, for one version of torch; with another one all entries are walked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

INDEX = Path(__file__).parent / "entry_operators.json"


def index_version() -> str:
    """The version of torch that an index is for, without the build."""
    return str(torch.__version__).partition("+")[0]


def entries_calling(prefixes: Sequence[str]) -> set[str] | None:
    """The names of the entries that call operators with these names (aten.mm, aten.mm.default);
    None where nothing is known of this version of torch."""
    index = json.loads(INDEX.read_text())
    if index["torch"] != index_version():
        return None
    wanted = {
        number
        for number, name in enumerate(index["operators"])
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
    }
    return {name for name, ops in index["entries"].items() if wanted.intersection(ops)}
