"""Candidates that offload in chunks: plans that fit because what the forward keeps leaves for the
host and comes back chunk by chunk, and parameters lie there if that is not enough.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with TensorFlowMem's decisions (memory/tensorflowmem.py), for several sizes of chunks, or the choice
itself. Where a step is long beside what has to leave the device, copies cost next to nothing, and
recomputation costs what it costs; unrolled networks and deep ones of images are such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from apportion.machine import host_link
from apportion.memory import (
    HostWay,
    low_order,
    order_model,
    partition,
    step_model,
    tensorflowmem,
)
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import PlanRequest, excess, fits, now, ranking_key
from apportion.plan.memory_notes import memory_notes
from apportion.plan.planned_memory import with_memory

CHUNKS = (64, 16, 256)  # of the limit, what a chunk makes
PASSES = ((True, False), (True, True))  # it offloads, it places parameters on the host
HIDDEN = 0.6  # of a step: what its copies may take in one direction
DEAR, SHOWN = 1.3, 2.0  # where all else takes so much of a step, they may take so much
WORTH = 0.005  # of a step, what has to be left to gain
LARGER, CLOSE = 5, 1.1  # sizes beyond the best of CHUNKS that are tried, and how far apart


def replace_in_chunks(
    request: PlanRequest, chosen: Selection, best: Selection, ends: float = math.inf
) -> Selection:
    """The better of `best` and of what `chosen`, which keeps everything on the device, becomes in
    chunks. Where something fits already, nothing is tried if copies cannot be hidden or little is
    left to gain. Sizes are tried until the moment `ends`; while nothing fits, what leaves the least
    on the device is tried even then."""
    if chosen.interrupted or not _promising(request, chosen.best, best.best):
        return best
    found, found_by = best.best, None
    chunked = _ChunkedStep(request, chosen.best)
    for trial in chunked.trials(lambda: now(request) > ends):
        one = trial.candidate
        if ranking_key(request, one) < ranking_key(request, found):
            found, found_by = one, trial
        if now(request) > ends and fits(request, found):
            break
    if found_by is not None and fits(request, found):
        for one in chunked.larger(found_by, ends):
            found = min(found, one, key=lambda each: ranking_key(request, each))
    return best if found is best.best else replace(best, best=found, others=())


def _promising(request: PlanRequest, start: Candidate, best: Candidate) -> bool:
    if len(request.cluster.devices) != 1 or request.cluster.communication_on_device:
        return False
    over, seconds = max(excess(request, start)), start.timeline.step_seconds
    if over <= 0:
        return False
    if not fits(request, best):
        return True
    if best.timeline.step_seconds <= (1 + WORTH) * seconds:
        return False
    dear = best.timeline.step_seconds > DEAR * seconds
    allowed = (SHOWN if dear else HIDDEN) * seconds
    return host_link(request.cluster, 0).bandwidth * allowed >= over


@dataclass(frozen=True)
class _ChunkTrial:
    """A Candidate by chunks that make so many bytes each, and the passes it is made by."""

    candidate: Candidate
    nbytes: int
    how: tuple[bool, bool]


class _ChunkedStep:
    """A step that is over its limit on one device, and what becomes of it in chunks."""

    def __init__(self, request: PlanRequest, start: Candidate) -> None:
        assert request.memory_limit is not None, "without a limit nothing is over"
        self.request, self.start, self.limit = request, start, request.memory_limit[0]
        line, cluster = start.timeline, request.cluster
        self.model = step_model(start.space, start.tasks, line, 0, cluster, start.cost)
        self.orders = order_model(self.model, start.tasks, line, 0, start.space.origins)
        self.order = low_order(request.space.source, self.orders)
        self.way = HostWay(host_link(cluster, 0))

    def trials(self, is_late: Callable[[], bool] = lambda: False) -> Iterator[_ChunkTrial]:
        """One for each size of chunks, with parameters on the host only if nothing fits without.
        Where a plan is over, the estimate was too low, and it is made for a lower limit; if that
        changes nothing, all that can leave has left, and there is no use in other sizes. When it is
        late, one size more is tried with parameters on the host, and no other."""
        fit = False
        for how in PASSES:
            for share in CHUNKS:
                if is_late() and (how != PASSES[-1] or share != CHUNKS[0]):
                    break
                found = self._trial(self.limit // share, how, self.limit)
                yield found
                over = max(excess(self.request, found.candidate))
                lower = self.limit - 5 * over // 4
                if over > 0 and lower > 0:
                    found = self._trial(self.limit // share, how, lower)
                    yield found
                    if max(excess(self.request, found.candidate)) >= over and how != PASSES[-1]:
                        break
                fit = fit or fits(self.request, found.candidate)
            if fit:
                return

    def larger(self, fitting: _ChunkTrial, ends: float) -> Iterator[Candidate]:
        """Candidates of larger chunks than one that fits: they hold more and wait less. Sizes are
        doubled while they fit, and then halved in between, until the moment `ends`."""
        good, bad = fitting.nbytes, self.limit
        for _ in range(LARGER):
            nbytes = min(2 * good, math.isqrt(good * bad))
            if now(self.request) > ends or nbytes < CLOSE * good:
                return
            found = self._trial(nbytes, fitting.how, self.limit).candidate
            yield found
            if fits(self.request, found):
                good = nbytes
            else:
                bad = nbytes

    def _trial(self, nbytes: int, how: tuple[bool, bool], within: int) -> _ChunkTrial:
        parts = partition(self.orders, self.order, nbytes)
        plan = tensorflowmem(self.model, self.orders, self.way, within, parts, *how)
        found = with_memory(self.request, self.start, plan)
        seconds = sum(self.model.costs.seconds)
        notes = memory_notes(self.start, self.start, found, 0, seconds)
        return _ChunkTrial(replace(found, notes=(*found.notes, *notes)), nbytes, how)
