"""linear: the relaxation of a sum of tables to a linear program, and the integer program, on HiGHS.

In: an Energy. Out: a proven lower bound, or the minimum with one, or a Certificate for a value.

A table is written as what its rows and columns cost at most, less what some of its cells save:

    t[x, y] = r[x] + c[y] - s[x, y],   s >= 0, mostly 0

With p_i[v] in [0, 1] for "variable i has value v", and q_e[x, y] for the cells that save something,

    minimise    sum_i (u_i + its r and c) p_i  -  sum_e s_e q_e
    subject to  sum_v p_i[v] = 1
                sum_y q_e[x, y] <= sum of p_a over rows like x,   for each kind of row that saves
                sum_x q_e[x, y] <= sum of p_b over columns like y

which has the value of the usual program with a variable for each cell of each table (savings are
not negative, so probability that is left over may go anywhere), and a third of its columns.

The duals of the inequalities are costs to move (reweight.py): a_e = dual of the row - r, and
likewise b_e. What these prove is worked out from them in plain sums, so the solver's tolerances
cannot make a bound too high.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

from apportion.columns import Bools, Floats, Ints
from apportion.search.tables.ascend import (
    BoundedSolution,
    best_mixture,
    goal,
    narrow_by_messages,
    pass_messages,
)
from apportion.search.tables.copies_bound import tighten
from apportion.search.tables.eliminate import CAP, Energy, TooWide, eliminate
from apportion.search.tables.reweight import (
    FlatEnergy,
    flatten,
    move_costs,
    prove_bound,
    run_passes,
)
from apportion.search.tables.shrink import ReducedEnergy, rounding_error, shrink
from apportion.work_clock import work_seconds

SHARPER = 1e3  # times the costs of an integer program, so that tolerances weigh less
TOLERANCE = 1e-6  # of the solver, per column that is 1
POLISHING = 3  # rounds of passes that take up what the solver's tolerances left
MESSAGES = "message passing"
ROUNDS = 100  # of passes before variables are split
SPLIT_CAP = 1_000_000  # entries of a table with variables split
STEPS = 40  # towards agreement of split variables
SHARE = 0.6  # of the time left, for these steps; the rest is for the integer program
COLUMNS = 2_000_000  # a program of more is not tried


@dataclass(frozen=True, slots=True)
class RelaxedBound:
    """A proven lower bound.

    integral  a choice that attains it, if the relaxation has found one
    seconds   of CPU
    finished  whether the program was solved; else the bound is that of message passing
    """

    value: float
    integral: list[int] | None
    seconds: float
    finished: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """That a value is within `gap` (a share of it) of the minimum, and what proved it."""

    value: float
    bound: float
    gap: float
    how: str


@dataclass(frozen=True, slots=True)
class _SavingsTable:
    """A table as rows, columns and savings. `row` is the inequality of each value of the first
    variable, -1 for none, `column` those of the second; a cell is in one of each."""

    rows: Floats
    columns: Floats
    row: Ints
    column: Ints
    cell_row: Ints
    cell_column: Ints
    cell_saving: Floats
    count: int


@dataclass(frozen=True, slots=True)
class _LinearProgram:
    """Columns are the values of all variables, then cells that save; `scale` divides the costs.

    first_row  of each pair
    """

    cost: Floats
    upper: csr_matrix
    equal: csr_matrix
    scale: float
    values: int
    savings: list[_SavingsTable]
    first_row: Ints


# The program


def _savings_table(table: Floats) -> _SavingsTable:
    one, other = _rows_columns_savings(table), _rows_columns_savings(table.T)
    if (other[2] > 0).sum() < (one[2] > 0).sum():
        one = (other[1], other[0], other[2].T)
    rows, columns, savings = one
    kinds, row = np.unique(savings, axis=0, return_inverse=True)
    core, column = np.unique(kinds, axis=1, return_inverse=True)
    cell_row, cell_column = np.nonzero(core)
    used_rows, cell_of_row = np.unique(cell_row, return_inverse=True)
    used_columns, cell_of_column = np.unique(cell_column, return_inverse=True)
    count = len(used_rows) + len(used_columns)
    return _SavingsTable(
        rows,
        columns,
        _numbered(row, used_rows, 0),
        _numbered(column, used_columns, len(used_rows)),
        cell_of_row.astype(np.int64),
        cell_of_column.astype(np.int64) + len(used_rows),
        core[cell_row, cell_column],
        count,
    )


def _rows_columns_savings(table: Floats) -> tuple[Floats, Floats, Floats]:
    rows = table.max(axis=1)
    columns = (table - rows[:, None]).max(axis=0)
    savings = rows[:, None] + columns[None, :] - table
    savings[savings < 1e-12 * np.abs(table).max(initial=0.0)] = 0.0
    return rows, columns, savings


def _numbered(kind: npt.NDArray[np.intp], used: npt.NDArray[np.intp], first: int) -> Ints:
    """For each value the number of its kind among those used, -1 if it is none of them."""
    number = np.full(int(max(kind.max(initial=0), used.max(initial=0))) + 1, -1, np.int64)
    number[used] = np.arange(first, first + len(used))
    return number[kind.reshape(-1)]


def _linear_program(energy: Energy, flat: FlatEnergy) -> _LinearProgram:
    known: dict[int, _SavingsTable] = {}
    savings, first_row = [], np.zeros(len(flat.first), np.int64)
    cost = flat.unary.copy()
    cells, rows, columns, signs = [cost], list[Ints](), list[Ints](), list[Floats]()
    height, width = 0, len(cost)
    for e, (a, b) in enumerate(zip(flat.first.tolist(), flat.second.tolist(), strict=True)):
        place = int(flat.table_at[e])
        if place not in known:
            known[place] = _savings_table(flat.table(e))
        s = known[place]
        savings.append(s)
        first_row[e] = height
        cost[flat.start[a] : flat.start[a + 1]] += s.rows
        cost[flat.start[b] : flat.start[b + 1]] += s.columns
        own_a, own_b = np.flatnonzero(s.row >= 0), np.flatnonzero(s.column >= 0)
        number = width + np.arange(len(s.cell_saving))
        rows.append(
            height + np.concatenate([s.cell_row, s.cell_column, s.row[own_a], s.column[own_b]])
        )
        columns.append(
            np.concatenate([number, number, flat.start[a] + own_a, flat.start[b] + own_b])
        )
        signs.append(np.repeat([1.0, -1.0], [2 * len(number), len(own_a) + len(own_b)]))
        cells.append(-s.cell_saving)
        height += s.count
        width += len(number)
    total = np.concatenate(cells)
    scale = float(np.abs(total).max(initial=0.0)) or 1.0
    where = (_concatenate(rows), _concatenate(columns))
    upper = csr_matrix((np.concatenate([*signs, np.empty(0)]), where), (height, width))
    of = np.repeat(np.arange(len(energy.sizes)), energy.sizes)
    equal = csr_matrix((np.ones(len(of)), (of, np.arange(len(of)))), (len(energy.sizes), width))
    return _LinearProgram(total / scale, upper, equal, scale, len(cost), savings, first_row)


def _concatenate(parts: list[Ints]) -> Ints:
    return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)


# The relaxation


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """A solution of the relaxation: probabilities, and the costs that its duals move, in `flat`."""

    probabilities: Floats
    flat: FlatEnergy


def _relax(energy: Energy, deadline: float | None) -> _Relaxation | None:
    """None if it is too large or the time does not suffice."""
    flat = flatten(energy)
    made = _linear_program(energy, flat)
    left = _seconds_left(deadline)
    if len(made.cost) > COLUMNS or (left is not None and left <= 0):
        return None
    result = linprog(
        made.cost,
        made.upper,
        np.zeros(made.upper.shape[0]),
        made.equal,
        np.ones(made.equal.shape[0]),
        method="highs-ds",
        options={} if left is None else {"time_limit": left},
    )
    if result.status != 0:
        return None
    duals = np.maximum(-result.ineqlin.marginals, 0.0) * made.scale
    for e, s in enumerate(made.savings):
        own = np.append(duals[made.first_row[e] : made.first_row[e] + s.count], 0.0)
        move_costs(flat, e, own[s.row] - s.rows, own[s.column] - s.columns)
    return _Relaxation(result.x[: made.values], flat)


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - work_seconds()


def relaxed_bound(energy: Energy, deadline: float | None = None) -> RelaxedBound:
    """The bound of the relaxation. `deadline` is a moment of `work_seconds`; if it passes, or
    the program is too large, the bound is that of message passing."""
    began = time.process_time()
    left = shrink(energy)
    if not left.variables:
        choice = left.lift([])
        value = min(left.constant - left.margin, goal(energy.value(choice)))
        return RelaxedBound(value, choice, time.process_time() - began, True)
    relaxed = _relax(left.energy, deadline)
    if relaxed is None:
        quick = pass_messages(energy, deadline, 20)
        return RelaxedBound(quick.bound, None, time.process_time() - began, False)
    run_passes(relaxed.flat, POLISHING)
    value = left.constant - left.margin + prove_bound(left.energy, relaxed.flat).bound
    choice = left.lift(_most_probable(left.energy, relaxed.probabilities))
    attained = energy.value(choice)
    integral = choice if value >= goal(attained) else None
    return RelaxedBound(min(value, attained), integral, time.process_time() - began, True)


def _most_probable(energy: Energy, probabilities: Floats) -> list[int]:
    """Each variable at its most probable value."""
    ends = np.cumsum([0, *energy.sizes])
    return [int(probabilities[a:b].argmax()) for a, b in pairwise(ends)]


# The integer program


def minimise_with_bound(
    energy: Energy,
    deadline: float | None = None,
    start: Sequence[int] | None = None,
    cap: int = CAP,
    report: Callable[[float, float], None] | None = None,
) -> BoundedSolution:
    """The best choice found by the deadline, never worse than `start`, and a proven bound.

    Messages first; of what they leave undecided, elimination if no table has more than `cap`
    entries, else with variables copied (copies_bound.py), and then the integer program, whose bound
    is the solver's, less its tolerances. `report` is called with the best value and the bound as
    they change.
    """
    return _minimise_with_bound(energy, deadline, start, cap, report)[0]


def _minimise_with_bound(
    energy: Energy,
    deadline: float | None,
    start: Sequence[int] | None,
    cap: int,
    report: Callable[[float, float], None] | None,
) -> tuple[BoundedSolution, str]:
    """As `solve`, and what came last."""
    solved, left = narrow_by_messages(energy, deadline, start=start, report=report)
    if left is None or solved.optimal or not solved.finished:
        return solved, MESSAGES
    left = left.reduced_to(shrink(left.energy))
    try:
        picks, least = eliminate(left.energy, cap)
    except TooWide:
        solved = _tighten_by_copies(energy, solved, left, deadline, cap, report)
        if solved.optimal:
            return solved, "split variables"
        return _with_solution(
            energy, solved, left, _solve_integers(left, deadline)
        ), "integer program"
    found = _IntegerSolution(picks, least - rounding_error(left.energy), True)
    return _with_solution(energy, solved, left, found), "elimination"


def _tighten_by_copies(
    energy: Energy,
    solved: BoundedSolution,
    left: ReducedEnergy,
    deadline: float | None,
    cap: int,
    report: Callable[[float, float], None] | None,
) -> BoundedSolution:
    """A better bound by elimination with variables split, and better choices: mixtures of those
    that are met."""
    flat = flatten(left.energy)
    run_passes(flat, ROUNDS)
    base = left.constant - left.margin
    keep = [np.zeros(n, np.bool_) for n in left.energy.sizes]
    _mark(keep, left.picks(solved.choice))
    seconds = _seconds_left(deadline)
    end = None if seconds is None else work_seconds() + SHARE * seconds
    best = solved.value - left.constant
    for count, step in enumerate(tighten(left.energy, flat, best, min(cap, SPLIT_CAP))):
        for picks in step.choices:
            _mark(keep, picks)
        choices = [left.lift(picks) for picks in step.choices]
        mixed = best_mixture(left, keep)
        solved = _with_best_of(energy, solved, [*choices, mixed] if mixed else choices)
        solved = replace(
            solved, bound=max(solved.bound, min(base + step.bound, goal(solved.value)))
        )
        if report is not None:
            report(solved.value, solved.bound)
        if solved.optimal or count == STEPS or (end is not None and work_seconds() > end):
            break
    return solved


def _mark(keep: list[Bools], picks: Sequence[int]) -> None:
    for marks, pick in zip(keep, picks, strict=True):
        if pick >= 0:
            marks[pick] = True


def _with_best_of(
    energy: Energy, solved: BoundedSolution, choices: Sequence[list[int]]
) -> BoundedSolution:
    """The same, or the best of the choices if that is better."""
    best = min(choices, key=energy.value)
    value = energy.value(best)
    return replace(solved, choice=best, value=value) if value < solved.value else solved


def _with_solution(
    energy: Energy, solved: BoundedSolution, left: ReducedEnergy, found: _IntegerSolution
) -> BoundedSolution:
    """The better of what was known and what was found in what was left, and the better bound."""
    choice, value = solved.choice, solved.value
    if found.picks is not None:
        lifted = left.lift(found.picks)
        if energy.value(lifted) < value:
            choice, value = lifted, energy.value(lifted)
    inside = left.constant - left.margin + found.bound
    proven = max(solved.bound, min(inside, goal(value)))
    return BoundedSolution(choice, value, proven, found.finished)


@dataclass(frozen=True, slots=True)
class _IntegerSolution:
    picks: list[int] | None
    bound: float
    finished: bool


def _solve_integers(left: ReducedEnergy, deadline: float | None) -> _IntegerSolution:
    energy = left.energy
    flat = flatten(energy)
    made = _linear_program(energy, flat)
    seconds = _seconds_left(deadline)
    if len(made.cost) > COLUMNS or (seconds is not None and seconds <= 0):
        return _IntegerSolution(None, -math.inf, False)
    result = milp(
        made.cost * SHARPER,
        integrality=np.arange(len(made.cost)) < made.values,
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(made.upper, -np.inf, 0),
            LinearConstraint(made.equal, 1, 1),
        ],
        options={"mip_rel_gap": 0.0, **({} if seconds is None else {"time_limit": seconds})},
    )
    least = -math.inf
    if result.mip_dual_bound is not None:
        slop = TOLERANCE * (len(energy.sizes) + len(flat.first))
        least = (float(result.mip_dual_bound) - slop) * made.scale / SHARPER
    if result.x is None:
        return _IntegerSolution(None, least, False)
    return _IntegerSolution(_most_probable(energy, result.x), least, result.status == 0)


def certify_minimum(
    energy: Energy, value: float, deadline: float | None = None, cap: int = CAP
) -> Certificate:
    """How far a value is from the minimum at most: by the cheapest proof that closes the gap, or
    else the best one."""
    found = pass_messages(energy, deadline)
    best, how = found.bound, MESSAGES
    if best < goal(value):
        relaxed = relaxed_bound(energy, deadline)
        if relaxed.value > best:
            best, how = relaxed.value, "linear program"
    if best < goal(value):
        solved, last = _minimise_with_bound(energy, deadline, found.choice, cap, None)
        if solved.bound > best:
            best, how = solved.bound, last
    best = min(best, value)
    gap = (value - best) / abs(value) if value else value - best
    return Certificate(value, best, gap, how)
