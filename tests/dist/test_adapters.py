"""The same losses by hand, through transformers' Trainer and through Lightning's; and their loops
as people use them, beside the same libraries on one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS = 4


ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
TORCHRUN = (Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2")


def said(tmp_path: Path, *command: Any) -> str:
    """What a command prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def curve(tmp_path: Path, *command: str) -> list[float]:
    """The losses of a program on two ranks."""
    program = (EXAMPLES / command[0], *command[1:], "--steps", str(STEPS), "--double")
    printed = said(tmp_path, *TORCHRUN, *program)
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return [float(words[3]) for words in lines]


def test_trainers_follow_the_loop_by_hand(tmp_path: Path) -> None:
    for library in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(library)
    by_hand = curve(tmp_path, "nanogpt.py", "data", "run")
    assert len(by_hand) == STEPS and by_hand[-1] < by_hand[0]
    assert curve(tmp_path, "nanogpt_lightning.py") == pytest.approx(by_hand, rel=1e-9)
    # its Trainer adds up losses in float32
    assert curve(tmp_path, "nanogpt_trainer.py") == pytest.approx(by_hand, rel=3e-7)


def same(found: Any, expected: Any, where: str = "") -> None:
    """Whether two nests of numbers are equal, in float64; but a Trainer's losses as above."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            same(found[number], value, f"{where}[{number}]")
    else:
        near = 3e-7 if where.endswith(".loss") else 1e-9
        assert found == pytest.approx(expected, rel=near, abs=1e-9), where


@pytest.mark.parametrize("library", ["trainer", "lightning"])
def test_loops_as_people_use_them(library: str, tmp_path: Path) -> None:
    """Accumulation, clipping, schedules, evaluation, checkpoints, the best model, resuming."""
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name)
    script = Path(__file__).with_name(f"{library}_loop.py")
    plain = said(tmp_path, sys.executable, script, "plain", tmp_path / "plain")
    divided = said(tmp_path, *TORCHRUN, script, "data", tmp_path / "divided")
    logs = [[line for line in text.splitlines() if line[:2] == "{'"] for text in (plain, divided)]
    assert len(logs[1]) == len(logs[0])  # one rank speaks
    expected, found = (json.loads(text.splitlines()[-1]) for text in (plain, divided))
    if library == "lightning":
        assert "reads or changes parameters between steps" in found.pop("refused")
        expected.pop("refused")
        assert found["later"]["parameters"] != found["first"]["parameters"]
    else:
        assert found["later"]["best"] == 2  # not the last one
    same(found, expected)
