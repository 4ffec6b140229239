"""checkmate: the Ops to recompute as a mixed-integer programme, as in Checkmate (Jain et al. 2020).

Part of the room memory. A StepModel and a limit in bytes come in; a CheckmateRecompute goes out,
with a bound that no set of Ops can be quicker than. HiGHS solves it, within a time limit.

Checkmate may compute anything at any stage, any number of times. Here the forward is computed in
order, and what is recomputed is so once, as recompute.py can do it. A stage is a backward Op that
reads what the forward made, with the copies before it. For units k (a forward Op and its views),
memories g that they make and stages s, the variables are

    r[k]     k is recomputed
    e[k, s]  the copy of k has been made when the Op of stage s runs; rises with s, at most r[k]
    o[g, t]  at time t the first memory of g is held because a copy still to be made reads it
    c[g, t]  at time t the copy of g is held for such a copy

and times t are the rows of the forward, the copies of each stage, and the backward's rows. What the
backward itself reads is held as long as it is read, first or copy. The programme minimises the
seconds of copies under the limit at all times. It may make a copy sooner than recompute.py does, so
that it is at least as good as any set: its bound holds for these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apportion.memory.step_model import BACKWARD_PHASE, FORWARD_PHASE, StepModel

Terms = dict[int, float]
"""Coefficients by variable; -1 is the constant."""
ONE = -1


@dataclass(frozen=True)
class CheckmateRecompute:
    """What the solver found.

    ops       to recompute; None if it found no set in time, or there is none
    bound     seconds of copies that no set within the limit takes less than
    optimal   whether it is proven that nothing is better, or that nothing fits
    """

    ops: frozenset[int] | None
    bound: float
    optimal: bool


def checkmate(model: StepModel, limit: int, seconds: float = 30.0) -> CheckmateRecompute:
    """The quickest set within the limit, by a programme that is solved for so many seconds at
    most."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    step = _Programme(model, limit)
    step.build()
    count = step.count
    cost = np.zeros(count)
    cost[: len(step.units)] = step.cost
    which, columns, values, least = [], [], [], []
    for number, (terms, right) in enumerate(step.rows):
        least.append(right)
        for variable, value in terms.items():
            which.append(number)
            columns.append(variable)
            values.append(value)
    matrix = csr_array((values, (which, columns)), shape=(len(step.rows), count))
    found = milp(
        cost,
        integrality=np.array(step.whole),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, np.array(least), np.inf),
        options={"time_limit": seconds, "mip_rel_gap": 1e-4},
    )
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
    if found.x is None:
        return CheckmateRecompute(None, float("inf") if found.status == 2 else bound / 1e6,
                                  found.status == 2)  # fmt: skip
    units = np.flatnonzero(found.x[: len(step.units)] > 0.5)
    ops = frozenset(op for k in units for op in step.units[k])
    return CheckmateRecompute(ops, float(bound) / 1e6, found.status == 0)


@dataclass(frozen=True)
class _Memory:
    """What a unit makes: bytes, the stages that read it, the units that do, and the last row of the
    forward that does."""

    unit: int
    nbytes: int
    stages: tuple[int, ...]
    readers: tuple[int, ...]
    last: int


