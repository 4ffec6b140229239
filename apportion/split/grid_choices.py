"""grid_choices: the grids that axes of given extents can be cut into.

In: the extents of axes, and into how many parts they are cut together. Out: grids, each a number of
parts per axis. What searches enumerate and what explanations list as alternatives is made here.
"""

from __future__ import annotations

from collections.abc import Sequence

Grid = tuple[int, ...]
"""Parts per axis."""

MOST_AXES = 3  # that searches cut at once


def one_cut(axes: int, position: int, parts: int = 2) -> Grid:
    """So many axes of which the one at this position is cut; none of them if it is -1."""
    return tuple([parts if k == position else 1 for k in range(axes)])


def divisors(number: int) -> list[int]:
    """The numbers that divide this one, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]


def axes_cut(grid: Sequence[int]) -> int:
    """How many axes a grid cuts."""
    return sum(parts > 1 for parts in grid)


def part_grids(
    extents: Sequence[int], count: int, *, fewest: int = 1, most_axes: int = MOST_AXES
) -> list[Grid]:
    """All grids of `count` parts over axes of these extents, in lexicographic order.

    Every axis is cut into at least `fewest` parts, and at most `most_axes` of them are cut.
    """
    found: list[tuple[Grid, int]] = [((), count)]
    for extent in extents:
        found = [
            ((*grid, parts), left // parts)
            for grid, left in found
            for parts in range(fewest, min(extent, left) + 1)
            if left % parts == 0 and axes_cut((*grid, parts)) <= most_axes
        ]
    return [grid for grid, left in found if left == 1]
