"""colocrl: placement by a network that reads all groups and names their devices (Mirhoseini et al.,
ICML 2017), the one that Placeto is compared with.

In: an objective to learn on within a budget; or problems to learn from, or a problem and a policy.
Out: the best placement simulated; or a ColocrlPolicy.

Each update draws some placements of one graph and follows the gradient of

    mean over them of (R - b) log pi(placement)

where R is the square root of the step time, in multiples of the step on one device, and b its
moving average. A placement over a memory limit has failed: its R is 10, and late in training it is
left out of average and gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.columns import Floats, Ints
from apportion.learn.adam import (
    AdamMoments,
    Weights,
    adam_step,
    clipped,
    flat,
    no_moments,
    unflat,
)
from apportion.learn.colocrl_network import MOST_GROUPS, ColocrlNetwork, group_vectors
from apportion.learn.group_graph import GroupGraph, group_graph
from apportion.learn.training_limits import TrainingLimits
from apportion.place import (
    PlacementObjective,
    PlacementProblem,
    PlacementResult,
    PlacerProgress,
    Report,
    StepObjective,
    read_policy,
    write_policy,
)

KIND = "colocrl"
FEATURES = 1  # version
FAILED = 10.0
LATE = 0.5  # of the training


@dataclass(frozen=True)
class ColocrlSettings:
    """How ColocRL learns. The text gives none of the numbers: these are ours, but for the share of
    the moving average and the clip, which are those of its authors' next method (HDP)."""

    hidden: int = 128
    placements: int = 16  # of one update
    rate: tuple[float, float] = (2e-3, 2e-4)  # of Adam, at first and at the end
    average: float = 0.9
    clip: float = 1.0


@dataclass(frozen=True, eq=False)
class ColocrlPolicy:
    """A policy for one number of devices, and what its training needs to go on. `averages` has the
    moving average of each graph in training."""

    devices: int
    weights: Weights
    settings: ColocrlSettings
    moments: AdamMoments
    seed: int = 0
    updates: int = 0
    evaluations: int = 0
    progress: float = 0.0
    averages: Mapping[int, float] = field(default_factory=dict)
    trained_on: tuple[str, ...] = ()
    interrupted: bool = False


