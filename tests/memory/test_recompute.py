"""Recomputed Ops: any set of them leaves every result as it is, divided or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare_runs import REFERENCE, compare
from graphs import captured, problem
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.graph import BACKWARD, FORWARD, UPDATE, from_json, to_json, verify
from apportion.memory.carry_strategy import carry_strategy
from apportion.memory.recompute import recompute
from apportion.memory.rewritten_graph import RewrittenGraph
from apportion.run.one_process import undivided
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.search.baselines.single import single
from apportion.split.open_composites import composites
from apportion.split.space import Space
from apportion.split.strategy import Strategy, verify_strategy

UNIFORM = "apportion.random_uniform"


class Net(nn.Module):
    """Dropout and batch norm, of which the one must repeat its mask and the other must not count
    twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.dropout(torch.tanh(self.norm(self.first(x))), 0.5))
        return found


def small() -> Program:
    torch.manual_seed(0)
    model = Net().double()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) ** 2).mean()
        return found

    batch = torch.randn(12, 6, dtype=torch.float64)
    return capture(step, model, torch.optim.AdamW(model.parameters(), lr=0.01), batch)


def forward_ops(program: Program, share: float = 1.0, rng: Random | None = None) -> list[int]:
    return [
        op
        for op, meant in enumerate(program.graph.ops)
        if meant.phase == FORWARD and (rng is None or rng.random() < share)
    ]


def trains_the_same(
    program: Program, made: RewrittenGraph, strategy: Strategy, devices: int, seed: int = 0
) -> bool:
    again = replace(program, graph=made.graph)
    REFERENCE.borrow(again, program, seed)
    space = Space(made.graph, strategy.digits, strategy.opening)
    verify_strategy(space, strategy, devices)
    found = compare(
        again, space, strategy, devices, seed=seed, corrupt=lambda task, message: message
    )
    return bool(found.equal)


@pytest.mark.slow
def test_nothing_recomputed_is_the_same_graph() -> None:
    graph = small().graph
    assert recompute(graph, ()).graph is graph


def test_a_copy_is_the_same_call_and_the_backward_reads_it() -> None:
    program = small()
    graph = program.graph
    made = recompute(graph, forward_ops(program))
    verify(made.graph)
    assert made.graph.fingerprint != graph.fingerprint
    assert from_json(to_json(made.graph)).fingerprint == made.graph.fingerprint
    assert made.repeats
    for op in made.repeats:
        copy = made.graph.ops[op]
        first = graph.ops[made.origins[op]]
        assert (copy.kind, copy.args, copy.module) == (first.kind, first.args, first.module)
        assert copy.phase == BACKWARD
        assert copy.forward is not None and made.graph.ops[copy.forward].name == first.name
    recomputed = {v for op in made.repeats for v in graph.ops[made.origins[op]].outputs}
    for reader in made.graph.ops:
        if reader.phase == BACKWARD:
            assert recomputed.isdisjoint(reader.inputs), reader.name


def test_values_keep_their_numbers_and_the_step_ends_as_before() -> None:
    program = small()
    graph = program.graph
    made = recompute(graph, forward_ops(program)).graph
    assert made.values[: len(graph.values)] == graph.values
    assert (made.state, made.loss) == (graph.state, graph.loss)
    before = Counter(op.kind for op in graph.ops if op.phase == UPDATE)
    assert before == Counter(op.kind for op in made.ops if op.phase == UPDATE)


def test_a_copy_stands_just_before_what_first_needs_it() -> None:
    program = small()
    made = recompute(program.graph, forward_ops(program))
    copies = set(made.repeats)
    for op in copies:
        rest = [k for k in range(op + 1, len(made.graph.ops)) if k not in copies]
        following = made.graph.ops[rest[0]]
        reached = set(following.inputs)
        for k in range(rest[0] - 1, op, -1):
            if reached.intersection(made.graph.ops[k].outputs):
                reached.update(made.graph.ops[k].inputs)
        assert reached.intersection(made.graph.ops[op].outputs), made.graph.ops[op].name


def test_only_forward_operators_can_be_recomputed() -> None:
    graph = small().graph
    backward = next(k for k, op in enumerate(graph.ops) if op.phase == BACKWARD)
    with pytest.raises(ValueError, match="only those of the forward"):
        recompute(graph, [backward])
    with pytest.raises(ValueError, match="there is no operator"):
        recompute(graph, [len(graph.ops)])


@pytest.mark.parametrize("seed", range(8))
def test_dropout_and_batch_norm_on_one_device(seed: int) -> None:
    program = small()
    assert any(op.kind == UNIFORM for op in program.graph.ops)
    made = recompute(program.graph, forward_ops(program, 0.6, Random(seed)))
    assert trains_the_same(program, made, undivided(made.graph), 1)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_strategies_carry_over(seed: int, devices: int) -> None:
    program = small()
    rng = Random(100 * devices + seed)
    made = recompute(program.graph, forward_ops(program, 0.7, rng))
    space = Space(program.graph)
    strategy = draw(space, devices, rng)
    carried = carry_strategy(strategy, space, made)
    for op, choice in enumerate(carried.choices):
        assert choice == strategy.choices[made.origins[op]]
    assert trains_the_same(program, made, carried, devices)


def test_divided_classes_carry_over() -> None:
    program, rng = small(), Random(7)
    plain = Space(program.graph)
    batch = next(v for v, _ in program.inputs)
    digits = ((plain.atoms.value_classes[batch][0], (2, 6)),)
    space = plain.with_digits(digits)
    strategy = replace(draw(space, 2, rng), digits=digits)
    made = recompute(program.graph, forward_ops(program))
    carried = carry_strategy(strategy, plain, made)
    assert carried.digits
    for op, choice in enumerate(carried.choices):
        assert choice == strategy.choices[made.origins[op]]
    assert trains_the_same(program, made, carried, 2)


@pytest.mark.slow
def test_opened_composites_carry_over() -> None:
    program, space = captured("gpt2:tiny")
    rng = Random(5)
    made = recompute(program.graph, forward_ops(program, 0.8, rng))
    opening = composites(program.graph)
    strategy = draw(Space(program.graph, (), opening), 2, rng)
    carried = carry_strategy(strategy, space, made)
    assert len(carried.opening) > len(opening)  # copies are opened too
    assert trains_the_same(program, made, carried, 2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "rnn:tiny"])
@pytest.mark.parametrize("method", [single, data])
def test_baselines_carry_over(spec: str, method: Any) -> None:
    program, space = captured(spec)
    made = recompute(program.graph, forward_ops(program))
    carried = carry_strategy(method(problem(2, spec)).strategy, space, made)
    assert trains_the_same(program, made, carried, 2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "wresnet:tiny", "rnn:tiny", "wgan-gp:tiny"])
def test_random_recomputation_of_models(spec: str) -> None:
    program, space = captured(spec)
    for seed in range(2):
        rng = Random(seed)
        made = recompute(program.graph, forward_ops(program, rng.choice((0.3, 0.9)), rng))
        devices = rng.choice((1, 2, 3))
        carried = carry_strategy(draw(space, devices, rng), space, made)
        assert trains_the_same(program, made, carried, devices, seed), seed
