"""`apportion run` captures as often as it must, and starts one pool of processes.

The step of a user's file writes down who calls it with tensors that have no data: that is a
capture. Making the model is written down too, so that the processes can be counted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from apportion.cli import main as cli

USER = """
import os
from torch._subclasses import FakeTensor
from apportion import zoo


def write(word):
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}} {{word}}\\n")


def make():
    write("load")
    it = zoo.load("mlp:tiny")

    def step(model, batch):
        if any(isinstance(p, FakeTensor) for p in model.parameters()):
            write("capture")
        return it.step(model, batch)

    return step, it.model, it.optimizer, it.batch
"""


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("measured", [True, False], ids=["calibrate", "no-calibrate"])
def test_one_capture_each_and_one_pool(
    calibrating: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    check: bool,
    measured: bool,
) -> None:
    """One here, which records the step twice, to see whether it does the same. In the processes
    none, because they are told what the parent's capture has found, which --check widens."""
    log, file = tmp_path / "log", tmp_path / "train.py"
    file.write_text(USER.format(log=str(log)))
    options = ["--check"] * check + ["--no-calibrate"] * (not measured)
    command = ["run", f"{file}:make", "--procs", "2", "--method", "data", *options, "--json"]
    assert cli.status(command) == 0
    out, err = capfd.readouterr()
    assert ("measuring" in err) == measured and ("equal" in json.loads(out)) == check
    lines = [line.split() for line in log.read_text().splitlines()]
    loads = Counter(int(pid) for pid, word in lines if word == "load")
    captures = Counter(int(pid) for pid, word in lines if word == "capture")
    children = loads.keys() - {os.getpid()}
    assert len(children) == 2 and set(loads.values()) == {1}
    assert captures == {os.getpid(): 2}
