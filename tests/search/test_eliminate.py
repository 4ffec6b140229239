"""Elimination against trying everything."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from soak import cases

from apportion.columns import CompiledFunction
from apportion.search.tables import elimination_order, elimination_steps
from apportion.search.tables.eliminate import (
    Energy,
    TooWide,
    descend,
    eliminate,
    share_tables,
    try_all_choices,
)

seeds = st.integers(0, 10**9)


def random_energy(seed: int, count: int = 6) -> Energy:
    """A few variables of a few values, tables with many ties between any of them, ties of a
    variable with itself and tables given twice or the other way round among them."""
    rng = Random(seed)
    energy = Energy()
    for _ in range(rng.randint(1, count)):
        energy.variable([draw(rng) for _ in range(rng.randint(1, 4))])
    for _ in range(rng.randint(0, 2 * count)):
        a, b = rng.randrange(len(energy.sizes)), rng.randrange(len(energy.sizes))
        table = [[draw(rng) for _ in range(energy.sizes[b])] for _ in range(energy.sizes[a])]
        energy.pair(a, b, np.array(table, np.float64))
    return energy


def draw(rng: Random) -> float:
    return rng.choice([0.0, 1.0, 2.0, rng.uniform(-3, 3), 1e9 * rng.random()])


@settings(max_examples=cases(400))
@given(seed=seeds)
def test_elimination_equals_trying_everything(seed: int) -> None:
    energy = random_energy(seed)
    choice, value = eliminate(energy)
    _, least = try_all_choices(energy)
    assert math.isclose(value, least, rel_tol=1e-12, abs_tol=1e-6)
    assert value == energy.value(choice)
    assert all(0 <= x < n for x, n in zip(choice, energy.sizes, strict=True))


@settings(max_examples=cases(400))
@given(seed=seeds)
@example(seed=4)
@example(seed=141)
def test_steps_over_few_tables_are_told_apart(seed: int) -> None:
    """Most variables and pairs have the same few tables, so that many steps look alike: which of
    their inputs are given tables and which are those of earlier steps makes the difference."""
    rng, energy = Random(seed), Energy()
    tables = [np.array([[draw(rng) for _ in range(2)] for _ in range(2)]) for _ in range(2)]
    for _ in range(8):
        energy.variable([0.0, 0.0])
    for b in range(1, 8):
        for a in rng.sample(range(b), min(b, rng.randint(1, 2))):
            energy.pair(a, b, rng.choice(tables))
    choice, value = eliminate(energy)
    assert math.isclose(value, try_all_choices(energy)[1], rel_tol=1e-12, abs_tol=1e-6)
    assert value == energy.value(choice)


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_elimination_leaves_the_energy_as_it_was(seed: int) -> None:
    energy, same = random_energy(seed), random_energy(seed)
    assert eliminate(energy) == eliminate(energy)
    assert all(np.array_equal(a, b) for a, b in zip(energy.unary, same.unary, strict=True))
    assert energy.pairs.keys() == same.pairs.keys()
    assert all(np.array_equal(t, same.pairs[k]) for k, t in energy.pairs.items())


@pytest.mark.slow
@settings(max_examples=cases(300))
@given(seed=seeds)
def test_interpreted_and_compiled_elimination_are_equal_bit_for_bit(seed: int) -> None:
    energy = random_energy(seed, count=9)
    loops: list[CompiledFunction] = [elimination_order._greedy_order, elimination_steps._run]
    kept, found = [each.native for each in loops], []
    shared, cap = share_tables(energy), 20.0  # an order is given up in some of the examples
    for natives in ([None, None], [each.dispatcher for each in loops]):
        for each, native in zip(loops, natives, strict=True):
            each.native, each.seconds = native, 0.0
        steps = elimination_order.elimination_order(shared.sizes, shared.edges, cap)
        found.append((eliminate(energy), [column.tolist() for column in steps[:-1]], steps.whole))
    for each, native in zip(loops, kept, strict=True):
        each.native = native
    assert found[0] == found[1]


def test_nothing_costs_nothing() -> None:
    assert eliminate(Energy()) == ([], 0.0)


def test_a_table_over_one_variable_twice_is_its_diagonal() -> None:
    energy = Energy()
    x = energy.variable([5.0, 0.0, 0.0])
    energy.pair(x, x, np.array([[-9.0, 0, 0], [-99, 2, -99], [0, 0, 3]]))
    assert eliminate(energy) == ([0], -4.0)
    assert energy.value([1]) == 2.0
    assert energy.pairs == {}


def test_a_table_may_be_given_either_way_round() -> None:
    one, other = Energy(), Energy()
    table = np.arange(6.0).reshape(2, 3)
    for energy in (one, other):
        energy.variable([0.0, 0.0])
        energy.variable([0.0, 0.0, 0.0])
    one.pair(0, 1, table)
    one.pair(0, 1, table)
    other.pair(1, 0, 2 * table.T)
    assert all(one.value([a, b]) == other.value([a, b]) for a in range(2) for b in range(3))
    assert one.value([1, 2]) == 10.0


def clique(count: int, values: int = 3) -> Energy:
    """Every variable has a table with every other: no order keeps tables small."""
    rng, energy = np.random.default_rng(0), Energy()
    for _ in range(count):
        energy.variable(rng.uniform(size=values).tolist())
    for a in range(count):
        for b in range(a):
            energy.pair(a, b, rng.uniform(size=(values, values)))
    return energy


def test_elimination_gives_up_before_a_table_exceeds_the_cap() -> None:
    energy = clique(6)
    assert eliminate(energy, cap=3**6)[1] == pytest.approx(try_all_choices(energy)[1])
    with pytest.raises(TooWide, match="a table of more than 728 entries"):
        eliminate(energy, cap=3**6 - 1)


def test_a_long_chain_is_narrow() -> None:
    rng, energy = np.random.default_rng(1), Energy()
    for k in range(2000):
        energy.variable(rng.uniform(size=4).tolist())
        if k:
            energy.pair(k - 1, k, rng.uniform(size=(4, 4)))
    _, value = eliminate(energy, cap=16)
    best = energy.unary[0]  # the same by going along the chain
    for k in range(1, 2000):
        best = (best[:, None] + energy.pairs[k - 1, k]).min(axis=0) + energy.unary[k]
    assert value == pytest.approx(float(best.min()))


def test_any_number_of_variables_with_nothing_to_choose() -> None:
    energy = Energy()
    middle = energy.variable([0.0, 1.0])
    for k in range(100):
        energy.pair(energy.variable([1.0]), middle, np.array([[float(k == 0), 0.5]]))
    energy.pair(1, 2, np.array([[7.0]]))
    assert eliminate(energy) == ([0] * 101, 108.0)


@settings(max_examples=cases(200))
@given(seed=seeds)
def test_descent_is_never_worse_than_its_start_and_ends_where_no_single_change_helps(
    seed: int,
) -> None:
    energy, rng = random_energy(seed), Random(seed)
    start = [rng.randrange(n) for n in energy.sizes]
    before = list(start)
    choice, value = descend(energy, start)
    assert start == before
    assert value == energy.value(choice)
    assert try_all_choices(energy)[1] - 1e-6 <= value <= energy.value(start) + 1e-6
    for variable, size in enumerate(energy.sizes):
        for other in range(size):
            changed = [*choice[:variable], other, *choice[variable + 1 :]]
            assert energy.value(changed) >= value - 1e-6


def test_descent_stops_after_its_rounds() -> None:
    energy = clique(6)
    start = [0] * 6
    assert descend(energy, start, rounds=0) == (start, energy.value(start))
