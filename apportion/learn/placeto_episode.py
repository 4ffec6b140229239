"""placeto_episode: Placeto's decision process: one episode, group after group.

In: a graph, the weights of a policy, and the placement to begin with. Out: the states, the actions,
and the time of every placement on the way.

A state is a placement of all groups, and the group whose device is chosen next, in the order of the
graph. An action puts that group on a device. Every state is simulated, the first included: an
episode of g groups costs g + 1 simulated placements. The reward of an action is by how much it
shortened the step, so that rewards add up to what the episode gained:

    rho(s)  min(step time + 2 per gigabyte over the memory limit, 10)
    r_t     rho(s_t) - rho(s_t+1)

The step time in rho is in multiples of the step on one device; the published code has seconds, of
models whose step takes one or two on one device. Features are those of the published code. It
divides starts by their maximum, which is nearly zero for the last groups; here it is the largest
distance from the current group's start.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints
from apportion.learn.adam import Weights
from apportion.learn.group_graph import GroupGraph
from apportion.learn.placeto_acting import ActingNetwork, Singles
from apportion.place import StepObjective

PENALTY_PER_GB = 2.0
CAP = 10.0
OWN_FEATURES = 5  # cost, bytes, visits, whether it is the current one, start


class Episode(NamedTuple):
    """One episode of T actions, or fewer where it was cut short."""

    features: Singles  # width x groups x T
    current: Ints  # T: the group whose device is chosen
    action: Ints  # T
    rho: Floats  # T + 1: of every state
    improved: tuple[tuple[int, float], ...]  # (placements simulated by then, score), falling
    best: Ints  # the placement of units with the lowest score
    whole: bool


class Judge:
    """Simulates placements of groups; keeps the best."""

    def __init__(self, graph: GroupGraph) -> None:
        self.graph, self.problem = graph, graph.problem
        self._objective = StepObjective(self.problem)
        self._scale = 1.0 / max(graph.one_device_seconds, 1e-12)
        self.count = 0
        self.improved: list[tuple[int, float]] = []
        self.best = np.zeros(0, np.int64)

    def rho(self, place: Ints) -> tuple[float, Ints]:
        """rho of a placement of groups, and when each group starts."""
        units = self.graph.spread(place)
        score = self._objective.score(units)
        starts = self.graph.first_starts(self._objective.scratch.start)
        self.count += 1
        self._keep(score, units)
        if score * self.problem.tick < self._objective.tables.worst:
            return min(score * self._scale, CAP), starts
        found = self._objective.evaluate(units)
        over = float((found.memory - self.problem.limit).max())
        return min(found.value * self._scale + PENALTY_PER_GB * over / 1e9, CAP), starts

    def _keep(self, score: float, units: Ints) -> None:
        if not self.improved or score < self.improved[-1][1]:
            self.improved.append((self.count, score))
            self.best = units


def roll_out(
    graph: GroupGraph,
    weights: Weights,
    rounds: int,
    start: Ints,
    chances: Floats | None,
    *,
    most: int | None = None,
    deadline: float = np.inf,
) -> Episode:
    """One episode from the placement `start` of groups, with an action for each of `chances`; None:
    each group once, and always the device with the highest score. It ends early after `most`
    simulated placements, or at `deadline`."""
    steps = graph.groups if chances is None else len(chances)
    network = ActingNetwork(weights, graph, rounds)
    judge = Judge(graph)
    place, visits = start.copy(), np.zeros(graph.groups, np.int64)
    current = np.arange(steps) % graph.groups
    features = np.zeros((OWN_FEATURES + graph.devices, graph.groups, steps), np.float32)
    action, rho = np.zeros(steps, np.int64), np.zeros(steps + 1)
    rho[0], starts = judge.rho(place)
    done = 0
    while done < steps and (most is None or judge.count < most) and time.monotonic() < deadline:
        group = int(current[done])
        features[:, :, done] = state_features(graph, place, visits, group, starts)
        scores = network.scores(features[:, :, done], group)
        chance = None if chances is None else float(chances[done])
        device = choose(np.where(graph.allowed[group], scores, -np.inf), chance)
        action[done], place[group] = device, device
        visits[group] += 1
        done += 1
        rho[done], starts = judge.rho(place)
    return Episode(
        features[:, :, :done], current[:done], action[:done], rho[: done + 1],
        tuple(judge.improved), judge.best, done == steps,
    )  # fmt: skip


def state_features(
    graph: GroupGraph, place: Ints, visits: Ints, current: int, starts: Ints
) -> Singles:
    """The features of all groups in one state: width x groups."""
    found = np.zeros((OWN_FEATURES + graph.devices, graph.groups), np.float32)
    found[0] = _scaled(graph.seconds)
    found[1] = _scaled(graph.out_bytes)
    found[2] = visits
    found[3, current] = 1
    found[4] = _scaled((starts - starts[current]).astype(np.float64))
    found[OWN_FEATURES + place, np.arange(graph.groups)] = 1
    return found


def _scaled(numbers: Floats) -> Floats:
    most = np.abs(numbers).max()
    return numbers / most if most > 0 else numbers


def choose(scores: Singles, chance: float | None) -> int:
    """The device that a number from 0 to 1 picks by its probability; None: the best one."""
    if chance is None:
        return int(scores.argmax())
    odds = np.exp((scores - scores.max()).astype(np.float64))
    odds = np.cumsum(odds)
    return min(int(np.searchsorted(odds, chance * odds[-1], side="right")), len(scores) - 1)


def returns(rho: Floats) -> Floats:
    """What each action and those after it gained in all: rewards summed from the end."""
    rewards = rho[:-1] - rho[1:]
    return np.cumsum(rewards[::-1])[::-1].copy()
