"""Ranks whose steps overlap: in any schedule nobody waits forever, no buffer is used too soon."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from check_policies import Schedules, random_policy
from graphs import captured
from soak import kept

from apportion.execute.executable import Executable
from apportion.execute.late_work import LateSchedule, late_schedule
from apportion.execute.rank_steps import Post, Segment, Wait, rank_steps
from apportion.lower.runnable import runnable
from apportion.search.baselines.random_strategy import draw
from apportion.split.communication import NEED, P3, Communication
from apportion.split.space import Space

STEPS = 3
OVERLAPS = Communication(P3, overlaps=True, order=NEED)


def executables(
    space: Space, devices: int, count: int, how: Communication | None = None
) -> list[Executable]:
    found = []
    for seed in range(count):
        policy = how or random_policy(Random(seed), len(space.graph.values))
        strategy = replace(draw(space, devices, Random(seed)), communication=policy)
        found.append(Executable(space, strategy, runnable(space, strategy, devices)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("devices", kept([2, 3, 4], 3))
@pytest.mark.parametrize("spec", ["mlp:tiny", "rnn:tiny"])
def test_nobody_waits_forever(spec: str, devices: int) -> None:
    _, space = captured(spec)
    for seed, executable in enumerate(executables(space, devices, 8)):
        assert not Schedules(executable, devices, STEPS, Random(seed)).run(), (devices, seed)


def schedules(executable: Executable) -> list[LateSchedule]:
    return [late_schedule(executable, rank_steps(executable, device)) for device in range(2)]


@pytest.mark.slow
def test_a_rank_that_sends_too_late_is_found() -> None:
    _, space = captured("mlp:tiny")
    executable = next(x for x in executables(space, 2, 6, OVERLAPS) if x.tasks.late_start >= 0)
    found = Schedules(executable, 2, STEPS, Random(0))
    for rank in found.ranks:  # each waits for the first exchange before it is posted
        main = list(rank.schedule.main)
        at = next(k for k, step in enumerate(main) if isinstance(step, Post))
        position = main[at].exchange.position
        waits = [k for k, s in enumerate(main) if isinstance(s, Wait)]
        if any(main[k].exchange.position == position for k in waits):
            rank.schedule = replace(rank.schedule, main=(*main[:at], *main[at + 1 :]))
            rank.open_[0, position] = main[at].exchange
    assert found.run()


def test_late_work_waits_for_what_it_needs_and_is_done_before_it_is_due() -> None:
    _, space = captured("mlp:tiny")
    seen = 0
    for executable in executables(space, 2, 6, OVERLAPS):
        if executable.tasks.late_start < 0:
            continue
        for device, schedule in enumerate(schedules(executable)):
            steps = rank_steps(executable, device)
            assert schedule.main == steps[: len(schedule.main)]
            assert list(schedule.due) == sorted(schedule.due)
            assert 0 <= schedule.due[-1] <= len(schedule.nodes)
            made: dict[int, int] = {}
            for number, node in enumerate(schedule.nodes):
                seen += 1
                assert all(before < number for before in node.needs)
                makers = {made[slot] for slot in node.slots if slot in made}
                assert makers <= set(node.needs)
                made |= dict.fromkeys(node.made, number)
            late = [s for s in steps[len(schedule.main) :] if isinstance(s, Segment)]
            assert [n.segment for n in schedule.nodes if n.segment is not None] == late
    assert seen
