"""GDP: its network against plain twins, its loss and rewards, and what training finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_placements import made_problem

from apportion.learn.best_placement import judged
from apportion.learn.gdp import (
    INVALID,
    GdpSettings,
    advantage,
    apply_gdp,
    place_with_gdp,
    ppo_loss,
    reward,
    sample,
    train_gdp,
)
from apportion.learn.gdp_file import load_gdp, save_gdp
from apportion.learn.gdp_graph import FEATURES, GdpGraph, gdp_graph, side_by_side
from apportion.learn.gdp_network import GdpNetwork, GdpShape, PlacerLayer, slots_of
from apportion.learn.gdp_policy import GdpPolicy
from apportion.place import PLACERS, PlacementProblem, StepObjective, write_policy

KINDS = ("mm", "add", "relu", "conv")
SMALL = GdpSettings(rollouts=6, epochs=3)


def problem_with_kinds(
    nodes: int = 14, devices: int = 2, seed: int = 0, **more
) -> PlacementProblem:
    made = made_problem(nodes, devices, seed, **more)
    return replace(made, node_kinds=tuple(KINDS[i * i % 4] for i in range(nodes)))


def same(a: GdpPolicy, b: GdpPolicy) -> bool:
    one, two = a.network.state_dict(), b.network.state_dict()
    return (
        all(torch.equal(one[name], two[name]) for name in one)
        and all(torch.equal(a.moments[name], b.moments[name]) for name in a.moments)
        and torch.equal(a.random_state, b.random_state)
        and a.updates == b.updates
    )


# The network


def attention_by_segments(layer: PlacerLayer, x: torch.Tensor) -> torch.Tensor:
    """The layer, one segment after the other, with a cache of the inputs before it."""
    shape, out = layer.shape, []
    for begin in range(0, len(x), shape.segment):
        own = x[begin : begin + shape.segment]
        cache = x[max(0, begin - shape.memory) : begin].detach()
        out.append(_attention(layer, own, torch.cat([cache, own])))
    return torch.cat(out)


def _attention(layer: PlacerLayer, own: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    q = layer.query(layer.before_attention(own))
    k, v = layer.key_value(layer.before_attention(seen)).chunk(2, dim=1)
    size, parts = layer.shape.width // layer.shape.heads, []
    for head in range(layer.shape.heads):
        part = slice(head * size, (head + 1) * size)
        weights = (q[:, part] @ k[:, part].T / size**0.5).softmax(dim=1)
        parts.append(weights @ v[:, part])
    x = own + layer.join(torch.cat(parts, dim=1))
    return x + layer.dense(layer.before_dense(x))


def row_of(*sizes: int) -> GdpGraph:
    """Graphs of so many units without edges."""
    units, none = sum(sizes), torch.zeros(0, dtype=torch.int64)
    starts, order = torch.zeros(units + 1, dtype=torch.int64), torch.arange(units)
    return GdpGraph(torch.zeros(units, FEATURES), none, starts, order, torch.ones(units, 2), sizes)


@pytest.mark.parametrize(
    ("units", "segment", "memory"),
    [(23, 5, 5), (23, 5, 7), (20, 5, 10), (7, 16, 16), (9, 4, 0), (11, 3, 2)],
)
def test_all_segments_at_once_are_one_after_the_other(units: int, segment: int, memory: int):
    torch.manual_seed(0)
    layer = PlacerLayer(GdpShape(2, width=8, heads=2, segment=segment, memory=memory)).double()
    slots = slots_of(row_of(units), layer.shape)
    x = torch.randn(units, 8, dtype=torch.float64, requires_grad=True)
    aim = torch.randn(units, 8, dtype=torch.float64)
    results = []
    for form in (
        lambda x: layer(x[slots.unit], slots)[slots.slot],
        lambda x: attention_by_segments(layer, x),
    ):
        layer.zero_grad()
        x.grad = None
        y = form(x)
        ((y - aim) ** 2).sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_with_memory_as_long_as_the_graph_recurrence_is_full_attention():
    """Over the whole prefix: a unit attends to every unit of its own segment and of all before."""
    torch.manual_seed(1)
    units, segment = 22, 5
    layer = PlacerLayer(GdpShape(2, width=8, heads=2, segment=segment, memory=units)).double()
    x = torch.randn(units, 8, dtype=torch.float64)
    part = torch.arange(units) // segment
    q = layer.query(layer.before_attention(x)).view(units, 2, 4)
    k, v = layer.key_value(layer.before_attention(x)).view(units, 2, 2, 4).unbind(1)
    scores = torch.einsum("qhc,khc->hqk", q, k) / 2
    scores = scores.masked_fill(part[None, :] > part[:, None], -torch.inf)
    gathered = torch.einsum("hqk,khc->qhc", scores.softmax(dim=2), v).reshape(units, 8)
    y = x + layer.join(gathered)
    y = y + layer.dense(layer.before_dense(y))
    long, short = (
        slots_of(row_of(units), replace(layer.shape, memory=memory)) for memory in (units, segment)
    )
    found = layer(x[long.unit], long)[long.slot]
    torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(layer(x[short.unit], short)[short.slot], y)  # it forgets


def renumbered(problem: PlacementProblem, seed: int) -> tuple[PlacementProblem, np.ndarray]:
    """The same problem with its nodes in another order in which they can run, and its units
    numbered otherwise; and the new number of each unit."""
    rng, c, n = np.random.default_rng(seed), problem.columns, len(problem.columns.unit)
    reads = [set() for _ in range(n)]
    for output, source in enumerate(c.source):
        for reader in c.reader[c.reader_start[output] : c.reader_start[output + 1]]:
            reads[reader].add(int(source))
    order: list[int] = []
    while len(order) < n:
        ready = [i for i in range(n) if i not in order and reads[i] <= set(order)]
        order.append(int(rng.choice(ready)))
    at = np.argsort(order)
    unit = rng.permutation(problem.units)
    outputs = sorted(range(len(c.source)), key=lambda o: at[c.source[o]])
    readers = [sorted(at[c.reader[c.reader_start[o] : c.reader_start[o + 1]]]) for o in outputs]
    source = at[c.source[outputs]]
    columns = c._replace(
        unit=unit[c.unit[order]], duration=c.duration[order], backward=c.backward[order],
        resident=c.resident[order], source=source, nbytes=c.nbytes[outputs], send=c.send[outputs],
        output_start=np.searchsorted(source, np.arange(n + 1)).astype(np.int64),
        reader_start=np.cumsum([0, *map(len, readers)]), reader=np.concatenate(readers),
        allowed=c.allowed[np.argsort(unit)],
    )  # fmt: skip
    kinds = tuple(problem.node_kinds[i] for i in order)
    return replace(problem, columns=columns, node_kinds=kinds), unit


def test_embeddings_do_not_change_when_nodes_are_renumbered():
    problem = problem_with_kinds(24, 3, units=15, seed=3)
    network = GdpNetwork(GdpShape(3)).double()
    other, unit = renumbered(problem, 1)
    assert not np.array_equal(unit, np.arange(15))
    one, two = (network.embed(as_double(gdp_graph(it))) for it in (problem, other))
    torch.testing.assert_close(one, two[torch.from_numpy(unit)], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(one, two)


def as_double(graph: GdpGraph) -> GdpGraph:
    return replace(graph, features=graph.features.double())


def test_pooling_is_the_largest_over_neighbours_both_ways():
    problem = problem_with_kinds(12, 2, seed=5)
    graph, network = gdp_graph(problem), GdpNetwork(GdpShape(2))
    layer, h = network.rounds[0], torch.randn(12, 64)
    pairs = {tuple(pair) for pair in problem.unit_edges[0].tolist()}
    rows = []
    for v in range(12):
        near = [u for u in range(12) if (u, v) in pairs or (v, u) in pairs]
        seen = [torch.sigmoid(layer.project(h[u])) for u in near]
        pooled = torch.stack(seen).amax(dim=0) if seen else torch.zeros(64)
        rows.append(torch.relu(layer.combine(torch.cat([h[v], pooled]))))
    torch.testing.assert_close(layer(h, graph), torch.stack(rows))


def test_superposition_multiplies_the_input_of_every_layer():
    graph = gdp_graph(problem_with_kinds(20, 2))
    network = GdpNetwork(GdpShape(2, segment=8, memory=8))
    slots = slots_of(graph, network.shape)
    h = network.embed(graph)[slots.unit]
    x, c = h, network.condition(h)
    for layer in network.layers:
        x = layer(c * x, slots)
    logits = network.head(network.leave(x))
    torch.testing.assert_close(network(graph)[slots.unit], logits[slots.slot][slots.unit])
    plain = GdpNetwork(GdpShape(2, segment=8, memory=8, superposition=False))
    assert plain.condition is None and not torch.allclose(plain(graph), network(graph))


def test_impossible_devices_are_never_drawn():
    problem = problem_with_kinds(12, 3)
    allowed = np.ones((12, 3), bool)
    allowed[3], allowed[5, 2] = [False, True, False], False
    problem = replace(problem, columns=problem.columns._replace(allowed=allowed))
    logits = GdpNetwork(GdpShape(5))(gdp_graph(problem))  # wider than the problem
    drawn = sample(logits.detach(), 200, torch.Generator().manual_seed(0)).numpy()
    assert allowed[np.arange(12), drawn].all()
    assert all(set(drawn[:, u]) == set(np.flatnonzero(allowed[u])) for u in range(12))


def test_features_are_finite_where_there_is_nothing():
    problem = made_problem(1, 1)
    assert torch.isfinite(gdp_graph(problem).features).all()
    assert gdp_graph(problem).features.shape == (1, FEATURES)
    assert place_with_gdp(StepObjective(problem), evaluations=3).placement.tolist() == [0]


# Rewards and the loss


def test_rewards():
    assert reward(0.25, True) == -0.5
    assert reward(0.25, False) == INVALID == reward(100.0, True)
    assert advantage(np.array([1.0, 1.0])).tolist() == [0.0, 0.0]
    assert advantage(np.array([3.0, 1.0])).tolist() == [1.0, -1.0]
    assert advantage(np.array([-1.00001, -0.99999])).tolist() == pytest.approx([-0.01, 0.01])


def test_placements_over_the_limit_are_told_by_how_much():
    problem = made_problem(10, 2, memory=8_000_000)
    objective, free = StepObjective(problem), StepObjective(made_problem(10, 2))
    place = np.zeros(10, np.int64)
    found = objective.evaluate(place)
    over, value = judged(objective, place)
    assert not found.feasible
    assert over == pytest.approx(found.memory[0] / 8_000_000 - 1)
    assert judged(free, place) == (0.0, value) == (0.0, found.value)


def test_loss_is_that_of_a_plain_loop():
    torch.manual_seed(0)
    logits = torch.randn(5, 3, dtype=torch.float64)
    old = torch.randn(4, 5, dtype=torch.float64) * 0.3 - 1
    placements, gains = torch.randint(3, (4, 5)), torch.randn(4, 5, dtype=torch.float64)
    share = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    total = 0.0
    for unit in range(5):
        chance = np.exp(logits[unit].numpy()) / np.exp(logits[unit].numpy()).sum()
        total -= 0.7 * float(share[unit]) * sum(p * np.log(p) for p in chance)
        for r in range(4):
            ratio = chance[placements[r, unit]] / np.exp(float(old[r, unit]))
            kept, gain = min(max(ratio, 0.8), 1.2), float(gains[r, unit])
            total += min(ratio * gain, kept * gain) * float(share[unit]) / 4
    weight = torch.full((5,), 0.7, dtype=torch.float64)
    found = ppo_loss(logits, placements, old, gains, share, 0.2, weight)
    assert float(found) == pytest.approx(-total, rel=1e-12)


# Training


def test_batch_of_one_graph_without_superposition_is_gdp_one():
    """GDP-one, written plainly: the same numbers bit for bit."""
    problem = problem_with_kinds(12, 2)
    batch = train_gdp([problem], updates=3, superposition=False, settings=SMALL)
    network, graph = GdpNetwork(GdpShape(2, superposition=False)), gdp_graph(problem)
    adam = torch.optim.Adam(network.parameters(), lr=SMALL.learning_rate)
    random, objective = torch.Generator().manual_seed(0), StepObjective(problem)
    share = torch.full((12,), 1 / 12)
    for update in range(3):
        with torch.no_grad():
            logits = network(graph)
        places = sample(logits, SMALL.rollouts, random)
        rewards = np.array([-np.sqrt(objective.score(place)) for place in places.numpy()])
        old = logits.log_softmax(dim=1).gather(1, places.T).T
        gains = torch.from_numpy(advantage(rewards)).float()[:, None].expand(-1, 12)
        for _ in range(SMALL.epochs):
            adam.zero_grad()
            weight = torch.full((12,), SMALL.entropy / 33) * SMALL.entropy_decay**update
            ppo_loss(network(graph), places, old, gains, share, SMALL.clip, weight).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), SMALL.norm)
            adam.step()
    for name, tensor in batch.network.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name


def test_graphs_side_by_side_see_nothing_of_each_other():
    graphs = [gdp_graph(problem_with_kinds(n, k, seed=n)) for n, k in ((12, 2), (7, 3), (30, 2))]
    network = GdpNetwork(GdpShape(3, segment=8, memory=8)).double()
    graphs = [as_double(graph) for graph in graphs]
    apart = torch.cat([network(graph) for graph in graphs])
    torch.testing.assert_close(network(side_by_side(graphs)), apart)


def test_rewards_of_a_batch_are_averaged_over_graphs():
    """Its loss is the mean of the losses of its graphs, however large they are."""
    torch.manual_seed(0)
    sizes, logits = (3, 9), torch.randn(12, 2)
    placements, old = torch.randint(2, (4, 12)), torch.full((4, 12), -0.7)
    gains = torch.randn(4, 2).repeat_interleave(torch.tensor(sizes), dim=1)
    share = torch.cat([torch.full((size,), 1 / (2 * size)) for size in sizes])
    whole = ppo_loss(logits, placements, old, gains, share, 0.2, torch.full((12,), 0.1))
    losses = []
    for part in (slice(0, 3), slice(3, 12)):
        own = [it[:, part] for it in (placements, old, gains)]
        losses.append(ppo_loss(logits[part], *own, 2 * share[part], 0.2, torch.tensor(0.1)))
    torch.testing.assert_close(whole, torch.stack(losses).mean())
    problems = [problem_with_kinds(10, 2), problem_with_kinds(8, 3)]
    made = train_gdp(problems, updates=2, settings=SMALL)
    assert made.network.shape.devices == 3
    assert [it.used for it in made.searches] == [14, 14]
    for problem, search in zip(problems, made.searches, strict=True):
        assert StepObjective(problem).score(search.best) == search.value


@pytest.mark.slow
def test_finds_the_best_placement_of_a_tiny_problem():
    problem = made_problem(8, 2, seed=2)
    objective = StepObjective(problem)
    every = itertools.product(range(2), repeat=8)
    best = min(objective.score(np.array(place)) for place in every)
    found = place_with_gdp(StepObjective(problem), evaluations=500, budget=60)
    assert found.curve[-1][2] == best == objective.score(found.placement)


@pytest.mark.slow
def test_learning_makes_placements_shorter():
    problem = problem_with_kinds(20, 3, seed=4)
    columns = problem.columns
    problem = replace(problem, columns=columns._replace(send=columns.send * 30))  # far apart
    values = []

    def objective(problem: PlacementProblem) -> StepObjective:
        made = StepObjective(problem)
        score = made.score
        made.score = lambda place: values.append(score(place)) or values[-1]  # type: ignore
        return made

    settings = GdpSettings(rollouts=12, epochs=3, entropy=1.0)
    train_gdp([problem], updates=25, objective=objective, settings=settings)
    assert np.mean(values[-50:]) < 0.7 * np.mean(values[:50])


def test_equal_seeds_give_equal_policies_and_others_do_not():
    problem = problem_with_kinds(12, 2)
    one, two, three = (train_gdp([problem], updates=2, seed=s, settings=SMALL) for s in (1, 1, 2))
    assert same(one, two) and not same(one, three)
    assert one.searches[0].value == two.searches[0].value
    assert [row[1:] for row in one.searches[0].curve] == [r[1:] for r in two.searches[0].curve]


def test_training_resumes_from_a_file_as_if_it_had_not_stopped(tmp_path: Path):
    problem = problem_with_kinds(12, 2)
    through = train_gdp([problem], updates=4, settings=SMALL)
    first = train_gdp([problem], updates=2, settings=SMALL)
    save_gdp(tmp_path / "p.safetensors", first)
    loaded = load_gdp(tmp_path / "p.safetensors")
    assert same(first, loaded) and loaded.trained_on == (problem.name,)
    assert same(train_gdp([problem], updates=2, resume=loaded, settings=SMALL), through)


@pytest.mark.slow
def test_a_policy_is_used_as_it_is_and_fine_tuned(tmp_path: Path):
    problem, other = problem_with_kinds(12, 2), problem_with_kinds(17, 2, seed=8)
    policy = train_gdp([problem], updates=2, settings=SMALL)
    place = apply_gdp(policy, other)
    tuned = train_gdp([other], evaluations=1, start=policy, settings=SMALL)
    assert np.array_equal(tuned.searches[0].best, place)  # what is likely before any update
    save_gdp(tmp_path / "p", policy)
    found = place_with_gdp(StepObjective(other), evaluations=2, policy=tmp_path / "p")
    assert found.curve[0][2] == StepObjective(other).score(place)
    with pytest.raises(ValueError, match="places on 2 devices"):
        apply_gdp(policy, made_problem(5, 3))
    with pytest.raises(ValueError, match="places on 2 devices, not on 3"):
        train_gdp([made_problem(5, 3)], updates=1, start=policy)


def test_evaluations_are_exact_and_the_budget_ends_training():
    objective = StepObjective(problem_with_kinds(12, 2))
    found = place_with_gdp(objective, evaluations=50, budget=100)
    assert objective.evaluations == 50 == found.figures["evaluations"]
    none = PLACERS["gdp"](objective, budget=0.0)
    assert none.placement.shape == (12,) and objective.evaluations == 50


@pytest.mark.slow
def test_a_policy_that_has_settled_is_begun_again():
    """On one device there is only one placement: ten updates are enough to see that."""
    found = place_with_gdp(StepObjective(made_problem(4, 1)), evaluations=33 * 25)
    assert found.figures == {"updates": 25, "evaluations": 825, "runs": 3}
    assert [count for _, count, _ in found.curve] == [1]


def test_interruption_keeps_the_best():
    def stop(progress) -> None:
        raise KeyboardInterrupt

    found = place_with_gdp(StepObjective(problem_with_kinds(12, 2)), report=stop)
    assert found.interrupted and found.curve


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": {"devices": 2, "heads": 5}}, "does not divide"),
        ({"shape": {"width": 64}}, "devices"),
        ({"shape": {"devices": 3}}, "loading state_dict"),
        ({"features_version": 0}, "features of version 0"),
        ({"updates": "many"}, "many"),
    ],
)
def test_files_that_are_no_policies_are_refused(tmp_path: Path, change: dict, words: str):
    from apportion.place import read_policy

    save_gdp(tmp_path / "p", train_gdp([made_problem(6, 2)], updates=1, settings=SMALL))
    file = read_policy(tmp_path / "p")
    write_policy(tmp_path / "q", "gdp", file.tensors, {**file.facts, **change})
    with pytest.raises(ValueError, match=words):
        load_gdp(tmp_path / "q")


def test_training_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="needs a limit"):
        train_gdp([made_problem(4, 2)])
    with pytest.raises(ValueError, match="at least one problem"):
        train_gdp([], updates=1)
