"""Liveness: ranks of a torchrun job that notice when another is gone, and end so that it restarts.

Part of the room run. A rank that dies closes its connections, which its neighbours see at once. One
that is stopped, or whose machine has gone, keeps them open and everybody waits. So each rank writes
a heartbeat into torchrun's store every second, by a thread, and looks at those of the others: who
has not been heard of for too long is named, once, and this process ends. torchrun then ends the
others of its machine and, with --max-restarts, starts them all again.

    ended by a signal, or fails       connections close, PeerLost
    stopped, or its machine is gone   no heartbeat
    its torchrun is killed            the kernel ends it too (Linux)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

from apportion.execute import PeerLost
from apportion.run.join_round import JobRound, connect, join_round

BEAT_SECONDS = 1.0
LOST_STATUS = 75  # of a process that ends because another rank is gone
PR_SET_PDEATHSIG = 1
CONNECT_SECONDS = 10.0
LAST_SECONDS = 5.0  # for what the heartbeat does when it is stopped
DONE = "done"  # instead of a heartbeat, by a rank that has none any more


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent() -> None:
    """However torchrun ends, so does this process; on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended in between
            os.kill(os.getpid(), signal.SIGKILL)


def say_losses_briefly() -> None:
    """A rank that fails because another has says so in one line, and ends."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, PeerLost):
            _say(f"lost the connection to another rank, and ends: {_first_line(error)}")
            sys.stderr.flush()
            os._exit(LOST_STATUS)  # threads may wait for the one that is gone
        before(kind, error, trace)

    sys.excepthook = hook


class Heartbeat:
    """Writes this rank's heartbeat in the round of that `name`, and ends the process when another
    has had none for `patience` seconds."""

    def __init__(self, store: Any, name: str, rank: int, ranks: int, patience: float) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._patience = patience
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # Python aborts a thread that returns from torch after its end

    def stop(self) -> None:
        """No heartbeats any more, and nobody misses them."""
        self._stopped.set()
        self._thread.join(LAST_SECONDS)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        word, count = secrets.token_hex(4), 0
        seen: dict[int, tuple[bytes, float]] = {}
        while not self._stopped.is_set():
            count += 1
            try:
                self._store.set(self._key(self._rank), f"{word} {count}")
                silent = self._silent(seen)
            except Exception:
                self._end("torchrun's store does not answer any more")
                return
            if silent:
                self._end(f"{_ranks(silent)} not been heard of for {self._patience:g} s", silent)
                return
            self._stopped.wait(BEAT_SECONDS)
        with contextlib.suppress(Exception):  # torchrun may have ended before
            self._store.set(self._key(self._rank), DONE)

    def _key(self, rank: int) -> str:
        return f"apportion/heartbeat/{self._name}/{rank}"

    def _silent(self, seen: dict[int, tuple[bytes, float]]) -> list[int]:
        """The ranks whose heartbeat is as it was for too long."""
        now = time.monotonic()
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        keys = [self._key(rank) for rank in others]
        if self._store.check(keys):
            beats = self._store.multi_get(keys)
        else:  # some have not begun
            beats = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        for rank, beat in zip(others, beats, strict=True):
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
        return [
            rank
            for rank, (beat, since) in seen.items()
            if beat != DONE.encode() and now - since > self._patience
        ]

    def _end(self, why: str, silent: list[int] | None = None) -> None:
        if self._stopped.is_set():
            return
        first = min(rank for rank in range(self._ranks) if rank not in (silent or ()))
        if self._rank == first or silent is None:
            _say(f"{why}; the job ends here, to be started again")
            sys.stderr.flush()
        os._exit(LOST_STATUS)


def join_torchrun(timeout: float) -> JobRound:
    """Joins the other ranks of a torchrun job. Raises RuntimeError if they do not come."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return join_round(connect(host, port, timeout), rank, ranks, timeout)


def begin_heartbeat(name: str, patience: float) -> Heartbeat | None:
    """A Heartbeat of this rank in the round of that name; None if it is alone."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = connect(host, port, max(CONNECT_SECONDS, patience))
    return Heartbeat(store, name, dist.get_rank(), ranks, patience)


def _say(text: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"apportion: rank {rank}: {text}", file=sys.stderr)


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[0][:200]
