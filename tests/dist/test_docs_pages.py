"""The tutorial and the recipes work as they stand: files that they show are written, commands are
run, blocks of Python too, in the order of the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.cli import main as cli

DOCS = Path(__file__).parent.parent.parent / "docs"
FENCE = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.M | re.S)


class Reader:
    """Somebody who does what a page says, in the working directory."""

    def __init__(self, screen: pytest.CaptureFixture[str]) -> None:
        self.screen = screen

    def follow(self, page: str) -> dict[str, str]:
        """What each command of a page has printed."""
        printed = {}
        for kind, title, text in FENCE.findall((DOCS / page).read_text()):
            if title:
                Path(title).write_text(text)
            elif kind == "python":
                printed[text] = self.start([sys.executable, "-c", text])
            elif kind == "console":
                lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
                assert lines, f"{page}: a block without a command"
                printed |= {line: self.done(line.split()) for line in lines}
        return printed

    def done(self, words: list[str]) -> str:
        """What a command prints. Ours run in this process, which spares them torch's start."""
        name, *rest = words
        if name != "apportion":
            return self.start([str(Path(sys.executable).with_name(name)), *rest])
        self.screen.readouterr()
        status = cli.status(rest)
        out, err = self.screen.readouterr()
        assert status == 0, f"{' '.join(words)}: {err[-2000:]}"
        return out

    def start(self, words: list[str]) -> str:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, f"{' '.join(words)}: {ran.stderr}"
        return ran.stdout


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(capfd)


@pytest.mark.slow
def test_the_tutorial(reader: Reader) -> None:
    pytest.importorskip("transformers")
    by_command = reader.follow("tutorial.md")
    printed = "\n".join(by_command.values())
    assert "Data parallel over" in printed and "feasible" in printed  # by what 5 s were enough for
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
