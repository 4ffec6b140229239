"""Checks what the README and the tutorial show of commands' output, or writes it anew.

    python tools/readme_output.py              check: exit status 1 and the differences
    python tools/readme_output.py --write      write it anew, and the picture of the report
    python tools/readme_output.py --write --only 1     one block alone, here the large plan

A block of console lines has commands, each behind `$`, with a part of what it prints below it.
Which part is said by a comment before the block, for each command in turn, behind bars:

    <!-- shows: "fits" "methods tried":4 ... -->

A text is a line that begins so, and `:4` four lines from there on; `...` stands for lines that are
left out. What depends on the machine and the day is not shown, or follows a `~`: then it may differ
in its digits. Blocks without such a comment are not run here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "tutorial.md")
BLOCK = re.compile(r"<!-- shows: (?P<shows>.*?) -->\n```console\n(?P<text>.*?)^```$", re.M | re.S)
ITEM = re.compile(r'(?P<near>~?)"(?P<begins>[^"]+)"(?::(?P<count>\d+))?|(?P<gap>\.\.\.)')
CALL = "import sys; from apportion.cli.main import main; main()"


@dataclass(frozen=True)
class Shown:
    """A command with the lines that a page has of it, and what says which lines those are."""

    command: str
    lines: tuple[str, ...]
    items: str


def shown(block: re.Match[str]) -> Iterator[Shown]:
    """The commands of a block."""
    parts = re.split(r"^\$ ", block["text"], flags=re.M)[1:]
    wanted = block["shows"].split(" | ")
    if len(parts) != len(wanted):
        raise ValueError(f"{len(parts)} commands and {len(wanted)} parts of: {block['shows']}")
    for part, items in zip(parts, wanted, strict=True):
        command, *lines = part.rstrip("\n").split("\n")
        yield Shown(command, tuple(lines), items)


def chosen(items: str, printed: str) -> Iterator[tuple[str, bool]]:
    """The lines of an output that are to be shown, and of each whether its digits may differ."""
    lines = [line.rstrip() for line in printed.splitlines()]
    at = 0
    for item in ITEM.finditer(items):
        if item["gap"]:
            yield "...", False
            continue
        found = [k for k in range(at, len(lines)) if lines[k].lstrip().startswith(item["begins"])]
        if not found:
            raise ValueError(f"no line begins with {item['begins']!r} in:\n{printed}")
        at = found[0] + int(item["count"] or 1)
        yield from ((line, bool(item["near"])) for line in lines[found[0] : at])


def differences(each: Shown, printed: str) -> list[str]:
    """What a page shows otherwise than it is printed."""
    now = list(chosen(each.items, printed))
    if len(now) != len(each.lines):
        return [f"{each.command}: {len(each.lines)} lines are shown, {len(now)} would be"]
    return [
        f"{each.command}\n  shown   {line}\n  printed {text}"
        for line, (text, near) in zip(each.lines, now, strict=True)
        if (_masked(line) != _masked(text) if near else line != text)
    ]


def _masked(line: str) -> str:
    return " ".join(re.sub(r"\d+", "0", line).split())


def anew(block: re.Match[str], run: Callable[[str], str]) -> str:
    """The block with the output that its commands have now."""
    text = ""
    for each in shown(block):
        lines = [line for line, _ in chosen(each.items, run(each.command))]
        text += "\n".join([f"$ {each.command}", *lines]) + "\n"
    return f"<!-- shows: {block['shows']} -->\n```console\n{text}```"


def run(folder: Path, command: str) -> str:
    """What a command prints, as into a file."""
    print(f"$ {command}", file=sys.stderr)
    name, *rest = shlex.split(command)
    words = [sys.executable, "-c", CALL, *rest] if name == "apportion" else [name, *rest]
    settings = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{command} ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write the blocks anew, and the picture"
    )
    parser.add_argument("--only", type=int, help="one block, counted from 1")
    given = parser.parse_args()
    wrong: list[str] = []
    numbers = count(1)
    for page in PAGES:
        text = page.read_text()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for block in list(BLOCK.finditer(text)):
                if given.only not in (None, next(numbers)):
                    continue
                if given.write:
                    text = text.replace(block[0], anew(block, partial(run, folder)))
                else:
                    for each in shown(block):
                        wrong += differences(each, run(folder, each.command))
            if given.write:
                page.write_text(text)
            if given.write and page == PAGES[0] and (folder / "llama.json").exists():
                picture = [sys.executable, str(ROOT / "tools" / "report_picture.py")]
                subprocess.run([*picture, str(folder / "llama.json")], check=True)
    for each_wrong in wrong:
        print(each_wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
