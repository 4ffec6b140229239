"""Pinned memory of the host, taken at once for all that a rank keeps there.

Part of the room execute. Bytes come in, a PinnedMemory goes out, of which tensors are taken one
after the other. A GPU copies from and to pinned memory beside what it computes, at the full rate of
its link. torch pins each tensor by itself and rounds it up to a power of two; here one stretch of
plain memory, in huge pages where the system has some, is touched by several threads and then
registered: a tenth of the time, and no bytes are lost.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from apportion.machine import usable_cores
from apportion.quantity import format_quantity

ALIGNMENT = 4096
TOUCHED = 1 << 22  # bytes that a thread touches at a time


class PinnedMemory:
    """So many bytes, from which tensors are taken. RuntimeError if the host has not as many, or
    cannot pin them."""

    def __init__(self, nbytes: int, place: str = "cuda") -> None:
        self.nbytes, self.taken = nbytes, 0
        size = max(_aligned(nbytes), ALIGNMENT)
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise RuntimeError(_sentence(nbytes, "has no memory for")) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.numbers = np.frombuffer(memory, np.uint8)
        _touch(self.numbers)
        if place.startswith("cuda"):
            _register(self, self.numbers, nbytes)
        self.whole = torch.from_numpy(self.numbers)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in it."""
        size = math.prod(shape) * dtype.itemsize
        start, self.taken = self.taken, self.taken + aligned_bytes(shape, dtype)
        assert self.taken <= len(self.numbers), "more is taken than was asked for"
        return self.whole[start : start + size].view(dtype).view(shape)


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What a tensor takes of a PinnedMemory."""
    return _aligned(math.prod(shape) * dtype.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _touch(numbers: Any) -> None:
    """Makes the system give the memory now, and not page by page when it is used."""
    parts = [numbers[k : k + TOUCHED] for k in range(0, len(numbers), TOUCHED)]
    waiting = iter(parts)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                part = next(waiting, None)
            if part is None:
                return
            part[:: mmap.PAGESIZE] = 0

    threads = [
        threading.Thread(target=work) for _ in range(min(len(parts), max(usable_cores(), 1)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _register(owner: PinnedMemory, numbers: Any, nbytes: int) -> None:
    """Pins the memory until nobody needs it any more."""
    runtime: Any = torch.cuda.cudart()
    address = numbers.ctypes.data
    status = runtime.cudaHostRegister(address, len(numbers), 0)
    if int(status) != 0:
        raise RuntimeError(_sentence(nbytes, "cannot pin"))
    weakref.finalize(owner, _unregister, runtime, address, numbers)


_postponed: list[tuple[Any, int, Any]] = []
_recordings = 0


@contextmanager
def nothing_unpinned() -> Iterator[None]:
    """Until it ends, memory that nobody needs any more stays pinned: a call that unpins it, which
    may come whenever Python collects garbage, would spoil a CUDA graph that is being recorded."""
    global _recordings
    _recordings += 1
    try:
        yield
    finally:
        _recordings -= 1
        while _postponed and not _recordings:
            _unregister(*_postponed.pop())


def _unregister(runtime: Any, address: int, numbers: Any) -> None:
    if _recordings:
        _postponed.append((runtime, address, numbers))
    else:
        runtime.cudaHostUnregister(address)


def _sentence(nbytes: int, what: str) -> str:
    size = format_quantity(nbytes, "B")
    return (
        f"the host {what} the {size} that the plan keeps there: plan with less on the host "
        "(--offload none, --host-state none), or recompute, or raise its limit on locked memory"
    )
