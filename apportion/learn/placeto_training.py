"""placeto_training: how Placeto learns (Addanki et al., NeurIPS 2019): REINFORCE, with a baseline
for every time step.

In: problems with one number of devices. Out: a PlacetoPolicy.

Each update plays some episodes (placeto_episode.py) and follows the sum of their gradients, that of

    - (G_t - b_t) log pi(a_t | s_t) - beta H(pi(. | s_t))      summed over the steps t

where G_t is what the actions from t on gained, and the baseline b_t its mean over the latest
updates at the same step of the same graph, this one included. beta and the rate of Adam fall with
the progress of the training.

With several worker processes each plays an episode of its own. An episode's numbers depend on the
seed, its index and the weights, and gradients are added in the order of episodes: limited by
counts, training gives the same weights whatever the number of workers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.columns import Floats, Ints
from apportion.learn.adam import Column, adam_step, clipped, flat, no_moments, unflat
from apportion.learn.group_graph import GroupGraph, group_graph
from apportion.learn.placeto_episode import Episode, returns, roll_out
from apportion.learn.placeto_network import graph_masks
from apportion.learn.placeto_policy import (
    PlacetoPolicy,
    PlacetoSettings,
    network_of,
    new_policy,
    save_placeto,
)
from apportion.learn.training_limits import TrainingLimits
from apportion.place import PlacementProblem
from apportion.process_start import away_from_working_directory

GROUPS = 160
STATES = 160  # of which gradients are computed at once
SAVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """How far training is. `last` and `best` are means over the episodes of the latest update: of
    the step at their end and of the best on their way, in multiples of the step on one device."""

    episodes: int
    evaluations: int
    seconds: float
    last: float
    best: float


def train_placeto(
    problems: Sequence[PlacementProblem],
    *,
    episodes: int | None = None,
    evaluations: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    workers: int = 1,
    report: Callable[[EpisodeReport], None] | None = None,
    resume: PlacetoPolicy | None = None,
    settings: PlacetoSettings | None = None,
    out: Path | None = None,
) -> PlacetoPolicy:
    """A policy that has learned from all problems in turn, until the first of the limits: so many
    episodes, so many simulated placements, so many seconds. With `resume` it goes on where that
    policy stopped; counts include what that one had. Without `settings` an update has an episode
    for each worker. The policy is written to the file `out` every half minute, and in the end."""
    if episodes is None and evaluations is None and budget is None:
        raise ValueError("training needs a limit: a number of episodes or placements, or seconds")
    if not problems or len({len(p.devices) for p in problems}) != 1:
        raise ValueError("a policy of Placeto learns from problems with one number of devices")
    policy = resume or new_policy(
        len(problems[0].devices), seed, settings or PlacetoSettings(parallel=max(workers, 1))
    )
    check_devices(policy, problems[0])
    names = tuple(p.name for p in problems)
    if policy.trained_on != names:
        policy = replace(policy, history={}, trained_on=names)
    limits, saved = TrainingLimits(episodes, evaluations, budget, policy.progress), time.monotonic()
    with worker_pool(workers) as pool:
        training = PlacetoTraining([group_graph(p, GROUPS) for p in problems], policy, pool)
        try:
            while limits.left(
                training.policy.episodes, training.policy.evaluations
            ) and training.update(limits):
                if report is not None:
                    report(training.progress(limits.seconds))
                if out is not None and time.monotonic() - saved > SAVE_SECONDS:
                    save_placeto(out, training.policy)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            training.policy = replace(training.policy, interrupted=True)
    if out is not None:
        save_placeto(out, training.policy)
    return training.policy


def for_fine_tuning(
    policy: PlacetoPolicy, seed: int = 0, settings: PlacetoSettings | None = None
) -> PlacetoPolicy:
    """The weights of a policy at the start of a new training, which `resume` continues."""
    return replace(
        policy, settings=settings or policy.settings, moments=no_moments(len(flat(policy.weights))),
        seed=seed, episodes=0, evaluations=0, progress=0.0, history={}, interrupted=False,
    )  # fmt: skip


def check_devices(policy: PlacetoPolicy, problem: PlacementProblem) -> None:
    """Raises ValueError unless the policy is for the problem's number of devices."""
    if policy.devices != len(problem.devices):
        raise ValueError(
            f"this policy of Placeto is for {policy.devices} devices, and the problem has "
            f"{len(problem.devices)}; train one for that number"
        )


