"""The comparison with DTensor, on a few operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from apportion.verify.sample import sample_of
from apportion.verify.verdict import RIGHT, AxisCut, Verdict

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
aten = torch.ops.aten


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dtensor_rules

    return dtensor_rules


@pytest.fixture
def benchmark(rules: Any) -> Any:
    import dtensor

    return dtensor


@pytest.mark.slow
def test_a_run_on_one_entry() -> None:
    command = [sys.executable, "dtensor.py", "--entry", "mm", "--entry", "exp", "--every", "1"]
    told = subprocess.run(
        [*command, "--json"], cwd=BENCHMARKS, capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    facts = json.loads(told.stdout)
    splits = facts["splits"]
    assert splits["calls"] > 3
    assert splits["splits"]["dtensor"] >= splits["calls_with_a_split"]["dtensor"] > 0
    assert splits["in_both"] + splits["only_apportion"] == splits["splits"]["apportion"]
    ruled = splits["splits_if_sizes_were_even"]["dtensor"]
    assert splits["in_both"] + splits["only_dtensor"] == ruled >= splits["splits"]["dtensor"]
    assert sum(splits["run_on_slices"]["dtensor"].values()) == splits["splits"]["dtensor"]
    assert splits["run_on_slices"]["apportion"]["wrong"] == 0
    seen = facts["operators"]["database"]
    assert (
        seen["some_split"]["dtensor"] <= seen["handled"]["dtensor"] <= seen["overloads"]["dtensor"]
    )
    for side in ("dtensor", "apportion"):
        parts = [row[side] for name, row in facts["lines"].items() if name != "total"]
        assert min(parts) > 0
        assert sum(parts) == facts["lines"]["total"][side]


def test_an_unknown_entry_is_refused(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "entries", list)
    with pytest.raises(ValueError, match="no entry 'nothing'"):
        benchmark.sampled(1, 1, ["nothing"])


def test_rules_are_run_on_slices(rules: Any) -> None:
    x = torch.rand(4, 6)
    running = sample_of(aten.cumsum.default, x, 1)
    assert rules._holds(running, (0,), (Shard(0),), (Shard(0),)) == rules.RIGHT
    assert rules._holds(running, (0,), (Shard(1),), (Shard(1),)) == rules.WRONG
    total = sample_of(aten.sum.default, x)
    assert rules._holds(total, (0,), (Shard(0),), (Partial("sum"),)) == rules.RIGHT
    assert rules._holds(total, (0,), (Shard(0),), (Partial("max"),)) == rules.WRONG
    assert rules._holds(total, (0,), (Shard(0),), (Replicate(),)) == rules.WRONG
    product = sample_of(aten.mm.default, x, torch.rand(6, 2))
    assert rules._holds(product, (0, 1), (Shard(1), Shard(0)), (Partial("sum"),)) == rules.RIGHT
    assert rules._holds(product, (0, 1), (Shard(1), Replicate()), (Shard(1),)) == rules.WRONG


def test_what_is_no_split(rules: Any) -> None:
    assert rules.nontrivial((("0", "whole"), ("0",)))
    assert rules.nontrivial((("1",), ("whole",)))  # a reduction
    assert not rules.nontrivial((("whole",), ("whole",)))
    assert not rules.nontrivial((("partial",), ("0",)))
    assert rules.unread((("0", "1"), ("0",)), [1]) == (("0", "whole"), ("0",))


def test_splits_are_matched(benchmark: Any) -> None:
    cuts = (
        AxisCut("i", 2, RIGHT, ((0,), ()), ("0",)),
        AxisCut("i", 3, RIGHT, ((0,), ()), ("0",)),
        AxisCut("k", 2, RIGHT, ((1,), (0,)), ("sum",)),
        AxisCut("j", 2, "refused", ((), (1,)), ("1",)),
    )
    verdict = Verdict("aten.mm.default", "", ("aten.mm.default",), cuts=cuts)
    answer = {"failure": "", "splits": [], "any_size": [[["whole", "1"], ["1"]],
              [["1", "0"], ["whole"]]]}  # fmt: skip
    totals = benchmark.Totals()
    totals.add("aten.mm.default", answer, verdict)
    assert (totals.splits, totals.both, totals.dtensor_any_size) == (2, 1, 2)
    assert totals.dtensor_only == totals.ours_only == {"aten.mm.default": 1}


def test_lines_of_code_are_counted(benchmark: Any, tmp_path: Path) -> None:
    text = (
        '"""Doc\n\nstring."""\n\n# comment\nx = [\n    1,\n]  # note\n\ndef f():\n    """Doc."""\n'
    )
    path = tmp_path / "m.py"
    path.write_text(text + '    return """a\nb"""\n')
    assert benchmark.code_lines(path) == 6
