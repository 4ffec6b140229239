"""Moments of a CUDA stream become times of the host's clock, here with events made up."""

from __future__ import annotations

from typing import Any

from apportion.execute.cuda_clock import CudaClock, shared_out


class Event:
    """An event that the device came to at a time of its own clock, in milliseconds."""

    now = 5.0

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        Event.now += 0.25
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def started() -> CudaClock:
    clock = CudaClock("cuda:0", Event)
    base: Any = Event()
    base.record()
    clock.base, clock.base_ns = base, 1_000_000_000
    return clock


def test_moments_are_numbers_until_the_step_is_over() -> None:
    clock = started()
    a, b, c = clock(), clock(), clock()
    assert (a, b, c) == (-1, -2, -3)
    spans = [(7, a, b), (8, b, c)]
    assert clock.times(spans) == [
        (7, 1_000_250_000, 1_000_500_000),
        (8, 1_000_500_000, 1_000_750_000),
    ]


def test_tasks_that_ran_together_share_their_span() -> None:
    clock = started()
    a, b = clock(), clock()
    spans = [*shared_out((3, 4, 5, 6), a, b), (9, 10, 20)]
    found = {task: (began, ended) for task, began, ended in clock.times(spans)}
    assert found[3] == (1_000_250_000, 1_000_312_500) and found[6][1] == 1_000_500_000
    assert found[4][0] == found[3][1]
    assert found[9] == (10, 20)  # of the host's clock already


def test_shares_of_a_span() -> None:
    assert shared_out((1, 2), 0, 10) == [(1, 0, 5), (2, 5, 10)]
