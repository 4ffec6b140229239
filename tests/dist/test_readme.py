"""The README says what is so: its commands run as they stand and print what it shows, its example
in Python trains, and what it links to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_reader import ROOT, Reader, tool

README = (ROOT / "README.md").read_text()
SYSTEMS = ["Tofu", "OptCNN", "FlexFlow", "Placeto", "GDP", "TensorFlowMem", "P3", "Bösen", "Orion"]
TRIED = re.findall(r"^\|[^|]*\|[^|]*\| `((?:apportion|python) [^`]+)` \|", README, re.M)

output = tool("readme_output")
BLOCKS = list(output.BLOCK.finditer(README))
LARGE = [block for block in BLOCKS if "llama.json" in block["text"]]


def test_it_is_short_and_names_what_it_should() -> None:
    assert len(README.splitlines()) <= 130
    rows = re.findall(r"^\| (\w+), [^|]*\| [^|]+\| `", README, re.M)
    assert rows == SYSTEMS
    assert len(TRIED) == len(SYSTEMS)
    assert len(BLOCKS) == 3 and len(LARGE) == 2


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert (ROOT / "docs" / "report.png").stat().st_size < tool("report_picture").LARGEST


def test_lines_are_chosen_and_compared() -> None:
    printed = "one 1\ntwo 2 s\n  three\nfour 4\n"
    lines = [line for line, _ in output.chosen('"one" ... "three":2', printed)]
    assert lines == ["one 1", "...", "  three", "four 4"]
    same = output.Shown("c", ("two 7 s",), '~"two"')
    assert output.differences(same, printed) == []
    assert output.differences(output.Shown("c", ("two 7 s",), '"two"'), printed)
    assert output.differences(output.Shown("c", ("two 7 m",), '~"two"'), printed)
    with pytest.raises(ValueError, match="no line begins with 'five'"):
        list(output.chosen('"five"', printed))


def shown_otherwise(reader: Reader, blocks: list[re.Match[str]]) -> list[str]:
    """What blocks show that their commands do not print, run in order."""
    commands = [each for block in blocks for each in output.shown(block)]
    return [
        line for each in commands for line in output.differences(each, reader.done(each.command))
    ]


@pytest.mark.slow
def test_small_commands_print_what_is_shown(reader: Reader) -> None:
    assert shown_otherwise(reader, [block for block in BLOCKS if block not in LARGE]) == []


@pytest.mark.soak
@pytest.mark.slow
def test_the_large_plan_prints_what_is_shown(reader: Reader) -> None:
    pytest.importorskip("transformers")
    assert shown_otherwise(reader, LARGE) == []


@pytest.mark.slow
@pytest.mark.parametrize("line", TRIED, ids=SYSTEMS)
def test_a_system_runs(line: str, reader: Reader) -> None:
    Path("examples").symlink_to(ROOT / "examples")
    assert reader.done(line).strip()


@pytest.mark.slow
def test_the_example_in_python(tmp_path: Path) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "train.py").write_text(text)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, *launch], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 22  # predictions and ten losses on both ranks
