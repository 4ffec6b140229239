"""The benchmark of speed on a GPU: that it refuses elsewhere, and what it makes of figures."""

from __future__ import annotations

import sys

import pytest
import speed_gpu
import torch


def test_it_refuses_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["speed_gpu.py"])
    assert speed_gpu.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_ratios_are_to_the_faster_of_those_it_is_compared_with() -> None:
    steps = {"eager": 4.0, "compile": 2.0, "reduce-overhead": 1.0, "generated": 3.0, "inductor": 2}
    rows = [speed_gpu.Row("m", c, step, step, 0.0, [1.0], []) for c, step in steps.items()]
    found = {row.contender: row.ratio for row in speed_gpu._compared(rows)}
    assert found["eager"] is None
    assert found["generated"] == 0.75 and found["inductor"] == 2.0


@pytest.mark.slow
def test_contenders_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--place", "cpu", "--models", "mlp:tiny", "--depths", "--rounds", "1"]
    contenders = ["--contenders", "eager", "generated"]
    monkeypatch.setattr(sys, "argv", ["speed_gpu.py", *given, *contenders])
    assert speed_gpu.main() == 0
    out = capsys.readouterr().out
    assert "| mlp:tiny | eager |" in out and "| mlp:tiny | generated |" in out
