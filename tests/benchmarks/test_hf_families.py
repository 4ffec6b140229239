"""The survey of families: what becomes of one, and the page that is made of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
families = pytest.importorskip("families")


def test_what_cannot_be_loaded_is_not_a_failure_of_ours() -> None:
    found = families.outcome_of("lama", ["random"], False)
    assert found["outcome"] == "invalid" and "near are llama" in found["sentence"]


def test_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Any:
        def attempt(family: str, methods: list[str]) -> dict[str, Any]:
            raise error

        return attempt

    for error, outcome in (
        (families.CaptureError("a sentence"), "refused"),
        (KeyError("x"), "traceback"),
        (families.Invalid("no"), "invalid"),
    ):
        monkeypatch.setattr(families, "attempt", fails(error))
        assert families.outcome_of("llama", ["random"], False)["outcome"] == outcome


def test_the_page_counts_what_trains_by_itself() -> None:
    rows = [
        {"family": "a", "outcome": "equal", "sentence": "", "methods": ["data", "tofu"]},
        {"family": "b", "outcome": "refused", "sentence": "it reads | a value", "class": "B"},
        {"family": "c", "outcome": "invalid", "sentence": "no batch"},
    ]
    page = families.page(rows, "5", "abcd")
    assert "1 of the equal ones were run under data, tofu." in page
    assert (
        "## Not tried\n\nd." in page
        and "3 of 4 families were tried; 2 of them" in page
        and "(50.0%)" in page
    )
    assert "| b | B | refused | it reads \\| a value |" in page
