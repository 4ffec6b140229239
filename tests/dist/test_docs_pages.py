"""The tutorial and the recipes work as they stand: files that they show are written, commands are
run, blocks of Python too, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_reader import Reader


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
