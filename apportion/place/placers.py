"""placers: PLACERS, every way to place units on devices, one row each. One algorithm a file:

    place(objective, *, budget, seed, starts, contiguous, report) -> PlacementResult

with `budget` in seconds, `starts` placements to begin with, `report` a function that hears
PlacerProgress or None. To add a placer, write its file and add its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from apportion.place.objective import OBJECTIVES, STEP, Objective, PlacementResult, Report

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
    """

    place: str | Callable[..., PlacementResult]
    help: str
    objectives: tuple[str, ...] = OBJECTIVES
    auto: int | None = None
    share: float = 1.0
    contiguous: bool = False

    def __call__(
        self,
        objective: Objective,
        *,
        budget: float = 10.0,
        seed: int = 0,
        starts: Sequence[Ints] = (),
        contiguous: bool = False,
        report: Report | None = None,
    ) -> PlacementResult:
        place = self.place
        if isinstance(place, str):
            module, _, name = place.partition(":")
            place = getattr(import_module(f"apportion.{module}"), name)
        return place(
            objective, budget=budget, seed=seed, starts=starts, contiguous=contiguous,
            report=report,
        )  # fmt: skip


PLACERS: dict[str, Placer] = {
    "single": Placer("place.one_device:one_device", "everything on the best one device", auto=10),
    "local-search": Placer(
        "place.local_search:local_search",
        "moves of single units and of blocks, most of them on the critical chain",
        objectives=(STEP,),
    ),
}
