"""The last line of the demonstration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from apportion.cli.demo import order


def plan(method: str, seconds: float) -> Any:
    return SimpleNamespace(method=method, predicted=SimpleNamespace(step_seconds=seconds))


def test_both_orders_are_said() -> None:
    plans = [plan("data", 0.02), plan("tofu", 0.03)]
    done: list[Any] = [SimpleNamespace(measured_step_seconds=s) for s in (0.05, 0.04)]
    assert order(plans, done) == (
        "fastest first, predicted: data 20 ms, tofu 30 ms; measured: tofu 40 ms, data 50 ms"
    )
