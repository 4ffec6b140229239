"""What the system's counters say about other programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apportion.run.core_use import CoreUse, core_use, taken

BEGIN = CoreUse(wall=10.0, busy=100.0, own=50.0, cores=2)


def after(busy: float, own: float, cores: int = 2) -> CoreUse:
    return CoreUse(11.0, BEGIN.busy + busy, BEGIN.own + own, cores)


@pytest.mark.parametrize(
    ("busy", "own", "cores", "wanted", "share"),
    [
        (2.0, 2.0, 2, 2, 0.0),  # nobody else
        (2.0, 1.0, 2, 2, 0.5),  # another program on one of two cores
        (2.0, 0.0, 2, 2, 1.0),
        (1.0, 0.5, 2, 1, 0.0),  # there is a core for each
        (8.0, 2.0, 8, 2, 0.0),  # six cores taken of eight, two wanted
        (8.0, 1.0, 8, 2, 0.5),
        (1.9, 2.0, 2, 2, 0.0),  # counters of processes are not read at the same time
        (2.0, 1.5, 2, 4, 0.25),  # four processes on two cores want no more than two
    ],
)
def test_what_others_take_of_the_cores_that_are_wanted(
    busy: float, own: float, cores: int, wanted: int, share: float
) -> None:
    assert taken(BEGIN, after(busy, own, cores), wanted) == pytest.approx(share)


def test_where_the_system_says_nothing_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("apportion.run.core_use.STAT", tmp_path / "none")
    assert core_use() is None
    assert taken(None, BEGIN, 2) is None
    assert taken(BEGIN, BEGIN, 2) is None  # no time between them


def test_the_counters_of_the_usable_cores_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = min(os.sched_getaffinity(0))
    rows = [
        "cpu  999999 0 0 0 0 0 0 0 0 0",
        f"cpu{core} 100 200 300 9000 8000 10 20 70 5 5",
        "cpu9999 5000 0 0 0 0 0 0 0 0 0",
        "intr 1 2 3",
    ]
    (tmp_path / "stat").write_text("\n".join(rows))
    monkeypatch.setattr("apportion.run.core_use.STAT", tmp_path / "stat")
    found = core_use()
    assert found is not None
    assert found.cores == 1
    assert found.busy * os.sysconf("SC_CLK_TCK") == pytest.approx(700)  # no idle, no waiting


def test_own_processes_are_told_from_others() -> None:
    before = core_use()
    while sum(os.times()[:2]) < 0.05:  # a process that has just begun may have used nothing
        pass
    now = core_use([os.getpid()])
    assert before is not None
    assert now is not None
    assert now.own >= before.own
    assert now.own > 0
    assert now.busy >= before.busy
