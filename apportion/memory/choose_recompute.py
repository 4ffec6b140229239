"""choose_recompute: which Ops to recompute so that a step fits, in the least time.

Part of the room memory. A Graph, its RecomputeCosts, by how much the step is over its memory and a
function that simulates a set of recomputed Ops come in; a RecomputeChoice goes out.

The forward is cut into segments (checkpoint_segments.py). A segment may keep everything, recompute
the Ops that give the most bytes for their seconds, more of them, or all that no later segment
reads; a knapsack takes one option for each so that enough is saved. What is saved is an estimate:
it leaves out what a segment occupies while it is recomputed. So the result is simulated, and while
it is over the limit, as much more is asked for; once it fits, something between is tried. If fine
segments do not save enough, coarser ones have fewer boundaries. Where only few Ops make anything,
all sets of them are simulated, the quickest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from apportion.graph import FORWARD, Graph
from apportion.memory.checkpoint_segments import CheckpointSegment, ForwardCutter
from apportion.memory.knapsack import Saving, least_seconds
from apportion.memory.recompute_costs import ForwardMemory, RecomputeCosts

SHARES = (0.02, 0.1, 0.3, 0.6)  # of a Segment's seconds that a partial option may recompute
FEW = 9  # Ops of which all sets are tried
FINEST, COARSEST = 256, 2  # parts of what is kept that a Segment may keep
NEGLIGIBLE = 0.01  # share of what is kept that is not worth another simulation
EARLY = 1e-3  # by which a saving in the last Segment costs more than one in the first


@dataclass(frozen=True, slots=True)
class RecomputeOutcome:
    """A simulated step: bytes over the limit, negative if it fits, and its seconds."""

    over: int
    seconds: float

    @property
    def rank(self) -> tuple[bool, float]:
        """Less is better: what fits, then the seconds, or what is over."""
        return self.over > 0, float(self.over) if self.over > 0 else self.seconds


@dataclass(frozen=True)
class RecomputeChoice:
    """Ops to recompute, what a step with them takes, and how many sets were simulated."""

    ops: frozenset[int]
    outcome: RecomputeOutcome
    simulated: int


Simulate = Callable[[frozenset[int]], RecomputeOutcome]


def choose_recompute(
    graph: Graph, costs: RecomputeCosts, kept: RecomputeOutcome, run: Simulate, tries: int = 12
) -> RecomputeChoice:
    """The fastest set of Ops that was found to fit, or the one that is least over. `kept` is the
    step in which nothing is recomputed; `tries` sets are simulated at most."""
    return _Chooser(graph, costs, kept, run, tries).chosen()


def full_recompute(graph: Graph, costs: RecomputeCosts) -> frozenset[int]:
    """All Ops but those at the boundaries of Segments, which are cut so that boundaries and the
    largest Segment together are the least."""
    best = min(
        grains(graph, costs),
        key=lambda row: sum(s.boundary for s in row) + max((s.kept for s in row[:-1]), default=0),
    )
    return _without_last(best)


def _without_last(row: Sequence[CheckpointSegment]) -> frozenset[int]:
    """All that can be recomputed but the last Segment, which the backward begins with."""
    return frozenset().union(*(segment.inner for segment in row[:-1]))


def grains(graph: Graph, costs: RecomputeCosts) -> Iterator[list[CheckpointSegment]]:
    """The forward in finer and coarser Segments."""
    total, parts, lengths = ForwardMemory(graph, costs).total, FINEST, set()
    cutter = ForwardCutter(graph, costs)
    while parts >= COARSEST:
        row = cutter.segments(total // parts)
        if len(row) not in lengths:
            lengths.add(len(row))
            yield row
        parts //= 2


class _Chooser:
    def __init__(
        self,
        graph: Graph,
        costs: RecomputeCosts,
        kept: RecomputeOutcome,
        run: Simulate,
        tries: int,
    ) -> None:
        self.graph, self.costs, self.run, self.tries = graph, costs, run, tries
        self.over = kept.over
        self.known: dict[frozenset[int], RecomputeOutcome] = {frozenset(): kept}
        self.memory = ForwardMemory(graph, costs)
        self.total = self.memory.total

    def chosen(self) -> RecomputeChoice:
        if self.over > 0:
            self._search()
        ops, outcome = min(self.known.items(), key=lambda pair: pair[1].rank)
        return RecomputeChoice(ops, outcome, len(self.known) - 1)

    @property
    def left(self) -> int:
        return self.tries - len(self.known) + 1

    def _search(self) -> None:
        making = [op for op, nbytes in self._made().items() if nbytes]
        if len(making) <= FEW:
            self._try_all(making)
            return
        rows = list(grains(self.graph, self.costs))
        for row in rows:
            # To recompute the last one saves nothing: the backward begins with it.
            options = [self._options(segment) for segment in row[:-1]]
            if self._fitting(row, options):
                return
            if self.left <= 0:
                return

    def _made(self) -> dict[int, int]:
        """The forward Ops, each with the bytes that it makes."""
        graph, nbytes = self.graph, self.costs.nbytes
        return {
            op: sum(nbytes[v] for v in meant.outputs)
            for op, meant in enumerate(graph.ops)
            if meant.phase == FORWARD
        }

    def _try_all(self, making: Sequence[int]) -> None:
        """All sets of few Ops, the quickest first, up to the first that fits."""
        seconds, shares = self.costs.seconds, self.costs.shares
        sets = [some for n in range(len(making) + 1) for some in combinations(making, n)]
        aliases = [op for op, nbytes in self._made().items() if not nbytes]
        for some in sorted(sets, key=lambda some: sum(seconds[op] for op in some)):
            made = {v for op in some for v in self.graph.ops[op].outputs}
            views = [
                op for op in aliases if any(shares[v] in made for v in self.graph.ops[op].outputs)
            ]
            if self._simulated(frozenset((*some, *views))).over <= 0:
                return

    def _fitting(self, row: Sequence[CheckpointSegment], options: Sequence[_Options]) -> bool:
        """Asks for more and more until it fits, then for less; whether it does."""
        low, target = 0, self.over
        while self.left > 0:
            ops = self._packed(options, target)
            if ops is None:
                every = [_without_last(row), frozenset().union(*(s.inner for s in row))]
                return any(self._simulated(ops).over <= 0 for ops in every)
            found = self._simulated(ops)
            if found.over <= 0:
                self._less(options, low, target, found)
                return True
            low, target = target, target + max(found.over, self.total // 1000)
        return False

    def _less(
        self, options: Sequence[_Options], low: int, high: int, found: RecomputeOutcome
    ) -> None:
        """Asks for less than was enough, by what is left under the limit, while that is much."""
        while self.left > 0 and found.over < -NEGLIGIBLE * self.total:
            target = max(high + found.over, (low + high) // 2)
            ops = self._packed(options, target)
            if ops is None or ops in self.known:
                return
            now = self._simulated(ops)
            if now.over > 0:
                low = target
            else:
                high, found = target, now
            if high - low < NEGLIGIBLE * self.total:
                return

    def _simulated(self, ops: frozenset[int]) -> RecomputeOutcome:
        if ops not in self.known:
            self.known[ops] = self.run(ops)
        return self.known[ops]

    def _packed(self, options: Sequence[_Options], wanted: int) -> frozenset[int] | None:
        count = max(len(options), 1)
        items = [
            [
                Saving(saving.nbytes, saving.seconds * (1 + EARLY * place / count))
                for saving in some.savings
            ]
            for place, some in enumerate(options)
        ]
        which = least_seconds(items, wanted)
        if which is None:
            return None
        return frozenset().union(
            *(some.ops[number] for some, number in zip(options, which, strict=True))
        )

    def _options(self, segment: CheckpointSegment) -> _Options:
        """What a Segment may recompute."""
        found = recompute_options(self.graph, self.costs, self.memory, segment)
        ops, savings = zip(*found, strict=True)
        return _Options(ops, savings)


def recompute_options(
    graph: Graph, costs: RecomputeCosts, memory: ForwardMemory, segment: CheckpointSegment
) -> list[tuple[frozenset[int], Saving]]:
    """What a Segment may recompute: nothing, the Ops that give most for their time, all; and what
    each saves and costs."""
    made = {op: sum(costs.nbytes[v] for v in graph.ops[op].outputs) for op in segment.inner}
    order = sorted(made, key=lambda op: (costs.seconds[op] / max(made[op], 1), op))
    whole = sum(costs.seconds[op] for op in order)
    found = [(frozenset[int](), Saving(0, 0.0))]
    for share in (*SHARES, math.inf):
        spent, taken = 0.0, set()
        for op in order:
            spent += costs.seconds[op]
            if spent > share * whole:
                break
            taken.add(op)
        some = frozenset(taken)
        saved = memory.saved(some)
        if saved > found[-1][1].nbytes:
            found.append((some, Saving(saved, sum(costs.seconds[op] for op in some))))
    return found


@dataclass(frozen=True)
class _Options:
    """The sets of Ops that a Segment may recompute, and what each saves and costs."""

    ops: tuple[frozenset[int], ...]
    savings: tuple[Saving, ...]
