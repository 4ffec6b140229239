"""refine_recompute: a set of recomputed Ops made better, by a StepModel.

Part of the room memory. A StepModel, a limit in bytes and some sets to begin with come in; the
quickest set that was found to be within the limit goes out, or the one that is least over it.

What is decided about is a unit: an Op that makes something, with the views of it. Where there are
few, all sets are looked at. Else each set is mended and then pruned: while it is over the limit,
the unit is added that takes away most bytes over it for its time; then units are left out, the
slowest first, while it stays within. After that, again and again, the units of a stretch of the
forward, or some at random, are taken out and the set is mended anew; what is better is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from random import Random

import numpy as np

from apportion.columns import Bools
from apportion.memory.recompute_costs import kept_values
from apportion.memory.step_model import ModelledStep, StepModel

FEW = 12  # units of which all sets are looked at
ROWS = 20_000_000  # of Graphs that are walked over: a second or two, compiled
WALKS = 30_000  # at most
CHANCE = 0.2, 1.0  # what rates are multiplied by in a search
WORSE = 0.02  # by which a step may be slower than the best and still be gone on from
VAIN = 60  # walks for each unit after which nothing better is expected
CANDIDATES = 8  # units that are looked at to mend a set


@dataclass(frozen=True)
class RefinedRecompute:
    """Ops to recompute, and the step with them."""

    ops: frozenset[int]
    step: ModelledStep


def refine_recompute(
    model: StepModel, limit: int, starts: Iterable[frozenset[int]], effort: float = 1.0
) -> RefinedRecompute:
    """The best set found, beginning with `starts`; with half the effort, half as much is looked
    at."""
    walks = min(ROWS // max(len(model.graph.ops), 1), WALKS)
    return _Refiner(model, limit, int(effort * walks)).best(starts)


def all_sets(model: StepModel, limit: int) -> RefinedRecompute:
    """The best of all sets of units."""
    return _Refiner(model, limit, 0).best_of_all()


class _Refiner:
    def __init__(self, model: StepModel, limit: int, walks: int) -> None:
        self.model, self.limit = model, limit
        self.units = [np.array(unit) for unit in model.units]
        self.left = walks
        self.rng, self.searching = Random(0), False
        columns = model.columns
        self.cost = [int(columns.duration[u].sum() + columns.issue[u].sum()) for u in self.units]
        self.nbytes = [
            sum(int(columns.nbytes[v]) for op in unit for v in model.graph.ops[op].outputs)
            for unit in model.units
        ]

    def best_of_all(self) -> RefinedRecompute:
        count = len(self.units)
        best = min((self._step(self._mask_of(number)).rank, number) for number in range(1 << count))
        return self._refined(self._mask_of(best[1]))

    def _mask_of(self, number: int) -> Bools:
        """The set of the units whose bits are in a number."""
        found = self.model.mask(())
        for k, unit in enumerate(self.units):
            found[unit] = bool(number >> k & 1)
        return found

    def best(self, starts: Iterable[frozenset[int]]) -> RefinedRecompute:
        """Searches from each start, the best first, while walks are left; then from the best."""
        found = [self._pruned(self._mended(self._whole(ops))) for ops in starts]
        found.sort(key=lambda one: self._step(one).rank)
        self.searching = True
        for k, mask in enumerate(found):
            if self.left > 0:
                found[k] = self._searched(mask)
        best = min(found, key=lambda one: self._step(one).rank)
        return self._refined(self._searched(best))

    def _refined(self, mask: Bools) -> RefinedRecompute:
        return RefinedRecompute(frozenset(np.flatnonzero(mask).tolist()), self._step(mask))

    def _step(self, mask: Bools) -> ModelledStep:
        self.left -= 1
        return self.model.of_mask(mask, self.limit)

    def _whole(self, ops: frozenset[int]) -> Bools:
        """The units whose first Op is among these."""
        mask = self.model.mask(())
        for unit in self.units:
            if int(unit[0]) in ops:
                mask[unit] = True
        return mask

    def _members(self, mask: Bools) -> list[int]:
        return [k for k, unit in enumerate(self.units) if mask[unit[0]]]

    # One after another

    def _mended(self, mask: Bools, most: float = float("inf")) -> Bools:
        """With units added until it is within the limit, or nothing helps, or it takes too long."""
        mask = mask.copy()
        now = self._step(mask)
        while now.excess and now.nanoseconds < most and self.left > 0:
            found = None
            for some in self._candidates(mask, now.op):
                trial = self._with(mask, some)
                then = self._step(trial)
                gain = (now.excess - then.excess) / max(then.nanoseconds - now.nanoseconds, 1)
                gain *= self._chance()
                if then.excess < now.excess and (found is None or gain > found[0]):
                    found = gain, trial, then
            if found is None:
                return mask
            _, mask, now = found
        return mask

    def _chance(self) -> float:
        """What a rate is multiplied by, so that a search does not always prefer the same units."""
        return self.rng.uniform(*CHANCE) if self.searching else 1.0

    def _candidates(self, mask: Bools, op: int) -> list[tuple[int, ...]]:
        """Units that make what is held when an Op runs, the cheapest for their bytes first; each
        also with those before it whose results would have to be kept instead."""
        held = self.model.held_at(mask, op)
        makers = {self.number.get(int(self.model.columns.maker[v]), -1) for v in held} - {-1}
        free = [k for k in makers if not mask[self.units[k][0]]]
        rates = {k: self.cost[k] / max(self.nbytes[k], 1) * self._chance() for k in sorted(free)}
        free.sort(key=lambda k: (rates[k], k))
        found: dict[tuple[int, ...], None] = {}
        for k in free[:CANDIDATES]:
            found[(k,)] = None
            found[self._with_unkept(k, mask)] = None
        return list(found)

    @cached_property
    def number(self) -> dict[int, int]:
        """The units by their first Op."""
        return {int(unit[0]): k for k, unit in enumerate(self.units)}

    @cached_property
    def kept(self) -> set[int]:
        return kept_values(self.model.graph, self.model.costs, frozenset())

    @cached_property
    def sources(self) -> list[list[int]]:
        """For each unit those that make what it reads and the backward does not."""
        graph, columns = self.model.graph, self.model.columns
        found = []
        for unit in self.units:
            read = {int(columns.shares[v]) for op in unit for v in graph.ops[op].inputs}
            makers = (int(columns.maker[v]) for v in read - self.kept)
            found.append(sorted({self.number[m] for m in makers if m in self.number}))
        return found

    def _with_unkept(self, unit: int, mask: Bools) -> tuple[int, ...]:
        found, waiting = {unit}, [unit]
        while waiting:
            for source in self.sources[waiting.pop()]:
                if source not in found and not mask[self.units[source][0]]:
                    found.add(source)
                    waiting.append(source)
        return tuple(sorted(found))

    def _with(self, mask: Bools, some: Sequence[int], value: bool = True) -> Bools:
        found = mask.copy()
        for k in some:
            found[self.units[k]] = value
        return found

    def _pruned(self, mask: Bools) -> Bools:
        """Without the units that it fits without, or is no more over, the slowest first; where
        there are many, units that are alike are left out together, or a part of them."""
        members = sorted(self._members(mask), key=lambda k: (-self.cost[k], -self.nbytes[k], k))
        if len(members) <= max(FEW, self.left // 20):
            waiting, least = [[k] for k in reversed(members)], 1
        else:
            rows = groupby(members, lambda k: (self.cost[k], self.nbytes[k]))
            waiting = [list(alike) for _, alike in rows][::-1]
            least = max(len(members) // 64, 1)
        now = self._step(mask)
        while waiting and self.left > 0:
            some = waiting.pop()
            trial = self._with(mask, some, False)
            then = self._step(trial)
            if then.rank <= now.rank:
                mask, now = trial, then
            elif len(some) > least:
                half = len(some) // 2
                waiting += [some[half:], some[:half]]
        return mask

    # Again and again

    def _searched(self, mask: Bools) -> Bools:
        """The best that is met while what is a little slower than it is accepted too."""
        best, now, since = mask, self._step(mask), self.left
        while self.left > max(0, since - VAIN * len(self.units)):
            members = self._members(mask)
            if not members:
                break
            worst = now.nanoseconds * (1 + WORSE * self.rng.random()) if not now.excess else 1e30
            trial = self._with(mask, self._taken_out(members), False)
            if self.rng.random() < 0.5:
                trial = self._with(trial, self._put_in(trial))
            trial = self._pruned(self._mended(trial, worst))
            then = self._step(trial)
            if then.rank < now.rank:
                best, now, since = trial, then, self.left
            if then.rank <= now.rank or (then.excess == now.excess and then.nanoseconds < worst):
                mask = trial
        return best

    def _put_in(self, mask: Bools) -> tuple[int, ...]:
        """A unit, or a stretch of some, or one with those before it that the backward lacks."""
        first, count = self.rng.randrange(len(self.units)), self.rng.choice((0, 1, 1, 2, 4))
        if count == 0:
            return self._with_unkept(first, mask)
        return tuple(range(first, min(first + count, len(self.units))))

    def _taken_out(self, members: Sequence[int]) -> list[int]:
        """Some units of a set: a stretch of them, or one here and there."""
        count = self.rng.choice((1, 1, 2, 3, 5, 8, 1 + len(members) // 3))
        if self.rng.random() < 0.5:
            first = self.rng.randrange(len(members))
            return list(members[first : first + count])
        return self.rng.sample(members, min(count, len(members)))
