"""LoopSession: the processes that run loops, and what they have of which array.

Part of the room loops. `with loops.processes(4):` starts four processes of this machine, and loops
that are called inside run on them. In a script that `torchrun` started, `with loops.processes():`
makes the process that it runs in one of the ranks: all of them run the same script and call the
same loops. With neither, loops run in this process, serially.

An array goes to the processes when a loop first needs it, and comes back when the block ends.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.execute import PeerLost, peer_errors
from apportion.loops.array import GIVEN, Beginning, DenseArray, SparseArray
from apportion.loops.array_layout import ArrayLayout
from apportion.loops.balanced_bounds import even_bounds
from apportion.loops.elements import DealFacts, DealRequest
from apportion.loops.loop_body import LoopError
from apportion.loops.loop_plan import TABLED, ArrayUse
from apportion.loops.loop_rank import LoopRank
from apportion.loops.peers import GlooPeers, LocalHub, LocalPeers
from apportion.loops.rank_requests import (
    Accumulated,
    CloseTables,
    CollectArray,
    CollectValues,
    CountBytes,
    DealElements,
    DropArray,
    PlaceArray,
    RankRequest,
    TakeElements,
    reduced,
)
from apportion.servers import StoreSettings

Numbers = npt.NDArray[Any]
TIMEOUT = 3600.0  # seconds that processes have for a pass, unless told otherwise


class LoopSession:
    """Ranks, and what they have. `ask` lets all of them do something; kinds of sessions differ in
    that. `lost` says why it ended, if it ended badly."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.layouts: dict[int, ArrayLayout] = {}
        self.deals: dict[int, tuple[DealRequest, DealFacts]] = {}
        self.taken: set[int] = set()
        self.tabled: dict[int, tuple[ArrayLayout, StoreSettings]] = {}
        self.held: dict[int, weakref.ref[Any]] = {}
        self.files = 0
        self.lost = ""
        self.checkpoint = ""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all ranks."""
        return True

    def ask(self, request: RankRequest) -> list[Any]:
        """Everybody's answer, in the order of ranks."""
        raise NotImplementedError

    # Arrays

    def place(self, array: DenseArray, layout: ArrayLayout) -> None:
        """Lets the ranks have an array in a layout."""
        array.check()
        if array.holder is not self:
            if array.holder is not None:
                array.assign(array.numpy())
            self._hold(array)
            self._give(array, layout)
        elif self.layouts[array.number] != layout:
            self.ask(PlaceArray(_described(array), layout))
        self.layouts[array.number] = layout

    def with_tables(self, use: ArrayUse) -> ArrayUse:
        """A use of an array; it is noted whether the table of the last pass still holds it."""
        known = self.tabled.pop(use.number, None)
        if use.placement != TABLED or use.settings is None:
            return use
        self.tabled[use.number] = (use.layout, use.settings)
        return replace(use, is_kept=known == (use.layout, use.settings))

    def hold(self, array: DenseArray) -> None:
        """Lets the ranks have an array, in whatever layout."""
        if array.holder is not self:
            dim = max(range(array.ndim), key=lambda each: array.shape[each])
            bounds, order = even_bounds(array.shape[dim], self.count), tuple(range(array.ndim))
            self.place(array, ArrayLayout(dim, bounds, tuple(range(self.count)), order))

    def _give(self, array: DenseArray, layout: ArrayLayout) -> None:
        self.ask(PlaceArray(_described(array, array.contents), layout))
        array.contents = None

    def _hold(self, array: DenseArray | SparseArray) -> None:
        array.holder = self
        self.held[array.number] = weakref.ref(array)

    def drop_unused(self) -> None:
        """Let the ranks forget arrays that nobody has any more."""
        for number, known in list(self.held.items()):
            if known() is None:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self.ask(DropArray(number))
        self.held.pop(number, None)
        self.layouts.pop(number, None)
        self.tabled.pop(number, None)
        self.deals.pop(number, None)
        self.taken.discard(number)

    def forget(self, array: DenseArray | SparseArray) -> None:
        """The array gets other elements, elsewhere."""
        if array.number in self.held:
            self._drop(array.number)

    def collect(self, array: DenseArray) -> Numbers:
        """All elements of an array."""
        found = np.empty(array.shape, array.dtype)
        for parts in self.ask(CollectArray(array.number)):
            for box, block in parts:
                found[tuple(slice(low, high) for low, high in box)] = block
        return found

    # Elements

    def hold_elements(self, array: SparseArray) -> None:
        """Lets the ranks have a sparse array, whoever has which elements."""
        if array.lost:
            raise RuntimeError(array.lost)
        if array.holder is not self:
            if array.holder is not None and array.is_changed:
                array.fields, array.is_changed = (array.numpy(),), False
            self._hold(array)
        if array.number not in self.taken:
            self._take(array)
            self.taken.add(array.number)

    def deal(self, array: SparseArray, request: DealRequest) -> DealFacts:
        """Lets the ranks have their elements; nothing happens if they have them already."""
        self.hold_elements(array)
        known = self.deals.get(array.number)
        if known is None or known[0] != request:
            facts = self.ask(DealElements(array.number, request))[0]
            known = self.deals[array.number] = (request, facts)
        return known[1]

    def _take(self, array: SparseArray) -> None:
        self.ask(
            TakeElements(
                array.number, array.keys, array.fields, array.starts, array.ragged, array.shards
            )
        )  # fmt: skip

    def collect_values(self, array: SparseArray) -> Numbers:
        """The values of all elements, in the order in which they were given."""
        answers = self.ask(CollectValues(array.number))
        found = np.empty(sum(len(numbers) for numbers, _ in answers), answers[0][1].dtype)
        for numbers, values in answers:
            found[numbers] = values
        return found

    # The end

    def bring_back(self) -> None:
        """Takes all arrays back into this process."""
        for known in list(self.held.values()):
            array = known()
            if isinstance(array, DenseArray):
                array.contents, array.holder = self.collect(array), None
            elif isinstance(array, SparseArray):
                if array.is_changed and array.shards is None:
                    array.fields = (self.collect_values(array),)
                    array.is_changed = False
                array.holder = None
        self.ask(CloseTables())

    def lose(self, why: str) -> None:
        """The ranks are gone, and what they had."""
        self.lost = why
        for known in self.held.values():
            array = known()
            if array is not None:
                array.holder = None
            if isinstance(array, DenseArray) or (array is not None and array.is_changed):
                array.lost = (
                    f"the elements of this array were lost when {why}; load the last checkpoint, "
                    "or assign others"
                )


