"""State in lists, tuples and dicts is taken apart by names and put together again."""

from __future__ import annotations

from typing import Any

import pytest

from apportion.capture.state_tree import flat_state, nested_state


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"step": 1, "mean": 2.0},
        {"Q": [1, 2], "R": (3, [4, 5], {"a": 6, "b": [7]}), "S": []},
        {"Q": list(range(12)), "deep": [[[1]], [], None]},
        {"odd": {"a[0]": 1}, "numbers": {1: 2, -3: 4, 0.9: 5, 1e-8: 6, "1": 7}},
        {"odd": {"=1": 1}, "others": {(1, 2): 3}, "true": {True: 1}, "none": {float("inf"): 2}},
    ],
)
def test_nothing_is_lost(state: dict[str, Any]) -> None:
    assert nested_state(flat_state(state)) == state


def test_names() -> None:
    assert flat_state({"Q": [1, (2, 3)], "R": {"k": 4, 0.9: 5}, "S": []}) == {
        "Q[0]": 1, "Q[1](0)": 2, "Q[1](1)": 3, "R{k}": 4, "R{=0.9}": 5, "S": [],
    }  # fmt: skip
