"""carry_offloads: a Strategy for a Graph becomes one for the Graph with offloaded Values.

Part of the room memory. A Strategy and an OffloadedGraph come in. Out goes the Strategy in which
every Op has the Choice it had. A copy to the host or back is cut as the Value lies, where it lies,
so that it moves nothing from device to device; where its pieces are no grid (a sum of which each
device has a term), the whole is copied on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.describe import Box, IllegalCut
from apportion.memory.carry_strategy import (
    carried_choice,
    carried_digits,
    carried_layout,
    carried_values,
)
from apportion.memory.offload import OffloadedGraph
from apportion.split import Choice, Layout, Space, Strategy, composites, space_of, unsplit_choice


def carry_offloads(strategy: Strategy, before: Space, made: OffloadedGraph) -> Strategy:
    """The Strategy for the Graph with offloaded Values, from one for `before.source`. `before` is
    any Space of that Graph."""
    old = space_of(before.source, strategy, before)
    opened = frozenset(strategy.opening)
    opening = tuple(
        op
        for op in (composites(made.graph) if opened else ())
        if made.origins[op] in opened and not made.is_copy(op)
    )
    plain = Space(made.graph, (), opening)
    new = plain.with_digits(carried_digits(strategy, old.with_digits(()), plain))
    like = _counterparts(new, made)
    equal = _equal_values(old, new, like)
    layouts = _layouts(strategy, old, new, equal)
    choices: list[Choice] = []
    resting: dict[int, Choice] = {}  # by offloaded Value
    for op, counterpart in enumerate(like):
        if counterpart >= 0:
            given = strategy.choices[counterpart]
            choices.append(carried_choice(new, op, old, counterpart, given))
            continue
        value = made.values[new.graph.ops[op].inputs[0]]
        if value not in resting:
            resting[value] = _as_it_lies(new, op, value, choices, layouts)
        choices.append(resting[value])
    refetched = carried_values(strategy.refetched, equal)
    return Strategy(
        tuple(choices),
        layouts,
        new.digits,
        opening,
        strategy.wire,
        refetched,
        strategy.communication,
    )


def _counterparts(new: Space, made: OffloadedGraph) -> list[int]:
    """For each Op of the new opened Graph the one of the old that it is, -1 for a copy."""
    found, count = [], 0
    for origin in new.origins:
        copy = made.is_copy(origin)
        found.append(-1 if copy else count)
        count += not copy
    return found


def _equal_values(old: Space, new: Space, like: Sequence[int]) -> list[int]:
    """For each Value of the new opened Graph the one of the old that it was, -1 for a copy."""
    count = len(old.source.values)
    found = [value if value < count else -1 for value in range(len(new.graph.values))]
    for op, counterpart in zip(new.graph.ops, like, strict=True):
        was = old.graph.ops[counterpart].outputs if counterpart >= 0 else [-1] * len(op.outputs)
        for value, before in zip(op.outputs, was, strict=True):
            found[value] = before
    return found


def _layouts(strategy: Strategy, old: Space, new: Space, equal: Sequence[int]) -> dict[int, Layout]:
    """The Layouts of the Values that there were before."""
    found = {
        value: carried_layout(new, value, old, before, strategy.layouts)
        for value, before in enumerate(equal)
        if before >= 0
    }
    return {value: layout for value, layout in found.items() if layout is not None}


def _as_it_lies(
    space: Space, op: int, value: int, choices: Sequence[Choice], layouts: Mapping[int, Layout]
) -> Choice:
    """The Choice of a copy of a Value, whose maker's Choice is known: cut as the Value lies."""
    pieces = _pieces(space, value, choices, layouts)
    homes: dict[Box, list[int]] = {}
    for box, device in pieces:
        homes.setdefault(box, []).append(device)
    everywhere = tuple(dict.fromkeys(device for _, device in pieces))
    whole = unsplit_choice(space, op, everywhere)
    replicas = {len(devices) for devices in homes.values()}
    parts = [len(set(ranges)) for ranges in zip(*homes, strict=True)]
    if len(replicas) != 1 or len(parts) != len(space.axes(op)):
        return whole
    try:
        split = space.split(op, parts)
    except IllegalCut:
        return whole
    boxes = [part.outputs[0] for part in split.parts]
    if set(boxes) != set(homes) or len(boxes) != len(homes):
        return whole
    devices = [homes[box][k] for k in range(replicas.pop()) for box in boxes]
    return Choice(tuple(parts), tuple(devices))


def _pieces(
    space: Space, value: int, choices: Sequence[Choice], layouts: Mapping[int, Layout]
) -> list[tuple[Box, int]]:
    """The regions of a Value and their devices; the whole on each where these are terms."""
    if value in layouts:
        return layouts[value].pieces(space.factors(value))
    made = space.graph.producer[value]
    assert made is not None, "only what the forward makes is offloaded"
    choice = choices[made[0]]
    split = space.split(made[0], choice.parts)
    if split.terms[made[1]] > 1:
        whole = tuple((0, factor) for factor in space.factors(value))
        return [(whole, device) for device in dict.fromkeys(choice.devices)]
    return [
        (split.parts[k % choice.count].outputs[made[1]], device)
        for k, device in enumerate(choice.devices)
    ]
