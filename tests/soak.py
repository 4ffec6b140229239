"""How many cases tests draw: a few by default, all of them under `make soak`.

A test that draws its cases by a seed asks `cases` how many; a case among the parameters of a test
that shows with others what one of them shows is marked `soak`, and left out by default. The few are
enough to notice planted faults (tools/planted_faults.py); the many look for what nobody planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

FEWEST = 8
ALL = False  # set by conftest.py before tests are imported


def kept(all_of_them: Sequence[Any], *few: Any) -> list[Any]:
    """Parameters of a test: the few, and the others for `make soak`."""
    assert set(few) <= set(all_of_them), few
    return [it if it in few else pytest.param(it, marks=pytest.mark.soak) for it in all_of_them]


def cases(all_of_them: int, few: int | None = None) -> int:
    """All of them under `make soak`; else the few, which are a tenth if not said, and at least
    eight."""
    if ALL:
        return all_of_them
    return min(all_of_them, max(all_of_them // 10, FEWEST) if few is None else few)
