"""beam_order: orders built unit by unit, of which the lowest so far are kept.

Part of the room memory. An OrderModel comes in, units in another order go out. What is held after
some units have run depends on which have, not on their order; so of all orders of the same units
the one with the lowest peak stands for the others, and of sets of units of one size the `width`
with the lowest peak, then the least held, are kept. A unit that raises no peak and holds no more
afterwards than before is run at once: to wait for it can only hold more.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.memory.order_model import OrderModel

WIDTH = 128


@dataclass(frozen=True, slots=True, eq=False)
class PartialOrder:
    """Units that have run: their set as bits, the peak so far, what is held, those that are ready,
    the last one, and the order before it."""

    done: int
    peak: int
    held: int
    ready: frozenset[int]
    last: int = -1
    before: PartialOrder | None = None


def beam_order(model: OrderModel, width: int = WIDTH) -> list[int]:
    """The order of the lowest peak that a beam of this width leads to."""
    return _Beam(model).order(width)


class _Beam:
    def __init__(self, model: OrderModel) -> None:
        self.model = model
        self.needs = [sum(1 << one for one in row) for row in model.needs]
        self.users = [sum(1 << one for one in row) for row in model.touched_by]
        self.makes = [sum(model.nbytes[m] for m in row) for row in model.makes]

    def order(self, width: int) -> list[int]:
        model = self.model
        held = model.base + sum(model.nbytes[memory] for memory in model.begins)
        ready = frozenset(unit for unit, row in enumerate(model.needs) if not row)
        beam = [self._settled(PartialOrder(0, held, held, ready))]
        while any(state.ready for state in beam):
            known: dict[int, PartialOrder] = {}
            for state in beam:
                if not state.ready:
                    known.setdefault(state.done, state)
                for unit in state.ready:
                    after = self._settled(self._run(state, unit))
                    old = known.get(after.done)
                    if old is None or after.peak < old.peak:
                        known[after.done] = after
            beam = sorted(known.values(), key=lambda one: (one.peak, one.held, one.done))[:width]
        return _units(min(beam, key=lambda one: one.peak))

    def _run(self, state: PartialOrder, unit: int) -> PartialOrder:
        """The state when a unit has run too."""
        model, done = self.model, state.done | 1 << unit
        top = state.held + self.makes[unit] + model.workspace[unit]
        held = state.held + self.makes[unit] - self._freed(done, unit)
        new = {one for one in model.followers[unit] if not self.needs[one] & ~done}
        ready = (state.ready | new) - {unit}
        return PartialOrder(done, max(state.peak, top), held, ready, unit, state)

    def _freed(self, done: int, unit: int) -> int:
        """The bytes that nobody touches any more once a unit has run."""
        model = self.model
        return sum(
            model.nbytes[memory]
            for memory in model.touches[unit]
            if memory not in model.stays and not self.users[memory] & ~done
        )

    def _settled(self, state: PartialOrder) -> PartialOrder:
        """The state when all have run that cost nothing."""
        while True:
            for unit in sorted(state.ready):
                after = self._run(state, unit)
                if after.peak == state.peak and after.held <= state.held:
                    state = after
                    break
            else:
                return state


def _units(state: PartialOrder) -> list[int]:
    found = []
    one: PartialOrder | None = state
    while one is not None and one.last >= 0:
        found.append(one.last)
        one = one.before
    return found[::-1]
