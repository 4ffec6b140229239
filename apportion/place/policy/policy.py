"""policy: a placement by a learned policy, then local search from it.

In: an objective; the policy that comes with the package, or one from a file. Out: the best of what
the policy proposes and what local search makes of it in the seconds that are left. What `single`,
`expert` and `list-schedule` find is among what is compared, so that it is never worse than these.

The policy proposes one placement greedily for several numbers of devices, since using all of them
is not always best, then samples. It knows no groups: every unit is placed by itself
(policy_decode.py), on any number and kind of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from apportion.columns import Ints
from apportion.place.auto_place import Attempts
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.placement_problem import PlacementProblem, check_placement
from apportion.place.placers import PLACERS
from apportion.place.policy.policy_decode import decode
from apportion.place.policy.policy_features import policy_graph, unit_features
from apportion.place.policy.policy_network import (
    PolicyNetwork,
    encode,
    first_scores,
    load_network,
    shipped_network,
)
from apportion.work_clock import work_seconds

SAMPLES = 24
TEMPERATURES = (0.3, 0.6, 1.0)
TIGHTER = (0.9, 0.8, 0.65)  # shares of the memory limit to plan with if the whole is exceeded
COMPARED_SECONDS = 2.0  # at least, for all of them
PROPOSE_SHARE = 0.35  # of the budget, for samples
SEARCH_STARTS = 3
LOCAL_SEARCH = "local-search"
COMPARED = ("single", "expert", "list-schedule")


def policy(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    policy: Path | None = None,
) -> PlacementResult:
    """The policy's proposals, improved by local search for what is left of `budget` seconds."""
    network = shipped_network() if policy is None else load_network(policy)
    attempts = Attempts(objective, report)
    interrupted = False
    figures: dict[str, float] = {}
    try:
        for start in starts:
            check_placement(objective.problem, start)
            attempts.add(start)
        for name in COMPARED:
            found = PLACERS[name](objective, budget=max(0.2 * budget, COMPARED_SECONDS), seed=seed)
            figures[name] = attempts.add(found.placement)
            interrupted |= found.interrupted
        own = []
        for place in proposals(objective, network, seed=seed, seconds=PROPOSE_SHARE * budget):
            own.append(attempts.add(place))
        figures["policy"] = min(own)
        figures["proposals"] = float(len(own))
        left = budget - (work_seconds() - attempts.began)
        if left > 0 and LOCAL_SEARCH in PLACERS and not interrupted:
            searched = PLACERS[LOCAL_SEARCH](
                objective, budget=left, seed=seed, report=attempts.tell,
                starts=[place for _, _, place in attempts.found[:SEARCH_STARTS]],
            )  # fmt: skip
            figures[LOCAL_SEARCH] = attempts.add(searched.placement)
            interrupted = searched.interrupted
    except KeyboardInterrupt:
        if not attempts.found:
            raise
        interrupted = True
    return PlacementResult(
        attempts.found[0][2], curve=tuple(attempts.curve), figures=figures,
        notes=_notes(network), interrupted=interrupted,
    )  # fmt: skip


def proposals(
    objective: PlacementObjective,
    network: PolicyNetwork,
    *,
    seed: int = 0,
    samples: int = SAMPLES,
    seconds: float = np.inf,
) -> Iterator[Ints]:
    """What the policy proposes, the greedy placement on all devices first; no more of them after
    so many seconds."""
    began = work_seconds()
    problem = objective.problem
    graph = policy_graph(problem)
    base = first_scores(network, encode(network, graph, unit_features(problem, graph)))
    random = np.random.default_rng(seed)
    k = len(problem.devices)
    greedy = decode(graph, base, network.head).place
    yield greedy
    if not objective.evaluate(greedy).feasible:
        for share in TIGHTER:
            tight = graph._replace(limit=graph.limit * share)
            tighter = decode(tight, base, network.head).place
            yield tighter
            if objective.evaluate(tighter).feasible:
                graph = tight
                break
    for most in device_counts(k):
        if work_seconds() - began > seconds:
            return
        yield decode(graph, base, network.head, most_devices=most).place
    for number in range(samples):
        if work_seconds() - began > seconds:
            return
        noise = random.gumbel(size=graph.allowed.shape) * TEMPERATURES[number % len(TEMPERATURES)]
        yield decode(graph, base, network.head, noise=noise).place


def device_counts(devices: int) -> list[int]:
    """Smaller numbers of devices that may be better: all up to four, then powers of two."""
    return [k for k in range(devices - 1, 1, -1) if k <= 4 or k & (k - 1) == 0]


def greedy_placement(problem: PlacementProblem, network: PolicyNetwork) -> Ints:
    """What the policy proposes first."""
    graph = policy_graph(problem)
    base = first_scores(network, encode(network, graph, unit_features(problem, graph)))
    return decode(graph, base, network.head).place


def _notes(network: PolicyNetwork) -> tuple[str, ...]:
    trained = network.facts.get("trained_on") or []
    if not trained:
        return ("the policy has learned nothing yet",)
    return ()
