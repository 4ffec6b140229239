"""milp: placement as a mixed-integer linear program, solved by HiGHS, with a proven bound.

In: a ThroughputObjective or a LatencyObjective. Out: a placement and a bound that no placement is
below. A search comes first, since HiGHS takes long to find what annealing finds at once; the solver
is there for the bound.

Variables of throughput (Tarnawski et al. 2020), all loads as shares of the best one known:

    x[u, d]        unit u is on device d; binary
    in, out[t, d]  transfer t comes to d, or leaves it: at least x[reader, d] - x[source, d], and at
                   least x[source, d] - x[reader, d]
    L              at least every load; minimised

Interchangeable devices would each have the same program: of the units by falling work, the first is
on the first device of its class, the second on one of the first two, and so on.

Contiguous placements have positions in place of devices, and z[u, p]: unit u is at position p or
before. An edge between units says that z of the first is at least that of the second. t[p, c] says
that a device of class c is at position p, and bounds its load only then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from apportion.columns import Floats, Ints
from apportion.place.contraction import Contraction, contraction
from apportion.place.ideals import block_load, device_classes, dp_ideals
from apportion.place.load_search import load_search
from apportion.place.max_load import NO_LIMIT, LoadColumns, ThroughputObjective, work_bound
from apportion.place.objective import Objective, PlacementResult, Report

SEARCH_SHARE = 0.3  # of the budget goes to the search before
SEARCH_SECONDS = 12.0  # at most
TOLERANCE = 1e-6  # of the bound: what HiGHS may be wrong by
MOST_VARIABLES = 60_000


@dataclass
class LinearProgram:
    """Rows and columns of a program as they are added. All variables are at least 0."""

    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[tuple[list[int], list[float], float, float]] = field(default_factory=list)

    def add(self, upper: float = np.inf, whole: bool = False) -> int:
        """A new variable."""
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.upper) - 1

    def at_least(self, terms: Sequence[tuple[int, float]], low: float) -> None:
        """The sum of terms (variable, factor) is at least so much."""
        self.rows.append(([v for v, _ in terms], [f for _, f in terms], low, np.inf))

    def equal(self, terms: Sequence[tuple[int, float]], value: float) -> None:
        """The sum of terms is this."""
        self.rows.append(([v for v, _ in terms], [f for _, f in terms], value, value))

    def solve(self, target: int, seconds: float) -> tuple[Floats | None, float]:
        """Minimises one variable: the best values found, if any, and a bound on it."""
        data = np.array([f for _, factors, _, _ in self.rows for f in factors])
        column = np.array([v for variables, _, _, _ in self.rows for v in variables])
        start = np.cumsum([0] + [len(variables) for variables, _, _, _ in self.rows])
        matrix = csr_array((data, column, start), shape=(len(self.rows), len(self.upper)))
        matrix.sum_duplicates()  # HiGHS wants each variable once in a row
        low, high = (np.array([row[side] for row in self.rows]) for side in (2, 3))
        goal = np.zeros(len(self.upper))
        goal[target] = 1.0
        found = milp(
            goal,
            integrality=np.array(self.whole),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 0.0},
        )
        bound = found.mip_dual_bound
        return found.x, 0.0 if bound is None or not np.isfinite(bound) else float(bound)


def milp_placement(
    objective: Objective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best placement that a search and HiGHS find, with the bound of HiGHS."""
    if not isinstance(objective, ThroughputObjective):
        from apportion.place.latency_program import latency_milp

        return latency_milp(objective, budget=budget, seed=seed, starts=starts, report=report)
    until = time.perf_counter() + budget
    contiguous = contiguous or objective.contiguous
    share = min(budget * SEARCH_SHARE, SEARCH_SECONDS)
    if contiguous and not objective.apart:
        first = dp_ideals(objective, budget=share, contiguous=True)
    elif contiguous:
        raise ValueError("milp has no contiguous placements with separate maxima of both passes")
    else:
        first = load_search(objective, budget=share, seed=seed, starts=starts, report=report)
    value = objective.evaluate(first.placement).value
    bound = first.lower_bound or 0.0
    if bound >= value * (1 - TOLERANCE):
        return first
    if contiguous:
        it = contraction(objective.columns, objective.edges)
    else:
        it = contraction(objective.columns, np.zeros((0, 2), np.int64))
    if not it.safe:  # memory may tear apart what was merged
        same = np.arange(len(objective.columns.resident))
        it = Contraction(same, objective.columns, objective.edges, True)
    scale = value * objective.problem.tick
    make = _free_program
    program, target, where = make(it, scale)
    notes = first.notes
    if len(program.upper) > MOST_VARIABLES:
        notes = (*notes, f"{len(program.upper)} variables are too many for HiGHS: search alone")
        return PlacementResult(first.placement, bound, notes, first.curve, first.figures)
    values, proven = program.solve(target, until - time.perf_counter())
    bound = max(bound, min(proven * (1 - TOLERANCE), 1.0) * value)
    best = first.placement
    if values is not None:
        place = where(values)[it.block]
        if objective.score(place) < objective.score(best):
            best = place
    figures = {**first.figures, "variables": float(len(program.upper))}
    value = objective.evaluate(best).value
    return PlacementResult(best, min(bound, value), notes, first.curve, figures)


