"""Buffers of messages: two messages that are under way at once never have the same one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from graphs import captured
from make_tasks import Maker

from apportion.execute.executable import Executable
from apportion.execute.rank_steps import Post, Wait, rank_steps
from apportion.lower.message_buffers import message_buffers
from apportion.lower.runnable import runnable
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy


def turns(
    space: Space, strategy: Strategy, devices: int, device: int
) -> list[tuple[int, bool, int, int]]:
    """(end, whether it sends, begin, end) of every end of a message on a device, counted in the
    steps that the device's rank really takes."""
    executable = Executable(space, strategy, runnable(space, strategy, devices))
    ends = executable.tasks.ends
    row = {(int(t), int(d)): k for k, (t, d) in enumerate(zip(ends.task, ends.device, strict=True))}
    steps = rank_steps(executable, device)
    posted, waited, read = {}, {}, {}
    for at, step in enumerate(steps):
        if isinstance(step, Post):
            posted |= {n: at for n, _ in (*step.exchange.sends, *step.exchange.receives)}
        elif isinstance(step, Wait):
            waited |= {n: at for n, _ in (*step.exchange.sends, *step.exchange.receives)}
        else:
            read |= dict.fromkeys(step.messages, at)
    return [
        (
            row[message.task, device],
            sends,
            posted[number],
            waited[number] if sends else read[number],
        )
        for number, message in enumerate(executable.messages)
        for sends in (True, False)
        if device == (message.sender if sends else message.receiver)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_messages_that_are_under_way_at_once_have_different_buffers(devices: int) -> None:
    _, space = captured("mlp:tiny")
    shared = 0
    for seed in range(8):
        strategy = draw(space, devices, Random(seed))
        tasks = runnable(space, strategy, devices)
        buffers = message_buffers(tasks)
        for device in range(devices):
            found: dict[int, list[tuple[int, int, int]]] = {}
            for row, sends, begin, end in turns(space, strategy, devices, device):
                buffer = int((buffers.sent if sends else buffers.received)[row])
                assert buffers.device[buffer] == device
                found.setdefault(buffer, []).append((begin, end, 2 * row + sends))
            for times in found.values():
                times.sort()
                for (_, end, one), (begin, _, other) in pairwise(times):
                    assert one == other or end < begin  # one COLLECTIVE has one for all it sends
                    shared += one != other
    assert shared > 50


def test_a_buffer_holds_the_largest_of_its_messages_and_no_more() -> None:
    make = Maker(2)
    for size in (30, 50, 20):
        message = make.transfer(0, 1, size)
        taken = make.assemble(1, 1, after=[message])
        back = make.transfer(1, 0, 1, after=[taken])
        kept = make.assemble(0, 1, after=[back])
        slot = make.slot(1, size, taken, back)
        make.copy(make.slot(0, size, -1, message), slot, message, taken)
        make.copies.append((slot, make.slot(0, 1, kept, kept), back, kept, 1))
    buffers = message_buffers(make.done())
    sizes = [sorted(buffers.nbytes[buffers.device == d].tolist()) for d in (0, 1)]
    assert sizes == [[1, 50], [30, 50]]  # what brings nothing is not waited for at once


def test_there_are_no_buffers_without_messages() -> None:
    make = Maker(1)
    make.compute(0, flops=1)
    assert len(message_buffers(make.done()).nbytes) == 0
