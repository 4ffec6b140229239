"""Ranks whose steps overlap: in any schedule nobody waits forever, and all post alike."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from graphs import captured

from apportion.execute.executable import Executable
from apportion.execute.rank_steps import Post, RankStep, Wait, period, rank_steps
from apportion.lower.runnable import runnable
from apportion.search.baselines.random_strategy import draw
from apportion.split.communication import P3, Communication
from apportion.split.space import Space

STEPS = 3
Deed = tuple[int, RankStep]
"""The number of a training step, and what a rank does of it."""


def deeds(executable: Executable, device: int) -> list[Deed]:
    """All that a rank does in STEPS steps, and to finish the last."""
    steps = rank_steps(executable, device)
    order = period(executable, steps)
    found = [
        (k - late, steps[number]) for k in range(STEPS) for number, late in order if k or not late
    ]
    return found + [(STEPS - 1, steps[number]) for number, late in order if late]


def run_abstractly(executable: Executable, devices: int, rng: Random) -> list[Deed]:
    """Lets ranks go on by chance until nobody can; what those who have not ended wait for. A rank
    goes on from a Wait when the other ends have been posted. Asserts that the messages from one
    rank to another are sent and received in the same order."""
    scripts = [deeds(executable, device) for device in range(devices)]
    at, posted = [0] * devices, set[tuple[int, int, bool]]()
    sent, received = defaultdict[tuple[int, int], list[Deed]](list), defaultdict(list)

    def can(device: int) -> bool:
        if at[device] == len(scripts[device]):
            return False
        k, step = scripts[device][at[device]]
        if not isinstance(step, Wait):
            return True
        sends, receives = step.exchange.sends, step.exchange.receives
        there = [(k, number, False) in posted for number, _ in sends]
        return all(there) and all((k, number, True) in posted for number, _ in receives)

    while able := [device for device in range(devices) if can(device)]:
        device = rng.choice(able)
        k, step = scripts[device][at[device]]
        if isinstance(step, Post):
            for number, other in step.exchange.receives:
                posted.add((k, number, False))
                received[other, device].append((k, number))
            for number, other in step.exchange.sends:
                posted.add((k, number, True))
                sent[device, other].append((k, number))
        at[device] += 1
    assert sent == received
    return [script[k] for script, k in zip(scripts, at, strict=True) if k < len(script)]


def executables(space: Space, devices: int, count: int) -> list[Executable]:
    found = []
    for seed in range(count):
        how = Communication(P3, Random(seed).choice([0.0, 0.5, 1.0]))
        strategy = replace(draw(space, devices, Random(seed)), communication=how)
        found.append(Executable(space, strategy, runnable(space, strategy, devices)))
    return found


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", ["mlp:tiny", "rnn:tiny"])
def test_nobody_waits_forever(spec: str, devices: int) -> None:
    _, space = captured(spec)
    for seed, executable in enumerate(executables(space, devices, 8)):
        assert not run_abstractly(executable, devices, Random(seed)), (devices, seed)


def test_late_steps_come_before_what_is_due_and_after_their_own_step() -> None:
    _, space = captured("mlp:tiny")
    for executable in executables(space, 2, 6):
        tasks = executable.tasks
        if tasks.late_start < 0:
            continue
        for device in range(2):
            steps = rank_steps(executable, device)
            order = period(executable, steps)
            assert sorted(number for number, _ in order) == list(range(len(steps)))
            for late in (True, False):
                mine = [number for number, is_late in order if is_late == late]
                assert mine == sorted(mine)
            assert {number for number, late in order if late} == set(
                range(len(steps) - sum(late for _, late in order), len(steps))
            )
