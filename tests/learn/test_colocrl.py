"""ColocRL: its network against a plain loop, its training, and files."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_placements import made_problem

from apportion.learn.colocrl import (
    ColocrlPolicy,
    ColocrlSettings,
    apply_colocrl,
    load_colocrl,
    new_colocrl,
    place_with_colocrl,
    restarted_colocrl,
    save_colocrl,
    train_colocrl,
)
from apportion.learn.colocrl_network import KINDS, MOST_GROUPS, ColocrlNetwork, group_vectors
from apportion.learn.group_graph import group_graph
from apportion.place.objective import StepObjective

SMALL = ColocrlSettings(hidden=16, rate=(1e-2, 1e-3))


def test_vectors_say_operators_sizes_and_neighbours() -> None:
    graph = group_graph(made_problem(10, 2, seed=1))
    vectors = group_vectors(graph)
    assert (np.expm1(vectors[:, :KINDS]).sum(axis=1).round(9) == 1).all()
    assert np.expm1(vectors[:, KINDS]) == pytest.approx(graph.out_bytes / 1e6)
    near = vectors[:, KINDS + 3 :].reshape(10, 2, MOST_GROUPS)
    for source, target in itertools.product(range(10), repeat=2):
        joined = [source, target] in graph.edges.tolist()
        assert near[source, 0, target] == near[target, 1, source] == joined


def test_probabilities_are_those_of_the_devices_named() -> None:
    """The log of the probability, against a loop over one placement with the network's parts."""
    graph = group_graph(made_problem(6, 3, seed=1))
    torch.manual_seed(0)
    network = ColocrlNetwork(3, 8)
    vectors = torch.from_numpy(group_vectors(graph)).float()
    chances = torch.from_numpy(np.random.default_rng(0).random((5, 6)))
    with torch.no_grad():
        places, log = network(vectors, torch.from_numpy(graph.allowed), chances)
        for k in range(5):
            read, (h, c) = network.encoder(vectors)
            h, c, last, total = h[0], c[0], 3, 0.0
            for group in range(6):
                h, c = network.decoder(network.named.weight[last], (h, c))
                weight = torch.softmax(network.attention(read) @ h, 0)
                seen = (weight[:, None] * read).sum(0)
                mixed = torch.tanh(network.mix(torch.cat([h, seen])))
                odds = torch.softmax(network.head(mixed), 0)
                last = int(places[k, group])
                before = float(odds[:last].sum())
                assert before - 1e-6 <= chances[k, group] <= before + float(odds[last]) + 1e-6
                total += float(torch.log(odds[last]))
            assert float(log[k]) == pytest.approx(total, abs=1e-4)
    assert len({tuple(place) for place in places.tolist()}) > 1


@pytest.mark.parametrize("seed", [3, 4])
def test_training_finds_the_best_placement_of_a_tiny_problem(seed: int) -> None:
    problem = made_problem(6, 2, seed=seed)
    objective = StepObjective(problem)
    best = min(objective.score(np.array(p)) for p in itertools.product(range(2), repeat=6))
    objective.evaluations = 0
    found = place_with_colocrl(objective, evaluations=300, settings=SMALL)
    assert objective.evaluations == 300
    assert objective.score(found.placement) == best == found.curve[-1][2]


@pytest.mark.slow
def test_the_policy_learns() -> None:
    problem = made_problem(12, 2, seed=8)
    objective = StepObjective(problem)
    rng = np.random.default_rng(0)
    usual = np.mean([objective.score(rng.integers(0, 2, 12)) for _ in range(200)])
    policy = train_colocrl([problem], updates=200, settings=SMALL)
    assert apply_colocrl(policy, problem).curve[-1][2] < 0.95 * usual


def equal_weights(a: ColocrlPolicy, b: ColocrlPolicy) -> bool:
    return all(np.array_equal(a.weights[name], b.weights[name]) for name in a.weights)


def test_training_is_reproducible_and_goes_on_from_a_file(tmp_path: Path) -> None:
    problems = [made_problem(7, 2, seed=s) for s in (1, 2, 3)]
    whole = train_colocrl(problems, updates=6, seed=5, settings=SMALL)
    assert equal_weights(whole, train_colocrl(problems, updates=6, seed=5, settings=SMALL))
    assert not equal_weights(whole, train_colocrl(problems, updates=6, seed=6, settings=SMALL))

    def stop(policy: ColocrlPolicy) -> None:
        if policy.updates == 4:
            raise KeyboardInterrupt

    part = train_colocrl(problems, updates=6, seed=5, settings=SMALL, report=stop)
    assert part.interrupted and part.updates == 4
    save_colocrl(tmp_path / "part.safetensors", part)
    kept = load_colocrl(tmp_path / "part.safetensors")
    rest = train_colocrl(problems, updates=6, seed=5, resume=kept)
    assert equal_weights(rest, whole) and rest.averages == whole.averages


def test_use_elsewhere_and_wrong_numbers_of_devices(tmp_path: Path) -> None:
    policy = train_colocrl([made_problem(7, 2)], updates=2, settings=SMALL)
    test = made_problem(9, 2, seed=3)
    found = apply_colocrl(policy, test)
    assert StepObjective(test).score(found.placement) == found.curve[-1][2]
    tuned = train_colocrl([test], updates=2, resume=restarted_colocrl(policy))
    assert tuned.updates == 2 and not equal_weights(tuned, policy)
    with pytest.raises(ValueError, match="2 devices, and the problem has 3"):
        apply_colocrl(policy, made_problem(7, 3))
    with pytest.raises(ValueError, match="needs a limit"):
        train_colocrl([test])


def test_devices_are_allowed_failures_are_known_and_starts_kept() -> None:
    problem = made_problem(8, 2, seed=2)
    allowed = problem.columns.allowed.copy()
    allowed[:4, 0] = False
    problem = replace(problem, columns=problem.columns._replace(allowed=allowed))
    found = place_with_colocrl(StepObjective(problem), evaluations=40, settings=SMALL)
    assert (found.placement[:4] == 1).all()
    limit = int(StepObjective(problem).evaluate(np.ones(8, np.int64)).memory[1]) - 1
    tight = replace(problem, devices=tuple(replace(d, memory_bytes=limit) for d in problem.devices))
    objective = StepObjective(tight)
    found = place_with_colocrl(objective, evaluations=60, settings=SMALL)
    assert objective.evaluate(found.placement).feasible
    best = found.placement
    again = place_with_colocrl(StepObjective(tight), evaluations=2, starts=[best], settings=SMALL)
    assert objective.score(again.placement) <= objective.score(best)
    assert new_colocrl(2, 0, SMALL).moments.steps == 0
