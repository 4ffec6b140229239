"""process_crew: jobs that go on step by step, shared among processes of this machine.

In: jobs, a number of processes and a deadline. Out: the reports of the jobs, as they come.

A job is a generator that sends reports, which are plain data (JSON over a pipe). It yields how much
it is worth wherever another job may have its turn: jobs that are worth more get more of the time.
It yields 0 where it may be ended but would rather go on. Processes are forked: they have all that
the parent has, and nothing is copied or pickled. Every process runs its jobs until they end, time
is up, or the user interrupts; then the jobs are closed, so that each can send a last report.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from apportion.columns import compile_nothing
from apportion.work_clock import WORK_CLOCK, work_seconds

Report = dict[str, Any]
SendReport = Callable[[Report], None]
Job = Callable[[SendReport], Iterator[float]]

PATIENCE = 20.0  # seconds that the others are waited for after an interrupt
LONG = 60.0  # seconds of work for which a process may compile loops: each does so for itself alone


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    ends: float | None,
    receive: SendReport,
    enough: Callable[[], bool] = lambda: False,
) -> int:
    """Runs jobs until they end, the moment `ends` of `work_seconds` has come, or what they have
    told is `enough`. Every report is given to `receive`. Returns how many processes were lost, and
    with them what they had not sent yet.

    Raises KeyboardInterrupt after an interrupt, when everything that was sent has been received.
    """
    if workers <= 1 or not hasattr(os, "fork"):
        _run_in_turn(jobs, ends, receive, enough)
        return 0
    mine = [jobs[k::workers] for k in range(workers)]
    pipes: dict[int, int] = {}  # reading ends, and whose
    for part in mine:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that are idle
            child = os.fork()
        if child == 0:
            if pipes:  # one says for all that something is compiled
                WORK_CLOCK.announce = None
            _run_child(part, ends, writing, (reading, *pipes))
        os.close(writing)
        pipes[reading] = child
    return _receive_all(pipes, receive, enough)


def _run_in_turn(
    jobs: Sequence[Job], ends: float | None, send: SendReport, stopped: Callable[[], bool]
) -> None:
    """All jobs, the next being the one that has had the least time for what it is worth. However it
    ends, every job is closed."""
    every = [job(send) for job in jobs]
    had = dict.fromkeys(range(len(every)), 0.0)
    turn, spent = 0, 0.0
    try:
        while had and not stopped() and (ends is None or work_seconds() < ends):
            began = work_seconds()
            worth = next(every[turn], None)
            spent += work_seconds() - began
            if worth is None:
                del had[turn]
            elif worth > 0:
                had[turn] += spent / worth
            if worth != 0 and had:
                turn, spent = min(had, key=lambda k: had[k]), 0.0
    finally:
        for job in every:
            job.close()  # type: ignore[attr-defined]


def _run_child(
    jobs: Sequence[Job], ends: float | None, writing: int, others: Sequence[int]
) -> None:
    """What a forked process does; it never returns."""
    status = 1
    try:
        for other in others:
            os.close(other)
        stop: list[int] = []
        signal.signal(signal.SIGINT, lambda *_: stop.append(1))
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        if ends is not None and ends - work_seconds() < LONG:
            compile_nothing()

        def send(report: Report) -> None:
            left = json.dumps(report, separators=(",", ":")).encode() + b"\n"
            while left:
                left = left[os.write(writing, left) :]

        _run_in_turn(jobs, ends, send, lambda: bool(stop))
        status = 0
    except BrokenPipeError:
        pass
    except BaseException as error:
        os.write(2, f"apportion: a process of the search failed: {error!r}\n".encode())
    finally:
        os._exit(status)


def _receive_all(pipes: dict[int, int], receive: SendReport, enough: Callable[[], bool]) -> int:
    """Receives the reports of all processes until they end, and ends them when these are enough;
    how many did not finish."""
    unread = dict.fromkeys(pipes, b"")
    interrupted: float | None = None
    ended = False
    with selectors.DefaultSelector() as selector:
        for reading in pipes:
            selector.register(reading, selectors.EVENT_READ)
        while unread:
            try:
                for key, _ in selector.select(0.1):
                    _read(key.fd, unread, selector, receive)
                if not ended and enough():
                    ended = True
                    for child in pipes.values():
                        _signal(child, signal.SIGTERM)
                if interrupted is not None and time.perf_counter() > interrupted + PATIENCE:
                    break
            except KeyboardInterrupt:
                interrupted = interrupted or time.perf_counter()
                for child in pipes.values():
                    _signal(child, signal.SIGTERM)
    for reading in unread:
        os.close(reading)
        _signal(pipes[reading], signal.SIGKILL)
    lost = sum(os.waitpid(child, 0)[1] != 0 for child in pipes.values())
    if interrupted is not None:
        raise KeyboardInterrupt
    return lost


def _read(
    reading: int, unread: dict[int, bytes], selector: selectors.BaseSelector, receive: SendReport
) -> None:
    more = os.read(reading, 1 << 20)
    *lines, unread[reading] = (unread[reading] + more).split(b"\n")
    for line in lines:
        receive(json.loads(line))
    if not more:
        selector.unregister(reading)
        os.close(reading)
        del unread[reading]


def _signal(child: int, what: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, what)
