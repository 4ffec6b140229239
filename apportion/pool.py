"""Pool: N processes on this machine that can run one strategy after another.

Children are forked from a server that has imported torch but used no threads, so that the second
pool starts at once. The first child to fail, end or fall silent for longer than the timeout ends
them all; what is raised names its rank.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from apportion.execute import threads
from apportion.worker import Train, Trained, main


class Pool:
    """A context manager; `train` runs one request on all processes."""

    def __init__(self, processes: int, timeout: float = 600.0) -> None:
        if processes < 1:
            raise ValueError(f"{processes} processes cannot run anything; give at least 1")
        self.timeout = timeout
        self.folder = tempfile.TemporaryDirectory(prefix="apportion-")
        store = os.path.join(self.folder.name, "store")
        share = threads(processes)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["apportion.worker"])
        self.pipes: list[Any] = []
        self.children: list[Any] = []
        try:
            for rank in range(processes):
                ours, theirs = context.Pipe()
                child = context.Process(
                    target=main,
                    args=(rank, processes, store, share, timeout, theirs),
                    daemon=True,
                )
                child.start()
                theirs.close()
                self.pipes.append(ours)
                self.children.append(child)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def train(self, job: Train) -> list[Trained]:
        """Runs the request on all processes; raises RuntimeError naming the first rank to fail."""
        try:
            for rank, pipe in enumerate(self.pipes):
                try:
                    pipe.send(job)
                except (BrokenPipeError, ConnectionError):
                    raise RuntimeError(self._ended(rank)) from None
            return self._collect()
        except BaseException:
            self.close()
            raise

    def _collect(self) -> list[Trained]:
        answers: dict[int, Trained] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < len(self.pipes):
            open_ranks = [r for r in range(len(self.pipes)) if r not in answers]
            ready = wait(
                [self.pipes[r] for r in open_ranks]
                + [self.children[r].sentinel for r in open_ranks],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                silent = ", ".join(map(str, open_ranks))
                raise RuntimeError(
                    f"rank {silent} did not finish within {self.timeout:g} s; "
                    "all processes were ended"
                )
            for rank in open_ranks:
                if self.pipes[rank] in ready:
                    answers[rank] = self._answer(rank)
                elif self.children[rank].sentinel in ready:
                    raise RuntimeError(self._ended(rank))
        return [answers[r] for r in range(len(self.pipes))]

    def _answer(self, rank: int) -> Trained:
        try:
            answer = self.pipes[rank].recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(self._ended(rank)) from None
        if isinstance(answer, ValueError):
            raise answer
        if isinstance(answer, Exception):
            raise RuntimeError(self._first_cause(rank, str(answer)))
        assert isinstance(answer, Trained)
        return answer

    def _first_cause(self, rank: int, reason: str) -> str:
        """A rank whose peer died complains of the connection; the dead one is the cause."""
        time.sleep(0.05)
        for other, child in enumerate(self.children):
            if not child.is_alive():
                return self._ended(other)
        return f"rank {rank} failed: {reason}"

    def _ended(self, rank: int) -> str:
        self.children[rank].join(1.0)
        code = self.children[rank].exitcode
        if code is not None and code < 0:
            return f"rank {rank} was ended by signal {signal.Signals(-code).name}"
        return f"rank {rank} ended unexpectedly with status {code}"

    def close(self) -> None:
        """Ends all processes."""
        for pipe in self.pipes:
            pipe.close()
        for child in self.children:
            child.kill()
        for child in self.children:
            child.join()
        self.folder.cleanup()
