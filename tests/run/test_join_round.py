"""Ranks of a restarted job find each other, whatever their predecessors left in the store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import TCPStore

from apportion.run.join_round import JobRound, connect, join_round
from apportion.run.network_interface import SETTINGS, choose_interface
from apportion.run.rendezvous import listen_at, open_store


@pytest.fixture
def server() -> Any:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def together(
    server: Any, ranks: int, first: Callable[[int], None] = lambda rank: None
) -> list[str]:
    """The names of the round that each of so many ranks has joined."""
    found: dict[int, JobRound] = {}

    def run(rank: int) -> None:
        first(rank)
        found[rank] = join_round(connect("127.0.0.1", server.port, 20), rank, ranks, 20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank].name for rank in range(ranks)]


def test_all_ranks_are_in_one_round(server: Any) -> None:
    assert len(set(together(server, 4))) == 1


@pytest.mark.slow
def test_every_start_is_a_round_of_its_own(server: Any) -> None:
    """With fewer ranks, too, and although the words of the last ones are still there."""
    rounds = [together(server, count) for count in (3, 3, 2, 3, 1)]
    assert all(len(set(names)) == 1 for names in rounds)
    assert len({names[0] for names in rounds}) == 5


@pytest.mark.slow
def test_a_late_rank_is_waited_for(server: Any) -> None:
    """Rank 0 first reads the word of a predecessor that nobody answers for."""
    before = together(server, 3)
    names = together(server, 3, lambda rank: time.sleep(0.5 if rank == 2 else 0))
    assert len(set(names)) == 1 and names[0] != before[0]


@pytest.mark.slow
def test_a_missing_rank_is_named(server: Any) -> None:
    store = connect("127.0.0.1", server.port, 20)
    with pytest.raises(RuntimeError, match="rank 1, 2 did not join the job in time"):
        join_round(store, 0, 3, 0.3)


def test_a_meeting_place_listens_on_one_address() -> None:
    store = open_store("127.0.0.1", 0, 10)
    assert store.port
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=1):
        pass
    other = open_store("127.0.0.1", store.port, 10)  # it is taken, so this one connects
    other.set("a", "1")
    assert store.get("a") == b"1"
    with pytest.raises(ValueError, match="there is no address"):
        listen_at("no such host", 1)


def test_an_interface_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTINGS, "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="there is no network interface 'eth77' here"):
        choose_interface("eth77")
    choose_interface(None)
    assert SETTINGS[0] not in os.environ  # ranks of several hosts are told by the user
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    choose_interface(None)
    assert os.environ[SETTINGS[0]] == "lo"


BEAT = """
import sys, threading, time
from torch.distributed import TCPStore
from apportion.run import liveness
from apportion.run.join_round import connect
server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
liveness.BEAT_SECONDS = 0.05
beats = [liveness.Heartbeat(connect("127.0.0.1", server.port, 5), "r", k, 2, 1.5) for k in range(2)]
time.sleep(3)
print("alive", flush=True)
if sys.argv[1] == "stopped":
    beats[1].stop()
    time.sleep(3)
    print("still alive", flush=True)
else:
    beats[1]._key = lambda rank: "elsewhere"  # as if it were stopped by a signal
    time.sleep(20)
"""


@pytest.mark.slow
def test_a_silent_rank_ends_the_job() -> None:
    """Two heartbeats in one process: while both beat nothing happens; when one falls silent, the
    other says so, and the process ends."""
    done = subprocess.run(
        [sys.executable, "-c", BEAT, "silent"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "alive\n"
    assert done.returncode == 75
    said = done.stderr.strip().splitlines()
    assert said == ["apportion: rank 0: rank 1 has not been heard of for 1.5 s; the job ends here, "
                    "to be started again"]  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_has_ended_is_not_missed() -> None:
    """Nor does a heartbeat outlive its process: torch's store would abort it."""
    done = subprocess.run(
        [sys.executable, "-c", BEAT, "stopped"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\nstill alive\n", "")
