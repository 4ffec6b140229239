"""The tables of benchmarks/p3.py: what is compared with what, on figures that are made up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import p3_models
import pytest
import torch
from p3_tables import (
    BEGIN,
    DDP,
    DDP_SMALL,
    END,
    Contender,
    Found,
    Point,
    Sweep,
    by_name,
    errors,
    gain,
    in_order,
    lead,
    read_sweep,
    tables,
    write_tables,
)

from apportion import zoo

WALL = {"none": 2.0, "wfbp": 1.5, "p3": 1.25, "bytescheduler": 1.2, "auto": 1.0}


def point(ratio: float, predicted: dict[str, float]) -> Point:
    found = [Found(Contender(n, n, "", 0.1, predicted[n]), w, w, w, [w]) for n, w in WALL.items()]
    found += [Found(Contender(n), w, w, w, [w]) for n, w in ((DDP, 1.1), (DDP_SMALL, 1.05))]
    return Point(ratio, 1e8, found)


def sweep() -> Sweep:
    points = [point(0.0, WALL), point(1.0, WALL), point(2.0, WALL | {"auto": 3.0})]
    return Sweep("vgg19", "a machine", "a day", 6, 9_000_000, 36_000_000, 1.0, 5.0, {}, points)


def test_auto_is_compared_with_the_best_of_all_others() -> None:
    one = point(1.0, WALL)
    assert by_name(one)[DDP].wall == 1.05
    assert DDP_SMALL not in by_name(one)
    assert lead(one) == pytest.approx(0.05)
    assert gain(one, "p3", "wfbp") == pytest.approx(0.2)


def test_order_and_errors_are_those_of_predictions() -> None:
    right, wrong = point(1.0, WALL), point(2.0, WALL | {"auto": 3.0})
    assert in_order([right]) == (10, 10)
    assert in_order([right, wrong]) == (16, 20)  # auto is predicted last, and was first
    assert errors([wrong]) == pytest.approx([0, 0, 0, 0, 2.0])


def test_tables_go_between_their_marks_and_survive_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    again = read_sweep(json.loads(json.dumps(asdict(sweep()))))
    assert again == sweep()
    write_tables(page, [again])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "\n".join(tables([again])) in text
    assert "| +66% |" in text


def test_the_first_full_layer_of_vgg19_has_its_share() -> None:
    with torch.device("meta"):
        model = p3_models.vgg19()[1]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes["full1.weight"] / sum(sizes.values()) == pytest.approx(0.715, abs=0.001)


def test_a_model_is_loaded_by_its_name() -> None:
    it = zoo.load(p3_models.spec("tiny"), 0)
    assert it.step(it.model, it.batch).item() > 0
