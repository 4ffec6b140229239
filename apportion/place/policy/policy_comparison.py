"""policy comparison: a policy beside what needs no learning, on one problem.

In: a PlacementProblem, a PolicyNetwork, seconds of local search. Out: the step time of each, and
how many placements were simulated for it.
"""

from __future__ import annotations

from typing import Any

from apportion.columns import Ints
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem
from apportion.place.placers import PLACERS
from apportion.place.policy.policy import proposals
from apportion.place.policy.policy_network import PolicyNetwork
from apportion.place.searches.local_search import local_search
from apportion.work_clock import work_seconds


def evaluate_policy(
    problem: PlacementProblem, network: PolicyNetwork, budget: float, seed: int
) -> dict[str, Any]:
    """Step times in the problem's unit by method: what the policy proposes, local search with as
    many evaluations, and both after `budget` seconds of local search."""
    objective = StepObjective(problem)
    times: dict[str, float] = {}
    starts: dict[str, Ints] = {}
    for name in ("single", "list-schedule"):
        starts[name] = PLACERS[name](objective, seed=seed).placement
        times[name] = objective.score(starts[name])
    began = work_seconds()
    own = list(proposals(objective, network, seed=seed))
    seconds = work_seconds() - began
    best = min(own, key=objective.score)
    times["policy, greedy"] = objective.score(own[0])
    times["policy"] = objective.score(best)
    heuristic = min(starts.values(), key=objective.score)
    for name, start in (("local-search", heuristic), ("policy and local-search", best)):
        if name == "local-search":
            equal = local_search(objective, seed=seed, starts=[start], evaluations=len(own))
            times["local-search, equal evaluations"] = objective.score(equal.placement)
        found = local_search(objective, seed=seed, starts=[start], budget=budget)
        times[name] = objective.score(found.placement)
    return {
        "units": problem.units,
        "devices": len(problem.devices),
        "time_unit": problem.time_unit,
        "proposals": len(own),
        "policy_seconds": seconds,
        "search_seconds": budget,
        "times": times,
    }
