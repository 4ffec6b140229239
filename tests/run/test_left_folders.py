"""Folders of processes that were killed are found by their names, and others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from apportion.run.left_folders import PREFIX, remove_after, remove_left_folders


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def test_only_those_of_ended_processes_go(folder: Path, ended: int) -> None:
    own = os.getpid()
    made(folder, f"{PREFIX}{ended}-ab_c/store", f"pymp-a/{PREFIX}{ended}", "pymp-a/listener-x")
    stay = [
        f"{PREFIX}{own}-abc/store",
        f"pymp-b/{PREFIX}{own}",
        f"pymp-c/{PREFIX}{ended}",  # it was forked, and the other one still uses the folder
        f"pymp-c/{PREFIX}{own}",
        "pymp-d/listener-y",
        f"{PREFIX}of-mine/file",
    ]
    made(folder, *stay)
    remove_left_folders()
    assert sorted(str(p.relative_to(folder)) for p in folder.glob("*/*")) == sorted(stay)


@pytest.mark.slow
def test_the_end_of_a_process_is_waited_for(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"])
    made(folder, f"pymp-a/{PREFIX}{process.pid}")
    remove_after(process.pid)  # ended, but nobody has asked how
    assert list(folder.iterdir()) == []
    process.wait()
