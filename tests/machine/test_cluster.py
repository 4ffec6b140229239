"""Clusters: presets, counts, this machine, files, JSON, and what is refused."""

from __future__ import annotations

import json
import os
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_tasks import ports

from apportion.machine import cluster_file
from apportion.machine.cluster import cluster, known_clusters
from apportion.machine.topology import Cluster, cluster_from_json, cluster_to_json, verify
from apportion.quantity import (
    BYTES,
    BYTES_PER_SECOND,
    OPERATIONS_PER_SECOND,
    SECONDS,
    format_quantity,
    parse_quantity,
)

KINDS = ["a100", "h100", "h200", "k80", "p100", "titanx", "v100"]
MACHINES = {
    "p2.8xlarge": 8, "flexflow-p100": 16, "flexflow-k80": 64, "gdp-p100": 8, "placeto-k80": 8,
    "dgx-a100": 8, "dgx-h100": 8, "a100-pod": 32, "h100-pod": 64, "mixed-a100-v100": 8,
}  # fmt: skip


def route(c: Cluster, a: int, b: int) -> list[str]:
    return [c.links[k].name for k in c.routes[a][b]]


def example() -> str:
    """The file in the head of the module, without its indentation."""
    text = cluster_file.__doc__ or ""
    body = text[text.index("    name = ") : text.index("`flops` may also have")]
    return textwrap.dedent(body)


@pytest.mark.slow
def test_every_known_preset_loads_with_provenance() -> None:
    names = [name for name, _ in known_clusters()]
    assert {"p2.8xlarge", "local:N", *KINDS, *MACHINES} <= set(names)
    for name, description in known_clusters():
        assert description
        if "N" in name:
            continue
        c = cluster(name)
        assert c.name == name
        assert all(device.provenance for device in c.devices)
        assert all(link.provenance for link in c.links)
        assert all(device.asynchronous == (name != "placeto-k80") for device in c.devices)
        assert all(dict(d.rates)["float16"] == dict(d.flops)[2] for d in c.devices)


def test_p2_8xlarge_is_the_machine_of_the_tofu_paper() -> None:
    c = cluster("p2.8xlarge")
    assert len(c.devices) == 8
    assert {d.memory_bytes for d in c.devices} == {12_000_000_000}
    assert {c.links[k].bandwidth for k in c.routes[0][7]} == {21e9}
    assert len(set(c.host_routes)) == 1  # one link to the host, shared by all
    assert c.links[c.host_routes[0][0]].bandwidth == 10e9
    (host,) = c.hosts
    assert (host.memory_bytes, host.devices) == (488_000_000_000, tuple(range(8)))
    assert c.devices[0].launch_seconds == 10e-6  # inherited from the k80
    assert "Tofu" in c.devices[0].provenance and "K80 board" in c.devices[0].provenance


@pytest.mark.parametrize(("name", "count"), MACHINES.items())
def test_named_machines_have_their_devices(name: str, count: int) -> None:
    c = cluster(name)
    assert len(c.devices) == count
    assert sorted(d for host in c.hosts for d in host.devices) in ([], list(range(count)))
    for device, route in enumerate(c.host_routes):
        assert bool(route) == any(device in host.devices for host in c.hosts)


def test_flexflow_p100_has_nvlink_inside_and_100_gbit_between() -> None:
    c = cluster("flexflow-p100")
    assert [min(c.links[k].bandwidth for k in c.routes[0][b]) for b in (3, 4)] == [80e9, 12.5e9]
    assert set(c.routes[0][4]) & set(c.routes[1][5])  # one card for the node


def test_a_mixed_cluster_has_both_kinds_and_the_slower_network() -> None:
    c = cluster("mixed-a100-v100")
    assert [d.kind for d in c.devices] == ["a100"] * 4 + ["v100"] * 4
    assert min(c.links[k].bandwidth for k in c.routes[0][7]) == 12.5e9
    assert min(c.links[k].bandwidth for k in c.routes[0][3]) == 300e9
    assert "bfloat16" in dict(c.devices[0].rates) and "bfloat16" not in dict(c.devices[7].rates)


