"""A mixed-integer linear program as it is written down, row by row, and HiGHS to solve it.

In: variables and rows. Out: values that minimise one of the variables, and a proven bound on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from apportion.columns import Floats, Ints

Terms = Sequence[tuple[int, float]]  # variables with factors


@dataclass
class IntegerProgram:
    """Rows and columns of a program as they are added. All variables are at least 0."""

    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[tuple[list[int], list[float], float, float]] = field(default_factory=list)

    def add(self, upper: float = np.inf, whole: bool = False) -> int:
        """A new variable."""
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.upper) - 1

    def at_least(self, terms: Terms, low: float) -> None:
        """The sum of terms (variable, factor) is at least so much."""
        self.rows.append(([v for v, _ in terms], [f for _, f in terms], low, np.inf))

    def equal(self, terms: Terms, value: float) -> None:
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


@dataclass(frozen=True)
class PlacementProgram:
    """A program, the variable that is minimised, the ticks that are 1 in it, and how to read a
    placement from values."""

    program: IntegerProgram
    target: int
    scale: float
    where: Callable[[Floats], Ints]


def crossing(program: IntegerProgram, source: int, readers: Sequence[int]) -> tuple[int, int]:
    """Variables of whether a transfer comes in and whether it goes out."""
    comes, goes = program.add(1.0), program.add(1.0)
    for reader in readers:
        program.at_least([(comes, 1.0), (reader, -1.0), (source, 1.0)], 0.0)
        program.at_least([(goes, 1.0), (source, -1.0), (reader, 1.0)], 0.0)
    return comes, goes
