"""carry_strategy: a Strategy for a Graph becomes one for the Graph that a decision made of it.

Part of the room memory. A Strategy and a RewrittenGraph come in. Out goes the Strategy in which
every Op has the Choice it had, and one that repeats another the Choice of that; likewise the
Layouts of Values. What the Strategy opens is opened in repeats too.

A copy to the host or back is cut as the Value lies, where it lies, so that it moves nothing from
device to device; where its pieces are no grid (a sum of which each device has a term), the whole is
copied on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.describe import Box, IllegalCut
from apportion.memory.rewritten_graph import RewrittenGraph
from apportion.split import Choice, Layout, Space, Strategy, composites, space_of, unsplit_choice


def carry_strategy(strategy: Strategy, before: Space, made: RewrittenGraph) -> Strategy:
    """The Strategy for the rewritten Graph, from one for `before.source`. `before` is any Space of
    that Graph."""
    return _Carried(strategy, space_of(before.source, strategy, before), made).strategy()


class _Carried:
    """`like` has for each Op of the new opened Graph the one of the old that it is or repeats, -1
    for a copy to the host or back; `equal` for each Value the one that it equals, -1 if there was
    none; `layouts` those of the new Graph."""

    def __init__(self, strategy: Strategy, old: Space, made: RewrittenGraph) -> None:
        self.given, self.old, self.made = strategy, old, made
        opened = frozenset(strategy.opening)
        self.opening = tuple(
            op
            for op in (composites(made.graph) if opened else ())
            if made.origins[op] in opened and not made.is_host_copy(op)
        )
        plain = Space(made.graph, (), self.opening)
        self.new = plain.with_digits(carried_digits(strategy, old.with_digits(()), plain))
        self.like = self._counterparts()
        self.equal = self._equal_values()
        copied = {
            value
            for op, like in zip(self.new.graph.ops, self.like, strict=True)
            for value in (op.outputs if like < 0 else ())
        }
        self.layouts = {
            value: layout
            for value, equal in enumerate(self.equal)
            if equal >= 0 and value not in copied
            if (layout := carried_layout(self.new, value, old, equal, strategy.layouts)) is not None
        }

    def strategy(self) -> Strategy:
        choices: list[Choice] = []
        for op, like in enumerate(self.like):
            if like >= 0:
                given = self.given.choices[like]
                choices.append(carried_choice(self.new, op, self.old, like, given))
            else:
                choices.append(self._as_it_lies(op, choices))
        return replace(
            self.given, choices=tuple(choices), layouts=self.layouts, digits=self.new.digits,
            opening=self.opening, refetched=carried_values(self.given.refetched, self.equal),
        )  # fmt: skip

    def _counterparts(self) -> list[int]:
        firsts: dict[int, int] = {}
        for op, origin in enumerate(self.old.origins):
            firsts.setdefault(origin, op)
        found, last, place = [], -1, 0
        for origin in self.new.origins:
            place = place + 1 if origin == last else 0
            last = origin
            copy = self.made.is_host_copy(origin)
            found.append(-1 if copy else firsts[self.made.origins[origin]] + place)
        return found

    def _equal_values(self) -> list[int]:
        made, new, old = self.made, self.new.graph, self.old.graph
        found = [*made.values, *[-1] * (len(new.values) - len(made.values))]
        for op, like in zip(new.ops, self.like, strict=True):
            if like >= 0:  # an update on the host may make one more
                found_of = zip(op.outputs, old.ops[like].outputs, strict=False)
                for value, equal in found_of:
                    found[value] = equal
        return found

    # Copies to the host and back

    def _as_it_lies(self, op: int, choices: Sequence[Choice]) -> Choice:
        """The Choice of a copy of a Value: cut as that lies."""
        space, value = self.new, self.new.graph.ops[op].inputs[0]
        producer = space.graph.producer[value]
        if producer is not None and self.like[producer[0]] < 0:
            return choices[producer[0]]
        pieces = self._pieces(value, choices)
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

    def _pieces(self, value: int, choices: Sequence[Choice]) -> list[tuple[Box, int]]:
        """The regions of a Value and their devices; the whole on each where these are terms."""
        if value in self.layouts:
            return self.layouts[value].pieces(self.new.factors(value))
        made = self.new.graph.producer[value]
        if made is not None:
            return _left(self.new, made, choices[made[0]])
        before = self.equal[value]  # a shadow lies as its parameter does
        if before in self.given.layouts:
            return self.given.layouts[before].pieces(self.old.factors(before))
        made = self.old.graph.producer[self.old.graph.after.get(before, before)]
        if made is not None:
            return _left(self.old, made, self.given.choices[made[0]])
        readers = self.old.graph.consumers[before]
        devices = dict.fromkeys(d for op in readers for d in self.given.choices[op].devices)
        whole = tuple((0, factor) for factor in self.old.factors(before))
        return [(whole, device) for device in devices]


def _left(space: Space, made: tuple[int, int], choice: Choice) -> list[tuple[Box, int]]:
    """The regions that an Op leaves of one of its results, and their devices."""
    split = space.split(made[0], choice.parts)
    if split.terms[made[1]] > 1:
        value = space.graph.ops[made[0]].outputs[made[1]]
        whole = tuple((0, factor) for factor in space.factors(value))
        return [(whole, device) for device in dict.fromkeys(choice.devices)]
    return [
        (split.parts[k % choice.count].outputs[made[1]], device)
        for k, device in enumerate(choice.devices)
    ]


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
    """The Layout of the Value that this one equals, where it is one of this one too."""
    found = layouts.get(equal)
    if found is None or new.factors(value) != old.factors(equal):
        return None
    return found
