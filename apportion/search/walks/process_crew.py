"""crew: jobs that go on step by step, shared among processes of this machine.

A job is a generator; it yields what it is worth where others may have their turn (those that are
worth more have more of the time), 0 where it may be ended but wants to go on, and tells what it has
to say as plain data (JSON over a pipe).
Processes are forked: they have all that the parent has, and nothing is copied or pickled. Every
process goes on with its jobs until they end, time is up, or the user interrupts: then jobs are
closed, so that they can say a last word.
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

Said = dict[str, Any]
Tell = Callable[[Said], None]
Job = Callable[[Tell], Iterator[float]]

PATIENCE = 20.0  # seconds that the others are waited for after an interrupt


def share(jobs: Sequence[Job], workers: int, ends: float | None, hear: Tell) -> int:
    """Does jobs until they end or it is `ends` (perf_counter); `hear` is given what they tell. How
    many processes were lost, with what they had not told.

    Raises KeyboardInterrupt after an interrupt, when all that was told has been heard.
    """
    if workers <= 1 or not hasattr(os, "fork"):
        _go_round(jobs, ends, hear, lambda: False)
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
            _work(part, ends, writing, (reading, *pipes))
        os.close(writing)
        pipes[reading] = child
    return _listen(pipes, hear)


def _go_round(
    jobs: Sequence[Job], ends: float | None, tell: Tell, stopped: Callable[[], bool]
) -> None:
    """All jobs, the next being the one that has had the least time for what it is worth. However it
    ends, every job is closed."""
    every = [job(tell) for job in jobs]
    had = dict.fromkeys(range(len(every)), 0.0)
    turn, spent = 0, 0.0
    try:
        while had and not stopped() and (ends is None or time.perf_counter() < ends):
            began = time.perf_counter()
            worth = next(every[turn], None)
            spent += time.perf_counter() - began
            if worth is None:
                del had[turn]
            elif worth > 0:
                had[turn] += spent / worth
            if worth != 0 and had:
                turn, spent = min(had, key=lambda k: had[k]), 0.0
    finally:
        for job in every:
            job.close()  # type: ignore[attr-defined]


def _work(jobs: Sequence[Job], ends: float | None, writing: int, others: Sequence[int]) -> None:
    """What a forked process does; it never returns."""
    status = 1
    try:
        for other in others:
            os.close(other)
        stop: list[int] = []
        signal.signal(signal.SIGINT, lambda *_: stop.append(1))
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))

        def tell(said: Said) -> None:
            left = json.dumps(said, separators=(",", ":")).encode() + b"\n"
            while left:
                left = left[os.write(writing, left) :]

        _go_round(jobs, ends, tell, lambda: bool(stop))
        status = 0
    except BrokenPipeError:
        pass
    except BaseException as error:
        os.write(2, f"apportion: a process of the search failed: {error!r}\n".encode())
    finally:
        os._exit(status)


def _listen(pipes: dict[int, int], hear: Tell) -> int:
    """Hears all processes out; how many did not finish."""
    unread = dict.fromkeys(pipes, b"")
    interrupted: float | None = None
    with selectors.DefaultSelector() as selector:
        for reading in pipes:
            selector.register(reading, selectors.EVENT_READ)
        while unread:
            try:
                for key, _ in selector.select(1.0):
                    _read(key.fd, unread, selector, hear)
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
    reading: int, unread: dict[int, bytes], selector: selectors.BaseSelector, hear: Tell
) -> None:
    more = os.read(reading, 1 << 20)
    *lines, unread[reading] = (unread[reading] + more).split(b"\n")
    for line in lines:
        hear(json.loads(line))
    if not more:
        selector.unregister(reading)
        os.close(reading)
        del unread[reading]


def _signal(child: int, what: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, what)
