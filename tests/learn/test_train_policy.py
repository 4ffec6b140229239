"""Training of policy: the twin equals the numpy network, gradients point downhill, resuming equals
going on, and a little training makes placements better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_placements import made_problem
from policy_cases import unrolled

from apportion.learn.policy_rollouts import PolicyTask, learn_task
from apportion.learn.policy_twin import base_twin, encode_twin, scores_twin, twin_graph
from apportion.learn.train_policy import (
    LabelTask,
    PolicyTraining,
    TrainingProgress,
    load_state,
    make_label,
    state_path,
    train_policy,
)
from apportion.learn.varied_problem import some_devices, varied_problem
from apportion.learn.worker_crew import WorkerCrew
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem, check_problem
from apportion.place.policy.policy_decode import decode, score_devices
from apportion.place.policy.policy_features import policy_graph, unit_features
from apportion.place.policy.policy_network import encode, first_scores, load_network, new_network
from apportion.place.problem_file import save_problem

NETWORK = new_network(1)


@pytest.fixture
def problems(tmp_path: Path) -> list[Path]:
    paths = []
    for layers, steps in ((3, 4), (2, 5)):
        paths.append(tmp_path / f"{layers}x{steps}.npz")
        save_problem(paths[-1], unrolled(layers, steps, 4))
    return paths


def double() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(tensor) for name, tensor in NETWORK.tensors.items()}


@pytest.mark.parametrize(
    "problem", [unrolled(3, 4), made_problem(nodes=30, devices=3, seed=0, units=20)]
)
def test_the_twin_gives_what_numpy_gives(problem: PlacementProblem) -> None:
    graph = policy_graph(problem)
    features = unit_features(problem, graph)
    embedding = encode(NETWORK, graph, features)
    twin = encode_twin(double(), twin_graph(graph, features, torch.float64))
    np.testing.assert_allclose(twin.numpy(), embedding, atol=1e-9)
    single = {name: tensor.float() for name, tensor in double().items()}
    np.testing.assert_allclose(
        encode_twin(single, twin_graph(graph, features)).numpy(), embedding, atol=1e-5
    )
    base = first_scores(NETWORK, embedding)
    np.testing.assert_allclose(base_twin(double(), twin).numpy(), base, atol=1e-9)
    noise = np.random.default_rng(0).gumbel(size=graph.allowed.shape)
    seen = decode(graph, base, NETWORK.head, noise=noise, record=True)
    scores = scores_twin(
        double(), torch.from_numpy(base[graph.order]),
        torch.from_numpy(seen.features).double(), torch.from_numpy(seen.open),
    )  # fmt: skip
    for at, unit in enumerate(graph.order):
        own = np.zeros(len(graph.limit))
        score_devices(base[unit], NETWORK.head, seen.features[at].astype(float), seen.open[at], own)
        np.testing.assert_allclose(scores[at].numpy()[seen.open[at]], own[seen.open[at]], atol=1e-6)
        assert np.isneginf(scores[at].numpy()[~seen.open[at]]).all()
        # What was chosen is what scores and noise say.
        total = np.where(seen.open[at], own + noise[at], -np.inf)
        assert total.argmax() == seen.place[unit]


@pytest.mark.slow
def test_imitation_makes_its_label_more_likely() -> None:
    problem = unrolled(3, 4, 3)
    label = np.repeat([2, 0, 1], 4)
    tensors = dict(NETWORK.tensors)
    losses = []
    for _ in range(12):
        result = learn_task(problem, tensors, PolicyTask(0, None, 0, label=label))
        losses.append(result.mean)
        tensors = {k: t - 0.3 * result.gradient[k] for k, t in tensors.items()}
    assert losses[-1] < 0.8 * losses[0]


def test_the_gradient_of_imitation_is_that_of_its_loss() -> None:
    """By differences, in the direction of the gradient itself."""
    problem, label = unrolled(2, 3, 2), np.array([0, 0, 0, 1, 1, 1])
    task = PolicyTask(0, None, 0, label=label)
    result = learn_task(problem, NETWORK.tensors, task)
    square = sum(float((g.astype(float) ** 2).sum()) for g in result.gradient.values())
    step = 1e-3 / np.sqrt(square)
    ends = [
        learn_task(problem, {k: t + sign * step * result.gradient[k] for k, t in
                             NETWORK.tensors.items()}, task).mean
        for sign in (-1, 1)
    ]  # fmt: skip
    assert (ends[1] - ends[0]) / (2 * step) == pytest.approx(square, rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_variants_can_be_placed(seed: int) -> None:
    problem = unrolled(3, 4, 8)
    variant = varied_problem(problem, seed)
    check_problem(variant)
    assert 2 <= len(variant.devices) <= 8
    place = np.random.default_rng(seed).integers(0, len(variant.devices), variant.units)
    assert StepObjective(variant).score(place) > 0
    again = varied_problem(problem, seed)
    assert (again.columns.duration == variant.columns.duration).all()


def test_some_devices_behave_as_they_do_among_all() -> None:
    problem = made_problem(nodes=20, devices=4, seed=2, units=12)
    fewer = some_devices(problem, [1, 3])
    place = np.random.default_rng(0).integers(0, 2, 12)
    whole = StepObjective(problem).score(np.array([1, 3])[place])
    assert StepObjective(fewer).score(place) == whole


def test_labels_are_no_worse_than_list_scheduling() -> None:
    problem = unrolled(2, 4, 3)
    objective = StepObjective(problem)
    label = make_label(problem, None, LabelTask(0, None, 0, 0.05))
    assert objective.score(label) <= objective.score(np.zeros(8, np.int64))


QUICK = PolicyTraining(
    budget=1e6,
    tasks=2,
    rate=3e-3,
    label_variants=1,
    label_seconds=0.0,
    epochs=1,
    updates=3,
    improving=50,
)


@pytest.mark.slow
def test_resuming_gives_what_going_on_gives(tmp_path: Path, problems: list[Path]) -> None:
    whole = train_policy(problems, tmp_path / "whole.safetensors", replace(QUICK, updates=3))
    part = tmp_path / "part.safetensors"
    train_policy(problems, part, replace(QUICK, updates=1))
    again = train_policy(problems, part, replace(QUICK, updates=3), resume=part)
    for name, tensor in whole.tensors.items():
        assert (again.tensors[name] == tensor).all()
    assert load_state(part).reinforced == 3
    assert load_network(part).facts["updates"] == whole.facts["updates"]


@pytest.mark.slow
def test_a_policy_without_its_state_is_where_training_begins(
    tmp_path: Path, problems: list[Path]
) -> None:
    path = tmp_path / "p.safetensors"
    made = train_policy(problems, path, QUICK)
    state_path(path).unlink()
    state = load_state(path)
    for name, tensor in made.tensors.items():
        np.testing.assert_allclose(state.weights[name], tensor, atol=1e-6)


def test_other_files_are_no_state(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(ValueError, match="no safetensors"):
        load_state(tmp_path / "x")
    with pytest.raises(ValueError, match="no problems"):
        train_policy([], tmp_path / "p", QUICK)


@pytest.mark.slow
def test_processes_give_what_one_gives(problems: list[Path]) -> None:
    tasks = [PolicyTask(k % 2, k, k) for k in range(3)]
    with WorkerCrew(problems, 1) as alone, WorkerCrew(problems, 2) as crew:
        found = [c.do(learn_task, dict(NETWORK.tensors), tasks) for c in (alone, crew)]
        for one, other in zip(*found, strict=True):
            assert one.mean == other.mean
            for name, gradient in one.gradient.items():
                np.testing.assert_allclose(gradient, other.gradient[name], atol=1e-7)
        with pytest.raises(ValueError, match="units"):
            crew.do(_fail, None, tasks)


def _fail(problem: PlacementProblem, shared: object, task: PolicyTask) -> None:
    raise ValueError(f"{problem.units} units")


@pytest.mark.slow
def test_a_little_training_makes_placements_better(tmp_path: Path, problems: list[Path]) -> None:
    curve: list[TrainingProgress] = []
    training = PolicyTraining(
        budget=1e6, tasks=4, rate=3e-3, epochs=0, updates=40, improving=200, seed=1
    )
    train_policy(problems, tmp_path / "p.safetensors", training, report=curve.append)
    first, last = curve[0].figures["samples"], curve[-1].figures["samples"]
    assert last < 0.95 * first
