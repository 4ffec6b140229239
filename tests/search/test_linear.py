"""Linear and integer programs against trying everything."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from soak import cases
from test_ascend import frustrated, near, random_energy, seeds

from apportion.search.tables import linear
from apportion.search.tables.eliminate import Energy, eliminate, try_all_choices
from apportion.search.tables.linear import certify_minimum, minimise_with_bound, relaxed_bound
from apportion.search.tables.reweight import flatten
from apportion.search.tables.shrink import ReducedEnergy, shrink, unreduced
from apportion.work_clock import work_seconds


def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small enough to be tried shrinks to nothing, mostly; here it does not."""
    monkeypatch.setattr(linear, "shrink", unreduced)


def local_polytope(energy: Energy) -> float:
    """The relaxation as textbooks have it: a probability for each cell of each table."""
    at = np.cumsum([0, *energy.sizes])
    cost = np.concatenate([*energy.unary, *(t.reshape(-1) for t in energy.pairs.values())])
    rows: list[np.ndarray] = []
    right: list[float] = []
    for k, n in enumerate(energy.sizes):
        rows.append(np.isin(np.arange(len(cost)), np.arange(at[k], at[k] + n)).astype(float))
        right.append(1.0)
    begin = int(at[-1])
    for (a, b), table in energy.pairs.items():
        cells = np.arange(begin, begin + table.size).reshape(table.shape)
        for variable, lines in ((a, cells), (b, cells.T)):
            for value, line in enumerate(lines):
                row = np.zeros(len(cost))
                row[line] = 1.0
                row[at[variable] + value] = -1.0
                rows.append(row)
                right.append(0.0)
        begin += table.size
    found = linprog(cost, A_eq=np.array(rows), b_eq=right, method="highs")
    assert found.status == 0
    return float(found.fun)


def mild(seed: int) -> Energy:
    """A random energy whose entries are of like size, so that solvers agree to many digits."""
    energy, rng = Energy(), np.random.default_rng(seed)
    for _ in range(rng.integers(2, 6)):
        energy.variable(rng.integers(0, 3, size=rng.integers(1, 4)).astype(float))
    count = len(energy.sizes)
    for _ in range(2 * count):
        a, b = rng.choice(count, 2, replace=False)
        table = rng.integers(0, 4, size=(energy.sizes[a], energy.sizes[b])).astype(float)
        energy.pair(int(a), int(b), table)
    return energy


@settings(max_examples=cases(60))
@given(seed=seeds)
def test_savings_have_the_value_of_the_textbook_program(seed: int) -> None:
    energy = mild(seed)
    with pytest.MonkeyPatch.context() as patch:
        unshrunk(patch)
        found = relaxed_bound(energy)
    assert found.finished
    assert found.value == pytest.approx(local_polytope(energy), abs=1e-6)


@settings(max_examples=cases(100))
@given(seed=seeds)
def test_a_table_is_its_rows_and_columns_less_its_savings(seed: int) -> None:
    energy = random_energy(seed)
    for table in energy.pairs.values():
        saving = linear._savings_table(table)
        assert (saving.cell_saving > 0).all()
        made = saving.rows[:, None] + saving.columns[None, :]
        by_inequality = {
            (r, c): s
            for r, c, s in zip(saving.cell_row, saving.cell_column, saving.cell_saving, strict=True)
        }
        for x, row in enumerate(saving.row):
            for y, column in enumerate(saving.column):
                made[x, y] -= by_inequality.get((row, column), 0.0)
        assert np.allclose(made, table, rtol=1e-9, atol=1e-2)


@settings(max_examples=cases(150))
@given(seed=seeds, kind=st.sampled_from(["any", "tree", "ring"]), shrunk=st.booleans())
def test_a_bound_is_never_above_the_minimum(seed: int, kind: str, shrunk: bool) -> None:
    energy = random_energy(seed, 5, kind)
    with pytest.MonkeyPatch.context() as patch:
        if not shrunk:
            unshrunk(patch)
        found = relaxed_bound(energy)
    _, least = try_all_choices(energy)
    assert found.value <= least
    if found.integral is not None:
        assert near(energy.value(found.integral), least)
    if kind == "tree":
        assert near(found.value, least) or abs(least) < 1e3  # digits lost to entries of 1e9


