"""A user's own operator, described in a user's own file: it is cut, and trains the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from compare_runs import compare

from apportion import zoo
from apportion.capture.capture import (
    capture,
)
from apportion.capture.reference import (
    capture_as,
)
from apportion.cli import main as cli
from apportion.describe import descriptions
from apportion.plan.plan import Plan
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "custom_op.py"
SPEC = f"{EXAMPLE}:make"


@pytest.fixture(autouse=True)
def _described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that an example describes stays described."""
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))


def call_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capfd.readouterr()
    status = cli.status([*arguments, "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    assert "runs unsplit" not in err and "described already" not in err
    facts: dict[str, Any] = json.loads(out)
    return facts


def test_a_custom_operator_trains_the_same_model(capfd: pytest.CaptureFixture[str]) -> None:
    facts = call_json(capfd, "run", SPEC, "--procs", "2", "--method", "tofu", "--check")
    assert facts["equal"] is True
    assert facts["measured_bytes_moved"] == facts["bytes_moved"] > 0


def test_random_parts_of_a_custom_operator_train_the_same_model() -> None:
    """All ranks in one process."""
    it = zoo.load(SPEC, 1)
    program = capture_as(capture(it.step, it.model, it.optimizer, it.batch), torch.float64)
    space = Space(program.graph)
    for seed in range(3):
        strategy = draw(space, 4, Random(seed))
        found = compare(program, space, strategy, 4, seed=seed, corrupt=lambda _, message: message)
        assert found.equal, (seed, found)


def test_tofu_cuts_the_operator_and_its_backward(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "p.json")
    call_json(capfd, "plan", SPEC, "--cluster", "local:4", "--method", "tofu", "--out", file)
    made = Plan.load(file)
    parts = {
        op.kind: choice.count
        for op, choice in zip(made.space.graph.ops, made.strategy.choices, strict=True)
        if op.kind.startswith("mylib.")
    }
    assert parts == {
        "mylib.scaled_swiglu.default": 4,
        "mylib.scaled_swiglu_backward.default": 4,
    }


def test_a_plan_needs_the_descriptions_of_its_operators(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "p.json")
    call_json(capfd, "plan", SPEC, "--cluster", "local:2", "--method", "tofu", "--out", file)
    load = "import sys; from apportion.plan.plan import Plan; Plan.load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", load, file], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "; mylib.scaled_swiglu.default is not described here, so import the file that describes it "
        "first"
    )
    command = ["run", SPEC, "--plan", file, "--check", "--json"]
    run = [sys.executable, "-c", "from apportion.cli.main import main; main()", *command]
    done = subprocess.run(run, capture_output=True, text=True)
    assert json.loads(done.stdout)["equal"] is True, done.stderr


def test_a_file_that_is_loaded_again_describes_again() -> None:
    zoo.load(SPEC)
    before = descriptions.DESCRIPTIONS["mylib.scaled_swiglu"].formula
    zoo.load(SPEC)
    assert descriptions.DESCRIPTIONS["mylib.scaled_swiglu"].formula is not before