def new_colocrl(devices: int, seed: int, settings: ColocrlSettings) -> ColocrlPolicy:
    """A policy that has learned nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = ColocrlNetwork(devices, settings.hidden)
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    moments = no_moments(len(flat(weights)))
    return ColocrlPolicy(devices, weights, settings, moments, seed=seed)


class ColocrlTraining:
    """A policy while it learns, and the best placement of each graph that it has seen."""

    def __init__(self, graphs: Sequence[GroupGraph], policy: ColocrlPolicy) -> None:
        self.graphs, self.policy = graphs, policy
        self._vectors = [torch.from_numpy(group_vectors(graph)).float() for graph in graphs]
        self._objectives = [StepObjective(graph.problem) for graph in graphs]
        self.best: list[tuple[float, Ints] | None] = [None] * len(graphs)
        self.curve: list[tuple[float, int, float]] = []  # PlacementResult's, of the first graph
        self.simulated = 0
        self._began = time.monotonic()
        with torch.random.fork_rng(devices=[]):
            self._network = ColocrlNetwork(policy.devices, policy.settings.hidden)

    def update(self, limits: TrainingLimits) -> bool:
        """Draw the placements of one update and learn from them; whether there was time for it."""
        policy, settings = self.policy, self.policy.settings
        index = policy.updates % len(self.graphs)
        graph, count = self.graphs[index], settings.placements
        if limits.evaluations is not None:
            count = min(count, limits.evaluations - policy.evaluations)
        chances = np.random.default_rng([policy.seed, policy.updates]).random(
            (settings.placements, graph.groups)
        )
        places, log = self._decode(index, chances[:count])
        roots, failed = self._judge(index, places)
        progress = limits.progress(policy.updates, policy.evaluations)
        counted = ~failed if progress >= LATE else np.ones(count, bool)
        averages = dict(policy.averages)
        if counted.any():
            now = float(roots[counted].mean())
            old = averages.get(index, now)
            averages[index] = settings.average * old + (1 - settings.average) * now
        advantage = np.where(counted, roots - averages.get(index, 0.0), 0.0) / count
        self._network.zero_grad()
        (torch.from_numpy(advantage).float() * log).sum().backward()
        parts = [w.grad for w in self._network.parameters() if w.grad is not None]
        gradient = torch.cat([part.flatten() for part in parts]).numpy()
        rate = settings.rate[0] + (settings.rate[1] - settings.rate[0]) * progress
        column, moments = adam_step(
            flat(policy.weights), clipped(gradient, settings.clip), policy.moments, rate
        )
        self.policy = replace(
            policy, weights=unflat(column, policy.weights), moments=moments, averages=averages,
            updates=policy.updates + 1, evaluations=policy.evaluations + count, progress=progress,
        )  # fmt: skip
        return time.monotonic() < limits.deadline

    def greedy(self, index: int = 0) -> None:
        """Simulate the placement of the most probable devices."""
        with torch.no_grad():
            places, _ = self._decode(index, None)
        self._judge(index, places)

    def _decode(self, index: int, chances: Floats | None) -> tuple[Ints, torch.Tensor]:
        weights = self.policy.weights.items()
        self._network.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in weights})
        allowed = torch.from_numpy(self.graphs[index].allowed)
        drawn = None if chances is None else torch.from_numpy(chances)
        places, log = self._network(self._vectors[index], allowed, drawn)
        return places.numpy(), log

    def _judge(self, index: int, places: Ints) -> tuple[Floats, Any]:
        """Roots of step times, and which placements have failed."""
        graph, objective = self.graphs[index], self._objectives[index]
        roots, failed = np.zeros(len(places)), np.zeros(len(places), bool)
        for k, place in enumerate(places):
            units = graph.spread(place)
            score = objective.score(units)
            self.simulated += 1
            failed[k] = score * graph.problem.tick >= objective.tables.worst
            roots[k] = FAILED if failed[k] else np.sqrt(score / graph.one_device_seconds)
            best = self.best[index]
            if best is None or score < best[0]:
                self.best[index] = score, units
                if index == 0:
                    seconds = time.monotonic() - self._began
                    self.curve.append((seconds, self.simulated, score))
        return roots, failed


def train_colocrl(
    problems: Sequence[PlacementProblem],
    *,
    updates: int | None = None,
    evaluations: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    report: Callable[[ColocrlPolicy], None] | None = None,
    resume: ColocrlPolicy | None = None,
    settings: ColocrlSettings | None = None,
) -> ColocrlPolicy:
    """A policy that has learned from all problems in turn, until the first of the limits. With
    `resume` it goes on where that policy stopped; counts include what that one had."""
    if updates is None and evaluations is None and budget is None:
        raise ValueError("training needs a limit: a number of updates or placements, or seconds")
    if not problems or len({len(p.devices) for p in problems}) != 1:
        raise ValueError("a policy of ColocRL learns from problems with one number of devices")
    policy = resume or new_colocrl(len(problems[0].devices), seed, settings or ColocrlSettings())
    _check_number(policy, problems[0])
    names = tuple(p.name for p in problems)
    if policy.trained_on != names:
        policy = replace(policy, averages={}, trained_on=names)
    limits = TrainingLimits(updates, evaluations, budget, policy.progress)
    training = ColocrlTraining([group_graph(p, MOST_GROUPS) for p in problems], policy)
    try:
        while limits.left(training.policy.updates, training.policy.evaluations):
            training.update(limits)
            if report is not None:
                report(training.policy)
    except KeyboardInterrupt:
        return replace(training.policy, interrupted=True)
    return training.policy


def restarted_colocrl(policy: ColocrlPolicy, seed: int = 0) -> ColocrlPolicy:
    """The weights of a policy at the start of a new training, which `resume` continues."""
    return replace(
        policy, moments=no_moments(len(flat(policy.weights))), seed=seed, updates=0,
        evaluations=0, progress=0.0, averages={}, interrupted=False,
    )  # fmt: skip


def apply_colocrl(policy: ColocrlPolicy, problem: PlacementProblem) -> PlacementResult:
    """The placement of the most probable devices; no learning."""
    _check_number(policy, problem)
    training = ColocrlTraining([group_graph(problem, MOST_GROUPS)], policy)
    training.greedy()
    return _result(training)


def place_with_colocrl(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
    settings: ColocrlSettings | None = None,
    policy: ColocrlPolicy | Path | None = None,
) -> PlacementResult:
    """Learn on the one problem, then name the most probable devices; the best placement seen. With
    `evaluations` it ends after exactly so many simulated placements; with `policy`, or the file of
    one, it begins with what that has learned. `starts` are only compared: the network cannot begin
    with a placement."""
    graph = group_graph(objective.problem, MOST_GROUPS)
    if isinstance(policy, Path):
        policy = load_colocrl(policy)
    if policy is None:
        policy = new_colocrl(graph.devices, seed, settings or ColocrlSettings())
    else:
        _check_number(policy, objective.problem)
        policy = restarted_colocrl(policy, seed)
    given = [(objective.score(start), start) for start in starts]
    if evaluations is not None:
        evaluations = max(1, evaluations - len(given))
    learns = None if evaluations is None else evaluations - 1
    limits = TrainingLimits(None, learns, None if evaluations is not None else budget)
    training = ColocrlTraining([graph], policy)
    interrupted = False
    try:
        while limits.left(training.policy.updates, training.policy.evaluations):
            training.update(limits)
            if report is not None:
                best = training.best[0]
                report(PlacerProgress(best and best[0], None, training.simulated))
        training.greedy()
    except KeyboardInterrupt:
        interrupted = True
    objective.evaluations += training.simulated
    result = replace(_result(training), interrupted=interrupted)
    if given:
        score, start = min(given, key=lambda pair: pair[0])
        if training.best[0] is None or score <= training.best[0][0]:
            return replace(result, placement=np.asarray(start), curve=((0.0, 1, score),))
    return result


def _result(training: ColocrlTraining) -> PlacementResult:
    best, graph = training.best[0], training.graphs[0]
    if best is None:  # interrupted before the first placement was simulated
        return PlacementResult(graph.spread(graph.allowed.argmax(axis=1)))
    figures = {"updates": float(training.policy.updates), "groups": float(graph.groups)}
    return PlacementResult(best[1], curve=tuple(training.curve), figures=figures)


def _check_number(policy: ColocrlPolicy, problem: PlacementProblem) -> None:
    if policy.devices != len(problem.devices):
        raise ValueError(
            f"this policy of ColocRL is for {policy.devices} devices, and the problem has "
            f"{len(problem.devices)}; train one for that number"
        )


def save_colocrl(path: Path, policy: ColocrlPolicy) -> None:
    """Write a policy with all that training needs to go on."""
    tensors: dict[str, Any] = {f"network.{name}": w for name, w in policy.weights.items()}
    tensors["adam.mean"], tensors["adam.square"] = policy.moments.mean, policy.moments.square
    facts = {
        "features_version": FEATURES,
        "devices": policy.devices,
        "settings": asdict(policy.settings),
        "steps": policy.moments.steps,
        "seed": policy.seed,
        "updates": policy.updates,
        "evaluations": policy.evaluations,
        "progress": policy.progress,
        "averages": {str(index): value for index, value in policy.averages.items()},
        "trained_on": list(policy.trained_on),
    }
    write_policy(path, KIND, tensors, facts)


def load_colocrl(path: Path) -> ColocrlPolicy:
    """The policy of a file. Raises ValueError, naming it, if it has none of ColocRL's."""
    kept = read_policy(path, KIND)
    facts, tensors = kept.facts, kept.tensors
    try:
        if facts["features_version"] != FEATURES:
            raise ValueError(f"its features are of version {facts['features_version']}")
        said = dict(facts["settings"])
        settings = ColocrlSettings(**{**said, "rate": tuple(said["rate"])})
        found = new_colocrl(int(facts["devices"]), int(facts["seed"]), settings)
        weights = {name: tensors[f"network.{name}"] for name in found.weights}
        moments = AdamMoments(int(facts["steps"]), tensors["adam.mean"], tensors["adam.square"])
        same = all(weights[name].shape == w.shape for name, w in found.weights.items())
        if not same or not moments.mean.shape == moments.square.shape == found.moments.mean.shape:
            raise ValueError("its tensors do not have the shapes of such a network")
        return replace(
            found, weights=weights, moments=moments, updates=int(facts["updates"]),
            evaluations=int(facts["evaluations"]), progress=float(facts["progress"]),
            averages={int(k): float(v) for k, v in facts["averages"].items()},
            trained_on=tuple(map(str, facts["trained_on"])),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"{path} is no whole policy of ColocRL: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no policy of ColocRL: {error}") from None