def _free_program(it: Contraction, scale: float):
    """The program over all placements: it, the variable of the largest load, and how to read a
    placement of blocks from its values."""
    c, program = it.columns, LinearProgram()
    count, k = c.allowed.shape
    allowed = c.allowed & _first_devices(c)
    x = [[program.add(float(allowed[u, d]), True) for d in range(k)] for u in range(count)]
    for unit in range(count):
        program.equal([(v, 1.0) for v in x[unit]], 1.0)
    loads = _unit_loads(program, c, x, scale)
    for row, home in enumerate(c.source.tolist()):
        readers = c.reader[c.reader_start[row] : c.reader_start[row + 1]].tolist()
        for at in range(k):
            if c.price[row, at]:
                terms = _crossing(program, x[home][at], [x[r][at] for r in readers])
                loads[c.part[row]][at] += [(v, c.price[row, at] / scale) for v in terms]
    _memory_rows(program, c, x)
    target = _largest(program, loads, c.apart)
    table = np.array(x).reshape(count, k)
    return program, target, lambda values: values[table].argmax(axis=1).astype(np.int64)


def _crossing(program: LinearProgram, source: int, readers: list[int]) -> tuple[int, int]:
    """Variables of whether a transfer comes in and whether it goes out."""
    comes, goes = program.add(1.0), program.add(1.0)
    for reader in readers:
        program.at_least([(comes, 1.0), (reader, -1.0), (source, 1.0)], 0.0)
        program.at_least([(goes, 1.0), (source, -1.0), (reader, 1.0)], 0.0)
    return comes, goes


def _unit_loads(program, c, x, scale):
    k = c.allowed.shape[1]
    loads = [[[] for _ in range(k)] for _ in range(2)]
    for unit, row in enumerate(x):
        for at, variable in enumerate(row):
            for part in range(2):
                if c.allowed[unit, at] and c.work[unit, at, part]:
                    loads[part][at].append((variable, c.work[unit, at, part] / scale))
    return loads


def _largest(program, loads, apart: int) -> int:
    if not apart:
        target = program.add()
        for first, second in zip(*loads, strict=True):
            program.at_least([(target, 1.0)] + [(v, -f) for v, f in first + second], 0.0)
        return target
    target, parts = program.add(), (program.add(), program.add())
    for part in range(2):
        for terms in loads[part]:
            program.at_least([(parts[part], 1.0)] + [(v, -f) for v, f in terms], 0.0)
    program.equal([(target, 1.0), (parts[0], -1.0), (parts[1], -1.0)], 0.0)
    return target


def _memory_rows(program, c: LoadColumns, x) -> None:
    for at in range(c.allowed.shape[1]):
        if c.limit[at] < NO_LIMIT and c.resident.sum() > c.limit[at]:
            room = max(int(c.limit[at]), 1)
            terms = [(x[u][at], -c.resident[u] / room) for u in np.flatnonzero(c.resident)]
            program.at_least(terms, -1.0 if c.limit[at] else 0.0)


def _first_devices(c: LoadColumns):
    """Of interchangeable devices, which ones a unit needs to try: see above."""
    allowed = np.ones(c.allowed.shape, np.bool_)
    _, groups = device_classes(c)
    order = np.argsort(-c.work.sum(axis=(1, 2)), kind="stable")
    for group in groups:
        for rank, unit in enumerate(order[: len(group)].tolist()):
            allowed[unit, group[rank + 1 :]] = False
    return allowed
