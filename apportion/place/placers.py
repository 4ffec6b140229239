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
    only_contiguous  whether it considers no others, so that its bound holds among them alone
    """

    place: str | Callable[..., PlacementResult]
    help: str
    objectives: tuple[str, ...] = OBJECTIVES
    auto: int | None = None
    share: float = 1.0
    contiguous: bool = False
    only_contiguous: bool = False

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
    "auto": Placer("place.auto_place:auto", "the best of those that suit", contiguous=True),
    "single": Placer(
        "place.one_device:one_device", "everything on the best one device", auto=10, share=0.02,
        contiguous=True,
    ),
    "expert": Placer(
        "place.expert_placement:expert_placement", "what a person would choose", auto=20,
        share=0.02,
    ),
    "blocks": Placer(
        "place.blocks:contiguous_blocks", "contiguous blocks, balanced by compute", auto=30,
        share=0.1, contiguous=True,
    ),
    "m-topo": Placer(
        "place.m_topo:m_topo", "fills one device after the other (Baechi)", auto=40, share=0.02
    ),
    "list-schedule": Placer(
        "place.list_schedule:list_schedule", "the best of a dozen list schedulers", auto=50,
        share=0.3,
    ),
    "m-etf": Placer("place.m_etf:m_etf", "earliest task first (Baechi)", auto=60, share=0.1),
    "m-sct": Placer(
        "place.m_sct:m_sct", "small communication times, by a linear program (Baechi)", auto=70,
        share=0.2,
    ),
    "metis": Placer("place.metis:metis", "METIS's cut; apportion[partition]"),
    "scotch": Placer("place.scotch:scotch", "Scotch's cut; apportion[partition]"),
    "colocrl": Placer(
        "learn.colocrl:place_with_colocrl", "learns to name all devices in turn (ColocRL)",
        objectives=(STEP,),
    ),
    "placeto": Placer(
        "learn.placeto:place_with_placeto", "learns to move one group after the other (Placeto)",
        objectives=(STEP,),
    ),
}  # fmt: skip