def test_the_first_devices_of_a_preset() -> None:
    two, all_of_it = cluster("gdp-p100:2"), cluster("gdp-p100")
    assert (two.name, two.devices) == ("gdp-p100:2", all_of_it.devices[:2])
    assert len(two.links) == 4
    node = cluster("flexflow-k80:6")
    assert [host.devices for host in node.hosts] == [(0, 1, 2, 3), (4, 5)]
    assert route(node, 0, 5) == route(cluster("flexflow-k80"), 0, 5)
    verify(node)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_give_nodes_of_devices(kind: str) -> None:
    one, two = cluster(f"4x{kind}"), cluster(f"2x4x{kind}")
    assert (len(one.devices), len(two.devices)) == (4, 8)
    assert one.name == f"4x{kind}"
    assert two.devices[0].name == "node0/gpu0"
    bandwidth = [min(two.links[k].bandwidth for k in two.routes[0][b]) for b in (1, 4)]
    assert bandwidth[0] > bandwidth[1]  # the network is slower than the node


@pytest.mark.parametrize(
    ("spec", "memory", "half"),
    [
        ("2xrtx4090", 24e9, 165.2e12),  # the rates are dense, float32 accumulating
        ("2xrtx5090", 32e9, 209.5e12),
        ("2xrtx3090", 24e9, 71e12),
        ("4xl40s", 48e9, 362e12),
        ("8xa100-40", 40e9, 312e12),
        ("8xb200", 180e9, 2250e12),
        ("32xh100", 80e9, 989e12),
    ],
)
def test_gpus_that_people_have_are_counted_with_dense_rates(
    spec: str, memory: float, half: float
) -> None:
    place = cluster(spec)
    assert len(place.devices) == int(spec.partition("x")[0])
    assert {device.memory_bytes for device in place.devices} == {memory}
    assert {dict(device.flops)[2] for device in place.devices} == {half}


def test_messages_between_nodes_take_the_network_card_or_the_uplink() -> None:
    assert route(cluster("2x2xa100"), 0, 1) == ["node0/gpu0.out", "node0/gpu1.in"]
    assert route(cluster("2x2xa100"), 0, 3) == ["node0/gpu0.nic.out", "node1/gpu1.nic.in"]
    assert route(cluster("2x2xk80"), 0, 3) == [
        "node0/gpu0.out", "node0.bus", "node0.out", "node1.in", "node1.bus", "node1/gpu1.in",
    ]  # fmt: skip


def test_pairs_on_a_switch_of_their_own_avoid_the_shared_bus() -> None:
    c = cluster("flexflow-k80")
    assert len(c.devices) == 64
    assert not any(".bus" in name for name in route(c, 0, 1))
    assert "node0.bus" in route(c, 0, 2)


def test_local_processes_share_the_machine() -> None:
    one, four = cluster("local:1"), cluster("local:4")
    assert one.communication_on_device and not one.devices[0].asynchronous
    assert dict(four.devices[0].flops)[4] == pytest.approx(dict(one.devices[0].flops)[4] / 4)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert four.devices[0].memory_bytes == total // 4
    assert "4 processes share" in four.devices[0].provenance
    assert "assumed" in four.devices[0].provenance


