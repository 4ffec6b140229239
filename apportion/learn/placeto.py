"""placeto: learned placement, one group after the other (Addanki et al., NeurIPS 2019).

In: an objective to learn on within a budget; or a problem and a policy that has learned on others.
Out: the best placement that was simulated.

placeto_network.py is the policy, placeto_episode.py what it decides on, placeto_training.py how it
learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from apportion.columns import Ints
from apportion.learn.group_graph import group_graph
from apportion.learn.placeto_episode import roll_out
from apportion.learn.placeto_policy import (
    PlacetoPolicy,
    PlacetoSettings,
    load_placeto,
    new_policy,
)
from apportion.learn.placeto_training import (
    GROUPS,
    PlacetoTraining,
    check_devices,
    for_fine_tuning,
    worker_pool,
)
from apportion.learn.training_limits import TrainingLimits
from apportion.place import (
    PlacementObjective,
    PlacementProblem,
    PlacementResult,
    PlacerProgress,
    Report,
)

LEARNS = 0.9  # of a budget; the rest is for the greedy episode at the end
SEARCH = PlacetoSettings(begin="best", rate=(3e-3, 3e-4))  # of few episodes, and so few updates
KNOWING = (0.3, 0.03)  # the weight of entropy of a policy that has learned before


def apply_placeto(policy: PlacetoPolicy, problem: PlacementProblem) -> PlacementResult:
    """The best placement on the way of one episode that always takes the device with the highest
    score; no learning."""
    check_devices(policy, problem)
    training = PlacetoTraining([group_graph(problem, GROUPS)], policy)
    _greedy_episode(training)
    return _result(training)


def place_with_placeto(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
    workers: int = 1,
    settings: PlacetoSettings | None = None,
    policy: PlacetoPolicy | Path | None = None,
) -> PlacementResult:
    """Learn on the one problem, then place it greedily; the best placement seen. With `evaluations`
    it ends after exactly so many simulated placements, whatever time that takes; with `policy`, or
    the file of one, it begins with what that has learned on other problems, and places greedily
    before it learns as well."""
    graph = group_graph(objective.problem, GROUPS)
    known = policy is not None
    learner = _learner(objective.problem, seed, settings, policy)
    given = [(objective.score(start), np.asarray(start)) for start in starts]
    learns = None
    if evaluations is not None:  # without those of the greedy episodes, if there are enough
        left, end = evaluations - len(given), graph.groups + 1
        learns = max(left - 2 * end, 0) if known else max(left - end, min(left, end))
    limits = TrainingLimits(None, learns, None if evaluations is not None else LEARNS * budget)
    last = np.inf if evaluations is not None else limits.began + budget
    interrupted = False
    with worker_pool(workers) as pool:
        training = PlacetoTraining([graph], learner, pool)
        if given:
            training.begin[0] = graph.gathered(starts[0])
            training.know(*min(given, key=lambda pair: pair[0]), len(given))
        try:
            if known:
                _greedy_episode(training, evaluations, last)
            while limits.left(
                training.policy.episodes, training.policy.evaluations
            ) and training.update(limits):
                if report is not None:
                    best = training.best[0]
                    report(PlacerProgress(best and best[0], None, training.simulated))
            _greedy_episode(training, evaluations, last)
        except KeyboardInterrupt:
            interrupted = True
    objective.evaluations += training.simulated - len(given)
    return replace(_result(training), interrupted=interrupted)


def _learner(
    problem: PlacementProblem,
    seed: int,
    settings: PlacetoSettings | None,
    policy: PlacetoPolicy | Path | None,
) -> PlacetoPolicy:
    """The policy that learns: a new one, or a given one at the start of a new training; one that
    knows something explores less."""
    if policy is None:
        return new_policy(len(problem.devices), seed, settings or SEARCH)
    if isinstance(policy, Path):
        policy = load_placeto(policy)
    check_devices(policy, problem)
    how = settings or replace(SEARCH, rounds=policy.settings.rounds, entropy=KNOWING)
    return for_fine_tuning(policy, seed, how)


def _greedy_episode(
    training: PlacetoTraining, evaluations: int | None = None, deadline: float = np.inf
) -> None:
    """Play an episode on the first graph with the actions of the highest score."""
    policy = training.policy
    most = None if evaluations is None else evaluations - training.simulated
    if most is not None and most <= 0:
        return
    start = training.begin_of(0, policy.episodes)
    training.note(
        0,
        roll_out(
            training.graphs[0], policy.weights, policy.settings.rounds, start, None,
            most=most, deadline=deadline,
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
