"""Bytes moved against the kernel's own counter, in a network namespace where nothing else sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
MODEL = "mlp:layers=3,width=512,batch=64"

# Per message gloo announces that a receiver is ready and heads the bytes; TCP and IP head both, and
# acknowledge them: about 350 bytes. Per 65,483 bytes 66 of headers, and acknowledgements.
FRAMING, HEADERS = 500, 0.01


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import namespaces
    import network_counters

    if reason := namespaces.why_not():
        pytest.skip(reason)
    return network_counters


@pytest.mark.parametrize(
    ("processes", "methods"),
    [
        pytest.param(2, ("data", "tofu", "random"), marks=pytest.mark.soak),
        (3, ("data", "random")),
    ],
)
def test_the_kernel_counts_the_bytes_moved(
    counters: Any, processes: int, methods: tuple[str, ...]
) -> None:
    rows = counters.counts(MODEL, processes, methods, 3)
    assert [row.method for row in rows] == list(methods)
    for row in rows:
        assert row.messages > 0 and row.bytes_moved > 500_000, row
        allowed = HEADERS * row.bytes_moved + FRAMING * row.messages
        assert row.bytes_moved < row.counted < row.bytes_moved + allowed, row
