"""olla_order: the order of the lowest peak, a mixed-integer programme (OLLA, Steiner et al. 2022).

Part of the room memory. An OrderModel comes in, an OllaOrder goes out, with a bound that no order
is below. HiGHS solves it, within a time limit: an oracle for small steps.

Of OLLA's two parts this is the first, lifetimes; addresses are the allocator's here. One unit runs
at a time, so that for units u, memories m and times t the variables are

    d[u, t]  u has run when time t is over; whole numbers, rising with t; one more at each time
    a[m, t]  m is held at time t: at least d[maker, t] - d[user, t - 1] for each of its users
    peak     at least what is held at each time, which is minimised

and u may run at t only if those that it needs have run at t - 1. What a unit can run at is bounded
by how many come before and after it, so that most d are known. Updates do not wait for each other
here: what is found is measured with OrderModel, where they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.memory.order_model import OrderModel

Terms = dict[int, float]
ONE = -1  # the constant among the terms
GAP = 1e-6


@dataclass(frozen=True)
class OllaOrder:
    """What the solver found.

    order    of the units; None if it found none in time
    bound    bytes that no order holds less than at its peak, where updates do not wait
    optimal  whether it is proven that nothing is lower
    """

    order: tuple[int, ...] | None
    bound: int
    optimal: bool


def olla_order(model: OrderModel, seconds: float = 30.0, above: int | None = None) -> OllaOrder:
    """The order of the lowest peak, by a programme that is solved for so many seconds at most.
    `above` is a peak that some order is known to have."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    made = _OrderProgramme(model)
    made.build()
    which, columns, values = [], [], []
    for number, (terms, _) in enumerate(made.rows):
        for variable, value in terms.items():
            which.append(number)
            columns.append(variable)
            values.append(value)
    count = len(made.whole)
    matrix = csr_array((values, (which, columns)), shape=(len(made.rows), count))
    least = np.array([right for _, right in made.rows])
    highest = np.ones(count)
    highest[made.peak] = np.inf if above is None else above * made.scale * (1 + 1e-9)
    cost = np.zeros(count)
    cost[made.peak] = 1.0
    found = milp(
        cost,
        integrality=np.array(made.whole),
        bounds=Bounds(np.zeros(count), highest),
        constraints=LinearConstraint(matrix, least, np.inf),
        options={"time_limit": seconds, "mip_rel_gap": GAP},
    )
    low = 0.0 if found.mip_dual_bound is None else float(found.mip_dual_bound)
    bound = int(max(low, 0.0) / made.scale * (1 - GAP))
    if found.x is None:
        return OllaOrder(None, bound, False)
    return OllaOrder(made.order(found.x.tolist()), bound, found.status == 0)


class _OrderProgramme:
    """Variables are numbered as they come; rows are sums that are at least something."""

    def __init__(self, model: OrderModel) -> None:
        self.model, self.count = model, len(model.units)
        self.whole: list[int] = []
        self.rows: list[tuple[Terms, float]] = []
        total = model.base + sum(model.nbytes) + max(model.workspace, default=0)
        self.scale = 1000.0 / max(total, 1)
        self.soonest, self.latest = _spans(model)
        self.known: dict[tuple[int, int], int] = {}
        self.peak = self._new(0)

    def _new(self, whole: int) -> int:
        self.whole.append(whole)
        return len(self.whole) - 1

    def _done(self, unit: int, time: int) -> Terms:
        """d[unit, time]."""
        if time < self.soonest[unit]:
            return {}
        if time >= self.latest[unit]:
            return {ONE: 1.0}
        if (unit, time) not in self.known:
            self.known[unit, time] = self._new(1)
        return {self.known[unit, time]: 1.0}

    def _at_least(self, terms: Terms, right: float) -> None:
        right -= terms.pop(ONE, 0.0)
        terms = {variable: value for variable, value in terms.items() if value}
        if terms:
            self.rows.append((terms, right))

    def build(self) -> None:
        """Writes all rows."""
        for unit in range(self.count):
            for time in range(self.soonest[unit], self.latest[unit] + 1):
                here = self._done(unit, time)
                self._at_least(_added((1.0, here), (-1.0, self._done(unit, time - 1))), 0.0)
                for one in self.model.needs[unit]:
                    self._at_least(_added((1.0, self._done(one, time - 1)), (-1.0, here)), 0.0)
        for time in range(self.count):
            every = _added(*((1.0, self._done(unit, time)) for unit in range(self.count)))
            self._at_least(dict(every), time + 1.0)
            self._at_least({v: -x for v, x in every.items()}, -time - 1.0)
            self._hold(time)

    def _hold(self, time: int) -> None:
        """The peak is at least what is held at a time."""
        model = self.model
        terms: Terms = {self.peak: 1.0, ONE: -model.base * self.scale}
        for unit, extra in enumerate(model.workspace):
            runs = _added((1.0, self._done(unit, time)), (-1.0, self._done(unit, time - 1)))
            terms = _added((1.0, terms), (-extra * self.scale, runs))
        for memory, nbytes in enumerate(model.nbytes):
            terms = _added((1.0, terms), (-nbytes * self.scale, self._held(memory, time)))
        self._at_least(terms, 0.0)

    def _held(self, memory: int, time: int) -> Terms:
        """a[memory, time], or what it is known to be."""
        model, users = self.model, self.model.touched_by[memory]
        begun: Terms = {ONE: 1.0}
        if memory not in model.begins:
            maker = next((unit for unit in users if memory in model.makes[unit]), None)
            begun = {} if maker is None else self._done(maker, time)
        if not begun or memory in model.stays:
            return begun
        rows = [_added((1.0, begun), (-1.0, self._done(user, time - 1))) for user in users]
        rows = [row for row in rows if max(row.values(), default=0.0) > 0]
        if not rows:
            return {}
        if any(row == {ONE: 1.0} for row in rows):
            return {ONE: 1.0}
        variable = self._new(0)
        for row in rows:
            self._at_least(_added((1.0, {variable: 1.0}), (-1.0, row)), 0.0)
        return {variable: 1.0}

    def order(self, values: Sequence[float]) -> tuple[int, ...]:
        """The units in the order of a solution."""

        def when(unit: int) -> tuple[int, int]:
            for time in range(self.soonest[unit], self.latest[unit]):
                if values[self.known[unit, time]] > 0.5:
                    return time, unit
            return self.latest[unit], unit

        return tuple(sorted(range(self.count), key=when))


def _spans(model: OrderModel) -> tuple[list[int], list[int]]:
    """The first and the last time at which each unit can run."""
    count = len(model.units)
    before: list[set[int]] = [set() for _ in range(count)]
    after: list[set[int]] = [set() for _ in range(count)]
    for unit in range(count):  # as captured, so that what it needs comes first
        for one in model.needs[unit]:
            before[unit] |= before[one] | {one}
    for unit in range(count - 1, -1, -1):
        for one in model.followers[unit]:
            after[unit] |= after[one] | {one}
    return [len(some) for some in before], [count - 1 - len(some) for some in after]


def _added(*parts: tuple[float, Terms]) -> Terms:
    found: Terms = {}
    for factor, terms in parts:
        for variable, value in terms.items():
            found[variable] = found.get(variable, 0.0) + factor * value
    return {variable: value for variable, value in found.items() if value}
