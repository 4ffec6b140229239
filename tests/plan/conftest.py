"""Decisions about memory have the time of their share of the budget in these tests, which is
little, and not ten seconds at least."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("apportion.plan.decide_memory"), "BASELINE_SECONDS", 1.0)
