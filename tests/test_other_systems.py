"""Planning asks a system for nothing that Linux alone has: it works where that is taken away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "apportion"
GUARDED = {"machine/cluster.py", "run/core_use.py"}
"""Files that ask which cores may be used, and what they do where nobody says."""

LESS = """
import builtins, io, os, select, selectors, signal
for module, names in {
    os: "sched_getaffinity sched_setaffinity memfd_create eventfd eventfd_read eventfd_write "
        "EFD_CLOEXEC EFD_NONBLOCK pidfd_open copy_file_range splice posix_fadvise",
    select: "epoll EPOLLIN EPOLLOUT EPOLLET EPOLL_CLOEXEC",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
selectors.DefaultSelector = selectors.PollSelector

def hiding(there):
    def hidden(path, *rest, **named):
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "there is no such file", str(path))
        return there(path, *rest, **named)
    return hidden

os.stat, io.open = hiding(os.stat), hiding(io.open)
builtins.open = io.open
from apportion.cli.main import main
main()
"""


def test_cores_are_counted_in_one_place() -> None:
    for file in PACKAGE.rglob("*.py"):
        if str(file.relative_to(PACKAGE)) not in GUARDED:
            text = file.read_text()
            assert "sched_getaffinity" not in text, f"{file}: usable_cores says how many there are"


@pytest.mark.slow
def test_a_plan_is_made_where_there_is_nothing_of_linux() -> None:
    words = ["plan", "mlp:tiny", "--cluster", "2xh100", "--method", "tofu", "--recompute", "none"]
    done = subprocess.run(
        [sys.executable, "-c", LESS, *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout
