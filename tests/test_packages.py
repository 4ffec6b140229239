"""The sdist and the wheel build, are whole, and work where the source is not;
tools/check_packages.py installs them into an empty environment with all that they need."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from apportion.version import VERSION

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone: git knows the files")
def test_a_wheel_from_the_sdist_has_everything_and_works(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("packages", ROOT / "tools" / "check_packages.py")
    assert spec is not None and spec.loader is not None
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    sdist, wheel = packages.build(tmp_path)
    assert VERSION in sdist.name and VERSION in wheel.name
    assert packages.missing(wheel) == []
    there = tmp_path / "there"
    install = ["install", "-q", "--no-deps", "--no-index", "--target", str(there), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=120)
    (there / "bin" / "where").write_text(
        f"#!{sys.executable}\nimport apportion as ap\nprint(ap.__file__)"
    )
    (there / "bin" / "where").chmod(0o755)
    packages.COMMANDS = (packages.COMMANDS[0], "where", *packages.COMMANDS[2:])
    packages.use(there / "bin", tmp_path, PYTHONPATH=str(there))
    assert (tmp_path / "p.html").stat().st_size > 100_000


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(VERSION)}\b", text, re.M)


def test_every_extra_that_is_named_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [*(ROOT / "apportion").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    named = {
        (extra, file.name)
        for file in (*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for extras in re.findall(
            r"(?:apportion|\.)\[([a-z, ]+)\]|[(;] ?extra ([a-z]+)\)", file.read_text()
        )
        for extra in re.split(r", ?", extras[0] or extras[1])
    }
    assert {"hf", "partition", "tensorboard", "lightning", "dev"} & {extra for extra, _ in named}
    assert not [each for each in named if each[0] not in project["optional-dependencies"]]
