"""additive: the walk of flexflow over what optcnn minimises, to see that it finds what is known.

In: SummedSeconds and a number of proposals. Out: the best grids that the walk came by.

States are a grid for every layer on a fixed map of devices, costs the summed seconds
(summed_seconds.py), which optcnn minimises exactly. So no walk can come below optcnn, and one that
is any good gets there.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from apportion.search.layers.summed_seconds import SummedSeconds
from apportion.search.walks.metropolis import Chain


class LayerGridWalk:
    """The Walk: one layer gets another grid, or neighbours that exchange something the same one."""

    def __init__(self, costs: SummedSeconds, rows: list[int]) -> None:
        self.costs, self.rows = costs, list(rows)
        self.energy = costs.energy
        self.best = list(rows)
        self.cost = self.energy.value(self.rows)
        self._before: dict[int, int] = {}
        self._new = self.cost
        self._near: list[list[int]] = [[] for _ in rows]
        for a, b in self.energy.pairs:
            self._near[a].append(b)
            self._near[b].append(a)

    def change(self, rng: Random, limit: float) -> float | None:
        """Mostly one layer at random."""
        layer = rng.randrange(len(self.rows))
        changed = {layer: rng.randrange(self.energy.sizes[layer])}
        if self._near[layer] and rng.random() < 0.4:
            changed = self._follow(layer, rng)
        self._before = {k: self.rows[k] for k, row in changed.items() if self.rows[k] != row}
        if not self._before:
            return None
        new = self.cost - self._around(changed)
        for k, row in changed.items():
            self.rows[k] = row
        self._new = new + self._around(changed)
        return self._new

    @property
    def units(self) -> int:
        """Layers."""
        return len(self.rows)

    def scatter(self, rng: Random) -> None:
        """Any grids."""
        self.rows = [rng.randrange(size) for size in self.energy.sizes]
        self.cost = self.energy.value(self.rows)

    def _around(self, layers: Collection[int]) -> float:
        """What of the sum some layers have a part in."""
        energy, rows = self.energy, self.rows
        edges = {(min(a, b), max(a, b)) for a in layers for b in self._near[a]}
        total = sum(float(energy.unary[k][rows[k]]) for k in layers)
        return total + sum(float(energy.pairs[a, b][rows[a], rows[b]]) for a, b in edges)

    def _follow(self, layer: int, rng: Random) -> dict[int, int]:
        """Neighbours get the grid of the same degrees, if there is one."""
        grids, row = self.costs.grids, self.rows[layer]
        degrees = tuple(grids[layer].degrees[row].tolist())
        found = {}
        for near in self._near[layer]:
            same = [
                k
                for k, each in enumerate(grids[near].degrees.tolist())
                if tuple(n for n in each if n > 1) == tuple(n for n in degrees if n > 1)
            ]
            if same and rng.random() < 0.7:
                found[near] = rng.choice(same)
        return found

    def keep(self) -> None:
        """The change stays."""
        self.cost = self._new

    def undo(self) -> None:
        """As it was."""
        self.rows = [self._before.get(k, row) for k, row in enumerate(self.rows)]

    def note(self) -> None:
        """The best so far."""
        self.best = list(self.rows)

    def back(self) -> float:
        """To the best so far."""
        self.rows = list(self.best)
        self.cost = self.energy.value(self.rows)
        return self.cost


def walk_summed_seconds(
    costs: SummedSeconds, proposals: int, seed: int = 0
) -> tuple[list[int], float]:
    """The best grids that a walk of so many proposals comes by, and their summed seconds.

    It begins at the last grid of every layer (whole, on all devices).
    """
    walk = LayerGridWalk(costs, [grids.rows - 1 for grids in costs.grids])
    chain = Chain(walk, Random(seed))
    while chain.proposals < proposals and not chain.over:
        chain.step()
    return walk.best, costs.energy.value(walk.best)
