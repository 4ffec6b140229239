"""Shrinking, passes and messages against trying everything."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import cases

from apportion.search.tables import ascend as messages_module
from apportion.search.tables.ascend import goal, narrow_by_messages, pass_messages
from apportion.search.tables.eliminate import Energy, eliminate, try_all_choices
from apportion.search.tables.reweight import (
    flatten,
    move_costs,
    moved_energy,
    prove_bound,
    run_passes,
)
from apportion.search.tables.shrink import shrink, unreduced
from apportion.work_clock import work_seconds

seeds = st.integers(0, 10**9)


def draw(rng: Random) -> float:
    return rng.choice([0.0, 1.0, 2.0, rng.uniform(-3, 3), 1e9 * rng.random()])


def random_energy(seed: int, count: int = 6, kind: str = "any") -> Energy:
    """A few variables of a few values; tables between any of them, along a tree or round a ring."""
    rng = Random(seed)
    energy = Energy()
    for _ in range(rng.randint(1, count)):
        energy.variable([draw(rng) for _ in range(rng.randint(1, 4))])
    n = len(energy.sizes)
    some = [(rng.randrange(n), rng.randrange(n)) for _ in range(rng.randint(0, 2 * count))]
    tree = [(rng.randrange(b), b) for b in range(1, n)]
    ring = [(b, (b + 1) % n) for b in range(n)]
    for a, b in {"any": some, "tree": tree, "ring": ring}[kind]:
        table = [[draw(rng) for _ in range(energy.sizes[b])] for _ in range(energy.sizes[a])]
        energy.pair(a, b, np.array(table, np.float64))
    return energy


def frustrated(count: int = 3, values: int = 2) -> Energy:
    """Every two of the variables would rather differ, and cannot all: bounds by pairs have a gap.

    The values themselves cost a little, so that no choice is as good as another."""
    energy = Energy()
    for k in range(count):
        energy.variable([0.01 * k * v for v in range(values)])
    for a in range(count):
        for b in range(a):
            energy.pair(a, b, np.eye(values))
    return energy


def near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=3e-9, abs_tol=1e-3)


# shrink


@settings(max_examples=cases(300))
@given(seed=seeds)
def test_shrinking_keeps_the_minimum_and_finds_the_way_back(seed: int) -> None:
    energy = random_energy(seed)
    small = shrink(energy)
    _, least = try_all_choices(energy)
    picks, inside = try_all_choices(small.energy)
    assert near(small.constant + inside, least)
    assert near(energy.value(small.lift(picks)), least)


@settings(max_examples=cases(200))
@given(seed=seeds)
def test_every_choice_of_what_is_left_has_its_value(seed: int) -> None:
    energy, rng = frustrated(5, 3), Random(seed)
    for k in range(4):
        energy.pair(energy.variable([draw(rng), draw(rng)]), k, np.array([[1.0, 2, 0], [0, 0, 2]]))
    small = shrink(energy)
    assert 0 < len(small.variables) < len(energy.sizes)
    picks = [rng.randrange(n) for n in small.energy.sizes]
    choice = small.lift(picks)
    assert near(energy.value(choice), small.constant + small.energy.value(picks))
    assert small.picks(choice) == picks


@settings(max_examples=cases(200))
@given(seed=seeds)
def test_a_tree_shrinks_to_nothing(seed: int) -> None:
    energy = random_energy(seed, 8, "tree")
    small = shrink(energy)
    assert small.variables == ()
    assert near(small.constant, eliminate(energy)[1])


@settings(max_examples=cases(200))
@given(seed=seeds)
def test_shrinking_to_some_values_is_the_minimum_over_those(seed: int) -> None:
    energy, rng = random_energy(seed), Random(seed)
    keep = [np.array([rng.random() < 0.6 for _ in range(n)]) for n in energy.sizes]
    for marks in keep:
        marks[rng.randrange(len(marks))] = True
    kept = Energy()
    for marks, costs in zip(keep, energy.unary, strict=True):
        kept.variable(costs[marks])
    for (a, b), table in energy.pairs.items():
        kept.pair(a, b, table[np.ix_(keep[a], keep[b])])
    small = shrink(energy, keep)
    picks, inside = try_all_choices(small.energy)
    choice = small.lift(picks)
    assert near(small.constant + inside, try_all_choices(kept)[1])
    assert near(energy.value(choice), small.constant + inside)
    assert all(marks[x] for marks, x in zip(keep, choice, strict=True))


def test_shrinking_twice_finds_the_way_back_through_both() -> None:
    energy = frustrated(5, 4)
    half = [np.array([True, False, True, True])] * 5
    kept = Energy()
    for marks, costs in zip(half, energy.unary, strict=True):
        kept.variable(costs[marks])
    for (a, b), table in energy.pairs.items():
        kept.pair(a, b, table[np.ix_(half[a], half[b])])
    values = tuple(np.flatnonzero(marks) for marks in half)
    left = replace(unreduced(energy), energy=kept, values=values)
    left = left.reduced_to(shrink(left.energy))
    left = left.reduced_to(shrink(left.energy, [np.arange(n) < 2 for n in left.energy.sizes]))
    picks, inside = try_all_choices(left.energy)
    choice = left.lift(picks)
    assert near(energy.value(choice), left.constant + inside)
    assert 1 not in choice


# Passes


@settings(max_examples=cases(200))
@given(seed=seeds, rounds=st.integers(0, 5))
def test_what_passes_prove_is_never_above_the_minimum(seed: int, rounds: int) -> None:
    energy = random_energy(seed)
    flat = flatten(energy)
    run_passes(flat, rounds)
    assert prove_bound(energy, flat).bound <= try_all_choices(energy)[1]


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_the_bound_holds_whatever_is_moved(seed: int) -> None:
    energy, rng = random_energy(seed), np.random.default_rng(seed)
    flat = flatten(energy)
    for e in range(len(flat.first)):
        rows, columns = flat.table(e).shape
        move_costs(flat, e, rng.normal(size=rows) * 1e9, rng.normal(size=columns))
    assert prove_bound(energy, flat).bound <= try_all_choices(energy)[1]


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_the_bound_never_falls(seed: int) -> None:
    energy = random_energy(seed, 8)
    flat = flatten(energy)
    bounds = []
    for _ in range(6):
        run_passes(flat, 1)
        bounds.append(prove_bound(energy, flat).bound)
    margin = prove_bound(energy, flat).margin
    assert all(b >= a - 10 * margin for a, b in pairwise(bounds))


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_on_a_tree_the_bound_is_the_minimum(seed: int) -> None:
    energy = random_energy(seed, 8, "tree")
    flat = flatten(energy)
    run_passes(flat, 20)
    assert near(prove_bound(energy, flat).bound, eliminate(energy)[1])


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_a_value_costs_at_least_its_slack_more_than_the_bound(seed: int) -> None:
    energy = random_energy(seed)
    flat = flatten(energy)
    run_passes(flat, 2)
    proof = prove_bound(energy, flat)
    for variable, slack in enumerate(proof.slack):
        for value, more in enumerate(slack):
            keep = [np.ones(n, np.bool_) for n in energy.sizes]
            keep[variable] = np.arange(energy.sizes[variable]) == value
            small = shrink(energy, keep)
            least = small.constant + try_all_choices(small.energy)[1]
            assert proof.bound + more <= least + 1e-9 * abs(least)


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_moving_costs_changes_no_total(seed: int) -> None:
    energy, rng = random_energy(seed), Random(seed)
    flat = flatten(energy)
    run_passes(flat, 3)
    moved = moved_energy(energy, flat, [np.ones(n, np.bool_) for n in energy.sizes])
    choice = [rng.randrange(n) for n in energy.sizes]
    assert near(moved.value(choice), energy.value(choice))


# messages


@settings(max_examples=cases(200))
@given(seed=seeds, kind=st.sampled_from(["any", "tree", "ring"]))
def test_messages_bracket_the_minimum(seed: int, kind: str) -> None:
    energy = random_energy(seed, 7, kind)
    found = pass_messages(energy)
    _, least = try_all_choices(energy)
    assert found.value == energy.value(found.choice)
    assert found.bound <= least <= found.value
    assert found.finished
    if found.optimal:
        assert near(found.value, least)
    if kind == "tree":
        assert near(found.bound, found.value)


def test_a_frustrated_energy_has_a_gap_and_what_is_left_holds_the_optimum() -> None:
    energy = frustrated(7, 3)
    found, left = narrow_by_messages(energy)
    _, least = try_all_choices(energy)
    assert found.bound < least - 0.5
    assert found.value == pytest.approx(least)  # fusing tries every mixture
    assert left is not None
    assert left.constant + try_all_choices(left.energy)[1] == pytest.approx(least)


@pytest.mark.slow
def test_narrowing_closes_a_gap_that_passes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that the best choice rules out are dropped, and the rest proves it the best."""
    rng = np.random.default_rng(2)
    energy = Energy()
    for _ in range(40):
        energy.variable(rng.uniform(size=3))
    for k in range(40):
        for step in (1, 2, 5):
            energy.pair(k, (k + step) % 40, 0.25 * rng.uniform(size=(3, 3)))
    best, _ = eliminate(energy)
    assert pass_messages(energy, start=best).optimal
    monkeypatch.setattr(messages_module, "SHARE", 0.0)
    assert not pass_messages(energy, start=best).optimal


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_messages_are_never_worse_than_their_start(seed: int) -> None:
    energy, rng = random_energy(seed), Random(seed)
    start = [rng.randrange(n) for n in energy.sizes]
    best, least = try_all_choices(energy)
    assert pass_messages(energy, start=start, rounds=1).value <= energy.value(start)
    assert pass_messages(energy, start=best).value == least


def test_messages_stop_at_their_deadline_with_a_bound() -> None:
    energy = frustrated(7, 3)
    found = pass_messages(energy, deadline=work_seconds() - 1)
    assert not found.finished
    assert -1e-6 < found.bound < found.value


def test_messages_tell_of_better_choices_and_bounds() -> None:
    told: list[tuple[float, float]] = []
    found = pass_messages(frustrated(7, 3), report=lambda value, bound: told.append((value, bound)))
    assert told[-1] == (found.value, found.bound)
    assert all(b <= goal(v) for v, b in told)
    assert [v for v, _ in told] == sorted((v for v, _ in told), reverse=True)


def test_nothing_costs_nothing() -> None:
    found = pass_messages(Energy())
    assert (found.choice, found.value, found.bound) == ([], 0.0, 0.0)
