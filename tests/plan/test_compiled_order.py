"""The compiler computes last what is large and needed by nobody yet."""

from __future__ import annotations

import pytest
import torch

from apportion.capture.capture import capture
from apportion.execute.executable import Executable
from apportion.execute.segment_cut import compiled_pieces
from apportion.machine.cluster import cluster
from apportion.plan.compiled_order import PieceKernels, compiled_order
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.simulate.fusion import fused_groups

ROWS, WIDTH, WIDE = 2048, 128, 65536


class Head(torch.nn.Module):
    """Large images, then a product whose weight is larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x).sigmoid()
        out: torch.Tensor = self.head(x[:4])
        return out


def step(model: Head, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = Head()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = capture(step, model, optimizer, torch.zeros(ROWS, WIDTH))
    return make_plan(program.graph, cluster("1xh200"), "single")


def test_each_kernel_comes_after_those_that_it_needs(plan: Plan) -> None:
    tasks, groups = plan.tasks, fused_groups(plan.tasks)
    pieces = compiled_pieces(Executable(plan.space, plan.strategy, plan.tasks))
    order = list(compiled_order(tasks, groups, tasks.slot_nbytes, pieces))
    assert sorted(task for kernel in order for task in kernel.tasks) == list(range(len(tasks)))
    there = {slot for slot in range(len(tasks.slot_first)) if tasks.slot_first[slot] < 0}
    for kernel in order:
        assert all(groups.root[slot] in there for slot in kernel.reads)
        there.update(int(groups.root[slot]) for slot in kernel.makes)


def test_the_gradient_of_a_large_weight_is_put_off(plan: Plan) -> None:
    tasks, groups = plan.tasks, fused_groups(plan.tasks)
    (piece,) = compiled_pieces(Executable(plan.space, plan.strategy, plan.tasks))
    kept = {s for s in range(len(tasks.slot_first)) if tasks.slot_last[s] > max(piece)}
    found = PieceKernels(tasks, groups, tasks.slot_nbytes, piece, kept)
    given, greedy = found.given(), found.greedy()
    assert sorted(given) == sorted(greedy) == list(range(len(found.kernels)))
    large = max(kept.intersection(found.readers), key=lambda slot: tasks.slot_nbytes[slot])
    assert plan.graph.values[int(tasks.slot_value[large])].shape == (WIDE, WIDTH)
    place = {
        name: next(k for k, n in enumerate(order) if large in found.kernels[n].makes)
        for name, order in (("given", given), ("greedy", greedy))
    }
    assert place["greedy"] > place["given"]
    assert found.most_held(greedy) <= found.most_held(given)


def test_tasks_of_no_piece_stay_where_they_are(plan: Plan) -> None:
    tasks, groups = plan.tasks, fused_groups(plan.tasks)
    order = list(compiled_order(tasks, groups, tasks.slot_nbytes, ()))
    assert [kernel.tasks for kernel in order] == [[task] for task in range(len(tasks))]
