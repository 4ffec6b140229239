"""Reference kernels: how fast this machine is now, and whether a CostTable is still of it.

Part of the room run. A Condition comes in, a MachineSpeed goes out, in some tenths of a second; it
is kept with what was measured then (CostTable.references), and compared at every later use. A
machine changes: its clock, what it shares with others, the virtual machine it is. What was measured
before says nothing of it then.

The kernels run in this process, with as many threads as each process of the Condition has, and by
the clock that rehearsals go by (rehearse.py). Each runs in blocks of its own, since one that moves
much memory makes the next one slow. What counts is the fastest tenth, which other programs disturb
least.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from apportion.machine import Condition, CostTable, ReferenceTime
from apportion.run.core_use import core_use, taken

ROUNDS, BLOCKS = 8, 3  # of each kernel
LONGEST = 0.5  # seconds for all of it, about; one round of each is always timed
LOW, HIGH = 0.1, 0.75  # quantiles: what counts, and what the spread is taken from
DISTURBED = 0.15  # share of the cores taken by others from which on nothing is measured for good
TOLERANCE = {"matmul": 1.2, "copy": 1.75, "small kernels": 1.2, "exchange": 1.5}
"""How many times longer or shorter a reference may take; docs/costs.md has what was seen."""
LOOK = 0.05  # seconds of looking who has the cores, before several threads are timed
ROUND_TRIP = 1 << 16


@dataclass(frozen=True)
class MachineSpeed:
    """Seconds of reference kernels, and the share of the cores that other programs had meanwhile
    (None where the system does not say)."""

    references: Mapping[str, ReferenceTime]
    taken: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether other programs had so much that measurements are not to be relied on."""
        return self.taken is not None and self.taken > DISTURBED


def machine_speed(condition: Condition) -> MachineSpeed:
    """How fast this machine is now."""
    wanted = condition.threads * condition.processes
    if condition.threads > 1 and (lost := _lost_now(wanted)) > DISTURBED:
        return MachineSpeed({}, lost)  # threads that wait for a core take seconds and say nothing
    with _threads(condition.threads), _references() as kernels:
        times: dict[str, list[float]] = {name: [] for name in kernels}
        before, began = core_use(), time.perf_counter()
        for name, kernel in (*kernels.items(),) * BLOCKS:
            clock = _clock(name, condition.threads)
            for number in range(ROUNDS + 1):
                if times[name] and time.perf_counter() - began > LONGEST:
                    break
                start = clock()
                kernel()
                times[name] += [clock() - start] if number else []
        after = core_use()
    found = {name: reference_time(seconds) for name, seconds in times.items()}
    return MachineSpeed(found, taken(before, after, wanted))


def _lost_now(wanted: int) -> float:
    """The share of the wanted cores that other programs have at the moment."""
    before = core_use()
    time.sleep(LOOK)
    return taken(before, core_use(), wanted) or 0.0


def reference_time(seconds: list[float]) -> ReferenceTime:
    """What counts of several measurements."""
    low, high = np.quantile(seconds, [LOW, HIGH]).tolist()
    return ReferenceTime(max(low, 1e-9), max(high / max(low, 1e-9) - 1, 0.0))


def changed(table: CostTable, now: MachineSpeed) -> str:
    """How this machine differs from what it was when the table was measured, in words; "" where it
    is the same within the tolerance, or where nobody can tell: while other programs run, a kernel
    that takes longer says nothing, one that takes less does."""
    for name, then in table.references.items():
        if name not in now.references:
            continue
        ratio = now.references[name].seconds / then.seconds
        if 1 / TOLERANCE.get(name, 2.0) <= ratio <= TOLERANCE.get(name, 2.0):
            continue
        if ratio < 1 or not now.disturbed:
            pace = f"{ratio:.1f} times as long" if ratio > 1 else f"{1 / ratio:.1f} times as fast"
            verb = "takes" if ratio > 1 else "is"
            return f"the reference kernel {name!r} {verb} {pace} as then"
    return ""


def caveat(table: CostTable | None) -> str:
    """Why a prediction with this table may be off now, in a sentence; "" if nothing is known
    against it."""
    if table is None or not table.references:
        return ""
    now = machine_speed(table.condition)
    if why := changed(table, now):
        when = table.measured or "an unknown day"
        return f"the prediction is of this machine as it was on {when}, plan again: {why}"
    if now.disturbed:
        return f"other programs have {now.taken:.0%} of the cores: steps may take longer"
    return ""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _clock(name: str, threads: int) -> Callable[[], float]:
    return time.perf_counter if threads > 1 or name == "exchange" else time.thread_time


@contextmanager
def _references() -> Iterator[dict[str, Callable[[], object]]]:
    matrix = torch.full((256, 256), 0.5)
    large, target = torch.zeros(1 << 23, dtype=torch.uint8), torch.empty(1 << 23, dtype=torch.uint8)
    few, others = torch.zeros(16), torch.ones(16)

    def matmul() -> None:
        for _ in range(4):
            matrix.mm(matrix)

    def small() -> None:
        for _ in range(200):
            torch.add(few, others)

    with _echo() as there_and_back:
        yield {
            "matmul": matmul,
            "copy": lambda: target.copy_(large),
            "small kernels": small,
            "exchange": there_and_back,
        }


@contextmanager
def _echo() -> Iterator[Callable[[], None]]:
    """Bytes that go to another thread and back, through the system, as messages do."""
    here, there = socket.socketpair()
    room, out = memoryview(bytearray(ROUND_TRIP)), bytes(ROUND_TRIP)

    def answer() -> None:
        theirs = memoryview(bytearray(ROUND_TRIP))
        with there:
            while _filled(there, theirs):
                there.sendall(theirs)

    other = threading.Thread(target=answer, daemon=True)
    other.start()

    def there_and_back() -> None:
        for _ in range(4):
            here.sendall(out)
            _filled(here, room)

    try:
        yield there_and_back
    finally:
        here.close()
        other.join()


def _filled(source: socket.socket, room: memoryview) -> bool:
    """Whether all of the bytes came before the other end was closed."""
    got = 0
    while got < len(room):
        count = source.recv_into(room[got:])
        if not count:
            return False
        got += count
    return True