def test_crowded_local_processes_have_slower_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    two, three = cluster("local:2"), cluster("local:3")
    assert sum(two.links[k].latency for k in two.routes[0][1]) == pytest.approx(62e-6)
    assert sum(three.links[k].latency for k in three.routes[0][1]) == pytest.approx(0.8e-3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dgx", r"unknown cluster 'dgx'; known: a100, .*p2\.8xlarge, .*local:N"),
        ("8xfoo", "unknown cluster '8xfoo'"),
        ("", "unknown cluster ''"),
        ("local", "unknown cluster 'local'"),
        ("2x2x2xh100", "unknown cluster '2x2x2xh100'"),
        ("0xh100", "'0xh100': the number of devices must be 1 to 1024"),
        ("-1xh100", "'-1xh100': the number of devices must be 1"),
        ("0x8xh100", "'0x8xh100': the number of nodes must be 1"),
        ("99x99xh100", "'99x99xh100': 9801 devices are more than 1024"),
        ("local:0", "'local:0': the number of processes must be 1"),
        ("local:-2", "'local:-2': the number of processes"),
        ("local:two", "'local:two': the number of processes"),
        ("local:²", "'local:²': the number of processes"),
        ("gdp-p100:9", "'gdp-p100:9': 'gdp-p100' has 8 devices"),
        ("gdp-p100:0", "'gdp-p100:0': the number of devices must be 1"),
        ("gdp-p100:", "'gdp-p100:': the number of devices must be 1"),
        ("nowhere/c.toml", "file nowhere/c.toml cannot be read: No such file"),
    ],
)
def test_wrong_specifications_are_refused_in_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cluster(spec)
    assert "\n" not in str(caught.value)


def test_the_documented_file_loads_and_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(example())
    c = cluster(str(path))
    assert c.name == "two small boxes"
    assert [d.name for d in c.devices[3:5]] == ["box0/gpu3", "box1/gpu0"]
    assert route(c, 0, 1) == ["box0/gpu0.out", "box0.bus", "box0/gpu1.in"]
    assert route(c, 0, 4) == [
        "box0/gpu0.nic.out", "box0.bus", "box0.out", "box1.in", "box1.bus", "box1/gpu0.nic.in",
    ]  # fmt: skip
    assert route(c, 1, 7)[0] == "box0/gpu0.nic.out"  # two devices share a network card
    assert route(c, 1, 7)[-1] == "box1/gpu2.nic.in"
    assert c.links[c.routes[0][4][2]].bandwidth == 7e9  # 56 Gbit/s
    assert [c.links[k].name for k in c.host_routes[5]] == ["box1/gpu1.host", "box1.host"]
    assert [(h.name, h.memory_bytes, h.devices) for h in c.hosts] == [
        ("box0", 64_000_000_000, (0, 1, 2, 3)),
        ("box1", 64_000_000_000, (4, 5, 6, 7)),
    ]
    assert c.devices[0].asynchronous
    assert (c.devices[0].memory_bytes, c.devices[0].launch_seconds) == (12_000_000_000, 10e-6)
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(c)))) == c


