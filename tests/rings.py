"""Which of many alike cases of a test `make quick` runs; `make test` runs all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], every: int) -> list[Any]:
    """The cases, all but each `every`-th marked slow."""
    return [
        case if number % every == 0 else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
