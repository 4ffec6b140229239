"""placeto: learned placement, one group after the other (Addanki et al., NeurIPS 2019).

In: an Objective to learn on within a budget; or a problem and a policy that has learned on others.
Out: the best placement that was simulated.

placeto_network.py is the policy, placeto_episode.py what it decides on, placeto_training.py how it
learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from apportion.columns import Ints
from apportion.learn.group_graph import group_graph
from apportion.learn.placeto_episode import roll_out
from apportion.learn.placeto_policy import PlacetoPolicy, PlacetoSettings, new_policy
from apportion.learn.placeto_training import (
    GROUPS,
    PlacetoTraining,
    check_devices,
    for_fine_tuning,
    worker_pool,
)
from apportion.learn.training_limits import TrainingLimits
from apportion.place import Objective, PlacementProblem, PlacementResult, PlacerProgress, Report


def apply_placeto(policy: PlacetoPolicy, problem: PlacementProblem) -> PlacementResult:
    """The best placement on the way of one episode that always takes the device with the highest
    score; no learning."""
    check_devices(policy, problem)
    training = PlacetoTraining([group_graph(problem, GROUPS)], policy)
    _greedy_episode(training)
    return _result(training)


def place_with_placeto(
    objective: Objective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
    workers: int = 1,
    settings: PlacetoSettings | None = None,
    policy: PlacetoPolicy | None = None,
) -> PlacementResult:
    """Learn on the one problem, then place it greedily; the best placement seen. With `evaluations`
    it ends after exactly so many simulated placements, whatever time that takes; with `policy` it
    begins with what that has learned on other problems."""
    problem = objective.problem
    graph = group_graph(problem, GROUPS)
    if policy is None:
        policy = new_policy(graph.devices, seed, settings or PlacetoSettings())
    else:
        check_devices(policy, problem)
        policy = for_fine_tuning(policy, seed, settings)
    given = [(objective.score(start), start) for start in starts]
    if evaluations is not None:
        evaluations = max(0, evaluations - len(given))
    end = graph.groups + 1  # placements of the greedy episode
    learns = None if evaluations is None else max(evaluations - end, min(evaluations, end))
    limits = TrainingLimits(None, learns, None if evaluations is not None else budget)
    interrupted = False
    with worker_pool(workers) as pool:
        training = PlacetoTraining([graph], policy, pool)
        if starts:
            training.begin[0] = graph.gathered(starts[0])
        try:
            while limits.left(
                training.policy.episodes, training.policy.evaluations
            ) and training.update(limits):
                if report is not None:
                    best = training.best[0]
                    report(PlacerProgress(best and best[0], None, training.simulated))
            if evaluations is None or training.simulated < evaluations:
                _greedy_episode(training, evaluations)
        except KeyboardInterrupt:
            interrupted = True
    objective.evaluations += training.simulated
    result = replace(_result(training), interrupted=interrupted)
    if given:
        score, start = min(given, key=lambda pair: pair[0])
        if training.best[0] is None or score <= training.best[0][0]:
            return replace(result, placement=np.asarray(start), curve=((0.0, 1, score),))
    return result


def _greedy_episode(training: PlacetoTraining, evaluations: int | None = None) -> None:
    """Play an episode on the first graph with the actions of the highest score."""
    policy = training.policy
    most = None if evaluations is None else evaluations - training.simulated
    training.note(
        0,
        roll_out(
            training.graphs[0], policy.weights, policy.settings.rounds, training.begin[0], None,
            most=most,
        ),
    )  # fmt: skip


def _result(training: PlacetoTraining) -> PlacementResult:
    best = training.best[0]
    if best is None:  # interrupted before the first placement was simulated
        graph = training.graphs[0]
        return PlacementResult(graph.spread(training.begin[0]))
    figures = {
        "episodes": float(training.policy.episodes),
        "groups": float(training.graphs[0].groups),
    }
    return PlacementResult(np.asarray(best[1]), curve=tuple(training.curve), figures=figures)
