"""milp: placement as a mixed-integer linear program, solved by HiGHS, with a proven bound.

In: a ThroughputObjective or a LatencyObjective. Out: a placement and a bound that no placement is
below. A search comes first, since HiGHS takes long to find what annealing finds at once; the solver
is there for the bound.

Variables of throughput (Tarnawski et al. 2020), all loads as shares of the best one known:

    x[u, d]        unit u is on device d; binary
    in, out[t, d]  transfer t comes to d, or leaves it: at least x[reader, d] - x[source, d], and at
                   least x[source, d] - x[reader, d]
    L              at least every load; minimised

A unit is not tried on a device where it alone takes longer than the best placement known. Of
interchangeable devices, the unit with most work is on the first, the next on one of the first two,
and so on. Where the bound is due to long units of which one device must have several, the numbers
of them on such devices fall instead: whole numbers, of which the first is then large enough.

Contiguous placements have positions in place of devices, and z[u, p]: unit u is at position p or
before. An edge between units says that z of the first is at least that of the second. t[p, c] says
that a device of class c is at position p, and bounds its load only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.loads.contraction import Contraction, contraction
from apportion.place.loads.ideals import device_classes, dp_ideals, first_devices
from apportion.place.loads.integer_program import IntegerProgram, PlacementProgram, crossing
from apportion.place.loads.latency_program import latency_program
from apportion.place.loads.latency_search import latency_search
from apportion.place.loads.load_search import load_search
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import (
    NO_LIMIT,
    LoadColumns,
    ThroughputObjective,
    crowded_units,
    work_bound,
    worst_load,
)
from apportion.work_clock import work_seconds

SEARCH_SHARE = 0.2  # of the budget goes to the search before
SEARCH_SECONDS = 5.0  # at most
LARGE = 2500  # variables, from which on the search is the better use of time
LONG_SHARE = 0.5  # of the budget goes to it then
TOLERANCE = 1e-6  # of the bound: what HiGHS may be wrong by
MOST_VARIABLES = 60_000


def milp_placement(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best placement that a search and HiGHS find, with the bound of HiGHS."""
    until = work_seconds() + budget
    contiguous = contiguous or getattr(objective, "contiguous", False)
    search = partial(
        _search(objective, contiguous), objective, contiguous=contiguous, seed=seed, report=report
    )
    first = search(budget=min(budget * SEARCH_SHARE, SEARCH_SECONDS), starts=starts)
    made = _unless_proven(objective, first, contiguous)
    count = 0 if made is None else len(made.program.upper)
    if count > LARGE:
        more = partial(search, seed=seed + 1)
        first = more(budget=budget * LONG_SHARE, starts=[*starts, first.placement])
        made = _unless_proven(objective, first, contiguous)
    if made is None or count > MOST_VARIABLES:
        note = f"{count} variables are too many for HiGHS: this is by search alone"
        return first if made is None else replace(first, notes=(*first.notes, note))
    try:
        values, proven = made.program.solve(made.target, until - work_seconds())
    except KeyboardInterrupt:
        return replace(first, interrupted=True)
    proven *= (1 - TOLERANCE) * made.scale / objective.problem.tick
    best, bound = first.placement, first.lower_bound or 0.0
    if values is not None and objective.score(place := made.where(values)) < objective.score(best):
        best = place
    it = objective.evaluate(best)
    bound = max(bound, proven)
    figures = {**first.figures, "variables": float(count)}
    notes = () if it.feasible else first.notes
    bound = min(bound, it.value) if it.feasible else bound
    return PlacementResult(best, bound, notes, first.curve, figures)


def _search(objective: PlacementObjective, contiguous: bool) -> Callable[..., PlacementResult]:
    """What comes before the solver."""
    if isinstance(objective, LatencyObjective):
        return latency_search
    if not isinstance(objective, ThroughputObjective):
        raise ValueError("milp is for --objective throughput or latency")
    return dp_ideals if contiguous else load_search


def _unless_proven(
    objective: PlacementObjective, found: PlacementResult, contiguous: bool
) -> PlacementProgram | None:
    """The program of an objective, if it has one and there is something left to prove."""
    it = objective.evaluate(found.placement)
    if found.interrupted:
        return None
    if it.feasible and (found.lower_bound or 0.0) >= it.value * (1 - TOLERANCE):
        return None
    scale = max(it.value * objective.problem.tick, 1.0)
    return _program(objective, contiguous, scale, it.feasible)


def _program(
    objective: PlacementObjective, contiguous: bool, scale: float, feasible: bool
) -> PlacementProgram | None:
    """The program of an objective, if it has one. `scale` is a placement's ticks, whose value is 1,
    and no placement of interest is above if that placement is `feasible`."""
    if objective.problem.units * len(objective.problem.devices) > MOST_VARIABLES:
        return None
    if isinstance(objective, LatencyObjective):
        return latency_program(objective, scale, feasible) if objective.pieces == 1 else None
    assert isinstance(objective, ThroughputObjective)
    c, edges = objective.columns, objective.edges if contiguous else np.zeros((0, 2), np.int64)
    it = contraction(c, edges)
    if not it.safe:  # memory may tear apart what was merged
        it = Contraction(np.arange(len(c.resident)), c, edges, True)
    if contiguous:
        made = _contiguous_program(it, scale)
    else:
        made = _free_program(it, scale, scale if feasible else np.inf)
    return replace(made, where=lambda values: made.where(values)[it.block])


Variables = list[list[int]]
LoadTerms = list[list[list[tuple[int, float]]]]  # by part and device