def test_the_page_tells_of_files_and_presets_as_they_are(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "clusters.md").read_text()
    (file,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(file)
    c = cluster(str(path))
    assert [d.kind for d in c.devices] == ["mycard"] * 4 + ["a100"] * 2
    assert route(c, 5, 0)[0] == "node/gpu0.nic.out"
    for name in cluster_file.preset_names():
        assert f"`{name}`" in page, name
    for table in (cluster_file.SwitchTable, cluster_file.DeviceTable, cluster_file.FlopsTable):
        for field in table.model_fields:
            assert f"`{field}`" in page, field


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "mygpu"', "", r"field device\[0\]\.kind is missing"),
        ('kind = "mygpu"', 'kind = "g"\nspeed = 3', r"field device\[0\]\.speed is not known"),
        ("devices = 2}", "sockets = 2}", r"field device\[0\]\.nic\.sockets is not known"),
        ('"12 GB"', "-1", r"field device\[0\]\.memory_bytes: .*greater than 0"),
        ('"12 GB"', "12.5", r"field device\[0\]\.memory_bytes: .*valid integer"),
        (
            '"12 GB"',
            '"12"',
            r"device\[0\]\.memory_bytes: '12' is not a number with a unit, such as",
        ),
        ('"240 GB/s"', '"240 Gb/s"', r"device\[0\]\.memory_bandwidth: '240 Gb/s' is not a number"),
        ('"240 GB/s"', '"240 GB"', r"device\[0\]\.memory_bandwidth: '240 GB' is not a number"),
        ('"240 GB/s"', "-240e9", r"device\[0\]\.memory_bandwidth: .*greater than 0"),
        ('"240 GB/s"', "inf", "memory_bandwidth.*finite"),
        ('"64 GB"', '"much"', r"field switch\[1\]\.host\.memory_bytes: 'much' is not a number"),
        ('float32 = "4.3 TFLOP/s", ', "", r"field device\[0\]\.flops\.float32 is missing"),
        ('"1.4 TFLOP/s"', '"-1.4 TFLOP/s"', r"flops\.float64: '-1.4 TFLOP/s' is not a number"),
        ('"1.4 TFLOP/s"', "-1.4e12", r"flops\.float64: .*greater than 0"),
        ('"1.4 TFLOP/s"', '"1.4 T"', r"flops\.float64: '1.4 T' is not a number .* 14 TFLOP/s"),
        ('latency = "5 us"', "latency = -1", r"device\[0\]\.nic\.latency: .*or equal to 0"),
        ('"56 Gbit/s"', "0", r"field switch\[1\]\.uplink\.bandwidth"),
        ("count = 2 ", "count = 0 ", r"field switch\[1\]\.count"),
        ("count = 2 ", "count = 400 ", "1600 devices are more than 1024"),
        (
            'parent = "network"',
            "",
            "exactly one switch must have no parent, not 'network' and 'box'",
        ),
        ('parent = "network"', 'parent = "net"', "switch 'box' has the unknown parent 'net'"),
        ('name = "network"', 'name = "network"\nparent = "box"', "is its own ancestor"),
        ('parent = "network"', 'parent = "box"', "switch 'box' is its own ancestor"),
        ('on = "box"', 'on = "bax"', "device 'gpu' is on 'bax', which is no switch"),
        ('name = "network"', 'name = "network"\ncount = 2', "no path from .*0/gpu to network1/gpu"),
        ('kind = "mygpu"', 'like = "x100"', r"field device\[0\]\.like: 'x100' is none of a100, "),
        ('name = "gpu"', 'name = "box"', "two switches or devices are named 'box'"),
        ('name = "two small boxes"', "name = ", "is not TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = example()
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        cluster(str(path))
    assert str(path) in str(caught.value)


def test_numbers_of_a_switch_need_provenance(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(re.sub(r"provenance.*\n", "", example(), count=1))
    with pytest.raises(ValueError, match=r"field switch\.provenance of 'box' is missing"):
        cluster(str(path))


ISLANDS = """
name = "two islands"

[[switch]]
name = "east"

[[switch]]
name = "west"

[[device]]
like = "k80"
name = "left"
on = "west"
count = 2

[[device]]
like = "k80"
name = "right"
on = "east"
"""


def test_devices_without_a_path_are_named(tmp_path: Path) -> None:
    path = tmp_path / "islands.toml"
    path.write_text(ISLANDS)
    with pytest.raises(ValueError, match="device 'left' has no path to device 'right': switches"):
        cluster(str(path))
    path.write_text(ISLANDS.replace('on = "east"', 'on = "south"'))
    with pytest.raises(ValueError, match=r"'right' is on 'south', .* no path to device 'left'"):
        cluster(str(path))
    path.write_text(ISLANDS.replace('name = "west"', 'name = "west"\nparent = "east"'))
    assert [d.name for d in cluster(str(path)).devices] == ["right", "west/left0", "west/left1"]


def test_a_device_like_another_needs_a_source_for_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "like.toml"
    other = ISLANDS.replace('name = "west"', 'name = "west"\nparent = "east"')
    path.write_text(other.replace("count = 2", 'memory_bytes = "8 GB"'))
    with pytest.raises(ValueError, match=r"field device\[0\]\.provenance is missing"):
        cluster(str(path))
    path.write_text(other.replace("count = 2", 'memory_bytes = "8 GB"\nprovenance = "mine"'))
    left = cluster(str(path)).devices[1]
    assert (left.memory_bytes, left.memory_bandwidth) == (8_000_000_000, 240e9)
    assert left.provenance.startswith("mine; otherwise NVIDIA Tesla K80")


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        *(("12 GB", BYTES, 12e9), ("16GiB", BYTES, 2**34), ("1.5 kB", BYTES, 1500.0)),
        *(("5 us", SECONDS, 5e-6), ("2.5 µs", SECONDS, 2.5e-6), ("1e3 ms", SECONDS, 1.0)),
        *(("25 GB/s", BYTES_PER_SECOND, 25e9), ("100 Gbit/s", BYTES_PER_SECOND, 12.5e9)),
        *(("14 TFLOP/s", OPERATIONS_PER_SECOND, 14e12), ("2 POP/s", OPERATIONS_PER_SECOND, 2e15)),
    ],
)
def test_quantities(text: str, units: dict[str, Any], number: float) -> None:
    assert parse_quantity(text, units) == number


@pytest.mark.parametrize("text", ["", "GB", "12", "12 gb", "12 Gbit", "1,5 GB", "-1 GB", "٣ GB"])
def test_what_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number with a unit, such as 12 GB"):
        parse_quantity(text, BYTES)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [(25e9, "B/s", "25 GB/s"), (0.0, "s", "0 s"), (62e-6, "s", "62 us"), (999.9, "B", "1000 B")],
)
def test_quantities_shown(number: float, unit: str, text: str) -> None:
    assert format_quantity(number, unit) == text


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not TOML"):
        cluster(str(path))