class _Programme:
    """Variables are numbered as they come; those of units are the first. Rows are sums that are at
    least something."""

    def __init__(self, model: StepModel, limit: int) -> None:
        self.model, self.limit, self.columns = model, limit, model.columns
        self.units = model.units
        columns = model.columns
        self.cost = [float(columns.duration[list(u)].sum()) / 1e3 for u in self.units]  # in us
        self.whole: list[int] = [1] * len(self.units)
        self.rows: list[tuple[Terms, float]] = []
        self.unit_of = {op: k for k, unit in enumerate(self.units) for op in unit}
        self.scale = 1.0 / (1 << 20)
        self._find_stages()
        self._find_memories()
        self._find_spans()
        self.made: dict[tuple[int, int], int] = {}
        self.known: dict[tuple[object, ...], int] = {}

    @property
    def count(self) -> int:
        return len(self.whole)

    def _new(self, whole: bool) -> int:
        self.whole.append(int(whole))
        return len(self.whole) - 1

    # What there is

    def _reads(self, op: int) -> list[int]:
        low, high = self.columns.read_start[op], self.columns.read_start[op + 1]
        return [int(self.columns.shares[v]) for v in self.columns.read[low:high]]

    def _makes(self, op: int) -> list[int]:
        low, high = self.columns.made_start[op], self.columns.made_start[op + 1]
        return [int(self.columns.shares[v]) for v in self.columns.made[low:high]]

    def _find_stages(self) -> None:
        columns = self.columns
        self.roots = {
            root: self.unit_of[op]
            for op in self.unit_of
            for root in self._makes(op)
            if columns.nbytes[root] and int(columns.maker[root]) in self.unit_of
        }
        self.stage_ops = [
            op
            for op in range(len(columns.phase))
            if columns.phase[op] == BACKWARD_PHASE and any(r in self.roots for r in self._reads(op))
        ]

    def _find_memories(self) -> None:
        stages, readers = defaultdict(set), defaultdict(set)
        last: dict[int, int] = {}
        place = {op: s for s, op in enumerate(self.stage_ops)}
        for op in range(len(self.columns.phase)):
            for root in self._reads(op):
                if root not in self.roots:
                    continue
                if op in place:
                    stages[root].add(place[op])
                elif self.columns.phase[op] == FORWARD_PHASE:
                    last[root] = op
                    if self.unit_of.get(op, self.roots[root]) != self.roots[root]:
                        readers[root].add(self.unit_of[op])
        self.memories = [
            _Memory(
                unit,
                int(self.columns.nbytes[root]),
                tuple(sorted(stages[root])),
                tuple(sorted(readers[root])),
                last.get(root, int(self.columns.maker[root])),
            )
            for root, unit in self.roots.items()
            if not self.columns.stays[root]
        ]

    def _find_spans(self) -> None:
        """The stages at which the copy of each unit may be made: from the first at which a copy
        needs it to the first that reads it."""
        count, end = len(self.units), len(self.stage_ops)
        self.first, self.latest = [end] * count, [-1] * count
        direct = [end] * count
        for memory in self.memories:
            if memory.stages:
                direct[memory.unit] = min(direct[memory.unit], memory.stages[0])
        readers: list[set[int]] = [set() for _ in range(count)]
        for memory in self.memories:
            readers[memory.unit].update(memory.readers)
        for k in range(count - 1, -1, -1):
            self.first[k] = min([direct[k], *(self.first[j] for j in readers[k])])
            late = max((self.latest[j] for j in readers[k]), default=-1)
            self.latest[k] = direct[k] if direct[k] < end else late
        self.direct, self.read_by = direct, readers

    # Whether a copy has been made

    def _done(self, k: int, s: int) -> Terms:
        """e[k, s]."""
        if s < self.first[k] or self.latest[k] < 0:
            return {}
        if s >= self.latest[k]:
            return {k: 1.0}
        if (k, s) not in self.made:
            self.made[k, s] = self._new(True)
        return {self.made[k, s]: 1.0}

    def build(self) -> None:
        self._put_order()
        for constant, terms in self._times():
            room = (self.limit - constant) * self.scale - terms.pop(ONE, 0.0)
            if sum(max(x, 0.0) for x in terms.values()) > room:  # else it holds whatever is chosen
                self.rows.append(({v: -x for v, x in terms.items()}, -room))

    def _put_order(self) -> None:
        for k in range(len(self.units)):
            for s in range(self.first[k], self.latest[k] + 1):
                done = self._done(k, s)
                if s < self.latest[k]:
                    self._at_least(_sum((1.0, {k: 1.0}), (-1.0, done)), 0.0)
                if s > self.first[k]:
                    self._at_least(_sum((1.0, done), (-1.0, self._done(k, s - 1))), 0.0)
                for j in self.read_by[k] if s < self.latest[k] else ():
                    needs = _sum((1.0, done), (-1.0, self._done(j, s)), (-1.0, {k: 1.0}))
                    if self._done(j, s):
                        self._at_least(needs, -1.0)

    def _at_least(self, terms: Terms, right: float) -> None:
        terms = {v: x for v, x in terms.items() if x}
        if terms:
            self.rows.append((terms, right))

    # What is held

    def _times(self) -> Iterator[tuple[int, Terms]]:
        """All times: the bytes that are held whatever is recomputed, and the others."""
        columns, (before, fixed) = self.columns, self._fixed()
        stages = {op: s for s, op in enumerate(self.stage_ops)}
        after = -1  # the last stage so far
        rest: dict[int, int] = {}  # by stage, the most that is held after it
        for op in range(len(columns.phase)):
            level = fixed[op] + int(columns.during[op])
            if op in stages:
                s = after = stages[op]
                for k in range(len(self.units)):
                    if self.first[k] <= s <= self.latest[k]:
                        most = max(int(columns.during[o]) for o in self.units[k])
                        yield before[op] + most, self._held(s, k)
                yield level, self._held(s, len(self.units))
            elif after >= 0 or columns.phase[op] != FORWARD_PHASE:
                rest[after] = max(rest.get(after, level), level)
            else:
                yield self._forward(op, level)
        for s, level in rest.items():
            yield level, self._held(s + 1, -1)

    def _fixed(self) -> tuple[list[int], list[int]]:
        """What is held before each Op and while it runs, beside the memories here."""
        columns = self.columns
        last: dict[int, int] = {}
        for op in range(len(columns.phase)):
            last.update(dict.fromkeys((*self._reads(op), *self._makes(op)), op))
        alive = {root for root in self.roots if not columns.stays[root]}  # which are not counted
        before, found, now = [], [], 0
        for op in range(len(columns.phase)):
            rest = int(columns.before[op])
            before.append(now + rest)
            new = {*self._reads(op), *self._makes(op)} - alive
            alive |= new
            held = [r for r in alive - self.roots.keys() if last[r] == op and not columns.stays[r]]
            now += sum(int(columns.nbytes[r]) for r in new)
            found.append(now + rest)
            alive.difference_update(held)
            now -= sum(int(columns.nbytes[r]) for r in held)
        return before, found

    def _forward(self, op: int, level: int) -> tuple[int, Terms]:
        """A row of the forward: what is needed later in it is there, else what is kept."""
        terms: Terms = defaultdict(float)
        for g, memory in enumerate(self.memories):
            made = self.units[memory.unit][0]
            if made <= op <= memory.last:
                level += memory.nbytes
            elif op > memory.last:
                self._add_first(terms, g, 0, -1)
        return level, terms

    def _held(self, s: int, k: int) -> Terms:
        """At stage s when the copy of unit k is made: those of lower units have been."""
        terms: Terms = defaultdict(float)
        for g in range(len(self.memories)):
            self._add_first(terms, g, s, k)
            self._add_copy(terms, g, s, k)
        return terms

    def _so_far(self, j: int, s: int, k: int) -> Terms:
        """Whether the copy of j has been made before that of k is, at stage s."""
        return self._done(j, s) if j < k else self._done(j, s - 1)

    def _add_first(self, terms: Terms, g: int, s: int, k: int) -> None:
        memory = self.memories[g]
        size = memory.nbytes * self.scale
        if memory.stages and s <= memory.stages[-1]:
            terms[memory.unit] -= size
            terms[ONE] += size
            return
        waits = [j for j in memory.readers if self._may_wait(j, s, k)]
        if waits:
            terms[self._waiting("o", g, waits, s, k)] += size

    def _may_wait(self, j: int, s: int, k: int) -> bool:
        """Whether the copy of unit j may still have to be made."""
        return self.latest[j] > s - 1 if j >= k else self.latest[j] > s

    def _add_copy(self, terms: Terms, g: int, s: int, k: int) -> None:
        memory = self.memories[g]
        size = memory.nbytes * self.scale
        if s < self.first[memory.unit]:
            return
        made = self._so_far(memory.unit, s, k + 1)
        if memory.stages and s <= memory.stages[-1]:
            for variable in made:
                terms[variable] += size
            return
        waits = [j for j in memory.readers if self._may_wait(j, s, k)]
        if waits and made:
            terms[self._waiting("c", g, waits, s, k)] += size

    def _waiting(self, kind: str, g: int, waits: list[int], s: int, k: int) -> int:
        """o or c: held for copies that may still have to be made."""
        unit = self.memories[g].unit
        made = self._so_far(unit, s, k + 1)
        key = (kind, g, s, tuple((j, j < k) for j in waits), tuple(made))
        if key in self.known:
            return self.known[key]
        variable = self.known[key] = self._new(False)
        for j in waits:
            wants = _sum((1.0, {variable: 1.0}), (-1.0, {j: 1.0}), (1.0, self._so_far(j, s, k)))
            if kind == "o":
                self._at_least(_sum((1.0, wants), (1.0, {unit: 1.0})), 0.0)
            else:
                self._at_least(_sum((1.0, wants), (-1.0, made)), -1.0)
        return variable


def _sum(*parts: tuple[float, Terms]) -> Terms:
    found: Terms = defaultdict(float)
    for factor, terms in parts:
        for variable, value in terms.items():
            found[variable] += factor * value
    return found
