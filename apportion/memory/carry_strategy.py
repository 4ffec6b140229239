"""carry_strategy: a Strategy for a Graph becomes one for the Graph with recomputed Ops.

Part of the room memory. A Strategy and a RecomputedGraph come in. Out goes the Strategy in which
every Op has the Choice it had, and every copy that of the Op it repeats; likewise the Layouts of
Values. What the Strategy opens is opened in the copies too.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion.describe import IllegalCut
from apportion.memory.recompute import RecomputedGraph
from apportion.split import Choice, Layout, Space, Strategy, composites, space_of, unsplit_choice


def carry_strategy(strategy: Strategy, before: Space, made: RecomputedGraph) -> Strategy:
    """The Strategy for the recomputed Graph, from one for `before.source`. `before` is any Space of
    that Graph."""
    old = space_of(before.source, strategy, before)
    opened = frozenset(strategy.opening)
    opening = tuple(op for op in composites(made.graph) if opened and made.origins[op] in opened)
    plain = Space(made.graph, (), opening)
    new = plain.with_digits(carried_digits(strategy, old.with_digits(()), plain))
    like = _counterparts(old, new, made)
    choices = [
        carried_choice(new, op, old, like[op], strategy.choices[like[op]])
        for op in range(len(like))
    ]
    values = _values(old, new, made, like)
    layouts = {
        value: layout
        for value, equal in enumerate(values)
        if (layout := carried_layout(new, value, old, equal, strategy.layouts)) is not None
    }
    refetched = carried_values(strategy.refetched, values)
    return Strategy(
        tuple(choices),
        layouts,
        new.digits,
        opening,
        strategy.wire,
        refetched,
        strategy.communication,
    )


def _counterparts(old: Space, new: Space, made: RecomputedGraph) -> list[int]:
    """For each Op of the new opened Graph the one of the old opened Graph that it is or repeats."""
    firsts: dict[int, int] = {}
    for op, origin in enumerate(old.origins):
        firsts.setdefault(origin, op)
    found, last, place = [], -1, 0
    for origin in new.origins:
        place = place + 1 if origin == last else 0
        last = origin
        found.append(firsts[made.origins[origin]] + place)
    return found


def _values(old: Space, new: Space, made: RecomputedGraph, like: Sequence[int]) -> list[int]:
    """For each Value of the new opened Graph the one of the old that it equals."""
    found = [*made.values, *[-1] * (len(new.graph.values) - len(made.values))]
    for op, counterpart in zip(new.graph.ops, like, strict=True):
        for value, equal in zip(op.outputs, old.graph.ops[counterpart].outputs, strict=True):
            found[value] = equal
    return found


def carried_digits(
    strategy: Strategy, old: Space, new: Space
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The divided classes by their numbers in the new Space."""
    wanted = dict(strategy.digits)
    if not wanted:
        return ()
    number: dict[int, int] = {}
    for value in range(len(old.source.values)):
        theirs, ours = old.atoms.value_classes[value], new.atoms.value_classes[value]
        if len(theirs) == len(ours):
            number.update(zip(theirs, ours, strict=True))
    return tuple((number[group], factors) for group, factors in wanted.items() if group in number)


def carried_choice(new: Space, op: int, old: Space, like: int, choice: Choice) -> Choice:
    """The Choice of the Op that this one repeats; uncut if its axes are divided otherwise."""
    ours = [(axis.name, axis.extent) for axis in new.axes(op)]
    if ours == [(axis.name, axis.extent) for axis in old.axes(like)]:
        try:
            new.split(op, choice.parts)
        except IllegalCut:
            pass
        else:
            return choice
    return unsplit_choice(new, op, tuple(dict.fromkeys(choice.devices)))


def carried_values(before: Sequence[int], equal: Sequence[int]) -> tuple[int, ...]:
    """The Values that equal some of before; `equal` has for each the one that it equals."""
    chosen = frozenset(before)
    return tuple([value for value, each in enumerate(equal) if each in chosen])


def carried_layout(
    new: Space, value: int, old: Space, equal: int, layouts: dict[int, Layout]
) -> Layout | None:
    found = layouts.get(equal)
    if found is None or new.factors(value) != old.factors(equal):
        return None
    return found