def test_on_frustrated_energies_the_relaxation_has_a_gap() -> None:
    energy = frustrated(5, 2)
    found = relaxed_bound(energy)
    assert found.integral is None
    assert found.value == pytest.approx(local_polytope(energy), abs=1e-6)
    assert found.value < try_all_choices(energy)[1] - 1


def test_wrong_duals_make_a_bound_worse_but_never_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = frustrated(5, 3)
    _, least = try_all_choices(energy)
    right = relaxed_bound(energy).value

    def off(*args: object, **options: object) -> object:
        result = linprog(*args, **options)
        result.ineqlin.marginals = result.ineqlin.marginals * 1.7 - 0.1
        return result

    monkeypatch.setattr(linear, "linprog", off)
    monkeypatch.setattr(linear, "POLISHING", 0)
    assert relaxed_bound(energy).value < right - 0.01
    assert right <= least


def test_a_bound_past_its_deadline_is_that_of_messages() -> None:
    energy = frustrated(5, 3)
    found = relaxed_bound(energy, work_seconds() - 1)
    assert not found.finished
    assert 0 <= found.value <= try_all_choices(energy)[1]


def test_equal_tables_are_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = linear._savings_table
    monkeypatch.setattr(linear, "_savings_table", lambda table: seen.append(1) or real(table))
    energy = frustrated(6, 3)
    linear._linear_program(energy, flatten(energy))
    assert len(seen) == 1


# The integer program


@settings(max_examples=cases(100))
@given(seed=seeds, cap=st.sampled_from([1, 10**6]))
def test_solving_finds_the_minimum_and_proves_it(seed: int, cap: int) -> None:
    energy = mild(seed)
    found = minimise_with_bound(energy, cap=cap)
    _, least = try_all_choices(energy)
    assert found.value == energy.value(found.choice) == pytest.approx(least)
    assert least - 1e-3 <= found.bound <= least
    assert found.finished


@pytest.mark.slow
@pytest.mark.parametrize("cap", [1, 10**6])
def test_solving_closes_the_gap_of_a_frustrated_energy(cap: int) -> None:
    energy = frustrated(7, 3)
    found = minimise_with_bound(energy, cap=cap)
    least = eliminate(energy)[1]
    assert found.value == pytest.approx(least)
    assert least - 1e-3 <= found.bound <= least


@settings(max_examples=cases(50))
@given(seed=seeds)
def test_solving_is_never_worse_than_its_start(seed: int) -> None:
    energy, rng = mild(seed), Random(seed)
    start = [rng.randrange(n) for n in energy.sizes]
    late = minimise_with_bound(energy, work_seconds() - 1, start)
    assert late.value <= energy.value(start)
    assert late.bound <= try_all_choices(energy)[1]


def test_a_program_that_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "COLUMNS", 3)
    energy = frustrated(7, 3)
    assert not relaxed_bound(energy).finished
    found = minimise_with_bound(energy, cap=1)
    assert not found.finished
    assert found.bound <= eliminate(energy)[1] <= found.value


# Certificates


@settings(max_examples=cases(60))
@given(seed=seeds)
def test_a_certificate_of_the_minimum_has_no_gap(seed: int) -> None:
    energy = mild(seed)
    _, least = try_all_choices(energy)
    found = certify_minimum(energy, least)
    assert found.bound <= least
    assert found.gap < 1e-6
    assert certify_minimum(energy, least + 1).gap == pytest.approx(1 / (least + 1), abs=1e-6)


@pytest.mark.slow
def test_a_certificate_names_what_closed_the_gap() -> None:
    chain = random_energy(1, 6, "tree")
    assert certify_minimum(chain, eliminate(chain)[1]).how == "message passing"
    energy = frustrated(7, 3)
    assert certify_minimum(energy, eliminate(energy)[1]).how == "elimination"
    assert certify_minimum(energy, eliminate(energy)[1], cap=1).how == "integer program"


def test_what_is_left_of_nothing_is_nothing() -> None:
    left: ReducedEnergy = shrink(Energy())
    assert (left.variables, left.constant) == ((), 0.0)
    assert relaxed_bound(Energy()).value == 0.0
    assert minimise_with_bound(Energy()).choice == []
    assert certify_minimum(Energy(), 0.0).gap == 0.0
