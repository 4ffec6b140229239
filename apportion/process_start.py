"""Starting Python processes that take no module from the working directory.

Comes before all rooms. A process that multiprocessing starts looks there first, and a user's file
called random.py or torch.py would be taken for the module of that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def away_from_working_directory() -> Iterator[None]:
    """Processes that start meanwhile do not import from the working directory, unless Python was
    told to."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
