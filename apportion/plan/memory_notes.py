"""What was bought with what: notes of a plan whose memory was decided about.

Part of the room plan. Candidates before and after decisions come in, sentences go out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apportion.memory import DEVICE, HOST
from apportion.plan.candidate import Candidate
from apportion.quantity import format_quantity
from apportion.simulate import host_peaks
from apportion.split import layers_of

WHERE = {HOST: "updated there", DEVICE: "updated on the device", "fixed": "never updated"}


def memory_notes(
    start: Candidate, base: Candidate, found: Candidate, device: int, once: float
) -> list[str]:
    """What order and recomputation have changed from `start` to `base`, and the host from there to
    `found`; and how far that is from a step in which all Ops run `once`."""
    notes = []
    first = _before_host(base if found.memory.uses_host else found)
    if first:
        notes.append(_traded(first, start, base, device))
    there = _on_host(found, device)
    if there:
        notes.append(_traded(there, base, found, device))
    share = found.timeline.step_seconds / once - 1
    notes.append(
        f"all operators once take {format_quantity(once, 's')} on device {device}; no plan with "
        f"this partition takes less: this one takes {share:+.1%}"
    )
    return notes


def _traded(told: Sequence[str], before: Candidate, after: Candidate, device: int) -> str:
    """What some decisions have saved, and what they cost."""
    held = [one.timeline.peak_bytes[device] for one in (before, after)]
    longer = after.timeline.step_seconds / before.timeline.step_seconds - 1
    sizes = [format_quantity(size, "B") for size in held]
    return (
        f"{' and '.join(told)}: {sizes[0]} become {sizes[1]} on device {device}, and a step takes "
        f"{longer:+.1%}"
    )


def _before_host(found: Candidate) -> list[str]:
    """What is decided about the order and about recomputation."""
    told, memory = [], found.memory
    if memory.order:
        told.append("each parameter is updated as soon as its gradient is final")
    if memory.recomputed:
        told.append(f"{len(memory.recomputed)} operators are computed again in the backward")
    return told


def _on_host(found: Candidate, device: int) -> list[str]:
    """What lies on the host."""
    memory, told, graph = found.memory, [], found.space.source
    held = format_quantity(host_peaks(found.tasks)[device], "B")
    if memory.host_state:
        layers = layers_of(graph)
        many = Counter(each.update for each in memory.host_state)
        rows = {
            update: {
                layers[graph.consumers[each.parameter][0]]
                for each in memory.host_state
                if each.update == update
            }
            for update in many
        }
        where = ", ".join(
            f"{count} {WHERE[name]}{_of_layers(rows[name])}" for name, count in sorted(many.items())
        )
        told.append(
            f"{sum(many.values())} parameters lie on the host with their optimizer's state "
            f"({where}; {held} there)"
        )
    if memory.offloaded:
        told.append(f"{len(memory.offloaded)} activations wait in the host's memory")
    return told


def _of_layers(layers: set[int]) -> str:
    real = layers - {-1}
    return f" of {len(real)} layers" if real else ""
