"""What the page may ask for: names, numbers within bounds, and no files."""

from __future__ import annotations

from typing import Any

import pytest

from apportion.serve.page_requests import read_json, read_search

GOOD = {"model": "gpt2:layers=4", "cluster": "8xh100"}


def test_a_search_has_the_defaults_of_the_command_line() -> None:
    asked = read_search(GOOD)
    assert (asked.method, asked.budget, asked.recompute, asked.seed) == (
        "auto",
        30.0,
        "as needed",
        0,
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "evil.py:make"}, "is a file"),
        ({"model": "hf:../config.json"}, "no name"),
        ({"model": "hf:config.json"}, "is a file"),
        ({"model": "gpt2\x1b[31m"}, "cannot be shown"),
        ({"model": 7}, "not a text"),
        ({"model": "x" * 400}, "characters"),
        ({"cluster": "mine.toml"}, "is a file"),
        ({"cluster": "999999xh100"}, "larger"),
        ({"method": "magic"}, "no method"),
        ({"budget": -1}, "less than"),
        ({"budget": 1e9}, "more than"),
        ({"budget": "10"}, "not a number"),
        ({"memory_limit": "lots"}, "lots"),
        ({"recompute": "some"}, "choose"),
        ({"seed": 1.5}, "whole number"),
    ],
)
def test_wrong_searches_are_refused_in_a_sentence(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        read_search(GOOD | changed)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"a": 1e999}', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_mapping_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="request cannot be read"):
        read_json(body)
