"""Candidates that offload in chunks: plans that fit because what the forward keeps leaves for the
host and comes back chunk by chunk, and parameters lie there if that is not enough.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with TensorFlowMem's decisions (memory/tensorflowmem.py), for several sizes of chunks, or the choice
itself. Where a step is long beside what has to leave the device, copies cost next to nothing, and
recomputation costs what it costs; unrolled networks and deep ones of images are such steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from apportion.machine import host_link
from apportion.memory import (
    ChunkPartition,
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


def replace_in_chunks(
    request: PlanRequest, chosen: Selection, best: Selection, ends: float = math.inf
) -> Selection:
    """The better of `best` and of what `chosen`, which keeps everything on the device, becomes in
    chunks. Nothing is tried where copies cannot be hidden or little is left to gain; sizes are
    tried until the moment `ends`, or until one fits."""
    if chosen.interrupted or not _promising(request, chosen.best, best.best):
        return best
    found = best.best
    for one in _in_chunks(request, chosen.best):
        found = min(found, one, key=lambda each: ranking_key(request, each))
        if now(request) > ends and fits(request, found):
            break
    return best if found is best.best else replace(best, best=found, others=())


def _promising(request: PlanRequest, start: Candidate, best: Candidate) -> bool:
    if len(request.cluster.devices) != 1 or request.cluster.communication_on_device:
        return False
    over, seconds = max(excess(request, start)), start.timeline.step_seconds
    if over <= 0:
        return False
    if fits(request, best) and best.timeline.step_seconds <= (1 + WORTH) * seconds:
        return False
    dear = not fits(request, best) or best.timeline.step_seconds > DEAR * seconds
    allowed = (SHOWN if dear else HIDDEN) * seconds
    return host_link(request.cluster, 0).bandwidth * allowed >= over


def _in_chunks(request: PlanRequest, start: Candidate) -> Iterator[Candidate]:
    """A Candidate for each size of chunks, with parameters on the host only if nothing fits
    without. Where a plan is over, the estimate was too low, and it is made for a lower limit."""
    model = step_model(start.space, start.tasks, start.timeline, 0, request.cluster, start.cost)
    orders = order_model(model, start.tasks, start.timeline, 0, start.space.origins)
    order, way = low_order(request.space.source, orders), HostWay(host_link(request.cluster, 0))
    assert request.memory_limit is not None, "without a limit nothing is over"
    limit, fit = request.memory_limit[0], False

    def candidate(parts: ChunkPartition, how: tuple[bool, bool], within: int) -> Candidate:
        plan = tensorflowmem(model, orders, way, within, parts, *how)
        found = with_memory(request, start, plan)
        notes = memory_notes(start, start, found, 0, sum(model.costs.seconds))
        return replace(found, notes=(*found.notes, *notes))

    for how in PASSES:
        for size in CHUNKS:
            parts = partition(orders, order, limit // size)
            found = candidate(parts, how, limit)
            yield found
            over = max(excess(request, found))
            lower = limit - 5 * over // 4
            if over > 0 and lower > 0:
                found = candidate(parts, how, lower)
                yield found
            fit = fit or fits(request, found)
        if fit:
            return
