"""Threads that work for a host keep nothing of what they are done with."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from apportion.execute.host_jobs import HostJob, HostJobs, InOrder


class Memory:
    """Stands for a tensor."""


def is_gone(what: weakref.ref[Any]) -> bool:
    """Whether something is forgotten, soon and long before an idle thread ends."""
    ends = time.monotonic() + 0.25
    while what() is not None and time.monotonic() < ends:
        time.sleep(0.005)
        gc.collect()
    return what() is None


def test_a_copy_that_waited_for_its_turn_is_forgotten_when_it_is_done() -> None:
    """Its memory belongs to the plan again: others lie there soon."""
    queue, done = InOrder(), threading.Event()

    def copy() -> tuple[weakref.ref[Memory], Callable[[], None]]:
        memory = Memory()

        def run() -> None:
            assert memory is not None
            done.set()

        return weakref.ref(memory), run

    what, run = copy()
    queue.submit(run)
    del run
    assert done.wait(5)
    assert is_gone(what)


def test_an_update_is_forgotten_when_it_is_done() -> None:
    jobs = HostJobs(lambda event: True, lambda event: None, threads=2)

    def update() -> tuple[weakref.ref[Memory], HostJob]:
        memory = Memory()
        return weakref.ref(memory), HostJob(0, None, lambda: [lambda: id(memory)])  # type: ignore

    what, job = update()
    jobs.submit(job)
    job.wait()
    del job
    assert is_gone(what)
