"""policy: features, encoder, decoding and the placer keep what they promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_problems import made_problem
from policy_cases import renumbered, unrolled

from apportion.columns import Floats, Ints
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem
from apportion.place.placers import PLACERS
from apportion.place.policy import policy as policy_module
from apportion.place.policy import policy_decode, policy_network
from apportion.place.policy.policy import greedy_placement, policy, proposals
from apportion.place.policy.policy_decode import by_first_use, decode, score_devices
from apportion.place.policy.policy_features import (
    UNIT_FEATURES,
    interchangeable,
    policy_graph,
    unit_features,
)
from apportion.place.policy.policy_network import (
    DEVICE_FEATURES,
    encode,
    first_scores,
    load_network,
    new_network,
    pool,
    save_network,
)

NETWORK = new_network(3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "p.safetensors"
    save_network(path, NETWORK)
    return path


def random_problem(seed: int, **options: object) -> PlacementProblem:
    """A random problem with a backward half."""
    problem = made_problem(np.random.default_rng(seed), **options)  # type: ignore[arg-type]
    n = len(problem.columns.unit)
    backward = (np.arange(n) >= 2 * n // 3).astype(np.int64)
    return replace(problem, columns=problem.columns._replace(backward=backward))


def embedding(problem: PlacementProblem) -> Floats:
    graph = policy_graph(problem)
    return encode(NETWORK, graph, unit_features(problem, graph))


def sample(problem: PlacementProblem, seed: int, **options: object) -> policy_decode.Decoded:
    graph = policy_graph(problem)
    base = first_scores(NETWORK, embedding(problem))
    noise = np.random.default_rng(seed).gumbel(size=graph.allowed.shape) * 3
    return decode(graph, base, NETWORK.head, noise=noise, **options)  # type: ignore[arg-type]


# Features


@pytest.mark.parametrize("seed", range(4))
def test_features_are_finite_and_of_fixed_number(seed: int) -> None:
    for devices in (1, 2, 5):
        problem = random_problem(seed, nodes=20, devices=devices, units=12)
        found = unit_features(problem, policy_graph(problem))
        assert found.shape == (12, UNIT_FEATURES) and np.isfinite(found).all()


def test_features_do_not_depend_on_the_unit_of_time() -> None:
    problem = unrolled()
    c, links = problem.columns, problem.links
    slower = replace(
        problem,
        columns=c._replace(duration=c.duration * 7),
        links=links._replace(hop_pace=links.hop_pace * 7, link_hold=links.link_hold * 7),
    )
    np.testing.assert_allclose(
        unit_features(slower, policy_graph(slower)), unit_features(problem, policy_graph(problem))
    )


@pytest.mark.parametrize("seed", range(3))
def test_embeddings_do_not_change_when_units_and_nodes_are_renumbered(seed: int) -> None:
    problem = unrolled(4, 3)
    units = np.random.default_rng(seed).permutation(problem.units)
    other = renumbered(problem, units, seed)
    np.testing.assert_allclose(embedding(other)[units], embedding(problem), atol=1e-9)


def test_units_of_an_ordered_machine_may_be_renumbered() -> None:
    problem = unrolled(4, 3, in_order=1)
    units = np.random.default_rng(0).permutation(problem.units)
    columns = problem.columns._replace(unit=units[problem.columns.unit])
    other = replace(problem, columns=columns)
    np.testing.assert_allclose(embedding(other)[units], embedding(problem), atol=1e-9)
    assert (sample(other, 1).place[units] == sample(problem, 1).place).all()


def test_what_crosses_between_units_is_counted_once_for_each_reading_unit() -> None:
    graph = policy_graph(unrolled(2, 2, 2))
    # Cell 0 is read by 1 and 2 forward, and gets a gradient from each.
    assert graph.before[graph.before_start[1] : graph.before_start[2]].tolist() == [0]
    assert graph.before_sends.tolist() == [100_000.0] * 4
    assert graph.before_flow.tolist() == [50_000.0] * 4
    assert graph.before_count.tolist() == [2.0] * 4
    assert graph.after_start.tolist() == [0, 2, 3, 4, 4]


def test_interchangeable_devices() -> None:
    problem = unrolled(devices=4)
    assert interchangeable(problem).tolist() == [0, 0, 0, 0]
    duration = problem.columns.duration.copy()
    duration[0, 2] += 1
    other = replace(problem, columns=problem.columns._replace(duration=duration))
    assert interchangeable(other).tolist() == [0, 0, 2, 0]
    lag = np.zeros((4, 4))
    lag[0, 1] = lag[1, 0] = lag[2, 3] = lag[3, 2] = 5
    paired = replace(problem, links=problem.links._replace(lag=lag))
    assert interchangeable(paired).tolist() == [0, 0, 2, 2]


# Decoding


@pytest.mark.parametrize("seed", range(6))
def test_devices_that_may_not_run_a_unit_do_not(seed: int) -> None:
    problem = random_problem(seed, nodes=30, devices=4, units=20, restricted=True)
    place = sample(problem, seed).place
    assert problem.columns.allowed[np.arange(20), place].all()


@pytest.mark.parametrize("seed", range(6))
def test_no_device_gets_more_than_its_memory_while_another_has_room(seed: int) -> None:
    problem = unrolled(4, 4, 4, limit=130)  # a unit takes 25
    graph = policy_graph(problem)
    assert set(graph.memory.tolist()) == {25.0}
    place = sample(problem, seed).place
    assert (np.bincount(place, minlength=4) <= 5).all()


def test_if_nothing_fits_the_least_excess_is_taken() -> None:
    problem = unrolled(4, 4, 4, limit=60)
    loads = np.bincount(sample(problem, 0).place, minlength=4)
    assert loads.tolist() == [4, 4, 4, 4]


def test_at_most_so_many_devices() -> None:
    problem = unrolled(4, 4, 4)
    assert len(set(sample(problem, 0).place)) > 2
    assert len(set(sample(problem, 0, most_devices=2).place)) == 2


def test_only_the_first_of_the_empty_interchangeable_devices_is_open() -> None:
    seen = sample(unrolled(3, 3, 4), 0, record=True)
    assert seen.open[0].tolist() == [True, False, False, False]
    assert seen.features.shape == (9, 4, DEVICE_FEATURES)
    assert np.isfinite(seen.features).all()
    first = [seen.place[np.flatnonzero(seen.place == d)] for d in range(4)]
    assert all(len(each) for each in first[: int(seen.place.max()) + 1])


def test_names_of_devices_do_not_matter() -> None:
    """Unequal devices in another order get the same units."""
    problem = unrolled(3, 4, 3)
    speeds = np.array([1, 2, 3])
    duration = problem.columns.duration * speeds
    problem = replace(problem, columns=problem.columns._replace(duration=duration))
    swap = np.array([2, 0, 1])
    columns = problem.columns._replace(duration=np.ascontiguousarray(duration[:, swap]))
    other = replace(problem, columns=columns)
    for network in (NETWORK, new_network(5), new_network(8)):
        assert (swap[greedy_placement(other, network)] == greedy_placement(problem, network)).all()


def test_following_a_placement_records_what_was_seen() -> None:
    problem = unrolled(3, 4, 3)
    graph = policy_graph(problem)
    base = first_scores(NETWORK, embedding(problem))
    drawn = sample(problem, 4, record=True)
    again = decode(graph, base, NETWORK.head, follow=drawn.place, record=True)
    assert (again.place == drawn.place).all()
    assert (again.features == drawn.features).all() and (again.open == drawn.open).all()


def test_interchangeable_devices_are_named_by_first_use() -> None:
    graph = policy_graph(unrolled(2, 3, 3))
    place = np.array([2, 2, 0, 0, 1, 1])
    assert graph.order.tolist() == [0, 1, 3, 2, 4, 5]
    assert by_first_use(graph, place).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_start_on_a_device_waits_for_messages() -> None:
    """Against times worked out by hand: cells 0 and 1 on different devices."""
    problem = unrolled(1, 2, 2)
    graph = policy_graph(problem)
    base = np.zeros((2, policy_network.HIDDEN))
    seen = decode(graph, base, NETWORK.head, follow=np.array([0, 1]), record=True).features
    mean, late = 300_000, 25_000 + 50_000 / 7.6
    gap = np.array([0.0, late])  # on its own device cell 1 starts at 100,000
    np.testing.assert_allclose(seen[1, :, 0], gap / (gap + mean), rtol=1e-6)
    np.testing.assert_allclose(seen[1, :, 15], [1, 0])
    np.testing.assert_allclose(seen[1, :, 6], [1, 0])
    cross = 2 * 25_000 + 100_000 / 7.6
    np.testing.assert_allclose(seen[1, :, 9], [0, cross / (cross + mean)], rtol=1e-6)


# Interpreted and compiled


def test_scores_are_the_same_interpreted_and_by_rows() -> None:
    rng = np.random.default_rng(0)
    base, seen = rng.standard_normal(policy_network.HIDDEN), rng.random((5, DEVICE_FEATURES))
    seen[seen < 0.3] = 0.0
    is_open = np.array([True, False, True, True, False])
    found, plain = np.zeros(5), np.zeros(5)
    score_devices.function(base, NETWORK.head, seen, is_open, found)
    policy_decode._scores_by_rows(base, NETWORK.head, seen, is_open, plain)
    assert (found[is_open] == plain[is_open]).all() and found[is_open].any()


def test_pooling_is_the_same_by_rows() -> None:
    rng = np.random.default_rng(0)
    start, others = np.array([0, 3, 3, 4]), np.array([2, 0, 1, 1])
    messages, weights = rng.random((3, 4)), rng.random(4)
    by_rows = policy_network._pool_by_rows(messages, start, others, weights)
    for one, other in zip(pool.function(messages, start, others, weights), by_rows, strict=True):
        assert (one == other).all() and one.any()


@pytest.mark.slow
def test_compiled_decoding_gives_the_same() -> None:
    problem = unrolled(4, 6, 4, limit=200)
    graph = policy_graph(problem)
    base = first_scores(NETWORK, embedding(problem))
    noise = np.random.default_rng(1).gumbel(size=graph.allowed.shape)
    found = []
    for run in (policy_decode.decode_units.function, policy_decode.decode_units.dispatcher):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy_decode, "decode_units", run)
            found.append(decode(graph, base, NETWORK.head, noise=noise, record=True))
    assert (found[0].place == found[1].place).all()
    assert (found[0].features == found[1].features).all()
    assert (found[0].open == found[1].open).all()


# Files


def test_a_network_reads_back(saved: Path) -> None:
    again = load_network(saved)
    for name, tensor in NETWORK.tensors.items():
        assert (again.tensors[name] == tensor).all()
    assert saved.stat().st_size < 500_000


def test_a_network_of_other_features_is_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_network, "FEATURES_VERSION", 99)
    with pytest.raises(ValueError, match="version 1; this release has version 99"):
        load_network(saved)


# The placer


def run(objective: StepObjective, saved: Path, **options: object) -> Ints:
    result = policy(objective, budget=0.0, policy=saved, **options)  # type: ignore[arg-type]
    assert result.figures["policy"] >= objective.score(result.placement)
    return result.placement


@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_single_list_scheduling_and_starts(seed: int, saved: Path) -> None:
    objective = StepObjective(random_problem(seed, nodes=24, devices=3, units=15))
    start = np.random.default_rng(seed).integers(0, 3, 15)
    score = objective.score(run(objective, saved, starts=[start]))
    assert score <= objective.score(start)
    for name in ("single", "list-schedule"):
        assert score <= objective.score(PLACERS[name](objective).placement)


@pytest.mark.slow
def test_the_same_for_the_same_seed(saved: Path) -> None:
    objective = StepObjective(unrolled(4, 5, 3))
    first = list(proposals(objective, NETWORK, seed=2, samples=4))
    again = list(proposals(objective, NETWORK, seed=2, samples=4))
    other = list(proposals(objective, NETWORK, seed=3, samples=4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
    assert (run(objective, saved, seed=2) == run(objective, saved, seed=2)).all()


def test_a_memory_limit_is_kept(saved: Path) -> None:
    objective = StepObjective(unrolled(4, 4, 4, limit=160))
    assert objective.evaluate(run(objective, saved)).feasible


def test_an_interrupt_keeps_the_best(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(policy_module, "proposals", interrupted)
    objective = StepObjective(unrolled())
    result = policy(objective, budget=1.0, policy=saved)
    assert result.interrupted and len(result.placement) == objective.problem.units
