"""What `calibrate --device cuda` has of a GPU's host: kept in the table, and no reason to fail."""

from __future__ import annotations

from pathlib import Path

from apportion.cli.calibrate_models import with_host
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.machine.cost_table import (
    BESIDE,
    HOST_BACK_LINE,
    HOST_OUT_LINE,
    HOST_WORK_LINE,
    CostFile,
    CostLine,
    load_cost_file,
    save_cost_file,
)
from apportion.machine.host_links import HostRates, host_rates


def test_rates_are_kept_and_planned_with(tmp_path: Path) -> None:
    names = (HOST_OUT_LINE, HOST_BACK_LINE, HOST_WORK_LINE)
    every = [*names, *(name + BESIDE for name in names)]
    lines = {name: CostLine(1e-5, 0.0, 1e-9 / (k + 2), 0.1, 4) for k, name in enumerate(every)}
    cost, notes = default_cost(cluster("1xh200")), list[str]()
    (table,) = with_host((cost.tables["h200"],), notes.append, lambda: lines)
    assert "host out 2 GB/s" in notes[0]
    save_cost_file(CostFile("here", "2.13", (table,)), tmp_path / "costs.json")
    read = load_cost_file(tmp_path / "costs.json")
    known = default_cost(cluster("1xh200"), own=[read])
    found = host_rates(cluster("1xh200"), known, 0)
    assert found == HostRates(*(lines[name] for name in every))
    assert host_rates(cluster("1xh200"), cost, 0) != found


def test_memory_that_cannot_be_pinned() -> None:
    def refused() -> dict[str, CostLine]:
        raise RuntimeError("the host cannot pin the 3 GB that the plan keeps there")

    notes = list[str]()
    tables = (default_cost(cluster("1xh200")).tables["h200"],)
    assert with_host(tables, notes.append, refused) is tables
    assert notes == [
        "the host is not measured: the host cannot pin the 3 GB that the plan keeps there"
    ]
