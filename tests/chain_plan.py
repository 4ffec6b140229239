"""Two products with a chain of element-wise operators between them, planned for one H200."""

from __future__ import annotations

import torch

from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan


class Chain(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width, bias=False)
        self.last = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last((self.first(x).relu() * 2.0).sigmoid())
        return out


def chain_step(model: Chain, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).sum()
    return loss


def chain_plan(rows: int, width: int) -> Plan:
    model = Chain(width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = capture(chain_step, model, optimizer, torch.zeros(rows, width))
    return make_plan(program.graph, cluster("1xh200"), "single")