class PlacetoTraining:
    """A policy while it learns, and the best placement of each graph that it has seen."""

    def __init__(
        self, graphs: Sequence[GroupGraph], policy: PlacetoPolicy, pool: Executor | None = None
    ) -> None:
        self.graphs, self.policy, self._pool = graphs, policy, pool
        self.begin = [self._first_placement(index) for index in range(len(graphs))]
        self.best: list[tuple[float, Ints] | None] = [None] * len(graphs)
        self.simulated = 0
        self.curve: list[tuple[float, int, float]] = []  # PlacementResult's, of the first graph
        self._began = time.monotonic()
        self._latest: list[Episode] = []

    def _first_placement(self, index: int, episode: int = 0) -> Ints:
        """A placement that nothing is known about."""
        allowed, how = self.graphs[index].allowed, self.policy.settings.begin
        rng = np.random.default_rng([self.policy.seed, 1, index, episode])
        chance = np.where(allowed, rng.random(allowed.shape), -1.0)
        found: Ints = (allowed if how == "one-device" else chance).argmax(axis=1)
        return found

    def begin_of(self, index: int, episode: int) -> Ints:
        """Where the groups of a graph are when this episode begins."""
        how, best = self.policy.settings.begin, self.best[index]
        if how == "fresh":
            return self._first_placement(index, episode)
        if how == "best" and best is not None:
            return self.graphs[index].gathered(best[1])
        return self.begin[index]

    def graph_of(self, episode: int) -> int:
        """The graph of an episode: all in turn, in another order each time."""
        turn, at = divmod(episode, len(self.graphs))
        order = np.random.default_rng([self.policy.seed, 2, turn]).permutation(len(self.graphs))
        return int(order[at])

    def update(self, limits: TrainingLimits) -> bool:
        """Play the episodes of one update and learn from them; whether a whole one was played."""
        policy, settings = self.policy, self.policy.settings
        count = settings.parallel
        if limits.episodes is not None:
            count = min(count, limits.episodes - policy.episodes)
        numbers = range(policy.episodes, policy.episodes + count)
        played = self._play(numbers, limits)
        simulated = sum(len(episode.rho) for _, episode in played)
        whole = [(index, episode) for index, episode in played if episode.whole]
        progress = limits.progress(policy.episodes, policy.evaluations)
        self.policy = replace(
            policy,
            episodes=policy.episodes + len(whole),
            evaluations=policy.evaluations + simulated,
            progress=progress,
        )
        if whole:
            self._learn(whole, progress)
            self._latest = [episode for _, episode in whole]
        return bool(whole)

    def _play(self, numbers: range, limits: TrainingLimits) -> list[tuple[int, Episode]]:
        tasks, left = [], np.inf
        if limits.evaluations is not None:
            left = limits.evaluations - self.policy.evaluations
        for number in numbers:
            index = self.graph_of(number)
            graph = self.graphs[index]
            steps = graph.groups * self.policy.settings.visits
            most = int(min(left, steps + 1))
            if most > 0:
                chances = np.random.default_rng([self.policy.seed, 3, number]).random(steps)
                start = self.begin_of(index, number)
                tasks.append((index, (graph, self.policy, start, chances, most, limits.deadline)))
            left -= most
        played = []
        for (index, _), episode in zip(tasks, self._each(_play, tasks), strict=True):
            self.note(index, episode)
            played.append((index, episode))
        return played

    def know(self, score: float, units: Ints, simulated: int) -> None:
        """Begin with the best of some placements of the first graph that others have found."""
        self.best[0] = score, units
        self.simulated = simulated
        self.curve.append((0.0, simulated, score))

    def note(self, index: int, episode: Episode) -> None:
        """Count what an episode has simulated, and keep its best placement if it is the best."""
        score, best = episode.improved[-1][1], self.best[index]
        if best is None or score < best[0]:
            self.best[index] = score, episode.best
        if index == 0:
            seconds = time.monotonic() - self._began
            for count, score in episode.improved:
                if not self.curve or score < self.curve[-1][2]:
                    self.curve.append((seconds, self.simulated + count, score))
        self.simulated += len(episode.rho)

    def _learn(self, played: Sequence[tuple[int, Episode]], progress: float) -> None:
        policy, settings = self.policy, self.policy.settings
        gains = [(index, returns(episode.rho)) for index, episode in played]
        history = with_returns(policy.history, gains, settings.updates)
        beta = settings.entropy[0] * (settings.entropy[1] / settings.entropy[0]) ** progress
        tasks = []
        for (index, episode), (_, gain) in zip(played, gains, strict=True):
            advantage = settings.scale * (gain - history[index].mean(axis=0))
            tasks.append((index, (self.graphs[index], policy, episode, advantage, beta)))
        gradient: Column = np.stack(self._each(episode_gradient, tasks)).sum(axis=0)
        rate = settings.rate[0] + (settings.rate[1] - settings.rate[0]) * progress
        column, moments = adam_step(
            flat(policy.weights), clipped(gradient, settings.clip), policy.moments, rate
        )
        weights = unflat(column, policy.weights)
        self.policy = replace(policy, weights=weights, moments=moments, history=history)

    def _each(
        self, function: Callable[..., Any], tasks: Sequence[tuple[int, tuple[Any, ...]]]
    ) -> list[Any]:
        rows = [task for _, task in tasks]
        if self._pool is None:
            return [function(*row) for row in rows]
        return list(self._pool.map(function, *zip(*rows, strict=True)))

    def progress(self, seconds: float) -> EpisodeReport:
        last = float(np.mean([episode.rho[-1] for episode in self._latest]))
        best = float(np.mean([episode.rho.min() for episode in self._latest]))
        return EpisodeReport(
            self.policy.episodes, self.policy.evaluations, seconds, last, best
        )  # fmt: skip


