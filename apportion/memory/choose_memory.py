"""choose_memory: what to recompute and what to offload so that a step fits, in the least time.

Part of the room memory. A Graph, its RecomputeCosts, the way to the host, by how much the step is
over its memory and a function that simulates a MemoryDecision come in; a MemoryChoice goes out.

The forward is cut into segments as in choose_recompute.py. Of a segment, Ops may be recomputed, the
Values that it keeps nevertheless may be offloaded, or both; a knapsack takes one option for each
segment so that enough is saved. What an offloaded Value costs is link time that the device's own
work does not hide, which depends on all others. So several *terms* are tried: segments, spread
evenly over the forward, may offload until their copies take a share of its seconds, and of each
copy a share of its seconds, the *price*, is taken to be paid. Every set is simulated, as in
choose_recompute.py, and the fastest that fits is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.graph import FORWARD, Graph
from apportion.memory.checkpoint_segments import CheckpointSegment
from apportion.memory.choose_recompute import EARLY, RecomputeOutcome, grains, recompute_options
from apportion.memory.knapsack import Saving, least_seconds
from apportion.memory.recompute_costs import ForwardMemory, RecomputeCosts, kept_values
from apportion.memory.time_offloads import HostWay

TERMS = ((0.8, 0.02), (0.4, 0.02), (0.8, 0.3), (1.5, 0.3), (math.inf, 1.0))
"""(Seconds of copies as a share of those of the forward, the price of a copy's seconds.)"""
SHARES = (0.5, 1.0)  # of the bytes that a segment keeps, the largest Values first
NEGLIGIBLE = 0.01  # share of what is kept that is not worth another simulation
SMALL = 1e-3  # share of what is kept under which a Value is not worth a copy


@dataclass(frozen=True)
class MemoryDecision:
    """Ops to recompute, and Values to offload, which own their memory."""

    ops: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()

    def __or__(self, other: MemoryDecision) -> MemoryDecision:
        return MemoryDecision(self.ops | other.ops, self.values | other.values)


@dataclass(frozen=True)
class MemoryChoice:
    """A decision, what a step with it takes, and how many were simulated."""

    decision: MemoryDecision
    outcome: RecomputeOutcome
    simulated: int


Simulate = Callable[[MemoryDecision], RecomputeOutcome]


def choose_memory(
    graph: Graph,
    costs: RecomputeCosts,
    way: HostWay,
    kept: RecomputeOutcome,
    run: Simulate,
    recomputes: bool = True,
    tries: int = 15,
    is_late: Callable[[], bool] = lambda: False,
) -> MemoryChoice:
    """The fastest decision that was found to fit, or the one that is least over. `kept` is the step
    in which everything is kept; `recomputes`: whether Ops may be recomputed too; `tries` decisions
    are simulated at most, and when it is late no more than the first that fits."""
    return _JointChooser(graph, costs, way, kept, run, recomputes, is_late, tries).chosen()


def offloadable(graph: Graph, costs: RecomputeCosts, ops: frozenset[int]) -> frozenset[int]:
    """The Values that the forward makes and keeps for the backward, if it recomputes these Ops."""
    found = set()
    for value in kept_values(graph, costs, ops):
        made = graph.producer[value]
        if made is not None and graph.ops[made[0]].phase == FORWARD and costs.nbytes[value]:
            found.add(value)
    return frozenset(found)


def views_of(graph: Graph, costs: RecomputeCosts, values: frozenset[int]) -> frozenset[int]:
    """The Ops of the forward that make nothing but views of these Values: what comes back from the
    host is viewed again."""
    return frozenset(
        op
        for op, meant in enumerate(graph.ops)
        if meant.phase == FORWARD
        and meant.outputs
        and all(v != costs.shares[v] and costs.shares[v] in values for v in meant.outputs)
    )


@dataclass(frozen=True)
class _Option:
    """What a segment may do: a decision, the bytes that it saves, the seconds of recomputing and
    those of a link that copies."""

    decision: MemoryDecision
    nbytes: int
    recomputing: float
    copying: float


class _JointChooser:
    def __init__(
        self,
        graph: Graph,
        costs: RecomputeCosts,
        way: HostWay,
        kept: RecomputeOutcome,
        run: Simulate,
        recomputes: bool,
        is_late: Callable[[], bool],
        tries: int,
    ) -> None:
        self.graph, self.costs, self.way, self.run = graph, costs, way, run
        self.is_late = is_late
        self.recomputes, self.tries, self.over = recomputes, tries, kept.over
        self.known: dict[MemoryDecision, RecomputeOutcome] = {MemoryDecision(): kept}
        self.memory = ForwardMemory(graph, costs)
        self.total = self.memory.total
        ops = zip(graph.ops, costs.seconds, strict=True)
        self.forward = sum(seconds for op, seconds in ops if op.phase == FORWARD)
        self.readers = _forward_readers(graph)

    def chosen(self) -> MemoryChoice:
        if self.over > 0:
            self._search()
        decision, outcome = min(self.known.items(), key=lambda pair: pair[1].rank)
        return MemoryChoice(decision, outcome, len(self.known) - 1)

    def _search(self) -> None:
        terms = TERMS if self.way.beside and self.recomputes else TERMS[-1:]
        rows = list(grains(self.graph, self.costs))
        # In the last segment nothing is saved: the backward begins with it.
        several = [[self._options(segment) for segment in row[:-1]] for row in rows]
        for number, (share, price) in enumerate(terms, 1):
            until = self.tries * number // len(terms)
            for options in several:
                if self._is_enough():
                    return
                allowed = _within(options, share * self.forward)
                if len(self.known) > until or self._fitting(allowed, price, until):
                    break

    def _fitting(self, options: Sequence[Sequence[_Option]], price: float, until: int) -> bool:
        """Asks for more and more until it fits, then for less; whether it does."""
        low, target, found = 0, self.over, None
        while len(self.known) <= until:
            decision = self._packed(options, target, price)
            if decision is None:
                decision = _everything(options)
                return self._simulated(decision).over <= 0
            found = self._simulated(decision)
            if found.over <= 0:
                self._less(options, price, low, target, until, found)
                return True
            low, target = target, target + max(found.over, self.total // 1000)
        return False

    def _is_enough(self) -> bool:
        """Whether something fits and there is no time for more."""
        return self.is_late() and any(one.over <= 0 for one in self.known.values())

    def _less(
        self, options: Sequence[Sequence[_Option]], price: float, low: int, high: int, until: int,
        found: RecomputeOutcome,
    ) -> None:  # fmt: skip
        """Asks for less than was enough, by what is left under the limit, while that is much."""
        while len(self.known) <= until and found.over < -NEGLIGIBLE * self.total:
            if self._is_enough():
                return
            target = max(high + found.over, (low + high) // 2)
            decision = self._packed(options, target, price)
            if decision is None or decision in self.known:
                return
            now = self._simulated(decision)
            if now.over > 0:
                low = target
            else:
                high, found = target, now
            if high - low < NEGLIGIBLE * self.total:
                return

    def _simulated(self, decision: MemoryDecision) -> RecomputeOutcome:
        if decision not in self.known:
            self.known[decision] = self.run(decision)
        return self.known[decision]

    def _packed(
        self, options: Sequence[Sequence[_Option]], wanted: int, price: float
    ) -> MemoryDecision | None:
        """One option for each segment, so that together they save what is wanted."""
        count = max(len(options), 1)
        items = [
            [
                Saving(
                    option.nbytes,
                    option.recomputing * (1 + EARLY * place / count)
                    + option.copying * price * (1 + EARLY * spread(place)),
                )
                for option in some
            ]
            for place, some in enumerate(options)
        ]
        which = least_seconds(items, wanted)
        if which is None:
            return None
        found = MemoryDecision()
        for some, number in zip(options, which, strict=True):
            found |= some[number].decision
        return found

    def _options(self, segment: CheckpointSegment) -> list[_Option]:
        """What a segment may do, nothing first."""
        repeated = [(frozenset[int](), Saving(0, 0.0))]
        if self.recomputes:
            repeated = recompute_options(self.graph, self.costs, self.memory, segment)
        found = []
        for ops, saving in repeated:
            found.append(_Option(MemoryDecision(ops), saving.nbytes, saving.seconds, 0.0))
            kept = self._kept_in(segment, ops)
            for share in SHARES:
                values = self._largest(kept, share)
                nbytes = sum(self.costs.nbytes[v] for v in values)
                if values:
                    took = sum(self.way.seconds(self.costs.nbytes[v]) for v in values)
                    decision = MemoryDecision(ops, values)
                    total = saving.nbytes + nbytes
                    found.append(_Option(decision, total, saving.seconds, took))
        return found

    def _kept_in(self, segment: CheckpointSegment, ops: frozenset[int]) -> list[int]:
        """The memories that a segment makes and keeps for the backward, if it recomputes these."""
        shares, found = self.costs.shares, dict[int, None]()
        for op in segment.ops:
            if op in ops:
                continue
            for value in self.graph.ops[op].outputs:
                root = shares[value]
                needed = root in self.memory.kept or not ops.isdisjoint(self.readers[value])
                made = self.graph.producer[root]
                if needed and made is not None and made[0] not in ops and self.costs.nbytes[root]:
                    found[root] = None
        return list(found)

    def _largest(self, kept: Sequence[int], share: float) -> frozenset[int]:
        """The largest of these, up to a share of their bytes."""
        nbytes = self.costs.nbytes
        order = sorted(kept, key=lambda v: (-nbytes[v], v))
        most, taken = share * sum(nbytes[v] for v in kept), 0
        found = []
        for value in order:
            if taken >= most or nbytes[value] < SMALL * self.total:
                break
            found.append(value)
            taken += nbytes[value]
        return frozenset(found)


def spread(place: int) -> float:
    """A number in [0, 1) by which the smallest of many are spread evenly: the binary digits of the
    place, mirrored at the point (van der Corput)."""
    found, share = 0.0, 0.5
    while place:
        found, place, share = found + share * (place % 2), place // 2, share / 2
    return found


def _within(options: Sequence[Sequence[_Option]], seconds: float) -> list[Sequence[_Option]]:
    """The options, those that copy only in segments spread evenly, whose copies take so long at
    most."""
    found, left = [[one for one in some if not one.copying] for some in options], seconds
    allowed: list[Sequence[_Option]] = [*found]
    for place in sorted(range(len(options)), key=spread):
        most = max(one.copying for one in options[place])
        if most <= left:
            allowed[place], left = options[place], left - most
    return allowed


def _everything(options: Sequence[Sequence[_Option]]) -> MemoryDecision:
    """What saves most in each segment."""
    found = MemoryDecision()
    for some in options:
        found |= max(some, key=lambda option: option.nbytes).decision
    return found


def _forward_readers(graph: Graph) -> list[frozenset[int]]:
    """For every Value the Ops of the forward that read it."""
    return [
        frozenset(op for op in readers if graph.ops[op].phase == FORWARD)
        for readers in graph.consumers
    ]
