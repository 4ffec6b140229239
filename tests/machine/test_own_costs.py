"""Costs of one's own are read back: those of a file count for more than those that are shipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from apportion.machine.cluster import cluster
from apportion.machine.compile_mode import predicted_mode
from apportion.machine.cost_model import check_kinds, default_cost, dump_cost, load_cost, shipped
from apportion.machine.cost_table import (
    Condition,
    CostFile,
    CostLine,
    CostTable,
    Fit,
    KernelMeasurement,
    load_cost_file,
    save_cost_file,
)

CALL = "aten.mm.default(float32[2,2] float32[2,2]) #0000000000"
MINE = CostTable(
    Condition("h200", mode="generated"),
    "2026-01-31",
    works={CALL: KernelMeasurement(0.25, 16.0, 48, 4, 512)},
    fits={"aten.mm.default/4": Fit(0.5, 0.0, 0.0, 0.0, 4)},
    lines={"assemble": CostLine(1.0, 0.0, 0.0, 0.0, 1)},
    issue={"": 0.125},
    resident=1024,
)


def own(*tables: CostTable) -> CostFile:
    return CostFile("a machine", "2.13.0", tables)


def test_a_table_of_ones_own_counts_for_more_than_the_shipped_one() -> None:
    where = cluster("2xh200")
    before = default_cost(where).tables["h200"]
    cost = default_cost(where, own=(own(MINE),))
    after = cost.tables["h200"]
    assert after.works[CALL].seconds == 0.25 and after.resident == 1024
    assert after.lines["assemble"].each == 1.0
    assert len(after.works) == len(before.works) + 1, "what is shipped is known as well"
    assert "a machine" in cost.provenance and cost.name == "measured"


def test_the_last_file_counts_for_most() -> None:
    slow = replace(MINE, works={CALL: MINE.works[CALL]._replace(seconds=2.0)})
    cost = default_cost(cluster("1xh200"), own=(own(MINE), own(slow)))
    assert cost.tables["h200"].works[CALL].seconds == 2.0


def test_a_gpu_that_nobody_else_has_measured() -> None:
    mine = replace(MINE, condition=Condition("a100", mode="generated"))
    guess = default_cost(cluster("1xa100"))
    assert guess.name == "estimated" and not guess.tables["a100"].works
    cost = default_cost(cluster("1xa100"), own=(own(mine),))
    table = cost.tables["a100"]
    assert cost.name == "measured" and set(table.works) == {CALL}
    assert table.fits["aten.mm.default/4"].launch == 0.5
    assert table.fits.keys() >= guess.tables["a100"].fits.keys(), "others are still estimated"


def test_issue_costs_are_those_of_the_mode() -> None:
    where, other = cluster("1xh200"), Condition("h200", mode="none")
    both = own(MINE, CostTable(other, issue={"": 7.0}))
    assert default_cost(where, "generated", (both,)).tables["h200"].issue[""] == 0.125
    none = default_cost(where, "none", (both,)).tables["h200"]
    assert none.issue[""] == 7.0 and none.works[CALL].seconds == 0.25


def test_kernels_of_the_mode_count_for_more_than_those_of_generated_code() -> None:
    where = cluster("1xh200")
    fused = CostTable(
        Condition("h200", mode="inductor"), works={CALL: MINE.works[CALL]._replace(seconds=0.0625)}
    )
    both = own(fused, MINE)
    assert default_cost(where, "inductor", (both,)).tables["h200"].works[CALL].seconds == 0.0625
    assert default_cost(where, "generated", (both,)).tables["h200"].works[CALL].seconds == 0.25
    assert default_cost(where, "auto", (both,)).mode == "inductor"


def test_the_mode_of_a_cluster() -> None:
    assert predicted_mode("auto", cluster("1xh200")) == "inductor"
    assert predicted_mode("auto", cluster("local:2")) == "generated"
    assert predicted_mode("none", cluster("local:2")) == "none"
    with pytest.raises(ValueError, match="no way to compile 'fast'; choose one of none, generated"):
        predicted_mode("fast", cluster("local:2"))


def test_a_cost_model_keeps_its_mode_in_a_file() -> None:
    cost = default_cost(cluster("1xa100"), "graph")
    data = json.loads(json.dumps(dump_cost(cost)))
    assert load_cost(data).mode == "graph"
    with pytest.raises(ValueError, match="compiled by 'x', which is unknown"):
        load_cost(data | {"mode": "x"})
    del data["mode"]
    assert load_cost(data).mode == "none", "as plans of earlier versions"


def test_a_file_says_its_mode(tmp_path: Path) -> None:
    save_cost_file(own(MINE), tmp_path / "t.json")
    (table,) = load_cost_file(tmp_path / "t.json").tables
    assert table.condition == MINE.condition and table.works == MINE.works
    data = json.loads((tmp_path / "t.json").read_text())
    del data["tables"][0]["condition"]["mode"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert load_cost_file(tmp_path / "old.json").tables[0].condition.mode == "none"


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"t\.json has costs of h200, and the devices of 2xa100 are"
    ):
        check_kinds(own(MINE), "t.json", cluster("2xa100"))
    check_kinds(own(MINE), "t.json", cluster("2xh200"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: "{", "is not a cost table that can be read"),
        (lambda data: json.dumps([]), "does not say that it is one"),
        (lambda data: json.dumps(data | {"version": 9}), "has version 9, this is version 1"),
        (lambda data: json.dumps(data | {"tables": 3}), "its tables: 3 is not a list"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], str], told: str
) -> None:
    path = tmp_path / "t.json"
    save_cost_file(own(MINE), path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=told):
        load_cost_file(path)


def test_nothing_shipped_is_of_an_unknown_mode() -> None:
    assert {t.condition.mode for t in shipped()} <= {"none", "generated", "graph", "inductor"}
