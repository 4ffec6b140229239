"""A device whose queues run as late, and in as odd an order, as they are allowed to: what tests run
a step on that is meant for a GPU.

LazyStreams put nothing through until somebody waits for it, and then one thing of any queue after
another, by chance, as events allow. ArenaPool records what kernels do on tensors of the CPU, and
hands out addresses of one stretch of memory again as soon as a tensor is gone. So a copy or a
kernel that does not wait for what it has to reads or writes memory that is another's by then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from apportion.execute.device_streams import COMPUTE, Pairs


class LazyEvent:
    """How often it was recorded, and how often a queue has come to that."""

    def __init__(self) -> None:
        self.recorded = self.passed = 0


class LazyStreams:
    """Three queues of functions; a wait is a function that is not ready until its event passed."""

    def __init__(self, rng: Random, skip_waits: bool = False) -> None:
        self.rng, self.skip_waits = rng, skip_waits
        self.lock = threading.RLock()
        self.queues: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {
            queue: deque() for queue in range(3)
        }

    def put(self, queue: int, run: Callable[[], None]) -> None:
        """Puts a function into a queue."""
        with self.lock:
            self.queues[queue].append((lambda: True, run))

    def event(self) -> LazyEvent:
        return LazyEvent()

    def record(self, event: LazyEvent, queue: int) -> None:
        with self.lock:
            event.recorded += 1
            number = event.recorded

            def passed() -> None:
                event.passed = max(event.passed, number)

            self.put(queue, passed)

    def wait(self, queue: int, event: LazyEvent) -> None:
        with self.lock:
            number = event.recorded
            if not self.skip_waits:
                self.queues[queue].append((lambda: event.passed >= number, lambda: None))

    def begin(self) -> None:
        """The compute queue is always the same."""

    def copy(self, queue: int, pairs: Pairs) -> None:
        for target, source in pairs:
            self.put(queue, lambda target=target, source=source: (target.copy_(source), None)[1])

    def is_done(self, event: LazyEvent) -> bool:
        with self.lock:
            for _ in range(self.rng.randrange(3)):
                self._one()
            return event.passed >= event.recorded

    def synchronize(self, event: LazyEvent) -> None:
        with self.lock:
            number = event.recorded
        while True:
            with self.lock:
                if event.passed >= number:
                    return
                moved = self._one()
            if not moved:
                time.sleep(1e-4)  # another thread has to put something in first

    def finish(self) -> None:
        while True:
            with self.lock:
                moved = self._one()
                if not any(self.queues.values()):
                    return
            if not moved:
                time.sleep(1e-4)

    def _one(self) -> bool:
        """Runs the first of some queue that is ready; whether there was one."""
        ready = [q for q, items in self.queues.items() if items and items[0][0]()]
        if not ready:
            return False
        _, run = self.queues[self.rng.choice(ready)].popleft()
        run()
        return True


class ArenaPool:
    """Memory of a GraphPool: the first gap that is large enough."""

    def __init__(self, streams: LazyStreams, nbytes: int = 1 << 22) -> None:
        self.streams = streams
        self.arena = np.zeros(nbytes, np.uint8)
        self.used: dict[int, int] = {}
        self.most = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = max(int(np.prod(shape)) * dtype.itemsize, 1)
        start = 0
        for begin, length in sorted(self.used.items()):
            if start + size <= begin:
                break
            start = max(start, begin + -(-length // 64) * 64)
        assert start + size <= len(self.arena), "the arena is full"
        self.used[start] = size
        self.most = max(self.most, start + size)
        part = self.arena[start : start + size]
        weakref.finalize(part, self.used.pop, start)
        made = torch.from_numpy(part)[: int(np.prod(shape)) * dtype.itemsize]
        return made.view(dtype).view(shape)

    def prepare(self) -> None:
        """There is nothing to give back."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        offset = tensor.data_ptr() - self.arena.ctypes.data
        if not 0 <= offset < len(self.arena):
            return tensor
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        raw = torch.from_numpy(self.arena[offset : offset + (last + 1) * tensor.itemsize])
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        recording = _Recording(self)
        with recording:
            function()
        calls = recording.calls

        def replay() -> None:
            self.streams.put(COMPUTE, lambda: _replayed(calls))

        return replay


class _Recording(TorchDispatchMode):
    """Notes the operators that run, on aliases; their results lie in the arena."""

    def __init__(self, pool: ArenaPool) -> None:
        super().__init__()
        self.pool = pool
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t.untyped_storage()._cdata for t in _tensors((args, kwargs))]
        outs: list[torch.Tensor] = []
        if function._schema.is_mutable:  # it is not to run now
            made = args[0] if function._schema.returns else None
        else:
            made = function(*args, **kwargs)

        def settled(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            if result.untyped_storage()._cdata in given:
                return result
            size = sum((n - 1) * s for n, s in zip(result.shape, result.stride(), strict=True))
            room = self.pool.empty((size + 1 if result.numel() else 0,), result.dtype)
            room = room.as_strided(result.shape, result.stride()) if result.numel() else result
            outs.append(self.pool.alias(room) if result.numel() else room)
            return room

        found = tree_map(settled, made)
        keep = tree_map(
            lambda x: self.pool.alias(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        self.calls.append((function, *keep, outs))
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, tree)
    return found


def _replayed(calls: list[tuple[Any, Any, Any, list[torch.Tensor]]]) -> None:
    with torch.no_grad():
        for function, args, kwargs, outs in calls:
            if not outs and not function._schema.is_mutable:
                continue  # a view
            made = function(*args, **kwargs)
            given = [t.untyped_storage()._cdata for t in _tensors((args, kwargs))]
            new = [t for t in _tensors(made) if t.untyped_storage()._cdata not in given]
            for room, result in zip(outs, new, strict=True):
                room.copy_(result)
