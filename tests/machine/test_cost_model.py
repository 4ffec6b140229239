"""Durations of single tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from make_tasks import EXACT, Maker, ports

from apportion.lower.task_graph import (
    CATEGORIES,
    TaskGraph,
)
from apportion.lower.task_kinds import (
    COLLECTIVE,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import (
    ASSUMED,
    ESTIMATED,
    FITTED,
    MEASURED,
    PUBLISHED,
    CostModel,
    default_cost,
    dump_cost,
    load_cost,
    times_messages,
)
from apportion.machine.cost_table import Condition, CostLine, CostTable, Fit, KernelMeasurement
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
    restricted,
    shares,
    sources,
)

MM = "aten.mm.default(float32[2,2] float32[2,2]) #0000000000"
FEED = "apportion.feed(1 40)"
INPUT = CATEGORIES.index("input")


def table(**given: object) -> CostTable:
    """A table of what a nanosecond costs."""
    return CostTable(Condition("cpu"), **given)  # type: ignore[arg-type]


def model(**given: object) -> CostModel:
    return CostModel("test", "", 1.0, {"cpu": table(**given)})


def with_kinds(tasks: TaskGraph, *kinds: str) -> TaskGraph:
    return replace(tasks, kinds=kinds)


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


def test_a_host_that_issues_ahead_is_not_part_of_the_duration() -> None:
    make = Maker(1)
    make.compute(0, flops=100)
    make.assemble(0, 50)
    c = ports(1)
    ahead = replace(c.devices[0], launch_seconds=7e-9, asynchronous=True)
    c = replace(c, devices=(ahead,))
    assert nanoseconds(make.done(), c, EXACT).tolist() == [100, 50]
    assert issue_nanoseconds(make.done(), c, EXACT).tolist() == [7, 7]
    known = model(issue={"": 3e-9, "aten.mm.default": 4e-9})
    tasks = with_kinds(make.done(), "aten.mm.default", "")
    assert issue_nanoseconds(tasks, c, known).tolist() == [4, 3]


@pytest.mark.parametrize(
    ("itemsize", "rate"), [(1, 1979e12), (2, 989e12), (4, 67e12), (8, 67e12), (16, 67e12)]
)
def test_the_rate_follows_the_size_of_an_element(itemsize: int, rate: float) -> None:
    make = Maker(1)
    make.compute(0, flops=10**12)
    tasks = make.done()
    tasks.itemsize[:] = itemsize
    assert nanoseconds(tasks, cluster("1xh100"), EXACT).tolist() == [round(1e12 / rate * 1e9)]


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
    assert default_cost(cluster("local:2")) is ASSUMED
    assert "half" in PUBLISHED.provenance
    assert default_cost(ports(2)) is ASSUMED
    assert "measured on h200" in default_cost(cluster("1xh200")).provenance
    mixed = default_cost(cluster("mixed-a100-v100"))
    assert mixed.name == "estimated"
    assert set(mixed.tables) == {"a100", "v100"}


def test_a_gpu_that_nobody_measured_reaches_the_share_of_its_rates_that_another_does() -> None:
    """Never more than all of it, and less the smaller the kernel."""
    place = cluster("1xa100")
    cost, (device,) = default_cost(place), place.devices
    make = Maker(1)
    for size in (10**6, 10**9, 10**12):
        make.compute(0, flops=size, nbytes=1000)
    for size in (10**4, 10**7, 10**10):
        make.compute(0, flops=1, nbytes=size)
    kinds = ("aten.mm.default",) * 3 + ("aten.add.Tensor",) * 3
    tasks = replace(make.done(), kinds=kinds)
    found = nanoseconds(tasks, place, cost) / 1e9
    best = [n / dict(device.flops)[4] for n in (1e6, 1e9, 1e12)]
    best += [n / device.memory_bandwidth for n in (1e4, 1e7, 1e10)]
    shares = np.array(best) / found
    assert (shares < 1.0).all()
    assert (np.diff(shares[:3]) > 0).all()
    assert (np.diff(shares[3:]) > 0).all()
    assert shares[[2, 5]].min() > 0.5
    assert set(sources(tasks, place, cost).tolist()) == {ESTIMATED}


@pytest.mark.parametrize("efficiency", [0.0, -1.0, 1.5, float("nan")])
def test_efficiency_is_a_share(efficiency: float) -> None:
    with pytest.raises(ValueError, match="efficiency"):
        CostModel("bad", "", efficiency)


# Measured, fitted, estimated


def three_computes() -> TaskGraph:
    """One whose call is known, one of a kind with a fit, one of no kind."""
    make = Maker(1)
    for _ in range(3):
        make.compute(0, flops=100, nbytes=30)
    tasks = with_kinds(make.done(), "aten.mm.default", "aten.mm.default", "mine.own.default")
    return replace(tasks, work=np.array([0, 1, 2]), works=(MM, "aten.mm.default() #1", "mine #2"))


def test_measured_before_fitted_before_estimated() -> None:
    cost = model(
        works={MM: KernelMeasurement(123e-9, 100, 30, 4)},
        fits={"aten.mm.default/4": Fit(10e-9, 2e-9, 1e-9, 0.0, 4)},
    )
    tasks = three_computes()
    assert nanoseconds(tasks, ports(1), cost).tolist() == [123, 10 + 200 + 30, 100]
    assert sources(tasks, ports(1), cost).tolist() == [MEASURED, FITTED, ESTIMATED]
    total = 123 + 240 + 100
    parts = {"measured": 123 / total, "fitted": 240 / total, "estimated": 100 / total}
    assert shares(tasks, ports(1), cost) == pytest.approx(parts)


def test_a_fit_of_the_family_is_an_estimate() -> None:
    cost = model(fits={"family:other/4": Fit(5e-9, 0.0, 2e-9, 0.0, 9)})
    tasks = three_computes()
    assert nanoseconds(tasks, ports(1), cost).tolist() == [100, 100, 65]
    assert set(sources(tasks, ports(1), cost).tolist()) == {ESTIMATED}


def test_a_fit_is_for_one_size_of_element() -> None:
    cost = model(fits={"aten.mm.default/2": Fit(5e-9, 0.0, 0.0, 0.0, 9)})
    assert nanoseconds(three_computes(), ports(1), cost).tolist()[0] == 100


def test_what_only_the_shape_is_known_of_costs_the_fit() -> None:
    cost = model(
        works={MM: KernelMeasurement(123e-9, 100, 30, 4)},
        fits={"aten.mm.default/4": Fit(10e-9, 2e-9, 1e-9, 0.0, 4)},
    )
    blank = replace(three_computes(), work=np.zeros(0, np.int64), works=())
    assert nanoseconds(blank, ports(1), cost).tolist() == [240, 240, 100]


def test_an_assembly_costs_boxes_and_bytes() -> None:
    make = Maker(2)
    message = make.transfer(0, 1, 40)
    assembly = make.assemble(1, 80, after=[message])
    a, b = make.slot(0, 40, -1, message), make.slot(1, 40, assembly, assembly)
    make.copy(a, b, message, assembly)
    cost = model(lines={"assemble": CostLine(5e-9, 2e-9, 1e-9, 0.0, 9)})
    assert nanoseconds(make.done(), ports(2), cost)[assembly] == 5 + 2 + 80
    assert sources(make.done(), ports(2), cost)[assembly] == FITTED


def test_the_first_task_of_a_device_takes_the_batch() -> None:
    make = Maker(2)
    make.compute(0, flops=100)
    make.compute(0, flops=100)
    make.compute(1, flops=100)
    make.slot(0, 40, -1, 0, category=INPUT)
    tasks = replace(make.done(), work=np.array([-1, -1, -1]))
    cost = model(works={FEED: KernelMeasurement(9e-9, 0, 40, 1)})
    assert nanoseconds(tasks, ports(2), cost).tolist() == [109, 100, 100]
    fit = model(fits={"apportion.feed/1": Fit(1e-9, 0.0, 2e-9, 0.0, 4)})
    assert nanoseconds(tasks, ports(2), fit).tolist() == [181, 100, 100]


# Messages that burn their devices

EXCHANGE = {"exchange": CostLine(100e-9, 10e-9, 1e-9, 0.0, 9)}
PACKED = EXCHANGE | {"pack": CostLine(3e-9, 7e-9, 2e-9, 0.0, 9)}


def exchange(devices: int, *messages: tuple[int, int, int]) -> TaskGraph:
    """Messages (sender, receiver, bytes) of one position."""
    make = Maker(devices)
    for a, b, n in messages:
        make.transfer(a, b, n)
    return replace(make.done(), position=np.zeros(len(messages), np.int64))


def test_messages_of_one_exchange_take_together_what_the_busiest_process_needs() -> None:
    place = ports(2, on_device=True)
    both = exchange(2, (0, 1, 50), (1, 0, 50))
    assert times_messages(place, model(lines=EXCHANGE))
    found = nanoseconds(both, place, model(lines=EXCHANGE))
    assert found.sum() == 100 + 2 * 10 + 100  # one of both lanes: it comes after the other
    alone = nanoseconds(exchange(2, (0, 1, 50)), place, model(lines=EXCHANGE))
    assert alone.tolist() == [100 + 10 + 50]


def test_two_pairs_exchange_at_the_same_time() -> None:
    place = ports(4, on_device=True)
    found = nanoseconds(exchange(4, (0, 1, 50), (2, 3, 50)), place, model(lines=EXCHANGE))
    assert found.tolist() == [160, 160]


def test_a_message_is_packed_by_its_sender() -> None:
    make = Maker(2)
    message = make.transfer(0, 1, 40)
    assembly = make.assemble(1, 80, after=[message])
    make.copy(
        make.slot(0, 40, -1, message), make.slot(1, 40, assembly, assembly), message, assembly
    )
    found = nanoseconds(make.done(), ports(2, on_device=True), model(lines=PACKED))
    assert found[message] == 100 + 10 + 40 + 3 + 7 + 2 * 80


def test_a_collective_costs_what_its_messages_would() -> None:
    place = ports(3, on_device=True)
    pairs = [(a, b, 50) for a in range(3) for b in range(3) if a != b]
    cost = model(lines=EXCHANGE)
    make = Maker(3)
    make.compute(0)
    one = replace(
        make.done(),
        kind=np.array([COLLECTIVE]), nbytes=np.array([300]), group=np.array([0]),
        groups=((0, 1, 2),), pattern=np.array([0]),
    )  # fmt: skip
    (found,) = nanoseconds(one, place, cost)
    assert found == 100 + 4 * 10 + 200
    lanes, ends = np.zeros(3), nanoseconds(exchange(3, *pairs), place, cost)
    for (a, b, _), took in zip(pairs, ends.tolist(), strict=True):
        lanes[a] = lanes[b] = max(lanes[a], lanes[b]) + took
    assert lanes.max() == pytest.approx(found, abs=6)


def test_without_a_line_messages_are_the_links() -> None:
    place = ports(2, on_device=True)
    assert not times_messages(place, EXACT)
    assert not times_messages(ports(2), model(lines=EXCHANGE))
    assert nanoseconds(exchange(2, (0, 1, 50)), place, EXACT).tolist() == [50]


# In a file


def test_what_is_saved_of_a_cost_model_says_the_same() -> None:
    unused = "aten.add.Tensor() #9"
    cost = model(
        works={MM: KernelMeasurement(123e-9, 100, 30, 4), unused: KernelMeasurement(1.0, 0, 0, 4)},
        fits={
            "aten.mm.default/4": Fit(10e-9, 2e-9, 1e-9, 0.0, 4),
            "aten.add.Tensor/4": Fit(1.0, 0.0, 0.0, 0.0, 4),
            "family:other/4": Fit(5e-9, 0.0, 2e-9, 0.0, 9),
        },
        lines=PACKED,
    )
    tasks = three_computes()
    kept = restricted(cost, tasks)
    assert set(kept.tables["cpu"].works) == {MM}
    assert set(kept.tables["cpu"].fits) == {"aten.mm.default/4", "family:other/4"}
    again = load_cost(dump_cost(kept))
    before, after = (nanoseconds(tasks, ports(1), x).tolist() for x in (cost, again))
    assert before == after
    assert (again.name, again.efficiency) == (cost.name, cost.efficiency)