def _free_program(it: Contraction, scale: float, known: float) -> PlacementProgram:
    """The program over all placements of at most `known` ticks."""
    c, program = it.columns, IntegerProgram()
    count, k = c.allowed.shape
    allowed = c.allowed & (c.work.sum(axis=2) <= known)
    crowd, bound = crowded_units(c, known * (1 + TOLERANCE))
    if bound <= work_bound(c):
        allowed, crowd = allowed & first_devices(c), crowd[:0]
    x = [[program.add(float(allowed[u, d]), True) for d in range(k)] for u in range(count)]
    for group in device_classes(c)[1] if len(crowd) else ():
        numbers = [program.add(whole=True) for _ in group]
        for number, at in zip(numbers, group, strict=True):
            program.equal([(number, 1.0), *((x[u][at], -1.0) for u in crowd)], 0.0)
        for one, other in pairwise(numbers):
            program.at_least([(one, 1.0), (other, -1.0)], 0.0)
    for row in x:
        program.equal([(v, 1.0) for v in row], 1.0)
    loads = _loads(program, c, x, range(k), scale)
    for at in range(k):
        if c.limit[at] < NO_LIMIT and c.resident.sum() > c.limit[at]:
            program.at_least(
                [(x[u][at], -share) for u, share in _shares(c)], -c.limit[at] / c.resident.sum()
            )
    target = _largest(program, loads, bool(c.apart))
    table = np.array(x).reshape(count, k)
    return PlacementProgram(program, target, scale, lambda values: _argmax(values[table]))


def _contiguous_program(it: Contraction, scale: float) -> PlacementProgram:
    """The program over placements whose devices are in an order."""
    c, program = it.columns, IntegerProgram()
    count, k = c.allowed.shape
    classes, groups = device_classes(c)
    many, positions = len(groups), range(k)
    x = [[program.add(1.0, True) for _ in positions] for _ in range(count)]
    kind = [[program.add(1.0, True) for _ in range(many)] for _ in positions]
    for row in (*x, *kind):
        program.equal([(v, 1.0) for v in row], 1.0)
    for number, group in enumerate(groups):
        program.at_least([(kind[p][number], -1.0) for p in positions], -float(len(group)))
    for one, other in it.edges.tolist():  # what is up to a position includes what it reads
        for last in range(k - 1):
            before = [(x[one][p], 1.0) for p in range(last + 1)]
            program.at_least([*before, *((x[other][p], -1.0) for p in range(last + 1))], 0.0)
    for unit, at in zip(*np.nonzero(~c.allowed[:, classes.device]), strict=True):
        for p in positions:
            program.at_least([(x[unit][p], -1.0), (kind[p][at], -1.0)], -1.0)
    target, most = program.add(), worst_load(c) / scale
    for number, device in enumerate(classes.device.tolist()):
        loads = _loads(program, c, x, [device] * k, scale)
        for p in positions:
            terms = [(v, -f) for v, f in loads[0][p] + loads[1][p]]
            program.at_least([(target, 1.0), (kind[p][number], -most), *terms], -most)
            if c.limit[device] < NO_LIMIT and c.resident.sum() > c.limit[device]:
                rest = 1.0 - c.limit[device] / c.resident.sum()
                held = [(x[u][p], -share) for u, share in _shares(c)]
                program.at_least([*held, (kind[p][number], -rest)], -1.0)
    tables = np.array(x).reshape(count, k), np.array(kind)

    def where(values: Floats) -> Ints:
        free = [list(group) for group in groups]
        device = np.array([free[at].pop() for at in _argmax(values[tables[1]])])
        found: Ints = device[_argmax(values[tables[0]])]
        return found

    return PlacementProgram(program, target, scale, where)


def _argmax(values: Floats) -> Ints:
    found: Ints = values.argmax(axis=1).astype(np.int64)
    return found


def _shares(c: LoadColumns) -> list[tuple[int, float]]:
    """Blocks with what they need of all memory that is needed."""
    total = float(c.resident.sum())
    return [(int(u), float(c.resident[u]) / total) for u in np.flatnonzero(c.resident)]


def _loads(
    program: IntegerProgram, c: LoadColumns, x: Variables, devices: Sequence[int], scale: float
) -> LoadTerms:
    """The load of each column of x, which is that device, or a position with a device like it."""
    loads: LoadTerms = [[[] for _ in devices] for _ in range(2)]
    for unit, row in enumerate(x):
        for column, at in enumerate(devices):
            for part in range(2):
                if c.allowed[unit, at] and c.work[unit, at, part]:
                    term = (row[column], float(c.work[unit, at, part]) / scale)
                    loads[part][column].append(term)
    for sent, home in enumerate(c.source.tolist()):
        readers = c.reader[c.reader_start[sent] : c.reader_start[sent + 1]].tolist()
        for column, at in enumerate(devices):
            if price := float(c.price[sent, at]) / scale:
                found = crossing(program, x[home][column], [x[r][column] for r in readers])
                loads[c.part[sent]][column] += [(v, price) for v in found]
    return loads


def _largest(program: IntegerProgram, loads: LoadTerms, apart: bool) -> int:
    """The variable that is minimised: at least every load, or the sum of the largest of both
    parts."""
    target = program.add()
    if not apart:
        for first, second in zip(*loads, strict=True):
            program.at_least([(target, 1.0), *((v, -f) for v, f in first + second)], 0.0)
        return target
    parts = program.add(), program.add()
    for part in range(2):
        for terms in loads[part]:
            program.at_least([(parts[part], 1.0), *((v, -f) for v, f in terms)], 0.0)
    program.equal([(target, 1.0), (parts[0], -1.0), (parts[1], -1.0)], 0.0)
    return target
