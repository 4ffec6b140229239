"""chunk_model: what a step holds and takes whose state and activations may lie on the host.

Part of the room memory. A Graph, what its Ops take and hold if everything is on the device, and the
rates of the host come in, a ChunkModel goes out. It looks at a step as chunks of the order
(time_host_state.py) and at what may lie on the host as units, the large parameters of a layer or an
activation, and says for one option of each unit the peak of the device and the time of a step:

    compute   runs chunk after chunk; a chunk waits for what it reads from the host, and for what is
              to be gone
    back, out the copies, each way one after the other, begun at the starts of chunks
    host      updates, of those that are ready the one that the next step needs first

Several steps are run one after the other, so that what one leaves to the next is as it will be. A
run takes milliseconds where lowering and simulating takes seconds: a planner can try hundreds of
mixtures before one is simulated. At the peak everything is counted that is there at any time of a
chunk, so that it is never less than the order's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from apportion.columns import Ints
from apportion.machine import HostRates

STEPS = 4

RESIDENT, ON_HOST, STREAMED, OFFLOADED = "resident", "host", "device", "offloaded"
"""Where a unit's state lies: on the device; on the host, updated there; on the host, updated on the
device. And of an activation that it lies on the host between forward and backward."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bytes that come to the device: for the reader in chunk `need`, the last one in `last`."""

    nbytes: int
    copies: int
    need: int
    last: int
    begun: bool = True  # the step begins with it on the host; else it has left in this step


@dataclass(frozen=True, slots=True)
class Leave:
    """Bytes that leave the device at the end of chunk `made`; `held`: they lie there until they are
    gone, beside what is counted otherwise."""

    nbytes: int
    copies: int
    made: int
    held: int


@dataclass(frozen=True, slots=True)
class UnitOption:
    """What a unit may do.

    name      RESIDENT, ON_HOST, STREAMED or OFFLOADED
    saved     bytes of the device that it frees for the whole step
    fetches   what comes, in the order of need
    leaves    what leaves
    work      bytes that the host reads and writes when it updates, after what leaves
    host      bytes that lie on the host
    """

    name: str
    saved: int = 0
    fetches: tuple[Fetch, ...] = ()
    leaves: tuple[Leave, ...] = ()
    work: int = 0
    host: int = 0


