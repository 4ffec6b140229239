"""The same losses by hand, through transformers' Trainer and through Lightning's; and their loops
as people use them, beside the same libraries on one process."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rank_launch import Launch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS = 4


MODULES = {"trainer": "transformers.trainer", "lightning": "lightning.pytorch"}


@pytest.fixture
def program(launch: Launch, tmp_path: Path) -> Launch:
    """Runs a program in a folder of its own."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    return functools.partial(launch, folder=tmp_path, environment=environment)


def curve(program: Launch, name: str, *words: str, modules: tuple[str, ...] = ()) -> list[float]:
    """The losses of a program on two ranks."""
    given = (EXAMPLES / name, *words, "--steps", str(STEPS), "--double")
    printed = program(*given, modules=modules)
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return [float(words[3]) for words in lines]


def test_trainers_follow_the_loop_by_hand(program: Launch) -> None:
    for library in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(library)
    by_hand = curve(program, "nanogpt.py", "data", "run")
    assert len(by_hand) == STEPS and by_hand[-1] < by_hand[0]
    lightning = curve(program, "nanogpt_lightning.py", modules=(MODULES["lightning"],))
    assert lightning == pytest.approx(by_hand, rel=1e-9)
    # its Trainer adds up losses in float32
    trainer = curve(program, "nanogpt_trainer.py", modules=(MODULES["trainer"],))
    assert trainer == pytest.approx(by_hand, rel=3e-7)


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
def test_loops_as_people_use_them(library: str, program: Launch, tmp_path: Path) -> None:
    """Accumulation, clipping, schedules, evaluation, checkpoints, the best model, resuming."""
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name)
    script = Path(__file__).with_name(f"{library}_loop.py")
    modules = (MODULES[library],)
    plain = program(script, "plain", tmp_path / "plain", ranks=0, modules=modules)
    divided = program(script, "data", tmp_path / "divided", modules=modules)
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
