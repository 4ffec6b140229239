"""Updates of all kinds are divided as one process computes them: as Bodies and as operators."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from compare_runs import compare
from generated_runs import RanksInMode, differing_replicas
from test_optimizer import OPTIMIZERS, captured

from apportion import graph as g
from apportion.capture.inline_update import inline_update
from apportion.capture.trace import CallSite
from apportion.capture.update_nodes import UpdateNode, UpdateNodes
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.baselines.random_strategy import draw
from apportion.search.problem import Problem
from apportion.search.registry import METHODS
from apportion.split.space import Space


@cache
def divisible(name: str) -> tuple[Any, list[Any], Space]:
    program, batches = captured(OPTIMIZERS[name])
    return program, batches, Space(program.graph)


# Muon iterates in bfloat16, whose rounding depends on how sums are divided.
EXACT = [name for name in OPTIMIZERS if name != "muon"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_divided_updates_are_those_of_one_process(name: str) -> None:
    program, _, space = divisible(name)
    found = compare(program, space, draw(space, 2, Random(1)), 2, steps=3)
    assert found.equal and found.max_rel_param_diff < 1e-8


@pytest.mark.parametrize("name", ["rmsprop", "adafactor", "lamb", "a count that is an int"])
@pytest.mark.parametrize("method", [data, fsdp])
def test_the_usual_plans_divide_updates(name: str, method: Any) -> None:
    program, _, space = divisible(name)
    machine = cluster("local:2")
    plan = method(Problem(space, machine, default_cost(machine)))
    assert compare(program, space, plan.strategy, 2, steps=3).equal


@pytest.mark.parametrize("method", ["optcnn", "tofu", "op-placement", "m-etf"])
def test_methods_plan_updates_of_several_operators(method: str) -> None:
    program, _, space = divisible("adafactor")
    machine = cluster("local:2")
    found = METHODS[method](Problem(space, machine, default_cost(machine)))
    assert compare(program, space, found.strategy, 2).equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["radam", "adafactor", "muon", "lamb"])
def test_generated_code_reads_the_settings_of_every_step(name: str) -> None:
    program, batches, space = divisible(name)
    strategy = draw(space, 2, Random(0))
    made, oracle = (RanksInMode(program, space, strategy, 2, m) for m in ("generated", "none"))
    before = program.optimizer.param_groups[0]["lr"]
    for number, batch in enumerate(batches[:3]):
        program.optimizer.param_groups[0]["lr"] = 0.01 * (1 + number)
        assert made.step(batch, 0, number) == oracle.step(batch, 0, number)
        assert not differing_replicas(made.executable, made.ranks)
    program.optimizer.param_groups[0]["lr"] = before
    assert not made.notes


def test_results_that_are_no_operators_are_copied() -> None:
    kind = ((2,), torch.float32)
    update = UpdateNodes(
        2, (UpdateNode("aten.neg.default", (g.Ref(1),), (2,)),), (kind,) * 3, (2, 0, 2)
    )
    types = [kind] * 6
    nodes = inline_update(update, (0, 1), (3, 4, 5), types, CallSite(g.UPDATE))
    assert [(node.kind, list(g.refs(node.args)), node.outputs) for node in nodes] == [
        ("aten.neg.default", [1], (5,)),
        ("aten.clone.default", [5], (3,)),
        ("aten.clone.default", [0], (4,)),
    ]
