"""Which pace of a wire takes least time, found by training steps that are measured.

Part of the room execute. Paces come in, the plan's first, and what a step took by each; out goes
the pace for every step, and in the end the one to stay with. The simulator has chosen the plan's
from what it knows of links; what slices cost processors, and what they gain where a rank is late
for once, is seen here. Results are the same by any pace.

All ranks count the same steps, and agree on what each pace took: the slowest of them says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from apportion.execute.backends import peer_errors
from apportion.execute.wire import Pace

SETTLE = 3  # steps before the first that counts
LEAD, COUNT = 1, 3  # steps of a pace in a row: the first still feels another one, three count
TURNS = 3
WORTH = 0.01  # of a step, by which another pace than the plan's has to be quicker

PACES = (Pace(160_000, 160_000), Pace(1 << 20, 1 << 20), Pace(1 << 22), Pace())
"""What is tried beside the plan's own: P3's, larger slices, ByteScheduler's order of size without a
credit, and whole messages."""

Agree = Callable[[Sequence[float]], list[float]]


class PaceSearch:
    """Steps of one rank, each by a pace that is tried."""

    def __init__(self, planned: Pace, agree: Agree) -> None:
        self.paces = tuple(dict.fromkeys((planned, *PACES)))
        self.agree = agree
        self.took: list[list[float]] = [[] for _ in self.paces]
        self._order = self._steps()
        self._next: tuple[int, bool] | None = next(self._order)

    @property
    def is_over(self) -> bool:
        """Whether enough steps were measured."""
        return self._next is None

    @property
    def pace(self) -> Pace:
        """The pace of the next step."""
        assert self._next is not None, "the search is over"
        return self.paces[self._next[0]]

    def note(self, seconds: float) -> None:
        """Takes what the step took."""
        assert self._next is not None, "the search is over"
        pace, counts = self._next
        if counts:
            self.took[pace].append(seconds)
        self._next = next(self._order, None)

    def decide(self) -> Pace:
        """The quickest pace; the plan's unless another is worth it. All ranks have to."""
        seconds = self.agree([statistics.median(each) for each in self.took])
        best = min(range(len(seconds)), key=seconds.__getitem__)
        return self.paces[best if seconds[best] < (1 - WORTH) * seconds[0] else 0]

    def _steps(self) -> Iterator[tuple[int, bool]]:
        """The pace of each step, and whether it counts; in another order at every turn."""
        yield from [(0, False)] * SETTLE
        count = len(self.paces)
        for turn in range(TURNS):
            for k in range(count):
                pace = (k + turn) % count
                yield from [(pace, False)] * LEAD
                yield from [(pace, True)] * COUNT


def slowest(seconds: Sequence[float]) -> list[float]:
    """The largest of all ranks, number by number."""
    told = torch.tensor(seconds, dtype=torch.float64)
    with peer_errors():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    found: list[float] = told.tolist()
    return found
