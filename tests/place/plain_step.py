"""The rules of a step, read one by one: from one event to the next, over lists of Python.

Nothing is fast here, and no item is numbered: what place/objectives/step_time.py does is compared
with it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from apportion.place.placement_problem import PlacementProblem


@dataclass
class PlainStep:
    """A step under way. Messages are (node, output, device that it goes to)."""

    problem: PlacementProblem
    device: list[int]  # of every node
    inputs: list[set[int]]  # outputs that a node still waits for
    extra: list[int]  # ticks that receiving takes
    ready: list[int]
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    finish: int = 0

    def readers(self, output: int) -> list[int]:
        c = self.problem.columns
        return c.reader[c.reader_start[output] : c.reader_start[output + 1]].tolist()

    def outputs(self, node: int) -> list[int]:
        return np.flatnonzero(self.problem.columns.source == node).tolist()

    def wanted_by(self, output: int) -> list[int]:
        """Other devices that want an output, in the order of its readers."""
        own = self.device[self.problem.columns.source[output]]
        found = dict.fromkeys(self.device[reader] for reader in self.readers(output))
        return [device for device in found if device != own]


def plain_step(problem: PlacementProblem, placement: list[int]) -> PlainStep:
    """The step, to its end."""
    c, links = problem.columns, problem.links
    n = len(c.unit)
    step = PlainStep(problem, [placement[unit] for unit in c.unit], [set() for _ in range(n)],
                     [0] * n, [0] * n, [-1] * n, [-1] * n)  # fmt: skip
    for output in range(len(c.source)):
        for reader in step.readers(output):
            step.inputs[reader].add(output)
    if links.in_order:
        receive(step)
    # Whatever waits for a device or for links: (ready, node, output, device), a node with -1, -1.
    waiting = [(step.ready[k], k, -1, -1) for k in range(n) if not step.inputs[k]]
    free: dict[int, int] = defaultdict(int)
    link_free: dict[int, int] = defaultdict(int)
    while waiting:
        first = min(w for w in waiting if w[2] >= 0 or not links.in_order or is_next(step, w[1]))
        waiting.remove(first)
        when, node, output, there = first
        if output < 0:
            run_node(step, node, max(when, free[step.device[node]]), free)
            waiting += [(step.end[node], node, o, d) for o, d in messages(step, node)]
            arrived = [(o, step.device[node], step.end[node]) for o in step.outputs(node)]
        else:
            targets = step.wanted_by(output) if links.once else [there]
            came = travel(step, output, step.device[node], there, when, link_free)
            arrived = [(output, target, came) for target in targets]
        for output, target, came in arrived:
            for reader in step.readers(output):
                if step.device[reader] == target:
                    step.inputs[reader].remove(output)
                    step.ready[reader] = max(step.ready[reader], came)
                    if not step.inputs[reader]:
                        waiting.append((step.ready[reader], reader, -1, -1))
    return step


def receive(step: PlainStep) -> None:
    """What devices that run in order behind a host take to receive, and when nodes are issued."""
    c, links = step.problem.columns, step.problem.links
    issues = [0] * len(c.unit)
    for output in range(len(c.source) if len(links.receive) else 0):
        for device in step.wanted_by(output):
            first = next(r for r in step.readers(output) if step.device[r] == device)
            each, pace, issue = links.receive[device]
            step.extra[first] += round(each + pace * c.send[output])
            issues[first] += int(issue)
    host: dict[int, int] = defaultdict(int)
    for node in range(len(c.unit) if len(c.issue) else 0):
        device = step.device[node]
        if c.issue[node, device] > 0:
            host[device] += int(c.issue[node, device]) + issues[node]
            step.ready[node] = host[device]


def is_next(step: PlainStep, node: int) -> bool:
    """Whether all nodes before it on its device have run."""
    return all(
        step.end[k] >= 0 for k in range(node) if step.device[k] == step.device[node]
    )  # fmt: skip


def run_node(step: PlainStep, node: int, begin: int, free: dict[int, int]) -> None:
    c, device = step.problem.columns, step.device[node]
    took = int(c.duration[node, device]) + step.extra[node]
    step.start[node], step.end[node] = begin, begin + took
    free[device] = begin + took + (step.problem.links.device_hold if took else 0)
    step.finish = max(step.finish, free[device])


def messages(step: PlainStep, node: int) -> list[tuple[int, int]]:
    """What leaves a node: outputs and where they go."""
    once = step.problem.links.once
    return [
        (output, device)
        for output in step.outputs(node)
        for device in step.wanted_by(output)[: 1 if once else None]
    ]


def travel(
    step: PlainStep, output: int, a: int, b: int, when: int, link_free: dict[int, int]
) -> int:
    """A message takes all links of its route at once, each when it is free; when it has come."""
    c, links = step.problem.columns, step.problem.links
    route = a * c.duration.shape[1] + b
    came = when
    for hop in range(links.hop_start[route], links.hop_start[route + 1]):
        link = int(links.hop_link[hop])
        passed = max(when, link_free[link]) + round(c.send[output] * links.hop_pace[hop])
        link_free[link] = passed + links.link_hold
        came = max(came, passed)
        step.finish = max(step.finish, link_free[link])
    came += round(links.lag[a, b] + links.drag[a, b] * c.send[output])
    step.finish = max(step.finish, came)
    return came


def plain_peaks(step: PlainStep) -> list[int]:
    """At the start of every node, all that each device holds then."""
    c, links = step.problem.columns, step.problem.links
    gone = [
        max([step.start[c.source[o]]] + [step.end[r] - links.grace for r in step.readers(o)])
        for o in range(len(c.source))
    ]
    found = []
    for device in range(c.duration.shape[1]):
        here = [k for k in range(len(c.unit)) if step.device[k] == device]
        stays = sum(int(c.resident[k]) for k in here)
        made = [o for o in range(len(c.source)) if step.device[c.source[o]] == device]
        lives = [
            sum(int(c.nbytes[o]) for o in made if step.start[c.source[o]] <= now <= gone[o])
            for now in step.start
        ]
        found.append(stays + (max(lives, default=0) if links.live else 0))
    return found
