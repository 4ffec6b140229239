"""placers: PLACERS, every way to place units on devices, one row each. One algorithm a file:

    place(objective, *, budget, seed, starts, contiguous, report) -> PlacementResult

with `budget` in seconds, `starts` placements to begin with, `report` a function that hears
PlacerProgress or None. To add a placer, write its file and add its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.place.objective import OBJECTIVES, Objective, PlacementResult, Report

if TYPE_CHECKING:
    from apportion.columns import Ints


@dataclass(frozen=True, slots=True)
class Placer:
    """A row of PLACERS.

    place       the function, or where it is: "module:function" of the package
    help        what `--help` says of it
    objectives  those that it can minimise
    auto        its place among those that auto tries, by rising numbers; None: not tried
    share       how much of auto's budget it may use
    contiguous  whether it can keep to contiguous placements (of throughput)
    learns      it can begin with what it has learned before (an argument `policy`, a file)
    """

    place: str | Callable[..., PlacementResult]
    help: str
    objectives: tuple[str, ...] = OBJECTIVES
    auto: int | None = None
    share: float = 1.0
    contiguous: bool = False
    learns: bool = False

    def __call__(
        self,
        objective: Objective,
        *,
        budget: float = 10.0,
        seed: int = 0,
        starts: Sequence[Ints] = (),
        contiguous: bool = False,
        report: Report | None = None,
        policy: Path | None = None,
    ) -> PlacementResult:
        if policy is not None and not self.learns:
            able = ", ".join(name for name, row in PLACERS.items() if row.learns)
            raise ValueError(f"only methods that learn take a policy: {able}")
        place = self.place
        if isinstance(place, str):
            module, _, name = place.partition(":")
            place = getattr(import_module(f"apportion.{module}"), name)
        how = {} if policy is None else {"policy": policy}
        return place(
            objective, budget=budget, seed=seed, starts=starts, contiguous=contiguous,
            report=report, **how,
        )  # fmt: skip


PLACERS: dict[str, Placer] = {
    "single": Placer("place.one_device:one_device", "everything on the best one device", auto=10),
}
