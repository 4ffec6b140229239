"""A process of a pool: it answers requests from the parent, one at a time.

Part of the room run. A request comes in and is called with this process; what it returns is the
answer. A model is loaded once for each specification and seed, and captured at most once for each
specification: not at all, if the parent sends what its capture has found.

Requests and answers go through a pipe between parent and child; tensors between children as
execute/backends.py says, at least through gloo on the loopback address. A child that fails answers
with the reason and leaves the rest to the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from apportion import zoo
from apportion.capture import Program, capture, widened
from apportion.execute import Backends, PeerLost, join_backends, peer_errors
from apportion.run.step_source import (
    RunnableStep,
    StepSource,
    bound_program,
    tensors_of_graph,
    tensors_of_program,
)
from apportion.split import Space

PR_SET_PDEATHSIG = 1
PATIENCE = 60.0  # seconds that gloo waits beyond the parent's timeout: the parent decides


@dataclass(frozen=True)
class RankFailure:
    """The answer of a rank that failed; with `lost_peer` because another one has."""

    reason: str
    lost_peer: bool = False


@dataclass
class PoolProcess:
    """What a request finds in the process that it is called with.

    progress  a cell that the parent sees; see transport.Worker
    captures  how often this process has captured a step
    backends  how it reaches the other ranks
    programs  by specification, seed, Graph (a plan's may recompute) and whether it is in float64
    kept      what other requests keep here for the next ones, by a name of theirs
    """

    rank: int
    progress: Any
    captures: int = 0
    backends: Backends = field(default_factory=Backends)
    programs: dict[tuple[str, int, str, bool], tuple[Program, Space]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def program(self, source: StepSource, double: bool = False) -> tuple[Program, Space]:
        """The Program of a model's specification and its Space; with `double` in float64."""
        key = (source.spec, source.model_seed, source.graph.fingerprint, double)
        if key not in self.programs:
            made = self._widened(source) if double else self._loaded(source)
            self.programs[key] = (made, Space(made.graph))
        return self.programs[key]

    def step(self, source: StepSource) -> RunnableStep:
        """The step of a source, whether it has a specification or a Graph only."""
        if source.spec:
            return tensors_of_program(self.program(source)[0])
        return tensors_of_graph(source.graph, source.given, source.settings)

    def _loaded(self, source: StepSource) -> Program:
        model = zoo.load(source.spec, source.model_seed, meta=False)
        if source.facts is not None:
            return bound_program(source.graph, source.facts, model)
        self.captures += 1
        return capture(
            model.step, model.model, model.optimizer, model.batch, model.clip_norm, model.fixed
        )

    def _widened(self, source: StepSource) -> Program:
        own = self.program(source)[0]
        return replace(own, graph=widened(own.graph))


def main(
    rank: int,
    world: int,
    folder: str,
    threads: int,
    timeout: float,
    pipe: Connection,
    carried: str,
) -> None:
    """The child's loop: answer until the pipe closes. `folder` holds the pool's two files: `store`,
    where ranks find each other, and `progress`, a number per rank. Messages are `carried` by
    memory, a wire or gloo, where they can be."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    warnings.simplefilter("ignore")  # the parent loads the same model and has shown them
    torch.set_num_threads(threads)
    try:
        cells = np.memmap(os.path.join(folder, "progress"), dtype=np.int64, mode="r+")
    except FileNotFoundError:
        return  # the parent was interrupted while it started us, and has cleaned up
    process = PoolProcess(rank, cells[rank : rank + 1])
    failure = _attempt(_join, process, world, os.path.join(folder, "store"), timeout, carried)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pipe
        while True:
            request = pipe.recv()
            pipe.send(failure or _attempt(request, process))


def _join(process: PoolProcess, world: int, store: str, timeout: float, carried: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with peer_errors():
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=process.rank, world_size=world,
            timeout=timedelta(seconds=timeout + PATIENCE),
        )  # fmt: skip
    if carried != "gloo":
        process.backends = join_backends("cpu", carried)


def _attempt(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns, or how it failed."""
    try:
        return function(*given)
    except PeerLost as error:
        return RankFailure(str(error), lost_peer=True)
    except ValueError as error:
        return RankFailure(str(error))
    except Exception as error:
        return RankFailure(f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    """However the parent dies, so does this process, even if it is stopped.

    A thread sees the parent's end at once. For a process that runs no threads any more: on Linux it
    is killed when the one that forked it dies, which is multiprocessing's server. That ends when
    nobody holds its pipe, so that its children must not hold it either.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    threading.Thread(target=_outlive_nobody, daemon=True).start()


def _outlive_nobody() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
