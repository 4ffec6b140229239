"""Messages by a Wire, between processes of their own: any order, slices, and an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rank_launch import Launch

BEGIN = """
import os, random, sys, time, torch, torch.distributed as dist
from apportion.execute.backends import Parcel, PeerLost, join_backends
from apportion.execute.wire import SMALL, Pace
dist.init_process_group("gloo")
me, others = dist.get_rank(), [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
backends = join_backends("cpu")
wire = backends.wire
assert wire is not None and backends.memory is None
"""
EXCHANGE = """
sizes = [0, 1, 17, SMALL, SMALL + 1, 5_000_001]
def message(source, target, number):
    step = 1 + source + 3 * target + 7 * number
    return (torch.arange(sizes[number % len(sizes)]) * step % 251).to(torch.uint8)
def pieces(whole, rng):
    cuts = sorted(rng.sample(range(len(whole) + 1), 2)) if len(whole) > 1 else [0, 0]
    return [whole[: cuts[0]], whole[cuts[0] : cuts[1]], whole[cuts[1] :]]
for turn, pace in enumerate([Pace(), Pace(100_000, 200_000), Pace(4096, 16_384), Pace(1 << 20)]):
    wire.pace = pace
    rng = random.Random(10 * turn + me)
    deeds = [(r, k, way) for r in others for k in range(12) for way in range(2)]
    rng.shuffle(deeds)
    into, works = {}, []
    for r, k, way in deeds:
        key = (turn << 32) + k
        if way:
            into[r, k] = torch.full((sizes[k % len(sizes)],), 7, dtype=torch.uint8)
            works.append(wire.receive(into[r, k], r, key))
        else:
            works.append(wire.send(pieces(message(me, r, k), rng), r, key, rng.randrange(3)))
    rng.shuffle(works)
    for work in works:
        work.wait()
    for (r, k), found in into.items():
        assert torch.equal(found, message(r, me, k)), (r, k)
flat = [torch.full((100_000 * (r + 1),), float(me)) for r in others]
into = [torch.empty(100_000 * (me + 1)) for r in others]
for work in backends.post([Parcel(b.view(torch.uint8), r) for b, r in zip(into, others)],
                          [Parcel(b.view(torch.uint8), r) for b, r in zip(flat, others)]):
    work.wait()
assert [b.unique().tolist() for b in into] == [[float(r)] for r in others]
dist.barrier()
"""
END = """
if me == 0:
    dist.barrier()
    time.sleep(1)  # the other is through the barrier
    os._exit(0)
works = backends.post([Parcel(torch.empty(8, dtype=torch.uint8), 0, 3)], [])
works += backends.post([], [Parcel(torch.empty(1 << 20, dtype=torch.uint8), 0, 4)])
dist.barrier()
for work in works:
    try:
        work.wait()
    except RuntimeError as error:
        assert "rank 0 has ended" in str(error), error
    else:
        raise AssertionError("nobody was there")
os._exit(0)  # gloo may abort when it is taken down after a rank was lost
"""
STRANGE = """
wire._sockets.express[1 - me].socket.sendall(b"x" * 24)
try:
    wire.receive(torch.empty(8, dtype=torch.uint8), 1 - me, 3).wait()
except RuntimeError as error:
    assert f"rank {1 - me} has ended (it sends what is no message)" in str(error), error
else:
    raise AssertionError("that was no message")
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="a wire needs Linux")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [pytest.param(EXCHANGE, 2, marks=pytest.mark.soak), (EXCHANGE, 3), (END, 2), (STRANGE, 2)],
    ids=["exchange of 2", "exchange of 3", "a rank ends", "no message"],
)  # fmt: skip
def test_messages(text: str, ranks: int, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "messages.py").write_text(BEGIN + text)
    settings = {"TORCH_CPP_LOG_LEVEL": "ERROR", "APPORTION_TRANSPORT": "wire"}
    environment = {**os.environ, **settings}
    launch(tmp_path / "messages.py", ranks=ranks, environment=environment, seconds=100)
