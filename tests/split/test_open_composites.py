"""Opening composites: the same step with its statistics as Values, to be cut across them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from graphs import captured, context_of, start, step
from torch import nn

from apportion.capture.capture import (
    capture,
)
from apportion.capture.program import (
    Program,
    batch_leaves,
    state_tensor,
)
from apportion.capture.reference import (
    capture_as,
    eager_steps,
)
from apportion.execute.rank import gather
from apportion.graph import Graph, verify
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.search.levels.level_grids import strategy_of_levels as strategy_of
from apportion.search.levels.levels import recurse
from apportion.search.levels.sites import find_sites
from apportion.search.levels.tofu import bytes_moved, tofu
from apportion.search.problem import Problem
from apportion.split.open_composites import STATISTICS, composites, open_composites, open_graph
from apportion.split.space import Space
from apportion.split.strategy import Strategy, from_json, space_of, to_json
from apportion.split.strategy import verify_strategy as verify_strategy
from apportion.verify.run_split import run_op

SPEC = "gpt2:tiny"


def values_of(program: Program, graph: Graph) -> dict[int, torch.Tensor]:
    """Every Value of a step, computed whole."""
    context = context_of(program, 0, 0)
    values = dict(program.constants) | batch_leaves(program, program.batch)
    for index in range(len(program.graph.values)):
        if index not in values and graph.producer[index] is None:
            values[index] = state_tensor(program, index)
    for op in graph.ops:
        results = run_op(op, op.args, [values[v] for v in op.inputs], context)
        values.update(zip(op.outputs, results, strict=False))
    return values


@cache
def wide() -> Problem:
    """A step with few samples and many classes, for two devices: what moves least is cut along the
    classes, across which the softmax normalises, and along the width of the norm before it."""
    machine = cluster("local:2")
    return Problem(Space(wide_program().graph), machine, default_cost(machine))


@cache
def wide_program() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(4, 8), torch.randint(512, (4,))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return capture_as(capture(loss, model, optimizer, batch), torch.float64)


@cache
def found() -> Strategy:
    return tofu(wide()).strategy


# The opened Graph


@pytest.mark.slow
def test_an_opened_step_computes_the_same_values() -> None:
    program, _ = captured(SPEC)
    inner = open_composites(program.graph)
    verify(inner)
    assert len(inner.ops) > len(program.graph.ops) and not composites(inner)
    expected, ours = values_of(program, program.graph), values_of(program, inner)
    assert expected.keys() <= ours.keys()  # Values keep their numbers
    for value, tensor in expected.items():
        torch.testing.assert_close(ours[value], tensor, rtol=1e-10, atol=1e-12)


def test_pieces_are_named_after_the_operator_and_keep_its_place() -> None:
    graph = captured(SPEC)[0].graph
    inner, origins = open_graph(graph, composites(graph))
    assert len(origins) == len(inner.ops)
    for op, origin in zip(inner.ops, origins, strict=True):
        before = graph.ops[origin]
        assert (op.phase, op.line, op.parameter) == (before.phase, before.line, before.parameter)
        if op is not before and op.kind != before.kind:
            assert op.kind == f"apportion.{op.name.removeprefix(f'{before.name}.')}"
        if op.forward is not None:
            assert before.forward is not None
            assert origins[op.forward] == before.forward
    names = [op.name for op in inner.ops]
    assert len(set(names)) == len(names)
    made = inner.values[len(graph.values) :]
    assert made and all("." in value.name for value in made)
    assert {op.kind for op in inner.ops} & STATISTICS


def test_only_what_is_named_is_opened() -> None:
    graph = captured(SPEC)[0].graph
    first, *rest = composites(graph)
    inner = open_composites(graph, (first,))
    assert graph.ops[first].kind == "aten.native_layer_norm.default"
    assert [op for op in inner.ops if op not in graph.ops and op.forward is None]
    shift = len(inner.ops) - len(graph.ops)
    assert composites(inner) == tuple(index + shift for index in rest)
    assert open_composites(graph, ()) is graph


@pytest.mark.slow
def test_a_graph_without_composites_stays_itself() -> None:
    graph = captured("mlp:tiny")[0].graph
    bare = replace(graph, ops=tuple(op for op in graph.ops if "softmax" not in op.kind))
    assert not composites(bare) and open_composites(bare) is bare


@pytest.mark.slow
def test_opened_axes_can_be_cut() -> None:
    graph = wide_program().graph
    closed, inner = Space(graph), Space(graph, (), composites(graph))
    assert inner.source is graph and len(inner.graph.ops) > len(graph.ops)
    index = next(k for k, op in enumerate(graph.ops) if op.kind == "aten._log_softmax.default")
    assert closed.cuttable(index) == (True, False)
    pieces = [k for k, o in enumerate(open_graph(graph, inner.opening)[1]) if o == index]
    cuttable = {
        inner.graph.ops[k].kind: [
            axis.name for axis, able in zip(inner.axes(k), inner.cuttable(k), strict=True) if able
        ]
        for k in pieces
    }
    assert cuttable == {
        "apportion.log_sum_exp": ["i0", "i1"],
        "apportion.log_softmax_of": ["i0", "i1"],
    }


# Strategies that open


def test_tofu_opens_where_cutting_inside_moves_less() -> None:
    problem, strategy = wide(), found()
    graph = problem.space.graph
    assert strategy.opening == composites(graph)
    closed = recurse(find_sites(problem.space), (2,) * (problem.devices.bit_length() - 1))
    assert bytes_moved(problem, strategy) < bytes_moved(problem, strategy_of(closed)) / 4
    space = space_of(graph, strategy)
    partial = [
        op.kind
        for k, op in enumerate(space.graph.ops)
        if op.kind in STATISTICS and max(space.split(k, strategy.choices[k].parts).terms) == 2
    ]
    assert {"apportion.log_sum_exp", "apportion.row_sum", "apportion.row_squares"} <= set(partial)


def test_a_strategy_that_opens_trains_the_single_device_s_model() -> None:
    program, strategy = wide_program(), found()
    losses, state = eager_steps(program, [program.batch] * 2, seed=0)
    space = space_of(program.graph, strategy)
    _, ranks = start(program, space, strategy, 2)
    for number, expected in enumerate(losses):
        copies = step(program, ranks, program.batch, 0, number)
        assert copies and copies == pytest.approx([expected] * len(copies), rel=1e-12)
    tensors = gather(ranks)
    assert tensors.keys() == state.keys() and tensors
    for value, tensor in state.items():
        torch.testing.assert_close(tensors[value], tensor, rtol=1e-10, atol=1e-12)


def test_a_strategy_that_opens_survives_json() -> None:
    strategy = found()
    again = from_json(json.loads(json.dumps(to_json(strategy))))
    assert again == strategy and again.opening
    space = space_of(wide_program().graph, again)
    assert lower(space, again, 2).bytes_moved == bytes_moved(wide(), strategy)


def test_a_plan_that_opens_survives_its_file(tmp_path: Any) -> None:
    made = make_plan(wide_program(), cluster("local:2"), method="tofu")
    assert made.strategy.opening
    made.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again.strategy == made.strategy and again.graph == made.graph
    assert again.simulate().predicted == made.predicted


def test_a_strategy_for_another_opening_is_refused() -> None:
    strategy, graph = found(), wide_program().graph
    with pytest.raises(ValueError, match="opens the graph in another way"):
        verify_strategy(Space(graph, strategy.digits), strategy, 2)


@pytest.mark.parametrize("index", [0, 10_000, -1])
def test_opening_an_operator_that_is_no_composite_is_refused(index: int) -> None:
    graph = wide_program().graph
    assert index not in composites(graph)
    with pytest.raises(ValueError, match="the strategy opens an operator that is no composite"):
        space_of(graph, replace(found(), opening=(index,)))
