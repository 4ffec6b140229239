"""Runs a notebook's cells, in order and in one namespace, in the current folder:

python tools/run_notebook.py examples/first_plan.ipynb            # shows what they print
python tools/run_notebook.py examples/first_plan.ipynb --write    # and keeps it in the file
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cells(notebook: dict[str, Any]) -> list[str]:
    """What each cell of code prints; an error ends it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
            printed.append(said.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """The notebook with what its cells print."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        row = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [row] if text else []
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    notebook = json.loads(given.notebook.read_text())
    printed = run_cells(notebook)
    sys.stdout.write("\n".join(printed))
    if given.write:
        text = json.dumps(with_outputs(notebook, printed), indent=1)
        given.notebook.write_text(text + "\n")


if __name__ == "__main__":
    main()
