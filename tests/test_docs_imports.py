"""Import lines in the documentation and the examples work as they are written."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
LINE = re.compile(r"^ *from (apportion[\w.]*) import ([\w ,]+)", re.M)
IMPORTS = sorted(
    {
        (module, name.split(" as ")[0].strip())
        for page in PAGES
        for module, names in LINE.findall(page.read_text())
        for name in names.split(",")
        if name.strip()
    }
)


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_an_import_works(module: str, name: str) -> None:
    package = import_module(module)
    try:
        getattr(package, name)
    except AttributeError:
        import_module(f"{module}.{name}")
