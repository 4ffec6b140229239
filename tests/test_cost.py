"""Durations of single tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from make_tasks import EXACT, Maker, ports

from apportion.cluster import cluster
from apportion.cost import ASSUMED, PUBLISHED, CostModel, default_cost, nanoseconds


def test_durations_by_hand() -> None:
    make = Maker(2)
    make.compute(0, flops=700, nbytes=300)  # bound by arithmetic
    make.compute(0, flops=300, nbytes=700)  # bound by memory
    make.compute(1)  # a view
    make.transfer(0, 1, 500)
    make.assemble(1, 200)
    c = ports(2, latency=10e-9)  # two ports
    slow = replace(c, devices=tuple(replace(d, launch_seconds=5e-9) for d in c.devices))
    assert nanoseconds(make.done(), slow, EXACT).tolist() == [705, 705, 5, 520, 205]
    half = replace(EXACT, efficiency=0.5)
    assert nanoseconds(make.done(), slow, half).tolist() == [1405, 1405, 5, 520, 405]


def test_no_task_takes_no_time() -> None:
    make = Maker(1)
    make.compute(0)
    assert nanoseconds(make.done(), ports(1), EXACT).tolist() == [1]


@pytest.mark.parametrize(
    ("itemsize", "rate"), [(1, 989e12), (2, 989e12), (4, 67e12), (8, 67e12), (16, 67e12)]
)
def test_the_rate_follows_the_size_of_an_element(itemsize: int, rate: float) -> None:
    make = Maker(1)
    make.compute(0, flops=10**12)
    tasks = make.done()
    tasks.itemsize[:] = itemsize
    expected = 1e12 / rate * 1e9 + 5000
    assert nanoseconds(tasks, cluster("1xh100"), EXACT).tolist() == [round(expected)]


def test_a_message_goes_at_the_pace_of_its_slowest_link() -> None:
    make = Maker(4)
    make.transfer(0, 1, 10**9)
    make.transfer(0, 2, 10**9)
    inside, between = nanoseconds(make.done(), cluster("2x2xh100"), EXACT).tolist()
    assert inside == round(1e9 / 450e9 * 1e9 + 6000)
    assert between == round(1e9 / 50e9 * 1e9 + 10000)


def test_no_tasks() -> None:
    assert nanoseconds(Maker(1).done(), ports(1), EXACT).tolist() == []


def test_too_few_devices_are_refused() -> None:
    make = Maker(3)
    make.compute(2)
    with pytest.raises(ValueError, match="tasks are for 3 devices, cluster 'test' has 2"):
        nanoseconds(make.done(), ports(2), EXACT)


def test_default_says_where_its_numbers_come_from() -> None:
    assert default_cost(cluster("p2.8xlarge")) is PUBLISHED
    assert default_cost(cluster("local:2")) is ASSUMED
    assert "half" in PUBLISHED.provenance


@pytest.mark.parametrize("efficiency", [0.0, -1.0, 1.5, float("nan")])
def test_efficiency_is_a_share(efficiency: float) -> None:
    with pytest.raises(ValueError, match="efficiency"):
        CostModel("bad", "", efficiency)
