"""Prints how large the project is: lines per module, public names, options of the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from apportion.cli.main import app

ROOT = Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES = 600, 80


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every function of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def public_names() -> int:
    """Names that `apportion/__init__.py` re-exports."""
    tree = ast.parse((ROOT / "apportion" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return len({alias.asname or alias.name for node in imports for alias in node.names})


def cli_options() -> int:
    group: Any = typer.main.get_command(app)
    commands = group.commands.values()
    return sum(p.param_type_name == "option" for command in commands for p in command.params)


def main() -> None:
    files = sorted((ROOT / "apportion").rglob("*.py"))
    for path in files:
        over = [f"{name} has {n} lines" for name, n in functions(path) if n > FUNCTION_LINES]
        if lines(path) > FILE_LINES:
            over.insert(0, f"over {FILE_LINES}")
        name = path.relative_to(ROOT / "apportion")
        print(f"{lines(path):6}  {name}{'  !! ' if over else ''}{', '.join(over)}")
    for folder in ("apportion", "tests", "tools", "examples", "benchmarks"):
        print(f"{sum(map(lines, (ROOT / folder).rglob('*.py'))):6}  all of {folder}/")
    print(f"{public_names():6}  public names\n{cli_options():6}  options of the command line")


if __name__ == "__main__":
    main()
