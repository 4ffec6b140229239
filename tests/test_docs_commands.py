"""Every command and every block of Python in the documentation is one that there is: commands are
parsed with their options, blocks are compiled. tests/dist/test_docs_pages.py runs those of the
tutorial and of the recipes, tests/dist/test_readme.py those of the README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from apportion.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"^(?: {4}|\$ )(apportion [a-z].*)$", re.M)
SPELLED = re.compile(r"`(apportion (?:[a-z]+) [^`\n]*--[^`\n]*)`")
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.M | re.S)
FORM = re.compile(r"[\[\]|]|\b[A-Z]\b|\.\.\.")  # of a line that says how commands are written


def commands() -> list[tuple[str, str]]:
    """Lines that are commands, each with the page that has it."""
    found = []
    for page in PAGES:
        for command in LINE.findall(page.read_text()):
            line = re.sub(r"\s{2,}#.*| > \S+$", "", command).strip()
            if not FORM.search(line.replace("{", "").replace("}", "")):
                found.append((page.name, line))
    return sorted(set(found))


def named(line: str) -> tuple[Any, list[str]]:
    """The command that a line names, and the words behind its name."""
    words = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while (inner := getattr(command, "commands", None)) is not None:
        assert words and words[0] in inner, f"no command {words[:1]}"
        command, words = inner[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_are_there(page: Path) -> None:
    for line in SPELLED.findall(page.read_text()):
        command, words = named(line)
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        asked = {re.split(r"[=|\]]", word)[0] for word in words if word.startswith("--")}
        assert asked <= {*known, "--help"}, f"{line}: there is no {asked - known}"


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_can_be_given_so(page: str, line: str) -> None:
    command, words = named(line)
    if words != ["--help"]:
        command.make_context(command.name, words)  # a usage error for what is not there


def test_commands_were_found() -> None:
    found = commands()
    assert len(found) > 40 and len({page for page, _ in found}) > 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_python_are_python(page: Path) -> None:
    for code in BLOCK.findall(page.read_text()):
        compile(code, page.name, "exec")