def with_returns(
    history: Mapping[int, Floats], gains: Sequence[tuple[int, Floats]], updates: int
) -> dict[int, Floats]:
    """The returns of the latest updates, by graph, with those of one more update: of each graph
    the mean over its episodes. The baseline is their mean: a number for each time step."""
    found = dict(history)
    for index in sorted({index for index, _ in gains}):
        mean = np.mean([gain for i, gain in gains if i == index], axis=0)
        found[index] = np.stack([*found.get(index, ()), mean][-updates:])
    return found


def _play(
    graph: GroupGraph,
    policy: PlacetoPolicy,
    start: Ints,
    chances: Floats,
    most: int,
    deadline: float,
) -> Episode:
    return roll_out(
        graph, policy.weights, policy.settings.rounds, start, chances, most=most, deadline=deadline
    )


def episode_gradient(
    graph: GroupGraph, policy: PlacetoPolicy, episode: Episode, advantage: Floats, beta: float
) -> Column:
    """The gradient of the loss of one episode, as one column."""
    network, masks = network_of(policy), graph_masks(graph)
    for at in range(0, len(advantage), STATES):
        part = slice(at, at + STATES)
        current = torch.from_numpy(episode.current[part])
        scores = network(torch.from_numpy(episode.features[:, :, part].copy()), current, masks)
        allowed = torch.from_numpy(graph.allowed[episode.current[part]].T.copy())
        action = torch.from_numpy(episode.action[part])
        placeto_loss(
            scores.masked_fill(~allowed, -torch.inf), action,
            torch.from_numpy(advantage[part]).float(), beta,
        ).backward()  # fmt: skip
    found = [torch.zeros_like(w) if w.grad is None else w.grad for w in network.parameters()]
    return torch.cat([gradient.flatten() for gradient in found]).numpy()


def placeto_loss(
    scores: torch.Tensor, action: torch.Tensor, advantage: torch.Tensor, beta: float
) -> torch.Tensor:
    """The loss of some steps, summed; scores are devices x steps."""
    log = torch.log_softmax(scores, dim=0)
    chosen = log.gather(0, action.unsqueeze(0))[0]
    odds = log.exp()
    entropy = -(odds * torch.log(odds + 1e-3)).sum()
    return -(advantage * chosen).sum() - beta * entropy


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor | None]:
    """Processes that play episodes; None for one alone."""
    if workers <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with (
        away_from_working_directory(),
        ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool,
    ):
        yield pool