@dataclass(frozen=True, slots=True)
class HostUnit:
    """Something that may lie on the host: parameters or Values, and its options, the first being
    that it lies on the device. `place`: the chunk that it belongs to."""

    members: tuple[int, ...]
    options: tuple[UnitOption, ...]
    place: int


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """What a step holds on the device and on the host, how long it takes and for how long its
    copies run, beside what it computes or not."""

    peak: int
    host: int
    seconds: float
    copying: float

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better: of equally quick ones that which copies less."""
        return round(self.seconds * 1e7), self.copying


@dataclass(frozen=True, eq=False)
class ChunkModel:
    """A step in chunks.

    seconds    of each chunk
    levels     bytes that the device holds at most in each, if all units are on it
    rates      of copies and of the host
    """

    seconds: tuple[float, ...]
    levels: Ints
    rates: HostRates
    units: tuple[HostUnit, ...]

    def of(self, choice: Sequence[int], lookahead: int) -> ChunkOutcome:
        """The step in which each unit takes the option of this number."""
        run = _ChunkRun(self, choice, lookahead)
        return ChunkOutcome(run.peak(), run.host, run.seconds(), run.copying)

    def bytes_of(self, choice: Sequence[int], lookahead: int) -> tuple[int, int]:
        """The most bytes of the device and those of the host, without timing the step."""
        run = _ChunkRun(self, choice, lookahead)
        return run.peak(), run.host

    def options(self, choice: Sequence[int]) -> list[UnitOption]:
        """The options themselves."""
        return [unit.options[k] for unit, k in zip(self.units, choice, strict=True)]


@dataclass(slots=True)
class _Copy:
    """A copy that is under way in a run: in which chunk it begins and is waited for."""

    unit: int
    seconds: float
    nbytes: int
    begin: int
    until: int
    first: bool = False  # of the state that a step begins with


class _ChunkRun:
    """One choice, timed."""

    def __init__(self, model: ChunkModel, choice: Sequence[int], lookahead: int) -> None:
        self.model, self.lookahead = model, lookahead
        self.count = len(model.seconds)
        self.starts = np.append(0.0, np.cumsum(model.seconds)).tolist()
        self.chosen = [
            (k, option) for k, option in enumerate(model.options(choice)) if option.name != RESIDENT
        ]
        self.host = sum(option.host for _, option in self.chosen)
        self.backs = self._backs()
        self.outs = self._outs()
        self.copying = sum(copy.seconds for copy in (*self.backs, *self.outs))

    def _line(self, nbytes: int, copies: int, out: bool) -> float:
        rates = self.model.rates
        line = rates.out_beside if out else rates.back_beside
        alone = rates.out if out else rates.back
        return alone.each * copies + nbytes * line.per_byte

    def _backs(self) -> list[_Copy]:
        """What comes, the latest first, each so early that it is there when it is read."""
        rows = [(fetch.need, k, fetch) for k, option in self.chosen for fetch in option.fetches]
        rows.sort(key=lambda row: (row[0], row[1]))
        found, free = [], self.starts[-1]
        for need, k, fetch in reversed(rows):
            took = self._line(fetch.nbytes, fetch.copies, out=False)
            free = min(free, self.starts[need]) - took
            begins = max(bisect_right(self.starts, free) - 1, need - self.lookahead, 0)
            begin = min(begins, need)
            found.append(_Copy(k, took, fetch.nbytes, begin, need, fetch.begun))
        found.reverse()
        return found

    def _outs(self) -> list[_Copy]:
        rows = [(leave.made, k, leave) for k, option in self.chosen for leave in option.leaves]
        rows.sort(key=lambda row: (row[0], row[1]))
        found, free = [], 0.0
        for made, k, leave in rows:
            took = self._line(leave.nbytes, leave.copies, out=True)
            free = max(free, self.starts[made + 1]) + took
            gone = bisect_right(self.starts, free)
            gone = min(gone, made + 1 + self.lookahead, self.count)
            found.append(_Copy(k, took, leave.nbytes, made + 1, max(gone, made + 1)))
        return found

    def peak(self) -> int:
        """The most bytes of the device."""
        change = np.zeros(self.count + 2, np.int64)
        rows = iter(self.backs)
        by_unit: dict[int, list[_Copy]] = {}
        for copy in rows:
            by_unit.setdefault(copy.unit, []).append(copy)
        leaving: dict[int, list[_Copy]] = {}
        for copy in self.outs:
            leaving.setdefault(copy.unit, []).append(copy)
        for k, option in self.chosen:
            comes = sorted(by_unit.get(k, []), key=lambda copy: copy.until)
            if option.name == OFFLOADED:
                (gone,), back = leaving[k], comes[0]
                change[gone.until] -= option.saved
                change[max(back.begin, gone.until)] += option.saved
                continue
            change[0] -= option.saved
            for fetch, copy in zip(
                sorted(option.fetches, key=lambda each: each.need), comes, strict=True
            ):
                change[copy.begin] += fetch.nbytes
                change[fetch.last + 1] -= fetch.nbytes
            for leave, copy in zip(option.leaves, leaving.get(k, ()), strict=True):
                change[leave.made + 1] += leave.held
                change[max(copy.until, leave.made + 1)] -= leave.held
        held = self.model.levels + np.cumsum(change)[: self.count]
        return int(held.max(initial=0))

    def seconds(self) -> float:
        """The time between the ends of the last two steps."""
        lanes = _Lanes(self)
        ends = [lanes.step() for _ in range(STEPS)]
        return ends[-1] - ends[-2]


class _Lanes:
    """When lanes are free, and when what lies on the host is ready, over several steps."""

    def __init__(self, run: _ChunkRun) -> None:
        self.run, self.now, self.out, self.back = run, 0.0, 0.0, 0.0
        self.queue = _HostQueue()
        self.ready: dict[int, float] = {}  # by unit, when what a step begins with is on the host
        self.jobs: dict[int, int] = {}
        self.begins = _by_chunk(run.backs, lambda copy: copy.begin, run.count)
        self.needs = _by_chunk(run.backs, lambda copy: copy.until, run.count)
        self.leaves = _by_chunk(run.outs, lambda copy: copy.begin, run.count)
        self.gone = _by_chunk(run.outs, lambda copy: copy.until, run.count)
        rates = run.model.rates
        self.works = {k: option.work * rates.work_beside.per_byte for k, option in run.chosen}
        self.needed = {copy.unit: copy.until for copy in reversed(run.backs) if copy.first}
        self.last = {copy.unit: id(copy) for copy in run.outs}  # the last that leaves of each
        self.steps = 0

    def step(self) -> float:
        """Runs a step; when it ends."""
        run, ended, left = self.run, dict[int, float](), dict[int, float]()
        for chunk in range(run.count + 1):
            for copy in self.needs[chunk]:
                self.now = max(self.now, ended.get(id(copy), 0.0))
            for copy in self.leaves[chunk]:
                self.out = max(self.out, self.now) + copy.seconds
                left[id(copy)] = self.out
                self._left(copy)
            for copy in self.gone[chunk]:
                self.now = max(self.now, left[id(copy)])
            for copy in self.begins[chunk]:
                ready = self._ready(copy) if copy.first else self.ready.get(~copy.unit, 0.0)
                self.back = max(self.back, self.now, ready) + copy.seconds
                ended[id(copy)] = self.back
            for copy in self.needs[chunk]:
                self.now = max(self.now, ended[id(copy)])
            if chunk < run.count:
                self.now += run.model.seconds[chunk]
        self.steps += 1
        return self.now

    def _left(self, copy: _Copy) -> None:
        """What happens when something is on the host: an update there, or it is what the next step
        begins with, or what this one fetches back."""
        if self.last[copy.unit] != id(copy):
            return
        if self.works[copy.unit]:
            urgency = self.needed.get(copy.unit, 0) + self.steps * (self.run.count + 1)
            self.jobs[copy.unit] = self.queue.submit(urgency, self.out, self.works[copy.unit])
        else:
            self.ready[copy.unit] = self.ready[~copy.unit] = self.out

    def _ready(self, copy: _Copy) -> float:
        job = self.jobs.get(copy.unit)
        return self.ready.get(copy.unit, 0.0) if job is None else self.queue.end(job)


class _HostQueue:
    """Work of the host: of what is ready the most urgent first."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, int, float]] = []  # ready, urgency, number, seconds
        self.able: list[tuple[int, int, float]] = []
        self.free = 0.0
        self.ends: dict[int, float] = {}
        self.count = 0

    def submit(self, urgency: int, ready: float, seconds: float) -> int:
        """The number of a new piece of work."""
        self.count += 1
        heappush(self.waiting, (ready, urgency, self.count, seconds))
        return self.count

    def end(self, number: int) -> float:
        """When a piece of work is done."""
        while number not in self.ends:
            if not self.able:
                self.free = max(self.free, self.waiting[0][0])
            while self.waiting and self.waiting[0][0] <= self.free:
                _, urgency, other, seconds = heappop(self.waiting)
                heappush(self.able, (urgency, other, seconds))
            _, other, seconds = heappop(self.able)
            self.free += seconds
            self.ends[other] = self.free
        return self.ends[number]


def _by_chunk(copies: Sequence[_Copy], key: object, count: int) -> list[list[_Copy]]:
    assert callable(key)
    found: list[list[_Copy]] = [[] for _ in range(count + 1)]
    for copy in copies:
        found[min(key(copy), count)].append(copy)
    return found


def decided(model: ChunkModel, choice: Sequence[int]) -> Mapping[int, str]:
    """For each member of a unit that is not on the device the name of its option."""
    return {
        member: unit.options[k].name
        for unit, k in zip(model.units, choice, strict=True)
        for member in unit.members
        if unit.options[k].name != RESIDENT
    }
