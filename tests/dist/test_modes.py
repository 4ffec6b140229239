"""How segments run, on real processes: every mode trains the same, and a run says which it was."""

from __future__ import annotations

import json

import pytest

from apportion.cli import main as cli


def facts_of(capfd: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    capfd.readouterr()
    command = ["run", "mlp:tiny", "--procs", "2", "--method", "data", "--no-calibrate", "--json"]
    status = cli.status([*command, *more])
    out, err = capfd.readouterr()
    assert status == 0, err
    found: dict[str, object] = json.loads(out)
    return found


def test_every_mode_trains_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    plain = facts_of(capfd, "--compile", "none")
    made = facts_of(capfd, "--check")
    fast = facts_of(capfd, "--fast")
    assert (plain["mode"], made["mode"], fast["mode"]) == ("none", "generated", "generated")
    assert plain["run_notes"] == made["run_notes"] == fast["run_notes"] == []
    assert made["equal"] is True
    assert made["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert fast["losses"] == made["losses"]


def test_a_mode_that_needs_a_gpu_is_noted(capfd: pytest.CaptureFixture[str]) -> None:
    found = facts_of(capfd, "--compile", "graph")
    assert found["mode"] == "generated"
    assert found["run_notes"] == ["graph needs a CUDA device; on cpu segments run generated"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--compile", "fast"], "there is no way to compile 'fast'; choose one of none, generated"),
        (["--fast", "--compile", "none"], "Give either --fast or --compile none, not both."),
    ],
)
def test_a_wrong_mode_is_refused(
    capfd: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert cli.status(["run", "mlp:tiny", *options]) == 2
    assert told in capfd.readouterr().err
