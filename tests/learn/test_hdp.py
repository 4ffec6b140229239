"""HDP: what its grouper and placer see, its schedule of rates, and what training finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_placements import made_problem

from apportion.learn.best_placement import BestPlacement
from apportion.learn.hdp import (
    HdpSettings,
    HdpTraining,
    place_with_hdp,
    resume_hdp,
    save_hdp,
)
from apportion.learn.hdp_network import (
    OPERATOR,
    SHAPE_WIDTH,
    HdpNetwork,
    HdpShape,
    group_vectors,
    hdp_graph,
)
from apportion.place import PLACERS, StepObjective


def test_operators_have_type_shapes_and_neighbours():
    problem = made_problem(12, 2, seed=1)
    problem = replace(problem, node_kinds=("mm", "add") * 6)
    graph = hdp_graph(problem)
    assert graph.operators.shape == (12, OPERATOR) == (12, 46)
    assert graph.operators[0, 0] == 0.5 and graph.operators[1, 0] == 0  # add comes before mm
    assert (graph.operators[:, 2:6] == -1).all()  # one output, of which only bytes are known
    pairs = problem.unit_edges[0]
    unit = int(pairs[0, 0])
    row = graph.operators[unit, 26:].view(10, 2)
    near = [(b, 1) for a, b in pairs if a == unit] + [(a, -1) for a, b in pairs if b == unit]
    found = {(round(float(at) * 12), int(way)) for at, way in row if way}
    assert found == set(near)


@pytest.mark.parametrize("overlap", [True, False])
def test_groups_count_edges_types_and_shapes(overlap: bool):
    problem = replace(made_problem(9, 2), node_kinds=("mm", "add", "relu") * 3)
    graph = hdp_graph(problem)
    shape = HdpShape(2, 4, graph.type_counts.shape[1], overlap=overlap)
    group = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0, 1])  # none is in the last
    rows = group_vectors(shape, graph, group)
    assert rows.shape == (4, shape.group_width)
    plain = np.zeros((4, shape.group_width))
    for a, b in problem.unit_edges[0]:
        plain[group[a], group[b]] += 1
        plain[group[b], 4 + group[a]] += 1
    kinds = sorted(set(problem.node_kinds))
    begin = 8 if overlap else 8 + shape.types
    for unit in range(9):
        plain[group[unit], 8 + kinds.index(problem.node_kinds[unit])] += 1
        plain[group[unit], begin : begin + SHAPE_WIDTH] += graph.shapes[unit].numpy()
    plain /= plain.max(axis=1, keepdims=True) + 1
    np.testing.assert_allclose(rows.numpy(), plain, rtol=1e-5)
    assert not rows[3].any()


def test_the_grouper_is_linear():
    network = HdpNetwork(HdpShape(2, 5, 25, hidden=8))
    graph = hdp_graph(made_problem(6, 2))
    twice = replace(graph, operators=2 * graph.operators)
    zero = replace(graph, operators=0 * graph.operators)
    at_zero = network.group_logits(zero)
    torch.testing.assert_close(
        network.group_logits(twice) - at_zero, 2 * (network.group_logits(graph) - at_zero)
    )


@pytest.mark.slow
def test_log_probability_of_devices_sums_to_one_over_all():
    """By drawing: how often a placement comes is what its log-probability says."""
    network = HdpNetwork(HdpShape(2, 2, 25, hidden=8), seed=3)
    vectors, random = torch.randn(2, network.shape.group_width), torch.Generator().manual_seed(0)
    seen: dict[tuple[int, ...], float] = {}
    counts: dict[tuple[int, ...], int] = {}
    with torch.no_grad():
        for _ in range(400):
            devices, chance = network.place(vectors, random)
            key = tuple(devices.tolist())
            seen[key] = float(chance.exp())
            counts[key] = counts.get(key, 0) + 1
    assert len(seen) == 4 and sum(seen.values()) == pytest.approx(1, abs=1e-5)
    assert all(abs(counts[key] / 400 - seen[key]) < 0.1 for key in seen)


def test_rates_and_costs_are_those_of_the_release():
    settings = HdpSettings()
    assert settings.rate(1) == settings.rate(449) == 0.1
    assert settings.rate(450) == pytest.approx(0.095)
    assert settings.rate(500) == pytest.approx(0.1 * 0.95**2)
    problem = made_problem(10, 2, memory=10)
    objective = StepObjective(problem)
    training = HdpTraining(objective, 0, "cpu")
    assert training.network.shape.groups == 40 and training.baseline == 10
    place = np.zeros(10, np.int64)
    assert training.cost(place, BestPlacement(objective, 0.0)) == (10.0, False)
    free = StepObjective(made_problem(10, 2))
    cost, fits = training.cost(place, BestPlacement(free, 0.0))
    assert fits and cost == np.sqrt(free.score(place))


def test_the_baseline_follows_costs_and_late_failures_teach_nothing():
    objective = StepObjective(made_problem(10, 2))
    training = HdpTraining(objective, 0, "cpu", HdpSettings(groups=4, hidden=8))
    seen = BestPlacement(objective, 0.0)
    training.step(seen)
    cost = np.sqrt(seen.value)
    assert training.baseline == pytest.approx(0.9 * 10 + 0.1 * cost)
    tight = StepObjective(made_problem(10, 2, memory=10))
    late = HdpTraining(tight, 0, "cpu", HdpSettings(groups=4, hidden=8, ignore_failures_after=1))
    late.step(BestPlacement(tight, 0.0))  # is learned from
    weights, baseline = late.network.first.weight.clone(), late.baseline
    late.step(BestPlacement(tight, 0.0))
    assert torch.equal(weights, late.network.first.weight) and baseline == late.baseline


@pytest.mark.slow
def test_finds_the_best_placement_of_a_tiny_problem():
    objective = StepObjective(made_problem(5, 2, seed=2))
    every = itertools.product(range(2), repeat=5)
    best = min(objective.score(np.array(place)) for place in every)
    # At the release's rate of 0.1 the grouper settles for one grouping within a few steps.
    settings = HdpSettings(groups=5, hidden=8, stop_sampling=100, learning_rate=0.003)
    found = place_with_hdp(objective, evaluations=250, settings=settings)
    assert found.curve[-1][2] == best == objective.score(found.placement)
    assert found.figures == {"evaluations": 250, "runs": 3}


def test_equal_seeds_give_equal_results_and_training_resumes(tmp_path: Path):
    objective = StepObjective(made_problem(8, 2))
    runs = [
        HdpTraining(objective, seed, "cpu", HdpSettings(groups=3, hidden=8)) for seed in (1, 1, 2)
    ]
    values = []
    for run in runs:
        seen = BestPlacement(objective, 0.0)
        for _ in range(4):
            run.step(seen)
        values.append([run.baseline, *run.network.state_dict().values()])
    alike = [all(np.array_equal(a, b) for a, b in zip(values[0], v, strict=True)) for v in values]
    assert alike == [True, True, False]
    first = HdpTraining(objective, 1, "cpu", HdpSettings(groups=3, hidden=8))
    for _ in range(2):
        first.step(BestPlacement(objective, 0.0))
    save_hdp(tmp_path / "h", first)
    again = resume_hdp(tmp_path / "h", objective)
    for _ in range(2):
        again.step(BestPlacement(objective, 0.0))
    assert again.baseline == runs[0].baseline and again.steps == 4
    for name, tensor in again.network.state_dict().items():
        assert torch.equal(tensor, runs[0].network.state_dict()[name]), name
    with pytest.raises(ValueError, match="does not fit this problem"):
        resume_hdp(tmp_path / "h", StepObjective(made_problem(8, 3)))


@pytest.mark.slow
def test_units_go_only_where_they_can_run():
    problem = made_problem(8, 2)
    allowed = np.ones((8, 2), bool)
    allowed[3, 0] = allowed[4, 1] = False
    problem = replace(problem, columns=problem.columns._replace(allowed=allowed))
    found = PLACERS["hdp"](StepObjective(problem), budget=0.0)
    assert allowed[np.arange(8), found.placement].all()
