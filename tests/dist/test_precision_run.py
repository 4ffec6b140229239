"""Mixed precision and bfloat16 on real processes, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import main as cli

USER = """
import torch
import torch.nn.functional as F
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5)).to({dtype})
    batch = (torch.randn(8, 6).to({dtype}), torch.randint(5, (8,)))

    def step(model, batch):
        x, labels = batch
        with torch.autocast("cpu", torch.bfloat16, enabled={autocast}):
            y = model(x * (torch.arange(6) * 0.1 + 1).to(x.dtype))
        return F.cross_entropy(y.float(), labels)

    return step, model, torch.optim.AdamW(model.parameters(), lr=0.01), batch
"""


def checked(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    command = ["run", *arguments, "--procs", "2", "--method", "tofu", "--no-calibrate", "--check"]
    capfd.readouterr()
    status = cli.status([*command, "--steps", "2", "--json"])
    out, err = capfd.readouterr()
    assert out, err
    facts: dict[str, Any] = json.loads(out)
    assert status == 0 and facts["equal"] is True, (facts, err)
    return facts


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [("torch.float32", True), ("torch.bfloat16", False)],
    ids=["autocast", "bfloat16"],
)
def test_a_users_precision_is_checked(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, dtype: str, autocast: bool
) -> None:
    """The casts of autocast are not there in float64; and NumPy, which carries the state of the
    processes, has no bfloat16."""
    file = tmp_path / "train.py"
    file.write_text(USER.format(dtype=dtype, autocast=autocast))
    facts = checked(capfd, f"{file}:make")
    assert facts["max_rel_param_diff"] < 1e-9 and facts["noise"] > 1e-5 and facts["reason"] == ""


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_precision_is_an_option(capfd: pytest.CaptureFixture[str], precision: str) -> None:
    facts = checked(capfd, "mlp:tiny", "--precision", precision)
    assert facts["model"] == f"mlp:tiny,precision={precision}"


def test_a_precision_for_a_users_file_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.status(["run", "train.py:make", "--precision", "bf16"]) == 2
    assert "decides itself in which precision" in capfd.readouterr().err
