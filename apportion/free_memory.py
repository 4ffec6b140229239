"""How much memory this machine has left, for whoever would need much of it."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory() -> float:
    """Bytes of this machine's memory that programs can still have."""
    info = Path("/proc/meminfo")
    if info.exists():
        rows = dict(line.split(":") for line in info.read_text().splitlines() if ":" in line)
        if "MemAvailable" in rows:
            return float(rows["MemAvailable"].split()[0]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2
