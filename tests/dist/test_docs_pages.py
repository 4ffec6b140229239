"""The tutorial and the recipes work as they stand: files that they show are written, commands are
run, blocks of Python too, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_reader import ROOT, Reader, tool
from soak import kept


@pytest.mark.slow
def test_the_tutorial(reader: Reader) -> None:
    pytest.importorskip("transformers")
    by_command = reader.follow("tutorial.md")
    printed = "\n".join(by_command.values())
    output = tool("readme_output")
    for block in output.BLOCK.finditer((ROOT / "docs" / "tutorial.md").read_text()):
        for each in output.shown(block):
            assert output.differences(each, by_command[each.command]) == []
    assert "equal: yes" in printed
    assert "gate_proj.mm: aten.mm.default" in printed
    (trained,) = [text for command, text in by_command.items() if command.startswith("torchrun")]
    losses = re.findall(r"\d\.\d{4}", trained)  # two processes print into the same lines
    assert len(losses) == 6 and len(set(losses)) == 3  # three steps, the same on both ranks
    assert re.search(r"^3 \d\.\d+$", printed, re.M)  # the step that was saved, and its loss
    assert Path("llama.html").stat().st_size > 100_000


@pytest.mark.slow
def test_the_recipes(reader: Reader) -> None:
    printed = "\n".join(reader.follow("how-to.md").values())
    assert "blocks.0.attn.qkv" in printed and "gdp-p100:2" in printed
    assert sorted(path.name for path in Path("book").iterdir()) == ["2.json", "3.json"]
    for name in ("recomputed.json", "p.json", "p.html", "p.trace.json", "best.json"):
        assert Path(name).stat().st_size > 1000


# The other pages under "How to" show commands among text. What needs something that is not here is
# left out, each with its reason.
LEFT_OUT = {
    "apportion serve": "stays until it is interrupted",
    "apportion place INPUT": "says how commands are written",
    "train.py:make": "a program of the reader's",
    " train.py book/": "the same",
    "--nnodes": "several hosts",
    "--device cuda": "a GPU",
    "--cluster 8xh200 --costs table.json": "a table of a GPU",
    "python benchmarks/": "an experiment",
    "sudo ": "an experiment",
}
READERS = re.compile(r" (hf:path/to/|\./)")  # files that only the reader has
QUICK = ("clusters", "timeline")


def commands(page: str) -> list[str]:
    """The commands that a page shows among its text, but for those that are left out."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    lines = re.findall(r"^ {4}((?:apportion|python|torchrun|sudo) .*)$", text, re.M)
    lines = [re.sub(r"\s+# .*", "", line) for line in lines]
    return [
        line
        for line in lines
        if not READERS.search(line) and not any(part in line for part in LEFT_OUT)
    ]


def how_to_pages() -> list[str]:
    """Pages of that tab with commands, which are those before the next tab."""
    tab = (ROOT / "mkdocs.yml").read_text().partition("- How to:")[2].partition("- Papers:")[0]
    return [page for page in re.findall(r"- ([\w-]+)\.md", tab) if commands(page)]


def test_what_is_left_out_is_there() -> None:
    every = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [part for part in LEFT_OUT if part not in every] == []
    assert {"planning", "memory", "transformers", "checkpoints", "export"} < set(how_to_pages())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", kept(how_to_pages(), *QUICK))
def test_commands_among_text(page: str, reader: Reader) -> None:
    pytest.importorskip("transformers")
    Path("examples").symlink_to(ROOT / "examples")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for name, pattern in {
        "mine.toml": r"^```toml\n(.*?)^```$",
        "mine.json": r"^ {4}(\{\"format\": .*\"mesh\".*\}\})$",
    }.items():
        for block in re.findall(pattern, text, re.M | re.S if name == "mine.toml" else re.M):
            Path(name).write_text(block)
    if any(" p.json" in line for line in commands(page)):
        reader.done("apportion plan gpt2:tiny --cluster local:2 --method data --out p.json")
    for line in commands(page):
        reader.done(line)