@pytest.mark.parametrize("spec", ["p2.8xlarge", "2x2xh100", "local:2"])
def test_json_round_trip(spec: str) -> None:
    c = cluster(spec)
    again = cluster_from_json(json.loads(json.dumps(cluster_to_json(c))))
    assert again == c
    assert hash(again) == hash(c)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "not of version 2"),
        ({"devices": []}, "has 0 devices"),
        ({"name": 3}, "field name: input should be a valid string"),
        ({"colour": "red"}, "field colour is not known"),
        ({"routes": [[[], [0]], [[1], []]]}, "does not have a route for every pair"),
        ({"routes": [[[], [99], [0]], [[0], [], [0]], [[0], [0], []]]}, "link that is not there"),
        ({"routes": [[[], [0, 0], [0]], [[0], [], [0]], [[0], [0], []]]}, "uses a link twice"),
        ({"routes": [[[0], [0], [0]], [[0], [], [0]], [[0], [0], []]]}, "wrong route from 0 to 0"),
        ({"host_routes": {1, 2}}, "not plain JSON"),
    ],
)
def test_wrong_json_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster_from_json({**cluster_to_json(ports(3)), **change})


def test_a_missing_field_of_json_is_named() -> None:
    data = cluster_to_json(ports(2))
    del data["devices"][1]["kind"]
    with pytest.raises(ValueError, match=r"field devices\[1\]\.kind is missing"):
        cluster_from_json(data)


def test_verify_names_the_part_that_is_wrong() -> None:
    c = ports(2)
    bad = replace(c.devices[1], memory_bytes=0)
    with pytest.raises(ValueError, match="device 'd1' has a number"):
        verify(replace(c, devices=(c.devices[0], bad)))
    with pytest.raises(ValueError, match="two parts named 'd0'"):
        verify(replace(c, devices=(c.devices[0], c.devices[0])))
    with pytest.raises(ValueError, match="link 'out0' has a bandwidth"):
        verify(replace(c, links=(replace(c.links[0], bandwidth=float("nan")), *c.links[1:])))
