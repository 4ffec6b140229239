"""apportion policy: train, show and evaluate, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apportion.cli.main import status
from apportion.cli.policy_commands import split_specs
from apportion.place.policy.policy_network import new_network, save_network


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "p.safetensors"
    save_network(path, new_network(0))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a request that is refused."""
    assert status(["policy", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_names_with_settings_are_divided_by_commas() -> None:
    assert split_specs("gnmt:layers=2,source=3,nmt:tiny,mlp") == [
        "gnmt:layers=2,source=3", "nmt:tiny", "mlp",
    ]  # fmt: skip
    assert split_specs("nmt:tiny,layers=3,gpt2") == ["nmt:tiny,layers=3", "gpt2"]
    with pytest.raises(ValueError, match="names nothing"):
        split_specs(",")


def test_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["policy", "show", str(saved), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "policy" and facts["bytes"] < 500_000
    assert facts["facts"]["trained_on"] == []
    assert status(["policy", "show", str(saved)]) == 0
    assert "parameters" in capsys.readouterr().out


def test_what_is_refused(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no policy file" in said(capsys, "show", str(tmp_path / "none"))
    saved.write_bytes(saved.read_bytes()[:100])
    assert "no safetensors" in said(capsys, "show", str(saved))
    train = ["train", "--models", "mlp:tiny", "--clusters", "p2.8xlarge", "--out", str(saved)]
    assert "no training of kind 'x'" in said(capsys, *train, "--kind", "x")
    assert "to go on from" in said(capsys, *train, "--resume", str(tmp_path / "none"))


@pytest.mark.slow
def test_train_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, on = str(tmp_path / "p.safetensors"), ["--clusters", "placeto-k80"]
    train = ["policy", "train", "--models", "mlp:tiny", *on, "--out", out, "--jobs", "1"]
    assert status([*train, "--budget", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained_on"] == ["mlp:tiny@placeto-k80"]
    asked = ["policy", "evaluate", out, "mlp:tiny", "--cluster", "p2.8xlarge", "--budget", "0.1"]
    assert status([*asked, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert times["local-search"] <= times["list-schedule"]
    assert times["policy"] <= times["policy, greedy"]
