"""Placeto: the network, the decision process, the training, and files, against plain versions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_placements import made_problem

from apportion.learn.group_graph import GroupGraph, graph_of_groups, group_graph
from apportion.learn.placeto import apply_placeto, place_with_placeto
from apportion.learn.placeto_acting import ActingNetwork
from apportion.learn.placeto_episode import (
    Judge,
    choose,
    returns,
    roll_out,
    state_features,
)
from apportion.learn.placeto_network import PlacetoNetwork, graph_masks
from apportion.learn.placeto_policy import (
    PlacetoSettings,
    load_placeto,
    network_of,
    new_policy,
    save_placeto,
)
from apportion.learn.placeto_training import (
    EpisodeReport,
    episode_gradient,
    for_fine_tuning,
    train_placeto,
    with_returns,
)
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem

FOUR = PlacetoSettings(parallel=4)


def trained_weights(devices: int = 2, seed: int = 1) -> dict[str, np.ndarray]:
    """Weights whose biases are not zero."""
    rng = np.random.default_rng(seed)
    return {
        name: w + rng.normal(0, 0.1, w.shape).astype(np.float32)
        for name, w in new_policy(devices, seed, PlacetoSettings()).weights.items()
    }


def some_features(graph: GroupGraph, states: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    width = 5 + graph.devices
    return rng.normal(size=(width, graph.groups, states)).astype(np.float32)


# The graph


def reachable(graph: GroupGraph, group: int) -> set[int]:
    found: set[int] = set()
    for source, target in graph.edges.tolist():
        if source == group:
            found |= {target} | reachable(graph, target)
    return found


def test_ancestors_are_all_groups_with_a_path() -> None:
    graph = group_graph(made_problem(14, 2, seed=5))
    for group in range(graph.groups):
        assert set(np.flatnonzero(graph.ancestors[:, group])) == reachable(graph, group)


def test_groups_are_ordered_by_their_first_node_and_edges_lead_on() -> None:
    problem = made_problem(30, 2, seed=2, units=9)
    graph = group_graph(problem)
    first = [int(np.flatnonzero(graph.node_group == g)[0]) for g in range(graph.groups)]
    assert first == sorted(first)
    assert (graph.edges[:, 0] < graph.edges[:, 1]).all()
    assert graph.seconds.sum() == pytest.approx(problem.unit_seconds.mean(axis=1).sum())
    assert graph.out_bytes.sum() == problem.columns.nbytes.sum()


def test_a_placement_of_groups_is_one_of_units() -> None:
    problem = made_problem(20, 2, seed=2)
    graph = graph_of_groups(problem, np.arange(20) // 4)
    place = np.array([0, 1, 0, 1, 1])
    assert graph.spread(place).tolist() == np.repeat(place, 4).tolist()


# The network


def plain_scores(weights: dict[str, np.ndarray], graph: GroupGraph, x: np.ndarray, v: int):
    """The network, group by group, of features width x groups."""

    def net(name: str, row: np.ndarray) -> np.ndarray:
        count = len([key for key in weights if key.startswith(f"{name}.")]) // 2
        for i in range(count):
            row = weights[f"{name}.{2 * i}.weight"] @ row + weights[f"{name}.{2 * i}.bias"][:, 0]
            if i < count - 1:
                row = np.maximum(row, 0)
        return row

    def said(name: str, rows: list[np.ndarray], width: int) -> np.ndarray:
        total = np.zeros(width)
        for row in rows:
            total = total + np.maximum(net(f"{name}.each", row), 0)
        return np.maximum(net(f"{name}.all", total), 0)

    d, g = x.shape
    parents = {t: [s for s, u in graph.edges.tolist() if u == t] for t in range(g)}
    children = {s: [t for u, t in graph.edges.tolist() if u == s] for s in range(g)}
    own = [net("own", x[:, i]) for i in range(g)]
    found = []
    for name, near in (("up", parents), ("down", children)):
        rows = own
        for _ in range(8):
            rows = [
                own[i] + said(name, [rows[j] for j in near[i]], d) if near[i] else own[i]
                for i in range(g)
            ]
        found.append(rows)
    y = [np.concatenate(pair) for pair in zip(*found, strict=True)]
    after = reachable(graph, v)
    before = {u for u in range(g) if v in reachable(graph, u)}
    others = set(range(g)) - after - before - {v}
    z = [
        said(name, [y[i] for i in sorted(group)], 2 * d)
        for name, group in (("ancestors", before), ("descendants", after), ("others", others))
    ]
    return net("head", np.concatenate([*z, y[v]]))


def test_network_and_acting_network_equal_the_plain_one() -> None:
    graph = group_graph(made_problem(11, 3, seed=4))
    weights = trained_weights(3)
    x = some_features(graph, 11)
    network = PlacetoNetwork(3)
    network.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    with torch.no_grad():
        scores = network(torch.from_numpy(x), torch.arange(11), graph_masks(graph)).numpy()
    acting = ActingNetwork(weights, graph, 8)
    for v in range(11):
        plain = plain_scores(weights, graph, x[:, :, v].astype(np.float64), v)
        scale = 1e-4 * np.abs(plain).max()
        assert scores[:, v] == pytest.approx(plain, rel=1e-3, abs=scale)
        assert acting.scores(x[:, :, v], v) == pytest.approx(plain, rel=1e-3, abs=scale)


def test_widths_are_the_published_ones() -> None:
    network = PlacetoNetwork(2)
    shapes = {name: tuple(w.shape) for name, w in network.state_dict().items()}
    assert shapes["own.0.weight"] == shapes["up.each.2.weight"] == (7, 7)
    assert shapes["others.all.2.weight"] == (14, 14)
    head = [shapes[f"head.{i}.weight"] for i in (0, 2, 4)]
    assert head == [(112, 56), (56, 112), (2, 56)]
    assert all(not w.any() for name, w in network.state_dict().items() if name.endswith("bias"))
    bound = np.sqrt(6 / (112 + 56))
    assert 0.9 * bound < network.state_dict()["head.0.weight"].abs().max() <= bound


def renumbered(graph: GroupGraph, seed: int) -> tuple[GroupGraph, np.ndarray]:
    """The graph in another order in which its groups can run; and the new number of each group."""
    rng = np.random.default_rng(seed)
    parents = [set(graph.edges[graph.edges[:, 1] == g, 0].tolist()) for g in range(graph.groups)]
    number = np.full(graph.groups, -1)
    for i in range(graph.groups):
        ready = [
            g
            for g in range(graph.groups)
            if number[g] < 0 and all(number[p] >= 0 for p in parents[g])
        ]
        number[rng.choice(ready)] = i
    back = np.argsort(number)
    edges = number[graph.edges]
    return replace(
        graph, group=number[graph.group], seconds=graph.seconds[back],
        out_bytes=graph.out_bytes[back], edges=edges[np.lexsort((edges[:, 1], edges[:, 0]))],
        allowed=graph.allowed[back],
    ), number  # fmt: skip


def test_embeddings_do_not_depend_on_numbers() -> None:
    graph = group_graph(made_problem(16, 2, seed=7, edges=1.3))
    other, number = renumbered(graph, 3)
    assert (number != np.arange(16)).sum() > 5
    network = PlacetoNetwork(2)
    x = some_features(graph, 16)
    moved = np.empty_like(x)
    moved[:, number] = x
    here, there = torch.from_numpy(x), torch.from_numpy(moved)
    with torch.no_grad():
        y, z = network.embed(here, graph_masks(graph)), network.embed(there, graph_masks(other))
        assert torch.allclose(y, z[:, number], rtol=1e-4, atol=1e-4)
        current = torch.arange(16)
        a = network(here, current, graph_masks(graph))
        b = network(there, torch.from_numpy(number), graph_masks(other))
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-3)
    assert a.std() > 1e-3


# The decision process


def test_rewards_telescope_and_improvement_is_positive() -> None:
    graph = group_graph(made_problem(12, 2, seed=1))
    weights = trained_weights()
    chances = np.random.default_rng(0).random(12)
    episode = roll_out(graph, weights, 8, np.zeros(12, np.int64), chances)
    gains = returns(episode.rho)
    assert len(gains) == 12 and len(episode.rho) == 13
    assert gains[0] == pytest.approx(episode.rho[0] - episode.rho[-1])
    assert returns(np.array([3.0, 1.0, 2.0])).tolist() == [1.0, -1.0]
    assert episode.rho[0] == pytest.approx(1, rel=0.1)  # all on one device: near its own time
    place = np.zeros(12, np.int64)
    place[episode.current] = episode.action
    assert Judge(graph).rho(place)[0] == episode.rho[-1]


def test_every_state_is_simulated_and_the_best_is_kept() -> None:
    problem = made_problem(12, 2, seed=1)
    graph, objective = group_graph(problem), StepObjective(problem)
    episode = roll_out(graph, trained_weights(), 8, np.zeros(12, np.int64), None)
    scores, place = [], np.zeros(12, np.int64)
    scores.append(objective.score(graph.spread(place)))
    for group, device in zip(episode.current, episode.action, strict=True):
        place[group] = device
        scores.append(objective.score(graph.spread(place)))
    assert episode.rho == pytest.approx(np.array(scores) / graph.one_device_seconds)
    assert episode.improved[-1] == (int(np.argmin(scores)) + 1, min(scores))
    assert objective.score(episode.best) == min(scores)


def test_features_are_the_published_ones() -> None:
    problem = made_problem(5, 2, seed=1)
    graph = group_graph(problem)
    place, visits = np.array([0, 1, 0, 0, 1]), np.array([1, 1, 0, 0, 0])
    starts = Judge(graph).rho(place)[1]
    found = state_features(graph, place, visits, 2, starts)
    assert found[0] == pytest.approx(graph.seconds / graph.seconds.max())
    assert found[1] == pytest.approx(graph.out_bytes / graph.out_bytes.max())
    assert found[2].tolist() == [1, 1, 0, 0, 0]
    assert found[3].tolist() == [0, 0, 1, 0, 0]
    since = starts - starts[2]
    assert found[4] == pytest.approx(since / np.abs(since).max())
    assert (
        found[5:].argmax(axis=0).tolist() == place.tolist() and (found[5:].sum(axis=0) == 1).all()
    )


def test_memory_over_the_limit_is_penalised_and_capped() -> None:
    free = made_problem(8, 2, seed=1)
    place = np.zeros(8, np.int64)
    plain = Judge(group_graph(free)).rho(place)[0]
    peak = int(StepObjective(free).evaluate(place).memory[0])
    limit = peak - 1_000_000
    limited = replace(free, devices=tuple(replace(d, memory_bytes=limit) for d in free.devices))
    assert Judge(group_graph(limited)).rho(place)[0] == pytest.approx(plain + 2e-3)
    columns = limited.columns._replace(resident=limited.columns.resident + 10**10)
    assert Judge(group_graph(replace(limited, columns=columns))).rho(place)[0] == 10.0


def test_a_placement_that_fits_is_better_than_a_faster_one_that_does_not() -> None:
    problem = made_problem(8, 2, seed=1)
    both = StepObjective(problem).evaluate(np.arange(8) % 2)
    limit = int(both.memory.max())
    limited = replace(
        problem, devices=tuple(replace(d, memory_bytes=limit) for d in problem.devices)
    )
    judge = Judge(group_graph(limited))
    judge.rho(np.zeros(8, np.int64))
    over = judge.improved[-1][1]
    judge.rho(np.arange(8) % 2)
    assert judge.improved[-1] == (2, both.value) and over > both.value
    judge.rho(np.ones(8, np.int64))
    assert judge.improved[-1] == (2, both.value)


@pytest.mark.slow
def test_actions_follow_their_probabilities_and_keep_to_allowed_devices() -> None:
    scores = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    assert [choose(scores, c) for c in (0.0, 0.19, 0.21, 0.69, 0.71, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert choose(scores, None) == 1
    problem = made_problem(10, 3, seed=2)
    allowed = problem.columns.allowed.copy()
    allowed[::2, 0] = allowed[1::2, 2] = False
    problem = replace(problem, columns=problem.columns._replace(allowed=allowed))
    objective = StepObjective(problem)
    found = place_with_placeto(objective, evaluations=100)
    assert allowed[np.arange(10), found.placement].all()


# Training


def test_the_baseline_is_a_mean_for_every_time_step() -> None:
    rng = np.random.default_rng(0)
    history: dict[int, np.ndarray] = {}
    updates = [[(g, rng.normal(size=4)) for g in (0, 0, 1)] for _ in range(5)]
    for gains in updates:
        history = with_returns(history, gains, 3)
    for step in range(4):
        of_first = [[gain[step] for g, gain in gains if g == 0] for gains in updates[-3:]]
        plain = sum(sum(both) / 2 for both in of_first) / 3
        assert history[0].mean(axis=0)[step] == pytest.approx(plain)
    assert len(history[1]) == 3


def test_the_gradient_is_that_of_the_loss_step_by_step() -> None:
    graph = group_graph(made_problem(9, 2, seed=3))
    policy = replace(new_policy(2, 0, PlacetoSettings()), weights=trained_weights())
    chances = np.random.default_rng(1).random(9)
    episode = roll_out(graph, policy.weights, 8, np.zeros(9, np.int64), chances)
    advantage = np.random.default_rng(2).normal(size=9)
    found = episode_gradient(graph, policy, episode, advantage, 0.3)
    network, masks = network_of(policy), graph_masks(graph)
    loss = torch.zeros(())
    for t in range(9):
        x = torch.from_numpy(episode.features[:, :, t : t + 1].copy())
        odds = torch.softmax(network(x, torch.tensor([episode.current[t]]), masks)[:, 0], 0)
        entropy = sum(-p * torch.log(p + 1e-3) for p in odds)
        loss = loss - float(advantage[t]) * torch.log(odds[episode.action[t]]) - 0.3 * entropy
    loss.backward()
    plain = torch.cat([w.grad.flatten() for w in network.parameters() if w.grad is not None])
    scale = float(plain.abs().max())
    assert scale > 1e-3
    assert np.abs(found - plain.numpy()).max() < 1e-4 * scale


def optimum(problem: PlacementProblem) -> float:
    objective = StepObjective(problem)
    k = range(len(problem.devices))
    return min(
        objective.score(np.array(place)) for place in itertools.product(k, repeat=problem.units)
    )


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.slow
def test_training_finds_the_best_placement_of_a_tiny_problem(seed: int) -> None:
    problem = made_problem(6, 2, seed=seed)
    objective = StepObjective(problem)
    found = place_with_placeto(objective, evaluations=600)
    assert objective.evaluations == 600
    assert objective.score(found.placement) == optimum(problem) == found.curve[-1][2]
    scores = [score for _, _, score in found.curve]
    assert scores == sorted(scores, reverse=True) and found.curve[-1][1] <= 600


@pytest.mark.slow
def test_the_policy_learns() -> None:
    """The greedy placement of a trained policy is better than that of an untrained one."""
    problem = made_problem(12, 2, seed=8)
    settings = PlacetoSettings(rate=(3e-3, 3e-4), parallel=2)
    reports: list[EpisodeReport] = []
    train_placeto([problem], episodes=400, settings=settings, report=reports.append)
    first, last = (np.mean([r.last for r in part]) for part in (reports[:10], reports[-10:]))
    assert last < 0.95 * first


def equal_weights(a: object, b: object) -> bool:
    return all(np.array_equal(a.weights[name], b.weights[name]) for name in a.weights)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_training_is_reproducible_and_goes_on_from_a_file(tmp_path: Path) -> None:
    problems = [made_problem(7, 2, seed=s) for s in (1, 2, 3)]
    whole = train_placeto(problems, episodes=12, seed=5, settings=FOUR)
    again = train_placeto(problems, episodes=12, seed=5, settings=FOUR)
    assert equal_weights(whole, again)
    assert not equal_weights(whole, train_placeto(problems, episodes=12, seed=6, settings=FOUR))

    def stop(report: EpisodeReport) -> None:
        if report.episodes == 8:
            raise KeyboardInterrupt

    path = tmp_path / "part.safetensors"
    part = train_placeto(problems, episodes=12, seed=5, report=stop, settings=FOUR, out=path)
    assert part.interrupted and part.episodes == 8
    kept = load_placeto(tmp_path / "part.safetensors")
    assert equal_weights(part, kept) and kept.episodes == 8
    rest = train_placeto(problems, episodes=12, seed=5, resume=kept)
    assert equal_weights(rest, whole) and rest.episodes == 12
    assert rest.evaluations == whole.evaluations == 12 * 8
    assert np.array_equal(rest.moments.square, whole.moments.square)


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    problems = [made_problem(7, 2, seed=s) for s in (1, 2)]
    alone = train_placeto(problems, episodes=8, seed=5, settings=FOUR)
    both = train_placeto(problems, episodes=8, seed=5, settings=FOUR, workers=2)
    assert equal_weights(alone, both)


@pytest.mark.slow
def test_use_without_learning_and_fine_tuning(tmp_path: Path) -> None:
    problems = [made_problem(7, 2, seed=s) for s in (1, 2)]
    policy = train_placeto(problems, episodes=8)
    test = made_problem(9, 2, seed=3)
    objective = StepObjective(test)
    found = apply_placeto(policy, test)
    assert objective.score(found.placement) == found.curve[-1][2] and found.curve[-1][1] <= 10
    path = tmp_path / "policy.safetensors"
    save_placeto(path, policy)
    objective.evaluations = 0
    better = place_with_placeto(objective, evaluations=45, policy=path)
    assert objective.evaluations == 45
    assert objective.score(better.placement) <= found.curve[-1][2]
    tuned = train_placeto([test], episodes=8, resume=for_fine_tuning(policy))
    assert tuned.episodes == tuned.moments.steps == 8
    assert not equal_weights(tuned, policy)
    with pytest.raises(ValueError, match="2 devices, and the problem has 3"):
        apply_placeto(policy, made_problem(7, 3))
    with pytest.raises(ValueError, match="one number of devices"):
        train_placeto([made_problem(7, 3), test], episodes=1)
    with pytest.raises(ValueError, match="needs a limit"):
        train_placeto([test])


def test_starts_are_never_made_worse_and_limits_are_kept() -> None:
    problem = made_problem(8, 2, seed=3)
    objective = StepObjective(problem)
    every = itertools.product(range(2), repeat=8)
    best = np.array(min(every, key=lambda place: objective.score(np.array(place))))
    objective.evaluations = 0
    found = place_with_placeto(objective, evaluations=25, starts=[np.zeros(8, np.int64), best])
    assert objective.evaluations == 25
    assert objective.score(found.placement) == objective.score(best) == found.curve[-1][2]
    quick = place_with_placeto(StepObjective(problem), budget=0.05)
    assert len(quick.placement) == 8


def test_an_interrupted_search_returns_its_best() -> None:
    problem = made_problem(8, 2, seed=3)

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    objective = StepObjective(problem)
    found = place_with_placeto(objective, evaluations=1000, report=stop, settings=FOUR)
    assert found.interrupted and objective.evaluations == 4 * 9
    assert objective.score(found.placement) == found.curve[-1][2]


def test_other_files_are_no_policy(tmp_path: Path) -> None:
    from apportion.place.policy.policy_file import read_policy, write_policy

    policy = train_placeto([made_problem(5, 2)], episodes=1)
    path = tmp_path / "p.safetensors"
    save_placeto(path, policy)
    kept = read_policy(path)
    some = dict(kept.tensors)
    del some["adam.mean"]
    write_policy(path, "placeto", some, kept.facts)
    with pytest.raises(ValueError, match=r"lacks 'adam.mean'"):
        load_placeto(path)
    wrong = {**kept.tensors, "network.own.0.weight": np.zeros((3, 3), np.float32)}
    write_policy(path, "placeto", wrong, kept.facts)
    with pytest.raises(ValueError, match="shapes"):
        load_placeto(path)
    write_policy(path, "placeto", kept.tensors, {**kept.facts, "features_version": 9})
    with pytest.raises(ValueError, match="version 9"):
        load_placeto(path)
    write_policy(path, "placeto", kept.tensors, {**kept.facts, "settings": {"color": 1}})
    with pytest.raises(ValueError, match="no policy of Placeto"):
        load_placeto(path)
