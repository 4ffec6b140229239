"""Names of models as people type them, made whole.

In: a spec. Out: the same with `hf:` before a hub name, a folder and a config.json. It is read
without torch or transformers.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from apportion.catalogue import known_models, open_model


def whole(spec: str) -> str:
    """A spec with `hf:` before a hub name, a folder with a config.json and such a file, and with
    the owner before the name of a built-in shape; zoo models and files with functions stay."""
    taken = re.fullmatch(r"([^,:]+)[,:]?(.*)", spec, re.DOTALL)
    if taken is None or spec.startswith("hf:") or spec.endswith(".py") or ".py:" in spec:
        return spec
    name, settings = taken.groups()
    if name in _zoo_names():
        return spec
    if "/" not in name and not _is_local(name):
        known = open_model(name)
        if known is None:
            return spec
        name = known.name
    return f"hf:{name},{settings}" if settings else f"hf:{name}"


@cache
def _zoo_names() -> frozenset[str]:
    return frozenset(model.name for model in known_models())


def _is_local(name: str) -> bool:
    return name.endswith(".json") or (Path(name) / "config.json").is_file()
