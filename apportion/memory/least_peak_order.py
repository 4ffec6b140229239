"""least_peak_order: of what is ready, what raises the peak least (LPMF, as inductor does it).

Part of the room memory. An OrderModel comes in, units in another order go out. Among those that are
ready the next one is

    the one with the lowest max(held and made, peak so far), of equal ones that with the lowest
    made - freed, of equal ones the first as captured

torch._inductor.memory has it under the name topological_sort_lpmf.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part, offsets
from apportion.memory.order_model import OrderModel


class OrderColumns(NamedTuple):  # numba takes no dataclass
    """Columns of units u and memories m.

    before                    u: how many come before it
    after_start, after        u + 1, and those that come after each
    touch_start, touch        u + 1, and the memories that each touches
    makes                     u: bytes that it makes, and holds while it runs
    extra                     u: of these what it holds while it runs only
    nbytes                    m: 0 if it stays
    users                     m: how many units touch it
    user_start, user          m + 1, and these
    """

    before: Ints
    after_start: Ints
    after: Ints
    touch_start: Ints
    touch: Ints
    makes: Ints
    extra: Ints
    nbytes: Ints
    users: Ints
    user_start: Ints
    user: Ints


def least_peak_order(model: OrderModel) -> list[int]:
    """The units in the order of least peak memory first."""
    now = model.base + sum(model.nbytes[memory] for memory in model.begins)
    order: list[int] = _greedy(_columns(model), now).tolist()
    return order


def _columns(model: OrderModel) -> OrderColumns:
    def rows(given: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints]:
        flat = [one for row in given for one in row]
        return offsets(np.array([len(row) for row in given], np.int64)), np.array(flat, np.int64)

    made = [sum(model.nbytes[m] for m in memories) for memories in model.makes]
    extra = np.array(model.workspace, np.int64)
    return OrderColumns(
        np.array([len(row) for row in model.needs], np.int64),
        *rows(model.followers),
        *rows(model.touches),
        np.array(made, np.int64) + extra,
        extra,
        np.array([0 if m in model.stays else b for m, b in enumerate(model.nbytes)], np.int64),
        np.array([len(row) for row in model.touched_by], np.int64),
        *rows(model.touched_by),
    )


@compiled
def _greedy(columns: OrderColumns, now: int) -> Ints:
    count = len(columns.before)
    left, users = columns.before.copy(), columns.users.copy()
    frees = np.zeros(count, np.int64)  # bytes that a unit would be the last to touch
    for memory in range(len(users)):
        if users[memory] == 1:
            frees[columns.user[columns.user_start[memory]]] += columns.nbytes[memory]
    ready = np.zeros(count, np.int64)
    waiting = 0
    for unit in range(count):
        if left[unit] == 0:
            ready[waiting] = unit
            waiting += 1
    order, done, peak = np.zeros(count, np.int64), np.zeros(count, np.bool_), now
    for place in range(count):
        at = _best(columns, frees, ready, waiting, now, peak)
        unit = ready[at]
        waiting -= 1
        ready[at] = ready[waiting]
        order[place], done[unit] = unit, True
        peak = max(peak, now + columns.makes[unit])
        now += columns.makes[unit] - columns.extra[unit] - frees[unit]
        for k in range(columns.touch_start[unit], columns.touch_start[unit + 1]):
            memory = columns.touch[k]
            users[memory] -= 1
            if users[memory] == 1:
                for j in range(columns.user_start[memory], columns.user_start[memory + 1]):
                    if not done[columns.user[j]]:
                        frees[columns.user[j]] += columns.nbytes[memory]
        for k in range(columns.after_start[unit], columns.after_start[unit + 1]):
            follower = columns.after[k]
            left[follower] -= 1
            if left[follower] == 0:
                ready[waiting] = follower
                waiting += 1
    return order


@compiled_part
def _best(
    columns: OrderColumns, frees: Ints, ready: Ints, waiting: int, now: int, peak: int
) -> int:
    """The place of the next unit among those that are ready."""
    found, best, least, first = 0, -1, 0, 0
    for at in range(waiting):
        unit = ready[at]
        top = max(now + columns.makes[unit], peak)
        net = columns.makes[unit] - columns.extra[unit] - frees[unit]
        if (
            best < 0
            or top < best
            or (top == best and (net < least or (net == least and unit < first)))
        ):
            found, best, least, first = at, top, net, unit
    return found
