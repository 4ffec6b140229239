"""The benchmark against FlexFlow's paper, on small steps."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from apportion.machine.cluster import cluster

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("flexflow")
    monkeypatch.setitem(module.MODELS, "nmt", ("mlp:tiny", 4))
    return module


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("flexflow_figures")


@pytest.mark.slow
def test_methods_and_proposals_are_measured(benchmark: Any) -> None:
    cell = benchmark.Cell("nmt", "k80", 4, ("data", "tofu", "proposals"))
    how = benchmark.How(search_seconds=1.0, proposals=30, fulls=30)
    data, tofu, walked = benchmark.rows_of(cell, how)
    assert data["batch"] == 16
    assert data["bytes_moved"] >= tofu["bytes_moved"] > 0
    assert 0 < data["task_seconds"] < 4 * data["step_seconds"]
    assert data["bytes_moved"] >= 2 * 3 * data["weight_bytes"]  # summed, and given back
    assert walked["proposals"] == 60 and 0 < walked["fulls"] <= 30
    assert walked["delta_ms"] > 0 and walked["full_ms"] > 0
    json.dumps([data, tofu, walked])


def row(method: str, seconds: float, **more: Any) -> dict[str, Any]:
    same = {"model": "nmt", "machine": "k80", "devices": 64, "batch": 4096, "fits": True}
    return {
        **same, "method": method, "step_seconds": seconds, "bytes_moved": 2**30 * seconds,
        "task_seconds": 60 * seconds, "weight_bytes": 10**8, "search_seconds": 1.0, **more,
    }  # fmt: skip


def test_flexflow_is_held_against_every_start(benchmark: Any) -> None:
    rows = [row("data", 2.0), row("tofu", 1.0), row("expert", 1.5), row("flexflow", 1.0)]
    assert benchmark.never_worse(rows) == []
    (worse,) = benchmark.never_worse([*rows[:3], row("flexflow", 1.2)])
    assert worse == "nmt on 64 k80: flexflow takes 1.2 s, tofu 1 s"


def test_tables_have_the_papers_figures_beside(figures: Any) -> None:
    one = row("single", 0.5, devices=1, batch=64)
    walked = row("proposals", 0.0, full_ms=100.0, delta_ms=10.0)
    rows = [one, row("data", 2.0), row("flexflow", 1.0, figures={"proposals": 1000}), walked]
    made = figures.tables(rows)
    assert "| data | 2 / 1.9 (1.05) | 2 / 65.8 (0.03) | 120 / 35.7 (3.36) | 1.00 |" in made["nmt"]
    assert "| flexflow | 1 / 1.1 (0.91) |" in made["nmt"] and "| 2.00 | 2.00 |" in made["nmt"]
    assert "| 10 / 4.1 (2.44) | 1,000 | 100 | 10 | 8982 / 2190 |" in made["search"]
    assert "| k80 | nmt | 64 | 32 | - | - | - | 64 | 2.000 |" in made["throughput"]
    assert "sixteen" not in made  # nothing was measured there


@pytest.mark.parametrize(
    ("where", "by_node", "seconds"),
    [
        ("flexflow-k80:1", True, 0.0),
        ("flexflow-k80:4", True, 3 / 15.75),
        ("flexflow-k80:64", True, 3 / 15.75 + 15 / 7),
        ("flexflow-p100:16", False, 3 / 80 + 12 / 12.5),
    ],
)
def test_all_gradients_go_through_one_card(
    figures: Any, where: str, by_node: bool, seconds: float
) -> None:
    found = figures.central_seconds(cluster(where), 10**9, by_node)
    assert found == pytest.approx(seconds)


def test_every_model_has_the_same_counts_of_updates(figures: Any) -> None:
    rows = [
        row(method, seconds, model=model, machine="p100", devices=n, batch=64 * n)
        for model in figures.MODELS
        for method, n, seconds in (("single", 1, 0.5), ("data", 16, 0.6))
    ]
    lines = figures.tables(rows)["updates"].splitlines()[2:]
    counted = {line.partition("| 100 |")[2].split("|", 2)[2] for line in lines}
    assert len(lines) == len(figures.MODELS)
    assert counted == {" 27.8 | 55.5 | 99.8 | 200 |"}


def test_a_page_gets_its_tables(figures: Any) -> None:
    text = "a\n<!-- table: nmt -->\nold\n<!-- end: nmt -->\nb\n"
    assert figures.page(text, {"nmt": "| new |"}) == text.replace("old", "| new |")
    with pytest.raises(ValueError, match="0 places for the table 'steps'"):
        figures.page(text, {"steps": "| new |"})


def test_what_is_done_is_not_done_again(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[tuple[str, int, tuple[str, ...]]] = []

    def answer(cells: Any, *rest: Any) -> Any:
        for cell in cells:
            asked.append((cell.machine, cell.devices, cell.methods))
            for method in cell.methods:
                yield row(method, 1.0, model=cell.model, machine=cell.machine, devices=cell.devices)

    monkeypatch.setattr(benchmark, "all_rows", answer)
    out = tmp_path / "rows.jsonl"
    words = ["--models", "nmt", "--machines", "k80", "--devices", "4,64", "--measure", "data,tofu"]
    monkeypatch.setattr(sys, "argv", ["flexflow.py", *words, "--out", str(out)])
    assert benchmark.main() == 0
    assert asked == [("k80", 64, ("data", "tofu")), ("k80", 4, ("data", "tofu"))]
    lines = out.read_text().splitlines()
    out.write_text("\n".join([*lines[:3], lines[3][:20]]))  # stopped while it wrote
    asked.clear()
    monkeypatch.setattr(sys, "argv", ["flexflow.py", *words, "--out", str(out), "--done", str(out)])
    assert benchmark.main() == 0
    assert asked == [("k80", 4, ("tofu",))]
    assert len(benchmark.read(out)) == 4
    assert "flexflow / best other" in capsys.readouterr().out
