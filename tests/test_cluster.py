"""Clusters: presets, counts, this machine, files, JSON, and what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_tasks import ports

from apportion.cluster import Cluster, cluster, from_json, known, to_json, verify

KINDS = ["a100", "h100", "h200", "k80", "p100", "titanx", "v100"]


def route(c: Cluster, a: int, b: int) -> list[str]:
    return [c.links[k].name for k in c.routes[a][b]]


def example() -> str:
    """The file in the head of the module, without its indentation."""
    text = sys.modules["apportion.cluster"].__doc__ or ""
    body = text[text.index("    name = ") : text.index("Bytes, seconds, bytes per second")]
    return textwrap.dedent(body)


def test_every_known_preset_loads_with_provenance() -> None:
    names = [name for name, _ in known()]
    assert {"p2.8xlarge", "local:N", *KINDS} <= set(names)
    for name, description in known():
        assert description
        if "N" in name:
            continue
        c = cluster(name)
        assert c.name == name
        assert all(device.provenance for device in c.devices)
        assert all(link.provenance for link in c.links)


def test_p2_8xlarge_is_the_machine_of_the_tofu_paper() -> None:
    c = cluster("p2.8xlarge")
    assert len(c.devices) == 8
    assert {d.memory_bytes for d in c.devices} == {12_000_000_000}
    assert {c.links[k].bandwidth for k in c.routes[0][7]} == {21e9}
    assert len(set(c.host_routes)) == 1  # one link to the host, shared by all
    assert c.links[c.host_routes[0][0]].bandwidth == 10e9


@pytest.mark.parametrize("kind", KINDS)
def test_counts_give_nodes_of_devices(kind: str) -> None:
    one, two = cluster(f"4x{kind}"), cluster(f"2x4x{kind}")
    assert (len(one.devices), len(two.devices)) == (4, 8)
    assert one.name == f"4x{kind}"
    assert two.devices[0].name == "node0/gpu0"
    bandwidth = [min(two.links[k].bandwidth for k in two.routes[0][b]) for b in (1, 4)]
    assert bandwidth[0] > bandwidth[1]  # the network is slower than the node


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
    assert one.communication_on_device
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
    assert from_json(json.loads(json.dumps(to_json(c)))) == c


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "mygpu"', "", r"field device\[0\]\.kind is missing"),
        ('kind = "mygpu"', 'kind = "g"\nspeed = 3', r"field device\[0\]\.speed is not known"),
        ("memory_bytes = 12_000_000_000", "memory_bytes = -1", r"field device\[0\]\.memory_bytes"),
        ("memory_bytes = 12_000_000_000", 'memory_bytes = "12"', "should be a valid integer"),
        ("memory_bandwidth = 240e9", "memory_bandwidth = inf", "memory_bandwidth.*finite"),
        ("float32 = 4.3e12, ", "", r"field device\[0\]\.flops\.float32 is missing"),
        ("bandwidth = 7e9", "bandwidth = 0", r"field switch\[1\]\.uplink\.bandwidth"),
        ("count = 2 ", "count = 0 ", r"field switch\[1\]\.count"),
        ("count = 2 ", "count = 400 ", "1600 devices are more than 1024"),
        ('parent = "network"', "", "exactly one switch must have no parent"),
        ('parent = "network"', 'parent = "net"', "switch 'box' has the unknown parent 'net'"),
        ('name = "network"', 'name = "network"\nparent = "box"', "exactly one switch"),
        ('parent = "network"', 'parent = "box"', "switch 'box' is its own ancestor"),
        ('on = "box"', 'on = "bax"', "device 'gpu' is on 'bax', which is no switch"),
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


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not TOML"):
        cluster(str(path))


@pytest.mark.parametrize("spec", ["p2.8xlarge", "2x2xh100", "local:2"])
def test_json_round_trip(spec: str) -> None:
    c = cluster(spec)
    again = from_json(json.loads(json.dumps(to_json(c))))
    assert again == c
    assert hash(again) == hash(c)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not of version 1"),
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
        from_json({**to_json(ports(3)), **change})


def test_a_missing_field_of_json_is_named() -> None:
    data = to_json(ports(2))
    del data["devices"][1]["kind"]
    with pytest.raises(ValueError, match=r"field devices\[1\]\.kind is missing"):
        from_json(data)


def test_verify_names_the_part_that_is_wrong() -> None:
    c = ports(2)
    bad = replace(c.devices[1], memory_bytes=0)
    with pytest.raises(ValueError, match="device 'd1' has a number"):
        verify(replace(c, devices=(c.devices[0], bad)))
    with pytest.raises(ValueError, match="two parts named 'd0'"):
        verify(replace(c, devices=(c.devices[0], c.devices[0])))
    with pytest.raises(ValueError, match="link 'out0' has a bandwidth"):
        verify(replace(c, links=(replace(c.links[0], bandwidth=float("nan")), *c.links[1:])))
