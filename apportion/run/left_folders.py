"""Temporary folders of pools, and who removes them if their process is killed and cannot.

Part of the room run. Two folders belong to the process that starts a pool: one of the pool's own,
and the one in which multiprocessing puts the socket of its server, `pymp-*`. The first has the
process's number in its name, the second has a file of that name (`mark_server_folder`). Whoever
finds such a folder whose process has ended may remove it: multiprocessing's server, which ends
soon after its parent, and the next process that starts a pool.

multiprocessing's server imports `apportion.run.pool_server`, which calls `remove_after` at its end.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

PREFIX = "apportion-pool-"  # of the names of folders, before the number of the process
SERVER_PREFIX = "pymp-"  # of multiprocessing's
WAIT_SECONDS = 3.0  # for a parent that is just ending
TURN_SECONDS = 0.01


def pool_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder for a pool of this process."""
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")


def mark_server_folder() -> None:
    """Says whose multiprocessing's folder is, before anything else is put there."""
    Path(util.get_temp_dir(), f"{PREFIX}{os.getpid()}").touch()


def remove_left_folders() -> None:
    """Removes the folders of processes that were killed."""
    if not Path("/proc/self").exists():
        return
    for folder, processes in _owned():
        if not any(map(is_running, processes)):
            shutil.rmtree(folder, ignore_errors=True)


def remove_after(process: int) -> None:
    """Removes what a process has left when it has ended, which it is about to do."""
    ends = time.monotonic() + WAIT_SECONDS
    while is_running(process) and time.monotonic() < ends:
        time.sleep(TURN_SECONDS)
    remove_left_folders()


def is_running(process: int) -> bool:
    """Whether there is such a process, and it has not ended; on Linux."""
    try:
        return _state(process) not in "ZX"
    except OSError:
        return False


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, as by Ctrl-Z; on Linux."""
    try:
        return _state(process) in "tT"
    except OSError:
        return False


def _state(process: int) -> str:
    """The kernel's letter for what a process does."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _owned() -> Iterator[tuple[Path, list[int]]]:
    """Folders, and the processes that each belongs to: multiprocessing's may be a forked one's
    too."""
    where = Path(tempfile.gettempdir())
    for folder in where.glob(f"{PREFIX}*"):
        if name := re.fullmatch(rf"{PREFIX}(\d+)-\w+", folder.name):
            yield folder, [int(name[1])]
    for folder in where.glob(f"{SERVER_PREFIX}*"):
        marks = [re.fullmatch(rf"{PREFIX}(\d+)", mark.name) for mark in folder.glob(f"{PREFIX}*")]
        if marks:
            yield folder, [int(mark[1]) for mark in marks if mark]
