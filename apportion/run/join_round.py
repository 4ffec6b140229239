"""A round of a torchrun job: the ranks that are there now, and a store that is theirs alone.

Part of the room run. torchrun starts ranks again after a failure and gives them the store that the
last ones had, in which these have left their addresses; gloo would connect to ranks that are gone.
How often a job was restarted is no sign: after a machine has left, its neighbours count otherwise.
So the ranks find each other first. Each draws a word and writes it under its number; rank 0 reads
all words and publishes them as a round; each that finds its own word in it says so; and when all
have, the round is closed. A word of a rank that is gone is answered by nobody, and rank 0 publishes
again when its successor has written another. Everything else happens under the round's name.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

PREFIX = "apportion/round"
TURN_SECONDS = 0.02


@dataclass(frozen=True)
class JobRound:
    """The store of the ranks of a round, and its name."""

    name: str
    store: Any


def connect(host: str, port: int, timeout: float) -> Any:
    """A connection to torchrun's store."""
    wait = timedelta(seconds=timeout)
    return TCPStore(host, port, None, False, wait, wait_for_workers=False)


def join_round(store: Any, rank: int, ranks: int, timeout: float) -> JobRound:
    """Waits for all ranks. Raises RuntimeError, naming those that did not come, after `timeout`
    seconds."""
    own = secrets.token_hex(8)
    store.set(f"{PREFIX}/word/{rank}", own)
    deadline = time.monotonic() + timeout
    name = _lead(store, own, ranks, deadline) if rank == 0 else _follow(store, own, rank, deadline)
    return JobRound(name, PrefixStore(f"{PREFIX}/{name}", store))


def _lead(store: Any, own: str, ranks: int, deadline: float) -> str:
    """Rank 0: publishes rounds until all ranks answer one; its name."""
    words: list[str] = []
    name = ""
    while True:
        found = [own, *(_get(store, f"{PREFIX}/word/{rank}") for rank in range(1, ranks))]
        if all(found) and found != words:
            words, name = found, secrets.token_hex(8)
            store.set(f"{PREFIX}/published", json.dumps({"name": name, "words": words}))
        answers = [f"{PREFIX}/{name}/here/{rank}" for rank in range(1, ranks)]
        if name and (not answers or store.check(answers)):
            store.set(f"{PREFIX}/{name}/closed", "1")
            return name
        if time.monotonic() > deadline:
            here = {r for r in range(1, ranks) if name and store.check([answers[r - 1]])}
            late = [str(r) for r in range(1, ranks) if r not in here]
            raise RuntimeError(f"rank {', '.join(late)} did not join the job in time")
        time.sleep(TURN_SECONDS)


def _follow(store: Any, own: str, rank: int, deadline: float) -> str:
    """Another rank: answers the round that has its word; its name, when that is closed."""
    name = ""
    while True:
        told = _get(store, f"{PREFIX}/published")
        if told:
            published = json.loads(told)
            if published["words"][rank : rank + 1] == [own] and published["name"] != name:
                name = published["name"]
                store.set(f"{PREFIX}/{name}/here/{rank}", "1")
        if name and store.check([f"{PREFIX}/{name}/closed"]):
            return name
        if time.monotonic() > deadline:
            raise RuntimeError("rank 0 did not close the round in time: some rank is missing")
        time.sleep(TURN_SECONDS)


def _get(store: Any, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""
