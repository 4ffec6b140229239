"""Work in processes that may die: a kernel called with wrong shapes can crash, or loop for ever.

verify/ runs everything that calls kernels through `attempt`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_SECONDS = 20  # for one piece of work


def attempt(
    work: Sequence[Callable[[], Any]], seconds: int = _SECONDS, *, here: bool = False
) -> Iterator[Any]:
    """The results of the pieces of work, which must be JSON, in order; None for one that killed
    its process.

    All run in one forked child; where it dies, the next child goes on behind the piece that did it.
    With `here` they run in this process, for what does not survive a fork.
    """
    if here:
        yield from (json.loads(json.dumps(piece())) for piece in work)
        return
    done = 0
    while done < len(work):
        for result in _child(work[done:], seconds):
            yield result
            done += 1
        if done < len(work):
            yield None
            done += 1


def _child(work: Sequence[Callable[[], Any]], seconds: int) -> Iterator[Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            _silence()
            torch.set_num_threads(1)  # the parent's threads do not survive a fork
            with os.fdopen(writing, "wb") as out:
                for piece in work:
                    signal.alarm(seconds)
                    text = json.dumps(piece()).encode()
                    out.write(struct.pack("<q", len(text)) + text)
                    out.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as source:
            while len(head := source.read(8)) == 8:
                size = struct.unpack("<q", head)[0]
                text = source.read(size)
                if len(text) < size:
                    break
                yield json.loads(text)
    finally:
        os.waitpid(pid, 0)


def _silence() -> None:
    """Crashes are expected here: no core files, and nothing printed by C code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
