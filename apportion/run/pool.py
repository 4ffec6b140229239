"""ProcessPool: N processes on this machine that can run one strategy after another.

Part of the room run. Requests go in (training.py, rehearse.py, trial.py), the answers of all ranks
come out. A SharedPool is one ProcessPool for several users, started when the first one needs it.

Children are forked from a server that has imported torch but used no threads, so that the second
pool starts at once. The first child to fail, end or fall silent for longer than the timeout ends
them all, and one message names its rank. When a rank dies, its neighbours complain of a closed
connection: that is never the cause as long as another one can be found.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from apportion.execute import carrier, threads
from apportion.process_start import away_from_working_directory
from apportion.run.left_folders import (
    is_stopped,
    mark_server_folder,
    pool_folder,
    remove_left_folders,
)
from apportion.run.process import RankFailure, main
from apportion.run.training import TrainingRequest, TrainingResult

TIMEOUT = 600.0  # seconds that all processes together may take to answer, unless told otherwise
PRELOADED = ("pool_server", "process", "training")  # by the server, before it forks processes
LONGEST_FOLDER = 60  # of the 107 bytes that the path of a socket may have
MOST_NAMED = 8  # ranks that a sentence names
GRACE = 3.0  # seconds that a dying rank has to be noticed after its neighbour has complained


class ProcessPool:
    """A context manager. `ask` sends a request to all processes, which have `timeout` seconds to
    answer it. After a failure the pool is closed."""

    def __init__(self, processes: int, timeout: float = TIMEOUT) -> None:
        if processes < 1:
            raise ValueError(f"{processes} processes cannot run anything; give at least 1")
        self.timeout = timeout
        self.closed = False
        self.pipes: list[Any] = []
        self.children: list[Any] = []
        _check_temporary_folder()
        remove_left_folders()
        self.folder = pool_folder()
        try:
            self._start(processes)
        except OSError as error:
            self.close()
            raise RuntimeError(
                f"processes cannot be started with the temporary folder {tempfile.gettempdir()}: "
                f"{error.strerror or error}; TMPDIR names another"
            ) from None
        except BaseException:
            self.close()
            raise

    def _start(self, processes: int) -> None:
        folder, share = self.folder.name, threads(processes)
        shape, path = (processes,), Path(folder, "progress")
        self.progress = np.memmap(path, dtype=np.int64, mode="w+", shape=shape)
        context = multiprocessing.get_context("forkserver")
        _start_server(context)
        ends = time.monotonic() + self.timeout
        for rank in range(processes):
            if time.monotonic() > ends:
                raise RuntimeError(
                    f"only {rank} of {processes} processes had started within {self.timeout:g} s"
                )
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            child = context.Process(
                target=main,
                args=(rank, processes, folder, share, self.timeout, theirs, carrier()),
                daemon=True,
            )
            self.children.append(child)
            with _nameless_main():
                child.start()
            theirs.close()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def train(self, request: TrainingRequest, timeout: float | None = None) -> list[TrainingResult]:
        """Runs the request on all processes; raises RuntimeError naming the rank that failed."""
        answers: list[TrainingResult] = self.ask(request, timeout)
        return answers

    def ask(self, request: Any, timeout: float | None = None) -> list[Any]:
        """What each process answers to a request, within the pool's timeout or a shorter one;
        raises RuntimeError naming the rank that failed."""
        self.progress[:] = 0
        try:
            for rank, pipe in enumerate(self.pipes):
                try:
                    pipe.send(request)
                except ConnectionError:
                    raise RuntimeError(self._ended(rank)) from None
            return self._collect(min(timeout or self.timeout, self.timeout))
        except BaseException:
            self.close()
            raise

    def _collect(self, timeout: float) -> list[Any]:
        """Everybody's answer. What ends it sooner, in this order: a rank that died, one that failed
        by itself, one that lost its peer."""
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            open_ranks = [r for r in range(len(self.pipes)) if r not in answers]
            asked = [r for r in open_ranks if r not in lost]
            ready = wait(
                [self.pipes[r] for r in asked] + [self.children[r].sentinel for r in open_ranks],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            for rank in open_ranks:
                if self.children[rank].sentinel in ready:
                    raise RuntimeError(self._ended(rank))
            for rank in [r for r in asked if self.pipes[r] in ready]:
                answer = self._receive(rank)
                if not isinstance(answer, RankFailure):
                    answers[rank] = answer
                elif answer.lost_peer:
                    deadline = min(deadline, time.monotonic() + GRACE) if not lost else deadline
                    lost[rank] = answer.reason
                else:
                    raise RuntimeError(f"rank {rank} failed: {answer.reason}")
            if not ready:
                raise RuntimeError(self._gave_up(open_ranks, lost, timeout))
        return [answers[r] for r in range(len(self.pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(self._ended(rank)) from None

    def _ended(self, rank: int) -> str:
        self.children[rank].join(GRACE)
        code = self.children[rank].exitcode
        if code is not None and code < 0:
            names = {int(known): known.name for known in signal.Signals}
            return f"rank {rank} was ended by signal {names.get(-code, -code)}"
        return f"rank {rank} ended unexpectedly with status {code}"

    def _gave_up(self, open_ranks: list[int], lost: dict[int, str], timeout: float) -> str:
        """Blames a stopped process, or else those that everybody waits for: the least advanced."""
        for rank, reason in lost.items():
            return f"rank {rank} lost the connection to another rank: {reason}"
        least = min(self.progress[r] for r in open_ranks)
        late = [r for r in open_ranks if self.progress[r] == least]
        stopped = [r for r in open_ranks if is_stopped(self.children[r].pid)]
        what = "is stopped and " if stopped else ""
        return f"{_ranks(stopped or late)} {what}did not answer within {timeout:g} s"

    def close(self) -> None:
        """Ends all processes."""
        self.closed = True
        started = [child for child in self.children if child.pid is not None]
        for child in started:
            child.kill()
        for child in started:
            child.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


class SharedPool:
    """At most one ProcessPool at a time, for all who need one in turn. It is started when it is
    first needed, and again only if a failure has closed it. A context manager.

    `timeout` is the longest that anybody will give the processes for an answer.
    """

    def __init__(self, processes: int, timeout: float = TIMEOUT) -> None:
        self.processes = processes
        self.timeout = max(timeout, TIMEOUT)
        self._pool: ProcessPool | None = None

    @property
    def running(self) -> bool:
        """Whether there are processes."""
        return self._pool is not None and not self._pool.closed

    def pool(self) -> ProcessPool:
        """The pool, running."""
        if self._pool is None or self._pool.closed:
            self._pool = ProcessPool(self.processes, self.timeout)
        return self._pool

    def close(self) -> None:
        """Ends the processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_temporary_folder() -> None:
    """Raises ValueError if sockets cannot lie in the temporary folder: their paths are short."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise ValueError(
            f"the name of the temporary folder has {len(folder)} characters, and sockets in it "
            f"have room for {LONGEST_FOLDER}; set TMPDIR to another, such as /tmp"
        )


def _start_server(context: Any) -> None:
    """Starts multiprocessing's server, unless it runs, deaf to Ctrl-C: an interrupt while it still
    imports would end in a traceback of its own, and the parent decides."""
    context.set_forkserver_preload([f"apportion.run.{name}" for name in PRELOADED])
    with away_from_working_directory():
        mark_server_folder()
        resource_tracker.ensure_running()  # by itself: it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _nameless_main() -> Iterator[None]:
    """Children do not run the user's script again, as multiprocessing would have them: they need
    nothing of it, and a script without a guard for that would start its own children."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def _ranks(ranks: Iterable[int]) -> str:
    """Their names, or of many the first ones."""
    names = [str(rank) for rank in ranks]
    if len(names) > MOST_NAMED:
        return f"ranks {', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
