"""Steps over a cable of 100 Mbit/s between two network namespaces; what limits them is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
MODEL = "mlp:layers=3,width=384,batch=64"
METHODS = ("tofu", "data", "random")  # from the fewest bytes to the most

HOLD = """
import time
from pathlib import Path
from namespaces import Cable, cabled
with cabled(Cable(1e6)) as machines:
    started = machines[1].start(["sleep", "600"])
    while Path(f"/proc/{started.pid}/comm").read_text() != "sleep\\n":
        time.sleep(0.01)  # the program that ties it to us has not become it yet
    print(*(machine.holder for machine in machines), started.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import namespaces

    if reason := namespaces.why_not():
        pytest.skip(reason)
    return namespaces


def test_steps_wait_for_a_limited_link(namespaces: Any) -> None:
    """How well they are predicted is benchmarks/limited_link.py's claim: a busy machine is slow."""
    # a process of its own: the processes of a pool stay as urgent as the first one made them
    command = ["--model", MODEL, "--methods", *METHODS, "--rates", "12.5e6", "--rounds", "4"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "limited_link.py"), *command, "--json"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for row in rows:
        assert row["sent_bytes"] == row["bytes_moved"], row
        # by no means faster than the cable lets half of the bytes through
        least = row["bytes_moved"] / 2 / row["rate"]
        assert row["measured"] > least and row["predicted"] > least, row
    assert [row["method"] for row in sorted(rows, key=lambda row: row["predicted"])] == [*METHODS]


def test_a_cable_is_no_faster_than_it_says(namespaces: Any) -> None:
    send = "import socket; s = socket.create_connection((%r, 5000)); s.sendall(bytes(2_000_000))"
    take = """
import socket, time
with socket.create_server((%r, 5000)) as door:
    print(flush=True)
    other, _ = door.accept()
    began, count = time.perf_counter(), 0
    while part := other.recv(1 << 16):
        count += len(part)
    print(count / (time.perf_counter() - began))
"""
    with namespaces.cabled(namespaces.Cable(4e6)) as (one, two):
        command = [sys.executable, "-c", take % two.address]
        with two.start(command, stdout=subprocess.PIPE) as taker:
            taker.stdout.readline()
            one.call(sys.executable, "-c", send % two.address)
            rate = float(taker.communicate(timeout=30)[0])
        assert two.sent_bytes("cable") < 1_000_000 < 2_000_000 < one.sent_bytes("cable")
    assert rate < 1.1 * 4e6


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_over(namespaces: Any, how: signal.Signals) -> None:
    environment = dict(os.environ, PYTHONPATH=str(BENCHMARKS))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        inside = [int(word) for word in process.stdout.readline().split()]
        assert len(inside) == 3 and all(map(_runs, inside))
        process.send_signal(how)
        process.wait(30)
    deadline = time.monotonic() + 10
    while any(map(_runs, inside)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, inside))


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
