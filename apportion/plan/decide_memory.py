"""What is decided about memory once methods have divided a step, where that is permitted.

Part of the room plan. A PlanRequest, what was chosen and the modes that are permitted come in; out
goes the same choice with recomputed Ops, offloaded activations and state on the host, as far as the
plan needs them to fit. What each of them costs is for recomputation.py, offloading.py,
host_residence.py and offload_in_chunks.py to say; here is in which order they are asked, and for
how long.
"""

from __future__ import annotations

from dataclasses import replace

from apportion.plan.auto import BASELINE_SECONDS, Selection
from apportion.plan.candidates import PlanRequest, fits, now, ranking_key
from apportion.plan.host_residence import MemoryModes, replace_on_host
from apportion.plan.offload_in_chunks import replace_in_chunks
from apportion.plan.offloading import replace_offloaded
from apportion.plan.recomputation import AUTO, KEEP, replace_recomputed

MEMORY_SHARE = 0.5  # of the budget that decisions about memory have
CHUNK_SHARE = 0.25  # of it that chunks have at least, whatever the others took


def memory_seconds(modes: MemoryModes, budget: float) -> float:
    """What a search leaves of its budget to decisions about memory, if nothing fits without."""
    if modes == MemoryModes():
        return 0.0
    return MEMORY_SHARE * budget


def decide_memory(
    request: PlanRequest, chosen: Selection, modes: MemoryModes, budget: float
) -> Selection:
    """The choice with time given for memory, as far as that is permitted and needed."""
    ends = now(request) + max(MEMORY_SHARE * budget, BASELINE_SECONDS)
    if modes.host_state == KEEP and not modes.pins:
        if modes.offload == KEEP:
            return replace_recomputed(request, chosen, modes.recompute, ends)
        return replace_offloaded(request, chosen, modes.recompute, modes.offload, ends)
    if modes.forced or modes.recompute != AUTO:
        return replace_on_host(request, chosen, modes, ends)
    if len(request.cluster.devices) > 1:
        return _on_several(request, chosen, modes, ends)
    return _on_one(request, chosen, modes, budget, ends)


def _on_several(
    request: PlanRequest, chosen: Selection, modes: MemoryModes, ends: float
) -> Selection:
    """Methods have cut the state over devices already, and a step with copies to many hosts takes
    long to simulate: copies are looked at only where recomputation is not enough."""
    best = replace_recomputed(request, chosen, AUTO, ends)
    for offload in dict.fromkeys((KEEP, modes.offload)):
        if fits(request, best.best):
            break
        other = replace_on_host(request, chosen, replace(modes, offload=offload), ends)
        best = _better(request, best, other)
    return best


def _on_one(
    request: PlanRequest, chosen: Selection, modes: MemoryModes, budget: float, ends: float
) -> Selection:
    """State on the host is looked at first, and recomputation alone more closely as well;
    activations are offloaded only if nothing fits without, or in chunks where a step is long beside
    what has to leave: that takes long to decide and seldom pays."""
    best = replace_on_host(request, chosen, replace(modes, offload=KEEP), ends)
    if now(request) <= ends or not best.best.memory.uses_host or not fits(request, best.best):
        best = _better(request, best, replace_recomputed(request, chosen, AUTO, ends))
    if modes.offload != KEEP and not fits(request, best.best):
        best = _better(request, best, replace_on_host(request, chosen, modes, ends))
    if modes.offload != KEEP and modes.host_state == AUTO and not modes.pins:
        later = now(request) + CHUNK_SHARE * budget
        return replace_in_chunks(request, chosen, best, max(ends, later))
    return best


def _better(request: PlanRequest, one: Selection, other: Selection) -> Selection:
    return min(one, other, key=lambda each: ranking_key(request, each.best))
