"""Bounds by splitting variables, against trying everything."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import cases
from test_ascend import frustrated, near, random_energy, seeds

from apportion.search.tables.copies_bound import copy_variables, tighten
from apportion.search.tables.eliminate import Energy, eliminate, try_all_choices
from apportion.search.tables.linear import minimise_with_bound
from apportion.search.tables.reweight import flatten, prove_bound, run_passes


def grid(side: int, seed: int = 0, values: int = 3) -> Energy:
    """Variables on a square, tables between neighbours: as wide as the square."""
    rng, energy = np.random.default_rng(seed), Energy()
    for _ in range(side * side):
        energy.variable(rng.uniform(size=values))
    for k in range(side * side):
        if (k + 1) % side:
            energy.pair(k, k + 1, rng.uniform(size=(values, values)))
        if k + side < side * side:
            energy.pair(k, k + side, rng.uniform(size=(values, values)))
    return energy


@settings(max_examples=cases(100))
@given(seed=seeds, cap=st.sampled_from([1.0, 20.0, 60.0, 1e6]))
def test_bounds_are_never_above_the_minimum_and_never_below_what_passes_prove(
    seed: int, cap: float
) -> None:
    energy = random_energy(seed, 6)
    _, least = try_all_choices(energy)
    flat = flatten(energy)
    run_passes(flat, 3)
    before = prove_bound(energy, flat)
    for number, step in enumerate(islice(tighten(energy, flat, least, cap), 5)):
        assert step.bound <= least
        if number == 0:
            assert step.bound >= before.bound - 10 * before.margin - 1e-3
        for choice in step.choices:
            assert energy.value(choice) >= least
    if cap == 1e6:
        assert near(step.bound, least)
        assert near(energy.value(step.choices[0]), least)


@pytest.mark.parametrize("cap", [30.0, 100.0, 1000.0])
def test_every_pair_is_between_copies_of_its_variables(cap: float) -> None:
    energy = grid(6)
    copies = copy_variables(energy, cap)
    assert copies.variable[:36] == list(range(36))
    assert copies.ends.keys() == energy.pairs.keys()
    for pair, (a, b) in copies.ends.items():
        assert (copies.variable[a], copies.variable[b]) == pair
    used = {end for ends in copies.ends.values() for end in ends}
    assert used == set(range(len(copies.variable)))


def test_nothing_is_split_that_need_not_be() -> None:
    assert len(copy_variables(grid(4), 3.0**5).variable) == 16
    assert len(copy_variables(grid(4), 3.0**3).variable) > 16


def test_wider_tables_prove_more() -> None:
    energy = grid(6, seed=1)
    least = eliminate(energy)[1]
    flat = flatten(energy)
    run_passes(flat, 2)
    bounds = [next(tighten(energy, flat, least, cap)).bound for cap in (20.0, 100.0, 3.0**7)]
    assert bounds[0] < bounds[1] < bounds[2]
    assert bounds[2] == pytest.approx(least)


def test_steps_raise_the_bound() -> None:
    energy = grid(6, seed=2)
    flat = flatten(energy)
    run_passes(flat, 1)
    bounds = [s.bound for s in islice(tighten(energy, flat, eliminate(energy)[1], 30.0), 25)]
    assert max(bounds) > bounds[0] + 0.01


@pytest.mark.slow
def test_solving_closes_with_split_variables_what_passes_leave() -> None:
    energy = frustrated(6, 3)
    least = eliminate(energy)[1]
    found = minimise_with_bound(energy, cap=3**4)
    assert found.value == pytest.approx(least)
    assert least - 1e-3 <= found.bound <= least
