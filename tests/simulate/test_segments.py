"""What an allocator holds whose segments grow, against cases that can be followed by hand."""

from __future__ import annotations

import numpy as np

from apportion.simulate.segments import MIB, SEGMENT_PAGES, segment_bytes

LARGE, SMALL = SEGMENT_PAGES


def held(*rows: tuple[int, int]) -> int:
    thing, nbytes = (np.array(column) for column in zip(*rows, strict=True))
    return segment_bytes(thing, nbytes)


def test_whole_pages() -> None:
    assert held((0, 1)) == SMALL
    assert held((0, MIB)) == SMALL and held((0, MIB + 1)) == LARGE
    assert held((0, LARGE), (1, 512)) == LARGE + SMALL
    assert held((0, LARGE + 1)) == 2 * LARGE


def test_room_that_was_given_back_is_used_again() -> None:
    assert held((0, LARGE), (0, 0), (1, LARGE // 2), (2, LARGE // 2)) == LARGE
    assert held((0, 0), (1, LARGE)) == LARGE  # what was never taken is not given back


def test_a_gap_stays_where_nothing_fits() -> None:
    rows = [(0, LARGE), (1, LARGE), (0, 0)]
    assert held(*rows, (2, LARGE)) == 2 * LARGE
    assert held(*rows, (2, LARGE + 512)) == 4 * LARGE, "it does not fit into the gap"


def test_gaps_side_by_side_are_one() -> None:
    rows = [(0, LARGE), (1, LARGE), (2, LARGE), (0, 0), (1, 0)]
    assert held(*rows, (3, 2 * LARGE)) == 3 * LARGE


def test_the_end_grows_by_what_is_missing() -> None:
    rows = [(0, LARGE), (1, LARGE), (1, 0)]
    assert held(*rows, (2, 2 * LARGE)) == 3 * LARGE


def test_the_smallest_room_first_and_the_end_last() -> None:
    first = [(0, 3 * LARGE), (1, LARGE), (2, 2 * LARGE), (3, LARGE), (0, 0), (2, 0)]
    rows = [*first, (4, 2 * LARGE), (5, 3 * LARGE)]
    assert held(*rows) == 7 * LARGE, "two pages go where two are free"
    rows = [(0, LARGE), (1, LARGE), (2, LARGE), (0, 0), (2, 0), (3, LARGE), (4, 2 * LARGE)]
    assert held(*rows) == 4 * LARGE, "the room at the end is left to grow"
