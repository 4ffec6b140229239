"""The loss is on every rank, though the plan leaves it on one, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

from rank_launch import Launch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan

TRAIN = """
import sys
import torch
import torch.distributed as dist
import apportion as ap
from apportion import zoo

it = zoo.load("mlp:tiny")
program = ap.capture(it.step, it.model, it.optimizer, it.batch)
runner = ap.distribute(program, ap.Plan.load("p.json"))
losses = list(runner.train([it.batch] * 5))
pending = type(losses[-1]) is not torch.Tensor
runner.step(it.batch)  # nobody looks at this one
said = [runner.worker.rank.device, pending, *map(float, losses)]
sys.stdout.write(" ".join(map(str, said)) + "\\n")
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
"""


def test_a_loss_that_one_rank_has(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    it = zoo.load("mlp:tiny")
    program = capture(it.step, it.model, it.optimizer, it.batch)
    make_plan(program, cluster("local:3"), "single").save(tmp_path / "p.json")
    for end in ("leave", "destroy"):
        said = launch(tmp_path / "train.py", end, ranks=3, folder=tmp_path)
        ranks = [line.split() for line in sorted(said.splitlines())]
        assert [rank[:2] for rank in ranks] == [["0", "False"], ["1", "True"], ["2", "True"]]
        losses = [rank[2:] for rank in ranks]
        assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 5
