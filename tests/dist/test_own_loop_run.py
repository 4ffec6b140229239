"""The body of a user's own loop on processes: every rank gets what the body returns."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from rank_launch import Launch

from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan

LOOP = """
import torch
import torch.nn.functional as F
from torch import nn


def body(model, optimizer, batch):
    optimizer.zero_grad()
    for x, y in batch:
        loss = F.mse_loss(model(x), y) / len(batch)
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters()):
            mean.lerp_(p, 0.1)
    far = sum((a - p).abs().sum() for a, p in zip(average.parameters(), model.parameters()))
    return {"loss": loss * len(batch), "norm": norm, "far": [far.detach()], "logits": model(x)}


def make():
    global average
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).double()
    average = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).double()
    average.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    batch = [(x[:4], y[:4]), (x[4:].clone(), y[4:].clone())]
    return body, model, torch.optim.AdamW(model.parameters(), lr=0.1), batch
"""

TRAIN = """
import sys
import apportion as ap
from loop import make

made = make()
runner = ap.distribute(ap.capture(*made), ap.Plan.load("p.json"))
for _ in range(3):
    found = runner.step(made[3])
    assert found["logits"] is None
    values = [float(found["loss"]), float(found["norm"]), float(found["far"][0])]
    sys.stdout.write(" ".join([str(runner.worker.rank.device), *map(repr, values)]) + "\\n")
"""


@pytest.mark.parametrize("method", ["data", "single"])
def test_every_rank_gets_what_the_body_returns(tmp_path: Path, method: str, launch: Launch) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "train.py").write_text(TRAIN)
    names: dict[str, object] = {}
    exec(compile(LOOP, str(tmp_path / "loop.py"), "exec"), names)
    step, model, optimizer, batch = names["make"]()  # type: ignore[operator]
    program = capture(step, model, optimizer, batch)
    assert any("logits is left out" in note for note in program.notes)
    make_plan(program, cluster("local:2"), method).save(tmp_path / "p.json")
    printed = launch(tmp_path / "train.py", folder=tmp_path)
    said = [line.split() for line in printed.splitlines()]
    for _ in range(3):
        found = copy.copy(step(model, optimizer, batch))
        expected = [float(x.detach()) for x in (found["loss"], found["norm"], found["far"][0])]
        for rank in ("0", "1"):
            mine = next(line for line in said if line[0] == rank)
            said.remove(mine)
            assert list(map(float, mine[1:])) == pytest.approx(expected, rel=1e-9)
    assert torch.is_tensor(found["logits"])
