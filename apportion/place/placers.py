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

from apportion.place.objective_names import LATENCY, OBJECTIVES, STEP, THROUGHPUT

if TYPE_CHECKING:
    from apportion.columns import Ints
    from apportion.place.objective import PlacementObjective, PlacementResult, Report


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
    learns           it can begin with what it has learned before (an argument `policy`, a file)
    """

    place: str | Callable[..., PlacementResult]
    help: str
    objectives: tuple[str, ...] = OBJECTIVES
    auto: int | None = None
    share: float = 1.0
    contiguous: bool = False
    only_contiguous: bool = False
    learns: bool = False

    def __call__(
        self,
        objective: PlacementObjective,
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


def placers_help() -> str:
    """One paragraph for each placer."""
    return "\n\n".join(f"{name}: {row.help}." for name, row in PLACERS.items())


PLACERS: dict[str, Placer] = {
    "auto": Placer("place.auto_place:auto", "the best of those that suit", contiguous=True),
    "single": Placer(
        "place.lists.one_device:one_device", "everything on the best one device", auto=10,
        share=0.02, contiguous=True,
    ),
    "expert": Placer(
        "place.lists.expert_placement:expert_placement", "what a person would choose", auto=20,
        share=0.02,
    ),
    "blocks": Placer(
        "place.lists.blocks:contiguous_blocks", "contiguous blocks, balanced by compute", auto=30,
        share=0.1, contiguous=True,
    ),
    "m-topo": Placer(
        "place.lists.m_topo:m_topo", "fills one device after the other (Baechi)", auto=40,
        share=0.02,
    ),
    "list-schedule": Placer(
        "place.lists.list_schedule:list_schedule", "the best of a dozen list schedulers", auto=50,
        share=0.3,
    ),
    "m-etf": Placer("place.lists.m_etf:m_etf", "earliest task first (Baechi)", auto=60, share=0.1),
    "m-sct": Placer(
        "place.lists.m_sct:m_sct", "small communication times, by a linear program (Baechi)",
        auto=70, share=0.2,
    ),
    "policy": Placer(
        "place.policy.policy:policy", "a learned policy, then local search from it", (STEP,),
        auto=75, share=0.5, learns=True,
    ),
    "metis": Placer("place.cuts.metis:metis", "METIS's cut; apportion[partition]"),
    "scotch": Placer("place.cuts.scotch:scotch", "Scotch's cut; apportion[partition]"),
    "colocrl": Placer(
        "learn.colocrl:place_with_colocrl", "learns to name all devices in turn (ColocRL)",
        objectives=(STEP,), learns=True,
    ),
    "placeto": Placer(
        "learn.placeto:place_with_placeto", "learns to move one group after the other (Placeto)",
        objectives=(STEP,), learns=True,
    ),
    "local-search": Placer(
        "place.searches.local_search:local_search",
        "moves of units and blocks, most on the critical chain",
        objectives=(STEP,), auto=200, share=1.0,
    ),
    "restarts": Placer(
        "place.searches.restarts:restarts", "moves of single units, from many random placements",
        (STEP,),
    ),
    "annealing": Placer(
        "place.searches.annealing:annealing", "simulated annealing with single units and blocks",
        (STEP,),
    ),
    "brkga": Placer("place.searches.brkga:brkga", "a genetic algorithm with biased random keys"),
    "random": Placer(
        "place.searches.random_placement:random_placement", "the best of many at random"
    ),
    "dp": Placer(
        "place.loads.ideals:dp_ideals",
        "the best contiguous placement, over ideals (Tarnawski et al.)",
        (THROUGHPUT,), auto=110, share=0.3, contiguous=True,
    ),
    "dpl": Placer(
        "place.loads.linear_ideals:dp_linear", "the same along one order of the graph: fast",
        (THROUGHPUT,), auto=100, share=0.1, contiguous=True,
    ),
    "pipedream": Placer(
        "place.loads.pipedream_planner:pipedream", "PipeDream's planner: a chain of merged layers",
        (THROUGHPUT,), contiguous=True,
    ),
    "load-search": Placer(
        "place.loads.load_search:load_search", "annealing on the largest load, over all devices",
        (THROUGHPUT,), auto=120, share=0.4,
    ),
    "latency-greedy": Placer(
        "place.loads.latency_greedy:latency_greedy", "fills accelerators in the order of the graph",
        (LATENCY,), auto=100, share=0.1,
    ),
    "latency-search": Placer(
        "place.loads.latency_search:latency_search", "annealing on the time of one sample",
        (LATENCY,), auto=120, share=0.4,
    ),
    "milp": Placer(
        "place.loads.milp:milp_placement", "a mixed-integer program with a proven bound, by HiGHS",
        (THROUGHPUT, LATENCY), auto=130, contiguous=True,
    ),
    "exhaustive": Placer(
        "place.loads.exhaustive_placement:exhaustive", "every placement: for tiny graphs",
        contiguous=True,
    ),
    "hdp": Placer(
        "learn.hdp:place_with_hdp", "learns groups and their devices (HDP)"
    ),
    "gdp": Placer(
        "learn.gdp:place_with_gdp", "GDP: attention over all units at once, trained by PPO",
        learns=True,
    ),
}  # fmt: skip