def _described(array: DenseArray, values: Numbers | None = None) -> DenseArray:
    """An array without its elements, as ranks know it; with `values` it begins with those."""
    beginning = Beginning(GIVEN, values=values) if values is not None else array.beginning
    return replace(array, beginning=beginning, contents=None, holder=None)


class ThreadSession(LoopSession):
    """Ranks that are threads of this process; a single one runs in the caller's."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        hub = LocalHub()
        self.ranks = [LoopRank(LocalPeers(rank, count, hub)) for rank in range(count)]
        self.hub = hub

    def ask(self, request: RankRequest) -> list[Any]:
        if self.count == 1:
            return [request.on(self.ranks[0])]
        answers: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                answers[number] = request.on(self.ranks[number])
            except BaseException as error:
                errors.append(error)
                self.hub.broken.set()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers


class PoolSession(LoopSession):
    """Ranks that are processes of this machine, started for the session. Arrays that this process
    has go to them through files, which are gone as soon as they have been read."""

    def __init__(self, count: int, timeout: float) -> None:
        from apportion.run import ProcessPool

        super().__init__(count)
        self.pool = ProcessPool(count, timeout)

    def ask(self, request: RankRequest) -> list[Any]:
        if self.lost:
            raise RuntimeError(f"the processes of this loop are gone: {self.lost}")
        try:
            return self.pool.ask(request)
        except RuntimeError as error:
            self.lose(str(error))
            where = f"; loops.load({self.checkpoint!r}, ...) has the last checkpoint"
            raise RuntimeError(f"{error}{where if self.checkpoint else ''}") from None
        except BaseException as error:
            self.lose(f"{type(error).__name__} ended the loop")
            raise

    def _give(self, array: DenseArray, layout: ArrayLayout) -> None:
        if array.contents is None:
            super()._give(array, layout)
            return
        path = self._save(array.contents)
        beginning = Beginning(GIVEN, path=str(path))
        try:
            described = replace(array, beginning=beginning, contents=None, holder=None)
            self.ask(PlaceArray(described, layout))
        finally:
            path.unlink(missing_ok=True)
        array.contents = None

    def _take(self, array: SparseArray) -> None:
        paths: list[Path] = []

        def saved(column: Numbers) -> str:
            paths.append(self._save(column))
            return str(paths[-1])

        try:
            self.ask(
                TakeElements(
                    array.number,
                    tuple(map(saved, array.keys)),
                    tuple(map(saved, array.fields)),
                    None if array.starts is None else saved(array.starts),
                    tuple(map(saved, array.ragged)),
                    array.shards,
                )
            )
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _save(self, values: Numbers) -> Path:
        self.files += 1
        path = Path(self.pool.folder.name, f"array{self.files}.npy")
        try:
            np.save(path, values)
        except OSError as error:
            raise RuntimeError(f"cannot write {path}: {error.strerror}") from None
        return path

    def close(self) -> None:
        self.pool.close()


_SESSIONS: list[LoopSession] = []


def current_session() -> LoopSession:
    """The innermost session; without one loops run in this process."""
    if not _SESSIONS:
        _SESSIONS.append(ThreadSession(1))
    return _SESSIONS[-1]


class TorchrunSession(LoopSession):
    """Ranks that torchrun has started: this process is one of them. All run the same script, so
    that each asks the same, of itself; what everybody has to know is gathered."""

    def __init__(self, timeout: float) -> None:
        import torch.distributed as dist

        self.started = not dist.is_initialized()
        if self.started:
            with peer_errors():
                dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        super().__init__(dist.get_world_size())
        self.rank = LoopRank(GlooPeers(dist.get_rank(), dist.get_world_size()))

    @property
    def is_first(self) -> bool:
        return self.rank.peers.rank == 0

    def ask(self, request: RankRequest) -> list[Any]:
        import torch.distributed as dist

        try:
            answer = request.on(self.rank)
            answers: list[Any] = [None] * self.count
            with peer_errors():
                dist.all_gather_object(answers, answer)
        except PeerLost as error:
            self.lose("another rank failed")
            where = f"; loops.load({self.checkpoint!r}, ...) has the last checkpoint"
            text = f"rank {self.rank.peers.rank} lost the connection to another rank: {error}"
            raise RuntimeError(f"{text}{where if self.checkpoint else ''}") from None
        return answers

    def close(self) -> None:
        import torch.distributed as dist

        if self.started:
            dist.destroy_process_group()


@contextmanager
def processes(count: int | None = None, timeout: float = TIMEOUT) -> Iterator[LoopSession]:
    """Runs the loops of a block on so many processes of this machine, or without a number on those
    that torchrun has started. Each pass has `timeout` seconds. Raises RuntimeError, and names the
    process, if one fails or is killed."""
    if count is None and "WORLD_SIZE" not in os.environ:
        raise LoopError("say how many processes: loops.processes(4), or start with torchrun")
    if count is not None and count < 1:
        raise LoopError(f"{count} processes cannot run anything; give at least 1")
    session = TorchrunSession(timeout) if count is None else PoolSession(count, timeout)
    with _current(session):
        try:
            yield session
            session.bring_back()
        finally:
            session.close()


@contextmanager
def _current(session: LoopSession) -> Iterator[None]:
    _SESSIONS.append(session)
    try:
        yield
    finally:
        _SESSIONS.remove(session)


@contextmanager
def threads(count: int) -> Iterator[LoopSession]:
    """Runs the loops of a block on threads of this process: for tests."""
    session = ThreadSession(count)
    with _current(session):
        yield session
        session.bring_back()


def accumulated(name: str, reset: bool = True) -> float:
    """What all iterations since the last reset have accumulated under a name. With `reset` the next
    ones begin anew."""
    found = reduced(current_session().ask(Accumulated(name, reset)))
    if found is None:
        raise LoopError(f"nothing has been accumulated under {name!r}")
    return found


def held_bytes() -> list[int]:
    """Bytes of arrays that each process has."""
    return current_session().ask(CountBytes())
