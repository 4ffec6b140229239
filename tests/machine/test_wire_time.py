"""How long exchanges occupy the wire, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make_tasks import Maker

from apportion.machine.cluster import cluster
from apportion.machine.cost_model import CostModel
from apportion.machine.cost_table import EXCHANGE_LINE, PACK_LINE, Condition, CostLine, CostTable
from apportion.machine.topology import Cluster
from apportion.machine.wire_time import wire_lines, wire_seconds
from apportion.simulate.simulate import simulate

FILE = """
name = "boxes"
communication_on_device = true

[[switch]]
name = "network"

[[switch]]
name = "box"
parent = "network"
count = {boxes}
uplink = {{bandwidth = 1e6, latency = 0.25}}
host = {{memory_bytes = 1_000_000_000, bandwidth = 1e9, latency = 0.0}}
provenance = "made up"

[[device]]
name = "process"
kind = "cpu"
on = "box"
count = {each}
memory_bytes = 1_000_000_000
memory_bandwidth = 1e9
launch_seconds = 0.0
flops = {{float64 = 1e9, float32 = 1e9, float16 = 1e9}}
port = {{bandwidth = 1e9, latency = 0.0}}
provenance = "made up"
"""


def boxes(folder: Path, count: int, each: int = 1) -> Cluster:
    file = folder / "boxes.toml"
    file.write_text(FILE.format(boxes=count, each=each))
    return cluster(str(file))


def wires(place: Cluster, *messages: tuple[int, int, int, int]) -> list[float]:
    columns = (np.array(column) for column in zip(*messages, strict=True))
    return wire_seconds(*columns, place).tolist()  # type: ignore[no-any-return]


def test_both_directions_are_used_at_once(tmp_path: Path) -> None:
    place = boxes(tmp_path, 2)
    assert wires(place, (5, 0, 1, 3_000_000)) == pytest.approx([3.5])
    assert wires(place, (5, 0, 1, 3_000_000), (5, 1, 0, 1_000_000)) == pytest.approx([3.5, 3.5])


def test_messages_of_one_exchange_share_a_link_and_others_do_not(tmp_path: Path) -> None:
    place = boxes(tmp_path, 3)
    together = wires(place, (5, 0, 1, 1_000_000), (5, 0, 2, 2_000_000), (9, 0, 2, 1_000_000))
    assert together == pytest.approx([3.5, 3.5, 1.5])  # both leave box 0 by its one uplink
    assert wires(place, (5, 0, 1, 1_000_000), (5, 1, 2, 2_000_000)) == pytest.approx([2.5, 2.5])


def test_devices_of_one_host_need_no_wire(tmp_path: Path) -> None:
    place = boxes(tmp_path, 2, each=2)
    assert wires(place, (0, 0, 1, 1_000_000), (1, 1, 2, 1_000_000)) == pytest.approx([0.0, 1.5])
    assert wires(cluster("local:3"), (0, 0, 1, 1_000_000), (0, 1, 2, 10)) == [0.0, 0.0]


def test_a_group_is_all_its_pairs(tmp_path: Path) -> None:
    place = boxes(tmp_path, 2, each=2)
    latency, pace = wire_lines([(0, 1), (0, 2), (0, 1, 2, 3)], place)
    assert latency.tolist() == pytest.approx([0.0, 0.25 * 2, 0.25 * 2])
    # two thirds of the messages cross, half of them each way
    assert pace.tolist() == pytest.approx([0.0, 0.5e-6, 1e-6 / 3])


def seconds(place: Cluster, *messages: tuple[int, int, int], per_byte: float) -> float:
    """Simulated seconds of one exchange between processes that were measured."""
    make = Maker(len(place.devices))
    for message in messages:
        make.transfer(*message)
    lines = {
        EXCHANGE_LINE: CostLine(0.125, 0.0, per_byte, 0.0, 1),
        PACK_LINE: CostLine(1, 0, 0, 0, 1),
    }
    cost = CostModel("test", "test", 1.0, {"cpu": CostTable(Condition("cpu"), lines=lines)})
    tasks = replace(make.done(), position=np.zeros(len(messages), np.int64))
    return simulate(tasks, place, cost).step_seconds


def test_an_exchange_takes_what_processes_or_wire_need(tmp_path: Path) -> None:
    place = boxes(tmp_path, 2)
    both = ((0, 1, 4_000_000), (1, 0, 4_000_000))
    # 0.125 for the exchange, 1 for packing, then 4 MB each way at 1 MB/s and two latencies
    assert seconds(place, *both, per_byte=0.0) == pytest.approx(0.125 + 1 + 4.5)
    assert seconds(place, both[0], per_byte=0.0) == pytest.approx(0.125 + 1 + 4.5)
    # processes that handle 1 MB/s, sent and received, need longer than the wire
    assert seconds(place, *both, per_byte=1e-6) == pytest.approx(0.125 + 1 + 8)
    # and inside one host nothing else counts
    assert seconds(cluster("local:2"), *both, per_byte=1e-7) == pytest.approx(0.125 + 1 + 0.8)
