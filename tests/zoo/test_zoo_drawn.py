"""The zoo's models drawn from ENAS's search spaces: the draw, and that all of it is used."""

from __future__ import annotations

from random import Random

import pytest
import torch
from compare_runs import compare
from graphs import captured
from soak import kept

from apportion import zoo
from apportion.capture.capture import capture
from apportion.search.baselines.random_strategy import draw
from apportion.zoo import enas_cifar10, enas_ptb

SPECS = [f"{name}:tiny,graph={k}" for name in ("enas-cifar10", "enas-ptb") for k in (1, 2, 3, 4)]


def _ops(spec: str, seed: int = 0) -> list[str]:
    it = zoo.load(spec, seed, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    return [f"{op.kind} {[graph.values[v].shape for v in op.inputs]}" for op in graph.ops]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["enas-cifar10", "enas-ptb"])
def test_the_graph_setting_draws_the_network_and_the_seed_does_not(name: str) -> None:
    drawn = [_ops(f"{name}:tiny,nodes=6,graph={k}" if "ptb" in name else f"{name}:tiny,graph={k}")
             for k in (1, 2, 3, 4)]  # fmt: skip
    assert all(a != b for k, a in enumerate(drawn) for b in drawn[:k])
    assert _ops(f"{name}:tiny,graph=2", seed=5) == _ops(f"{name}:tiny,graph=2")


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_gets_a_gradient(spec: str) -> None:
    it = zoo.load(spec)
    it.step(it.model, it.batch).backward()
    assert all(p.grad is not None for p in it.model.parameters())


@pytest.mark.slow
def test_all_networks_of_the_families_can_be_built() -> None:
    with torch.device("meta"):
        for graph in range(1, 33):
            enas_cifar10.build(enas_cifar10.Settings(graph=graph, filters=4, batch=2))
            enas_ptb.build(enas_ptb.Settings(graph=graph, hidden=4, batch=2))


def test_a_block_reads_what_stands_before_it_and_the_first_both_cells() -> None:
    for seed in range(20):
        cell = enas_cifar10.draw_cell(Random(seed), 5)
        assert cell[0].inputs == (0, 1)
        assert all(max(block.inputs) < 2 + k for k, block in enumerate(cell))


@pytest.mark.parametrize("graph", [1, 2])
def test_maps_are_halved_twice(graph: int) -> None:
    settings = enas_cifar10.Settings(graph=graph, layers=6, filters=4, image=16, batch=2)
    model, _, (images, _) = enas_cifar10.build(settings)
    shapes: list[torch.Size] = []
    last = list(getattr(model, "layers" if graph % 2 else "cells"))[-1]
    last.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
    assert model(images).shape == (2, 10)
    assert shapes[0][2:] == (4, 4) and shapes[0][1] % 16 == 0


def test_a_gate_of_the_recurrent_cell_keeps_or_replaces() -> None:
    cell = enas_ptb.DrawnRecurrentCell(enas_ptb.Settings(graph=3, nodes=1, hidden=4))
    h = torch.randn(2, 4)
    big = torch.full((2, 4), 50.0)
    new = torch.randn(2, 4)
    torch.testing.assert_close(cell._mix(0, torch.cat([-big, new], dim=1), h), h)
    replaced = cell._mix(0, torch.cat([big, new], dim=1), h)
    torch.testing.assert_close(replaced, enas_ptb.ACTIVATIONS[cell.activations[0]](new))


def test_too_few_layers_get_one_sentence() -> None:
    with pytest.raises(ValueError, match="layers=2 is below 3"):
        zoo.load("enas-cifar10:layers=2", meta=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    kept(["enas-cifar10:tiny", "enas-cifar10:tiny,graph=2", "enas-ptb:tiny"], "enas-ptb:tiny"),
)
def test_random_strategies_train_the_same_drawn_model(spec: str) -> None:
    program, space = captured(spec)
    found = compare(program, space, draw(space, 3, Random(7)), 3)
    assert found.equal, found
