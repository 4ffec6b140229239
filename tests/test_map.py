"""docs/map.md names modules and functions that are there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "map.md").read_text()
NAMED = re.findall(r"`([a-z_/]+)\.py` `(\w+)`", PAGE)
FILES = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", PAGE)


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_a_named_function_is_there(module: str, name: str) -> None:
    dotted = "apportion." + module.replace("/", ".").removesuffix(".__init__")
    assert hasattr(import_module(dotted), name), f"{dotted} has no {name}"


@pytest.mark.parametrize("name", sorted(set(FILES)))
def test_a_named_file_is_there(name: str) -> None:
    assert (ROOT / "apportion" / name).exists() or (ROOT / name).exists()


def test_every_room_is_on_the_map() -> None:
    rooms = {path.parent.name for path in (ROOT / "apportion").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/` ", PAGE, re.M))
    assert len(NAMED) > 25
