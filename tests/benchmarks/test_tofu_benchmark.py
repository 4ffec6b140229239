"""The benchmark that rebuilds Tofu's evaluation, on small models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from apportion.machine.cluster import cluster
from apportion.machine.topology import Cluster


@dataclass(frozen=True)
class Small:
    """A model whose only setting is its batch."""

    family: str = "rnn"
    saturating: int = 512

    def spec(self, batch: int) -> str:
        return f"rnn:tiny,hidden=2048,batch={batch}"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks"))
    import tofu

    return tofu


def with_memory(machine: Cluster, nbytes: int) -> Cluster:
    devices = (replace(device, memory_bytes=nbytes) for device in machine.devices)
    return replace(machine, devices=tuple(devices))


def test_every_model_has_its_figures(benchmark: Any) -> None:
    assert len(benchmark.PAPER) == 21
    assert benchmark.PAPER[benchmark.Model("rnn", 10, 8)] == (33, "OOM", 7.2, "OOM", 23)
    assert benchmark.PAPER[benchmark.Model("wresnet", 101, 6)] == (9.4, "OOM", 5.4, 8.7)


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_taken(benchmark: Any) -> None:
    one = cluster("p2.8xlarge:1")
    peaks = {
        batch: max(benchmark.planned(Small(), batch, one, "single").timeline.peak_bytes)
        for batch in (1, 64, 128)
    }
    assert peaks[64] < peaks[128]
    found = benchmark.largest(Small(), with_memory(one, peaks[64]), "single", 256)
    assert found.batch == 64
    step = benchmark.seconds(benchmark.planned(Small(), 64, one, "single"))
    assert found.samples == pytest.approx(64 / step)
    assert benchmark.largest(Small(), with_memory(one, peaks[1] - 1), "single", 256).samples is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "tofu", "op-placement"])
def test_computing_is_the_step_without_communication(benchmark: Any, method: str) -> None:
    machine = cluster("p2.8xlarge:4")
    made = benchmark.planned(Small(), 128, machine, method)
    compute = benchmark.computing(made, machine)
    assert 0 < compute < benchmark.seconds(made)
    fast = replace(
        machine, links=tuple(replace(k, bandwidth=1e18, latency=0) for k in machine.links)
    )
    assert compute <= benchmark.seconds(benchmark.planned(Small(), 128, fast, method))


def test_computing_alone_is_all_there_is_on_one_device(benchmark: Any) -> None:
    one = cluster("p2.8xlarge:1")
    made = benchmark.planned(Small(), 128, one, "single")
    assert benchmark.computing(made, one) == pytest.approx(benchmark.seconds(made))


@pytest.mark.slow
def test_swapping_needs_no_link_for_what_fits(benchmark: Any) -> None:
    whole, one = cluster("p2.8xlarge"), cluster("p2.8xlarge:1")
    made = benchmark.planned(Small(), 64, one, "single")
    step = benchmark.seconds(made)
    found = benchmark.swapping(Small(), whole, one)
    assert found.batch == 512
    assert found.samples == pytest.approx(512 / step, rel=0.01)
    small = with_memory(one, int(0.7 * max(made.timeline.peak_bytes)))
    assert benchmark.swapping(Small(), whole, small).samples < found.samples


def test_figures_stand_beside_the_papers(benchmark: Any) -> None:
    assert benchmark.beside(3.0, 2.0) == "3 / 2 (1.50)"
    assert benchmark.beside("OOM", 2.0) == "OOM / 2"
    assert benchmark.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
