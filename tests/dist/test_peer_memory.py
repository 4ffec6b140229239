"""Messages that a process reads out of another's memory, between processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rank_launch import Launch

BEGIN = """
import os, sys, time, torch, torch.distributed as dist
from apportion.execute.backends import Backends, Parcel, PeerLost, join_backends
from apportion.execute.peer_memory import join_peer_memory
dist.init_process_group("gloo")
me, others = dist.get_rank(), [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
"""
EXCHANGE = """
memory = join_peer_memory()
assert memory is not None
sizes = [0, 1, 17, 5_000_001]
def message(source, target, number):
    step = 1 + source + 3 * target + 7 * number
    return (torch.arange(sizes[number % len(sizes)]) * step % 251).to(torch.uint8)
for count, backwards in ((4, False), (4, True), (600, True)):
    into = {(r, k): torch.empty(sizes[k % 4 if count < 600 else k % 3], dtype=torch.uint8)
            for r in others for k in range(count)}
    pick = lambda k: k % 4 if count < 600 else k % 3
    works = []
    if me == 0:
        works += [memory.receive(into[r, k], r) for r in others for k in range(count)]
    works += [memory.send(message(me, r, pick(k)), r) for r in others for k in range(count)]
    if me != 0:
        works += [memory.receive(into[r, k], r) for r in others for k in range(count)]
    for work in reversed(works) if backwards else works:
        work.wait()
    for (r, k), found in into.items():
        assert torch.equal(found, message(r, me, pick(k))), (r, k)
dist.barrier()
"""
RING = """
memory = join_peer_memory()
new = lambda: torch.zeros(8, dtype=torch.uint8)
if me == 0:  # waits for 1 to read, and then sends what 2 waits for
    first = memory.send(new(), 1)
    dist.barrier()
    first.wait()
    memory.send(new(), 2).wait()
elif me == 1:  # hears of the first message before it has a buffer for it; then waits for 2
    dist.barrier()
    memory.receive(new(), 2).wait()
    first = memory.receive(new(), 0)
    memory.receive(new(), 2).wait()
    first.wait()
else:
    dist.barrier()
    memory.send(new(), 1).wait()
    memory.receive(new(), 0).wait()
    memory.send(new(), 1).wait()
dist.barrier()
"""
END = """
backends = join_backends("cpu")
assert backends.memory is not None
if me == 0:
    dist.barrier()
    time.sleep(1)  # the other is through the barrier
    os._exit(0)
works = backends.post([Parcel(torch.empty(8, dtype=torch.uint8), 0)], [])
dist.barrier()
try:
    works[0].wait()
except RuntimeError as error:
    assert "rank 0 has ended" in str(error), error
else:
    raise AssertionError("nothing was sent")
os._exit(0)  # gloo may abort when it is taken down after a rank was lost
"""
SWITCHED = """
if me == 1:
    os.environ["APPORTION_TRANSPORT"] = "gloo"
backends = join_backends("cpu")
assert backends.memory is None and backends.wire is None
dist.barrier()
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/net").exists(), reason="reading another process needs Linux"
)


@pytest.mark.parametrize(
    ("text", "ranks"), [(EXCHANGE, 2), (EXCHANGE, 3), (RING, 3), (END, 2), (SWITCHED, 2)],
    ids=["exchange of 2", "exchange of 3", "each waits for the next", "a rank ends",
         "switched off by one"],
)  # fmt: skip
def test_messages(text: str, ranks: int, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "messages.py").write_text(BEGIN + text)
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment.pop("APPORTION_TRANSPORT", None)
    launch(tmp_path / "messages.py", ranks=ranks, environment=environment, seconds=100)
