"""The benchmark of searches, on a small step."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("search")


@pytest.mark.slow
def test_methods_are_measured_on_clusters(
    search: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(path: str, where: str, method: str, *more: str, **limits: float) -> Any:
        return search.one(path, where, method, "--simulate" in more)

    monkeypatch.setattr(search, "apart", here)
    captured = search.Captured(tmp_path)
    rows = search.devices(captured, ["mlp:tiny,batch=16"], ["4xh100", "2x2xh100"])
    assert len(list(tmp_path.iterdir())) == 1  # captured once
    for row in rows:
        assert row["methods"].keys() == {"tofu", *search.BASELINES}
        assert all(m["seconds"] > 0 for m in row["methods"].values() if "seconds" in m)
        least = min(m["bytes_moved"] for m in row["methods"].values() if "bytes_moved" in m)
        assert row["methods"]["tofu"]["bytes_moved"] == least > 0
        assert search.quality(row["methods"], "bytes_moved") <= 1
    table = list(search.device_table(rows))
    assert sum(line.startswith("| 4 |") for line in table) == 2
    drawn = dict(search.figures({"devices": rows}))
    root = ElementTree.fromstring(drawn["search-quality.svg"])
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2


@pytest.mark.slow
def test_what_fails_says_why(search: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"ops": []}), encoding="utf-8")
    assert "why" in search.apart(str(broken), "4xh100", "tofu")


def test_ratios_are_to_the_best_baseline(search: Any) -> None:
    found = {"tofu": {"x": 6.0}, "data": {"x": 4.0}, "fsdp": {"x": 3.0}, "megatron": {"why": ""}}
    assert search.quality(found, "x") == 2.0
    assert search.quality({"tofu": {"x": 1.0}}, "x") is None
