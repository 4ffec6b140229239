"""Which of the permitted schemes a loop runs under: the one that moves the fewest bytes.

Part of the room loops. For every scheme the messages of a pass over evenly spread elements are
counted. So the larger arrays stay and the smaller ones rotate, without a rule that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.loops.array_uses import UsedArray, even_facts, uses_by_name
from apportion.loops.elements import DealRequest
from apportion.loops.loop_plan import ArrayUse
from apportion.loops.schemes import ONE_D, TWO_D, Scheme
from apportion.loops.tile_schedule import tile_schedule
from apportion.loops.traffic import pass_messages

MOST_PROCESSES = 8  # that are counted for: the choice is the same with more


@dataclass(frozen=True)
class SchemeChoice:
    """A scheme, the bytes that it moves in a pass, and where it has the arrays."""

    scheme: Scheme
    nbytes: int
    uses: Mapping[str, ArrayUse]


def weigh_schemes(
    schemes: Sequence[Scheme],
    arrays: Mapping[str, UsedArray],
    shape: tuple[int, ...],
    processes: int,
    depth: int,
    ordered: bool,
) -> list[SchemeChoice]:
    """All schemes with what they cost, the best one first."""
    found = []
    for scheme in schemes:
        schedule = tile_schedule(scheme, min(processes, MOST_PROCESSES), depth)
        request = DealRequest(scheme, shape, schedule.processes, schedule.time_parts, ordered)
        facts = even_facts(request)
        uses = uses_by_name(arrays, scheme, schedule, facts)
        nbytes = sum(each.nbytes for each in pass_messages(tuple(uses.values()), schedule, facts))
        found.append(SchemeChoice(scheme, nbytes, uses))
    kinds = (ONE_D, TWO_D)
    return sorted(
        found,
        key=lambda each: (
            each.nbytes,
            kinds.index(each.scheme.kind) if each.scheme.kind in kinds else len(kinds),
            each.scheme.skew,
            -shape[each.scheme.space],
        ),
    )
