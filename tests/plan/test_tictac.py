"""TicTac's order of transfers: what lets most be computed soonest comes first."""

from __future__ import annotations

from itertools import permutations

from apportion.plan.tictac import picked


def finished(order: tuple[int, ...], transfer: list[float], loads: dict[int, float]) -> float:
    """When all is computed if transfers come in this order, and work begins when it can."""
    there, at, free, left = 0, 0.0, 0.0, dict(loads)
    for k in order:
        at += transfer[k]
        there |= 1 << k
        for mask in [m for m in left if m & ~there == 0]:
            free = max(free, at) + left.pop(mask)
    return free


def test_what_lets_something_be_computed_comes_first() -> None:
    # One operator reads transfer 1 alone, the next both.
    assert picked([1.0, 1.0], {0b10: 5.0, 0b11: 1.0}) == [1, 0]
    assert picked([1.0, 1.0], {0b01: 5.0, 0b11: 1.0}) == [0, 1]


def test_what_is_needed_with_little_else_comes_before_what_needs_much() -> None:
    order = picked([1.0, 1.0, 1.0, 4.0], {0b0011: 3.0, 0b1111: 1.0})
    assert set(order[:2]) == {0, 1}


def test_a_chain_is_sent_in_its_order_which_is_the_best() -> None:
    transfer, loads = [2.0, 1.0, 3.0, 1.0], {0b0001: 2.0, 0b0011: 2.0, 0b0111: 2.0, 0b1111: 2.0}
    order = tuple(picked(transfer, loads))
    assert order == (0, 1, 2, 3)
    times = {each: finished(each, transfer, loads) for each in permutations(range(4))}
    assert times[order] == min(times.values())
