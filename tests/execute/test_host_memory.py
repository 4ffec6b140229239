"""Freed memory is used again without new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from apportion.execute.host_memory import keep_freed_memory
if {keep} and not keep_freed_memory():
    raise SystemExit("no setting")
for number in range(12):
    if number == 9:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    several = [torch.empty(1 << size).fill_(1.0) for size in (24, 20, 24)]
    del several
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    """Pages that the system gave out for the last few of many equal rounds."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if "no setting" in done.stderr:
        pytest.skip("this C library has no such setting")
    return int(done.stdout)


@pytest.mark.slow
def test_later_steps_take_no_new_pages() -> None:
    usual = faults(keep=False)
    assert usual > 50  # large pages may be few
    assert faults(keep=True) < usual / 4
