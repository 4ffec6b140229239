"""Plans that fit because state lies on the host: they say what was bought with what, train as one
device does, can be saved, and are the best there is where everything can be tried."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.machine.cluster import cluster
from apportion.machine.topology import Cluster, Host, Link
from apportion.memory.host_state import DEVICE, HOST, derived_ops, parameters_on_host
from apportion.memory.planned_graph import MemoryPlan, before_host
from apportion.memory.time_host_state import time_host_state
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import (
    DefaultCosts,
    PlanRequest,
    SearchLog,
    candidates,
    excess,
)
from apportion.plan.host_residence import MemoryModes, _Residence
from apportion.plan.make_plan import compare_methods, make_plan
from apportion.plan.memory_pins import read_pins
from apportion.plan.plan import Plan
from apportion.run.planned_program import planned_program
from apportion.simulate.host_bytes import host_peaks
from apportion.split.space import Space

WIDTH, LAYERS, ROWS = 64, 6, 16


class Stack(nn.Module):
    """Layers whose weights are much larger than what they make."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def program(layers: int = LAYERS, width: int = WIDTH, rows: int = ROWS) -> Program:
    torch.manual_seed(0)
    model = Stack(layers, width)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) ** 2).mean()
        return found

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return capture(step, model, optimizer, torch.randn(rows, width))


def gpu(host: float = 1e12, bandwidth: float = 50e9) -> Cluster:
    """One GPU with a host of so many bytes, at the end of so fast a link."""
    one = cluster("1xh100")
    link = Link("pcie", bandwidth, 1e-6, "made up")
    return replace(
        one, links=(*one.links, link), host_routes=((len(one.links),),),
        hosts=(Host("host", int(host), (0,), "made up"),),
    )  # fmt: skip


def planned(it: Program, limit: float, **how: Any) -> Plan:
    return make_plan(it, gpu(), "single", 1.0, memory_limit=limit, **how)


@pytest.mark.slow
def test_state_leaves_the_device_where_nothing_else_helps() -> None:
    it = program()
    kept = planned(it, 1e12)
    assert kept.host_state == () and kept.graph is it.graph
    limit = 0.6 * max(kept.predicted.peak_bytes)
    lost = planned(it, limit, recompute="auto")
    assert not lost.feasible
    made = planned(it, limit, recompute="auto", host_state="auto")
    assert made.feasible and made.host_state
    assert max(made.predicted.peak_bytes) <= limit
    assert made.predicted.step_seconds > kept.predicted.step_seconds
    held = host_peaks(made.tasks)[0]
    assert held >= sum(3 * it.graph.values[each.parameter].nbytes for each in made.host_state)
    text = " ".join(made.notes)
    assert "parameters lie on the host with their optimizer's state" in text
    assert "become" in text and "no plan with this partition takes less" in text


@pytest.mark.slow
@pytest.mark.parametrize("mode", [HOST, DEVICE])
def test_all_of_it_on_request(mode: str) -> None:
    it = program()
    made = planned(it, 1e12, host_state=mode)
    assert {each.update for each in made.host_state} == {mode}
    assert len(made.host_state) == LAYERS  # biases are not worth a copy
    assert ap.check(it, made, steps=2).equal


@pytest.mark.slow
def test_a_plan_is_saved_and_is_the_plan_of_its_step_only(tmp_path: Path) -> None:
    it = program()
    made = planned(it, 1e12, host_state="host", recompute="full")
    made.save(tmp_path / "p.json")
    read = Plan.load(tmp_path / "p.json")
    assert (read.memory, read.graph) == (made.memory, made.graph)
    assert read.simulate().predicted == made.predicted
    assert planned_program(it, read).graph.fingerprint == made.graph.fingerprint
    with pytest.raises(ValueError, match="another step"):
        planned_program(program(LAYERS - 1), made)
    fewer = replace(made.memory, host_state=made.host_state[1:])
    with pytest.raises(ValueError, match="another step"):
        planned_program(it, replace(made, memory=fewer))


@pytest.mark.slow
def test_a_host_without_room_is_no_way_out() -> None:
    it = program()
    limit = 0.6 * max(planned(it, 1e12).predicted.peak_bytes)
    how = {"memory_limit": limit, "recompute": "auto", "host_state": "auto"}
    made = make_plan(it, gpu(host=1000.0), "single", 1.0, **how)  # type: ignore[arg-type]
    assert not made.feasible


def test_modes_that_are_none() -> None:
    with pytest.raises(ValueError, match="cannot keep state on the host as 'moon'"):
        planned(program(), 1e12, host_state="moon")


@pytest.mark.slow
def test_pins_are_kept() -> None:
    it = program()
    pins = {"layers.0": ("resident", "keep"), "layers.1": "host", "layers.2": "device"}
    made = planned(it, 1e12, recompute="full", host_state="auto", pins=pins)
    names = {it.graph.values[e.parameter].name: e.update for e in made.host_state}
    assert names["layers.1.weight"] == HOST and names["layers.2.weight"] == DEVICE
    assert "layers.0.weight" not in names
    again = {it.graph.ops[op].module for op in made.recomputed}
    assert "layers.3" in again
    assert ap.check(it, made, steps=2).equal


@pytest.mark.parametrize(
    "pins,why",
    [
        ({"layers.9": "host"}, "has no module 'layers.9'"),
        ({"layers.1": "moon"}, "cannot be pinned 'moon'"),
        ({"layers.1": ("host", "device")}, "pinned in two ways"),
    ],
)
def test_pins_that_mean_nothing(pins: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_pins(pins, program(3).graph)


@pytest.mark.slow
def test_methods_side_by_side() -> None:
    it = program()
    limit = 0.6 * max(planned(it, 1e12).predicted.peak_bytes)
    rows = compare_methods(it, gpu(), ["single"], 1.0, limit, recompute="auto", host_state="auto")
    assert [row.feasible for row in rows] == [True] and rows[0].host_state


# Everything tried


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_the_best_of_all_decisions(share: float) -> None:
    """Twelve operators beside views: every set of recomputed ones with every place of both
    weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).sum()
        return found

    it = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 32))
    assert len(it.graph.ops) <= 16
    free = make_plan(it, gpu(), "single", 1.0, memory_limit=1e12)
    limit = int(share * max(free.predicted.peak_bytes))
    made = make_plan(
        it, gpu(), "single", 1.0, memory_limit=limit, recompute="auto", host_state="auto"
    )
    modes = MemoryModes("auto", "none", "auto")
    request = PlanRequest(Space(it.graph), gpu(), DefaultCosts(gpu()), (limit,))
    (start,) = candidates(request, "single", 0.0, SearchLog())
    trade = _Residence(request, start, modes)
    best = None
    for order, some in product((True, False), range(2 ** len(trade.model.units))):
        ops = frozenset(
            op for k, unit in enumerate(trade.model.units) if some >> k & 1 for op in unit
        )
        trade.order = trade.order if order else ()
        found = _all_states(trade, ops)
        for each in found:
            fit = max(excess(request, each)) <= 0
            if fit and (best is None or each.timeline.step_seconds < best):
                best = each.timeline.step_seconds
    assert made.feasible == (best is not None)
    if best is not None:
        assert made.predicted.step_seconds <= best * (1 + 1e-9)


def _all_states(trade: _Residence, ops: frozenset[int]) -> list[Any]:
    """The step with these Ops recomputed and each parameter in each place."""
    found = []
    weights = parameters_on_host(trade.graph)
    for places in product(("", HOST, DEVICE), repeat=len(weights)):
        state = {w: place for w, place in zip(weights, places, strict=True) if place}
        more = tuple(sorted(ops | derived_ops(trade.graph, state)))
        made = before_host(trade.graph, MemoryPlan(trade.order, more))
        there = time_host_state(made, trade.costs, trade.way, state)
        found.append(trade._scored(MemoryPlan(trade.order, more, there)))
    return found


@pytest.mark.slow
def test_what_fits_is_found_at_the_limit_of_what_it_holds() -> None:
    """There the model of chunks takes more to be held than is, so that by it nothing fits."""
    spec = "gpt2:layers=4,width=256,heads=4,vocab=512,batch=4,seq=128"
    loaded = zoo.load(spec, 0, meta=True)
    it = capture(loaded.step, loaded.model, loaded.optimizer, loaded.batch)

    def made(limit: float) -> Plan:
        how = {"memory_limit": limit, "recompute": "auto", "host_state": "auto"}
        return make_plan(it, cluster("1xh200"), "single", 0.1, **how)  # type: ignore[arg-type]

    first = made(0.6 * max(made(1e12).predicted.peak_bytes))
    held = max(first.predicted.peak_bytes)
    assert first.feasible and first.host_state
    found = made(held + 1)
    assert found.feasible and max(found.predicted.peak_bytes) <= held


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    """Of mixtures that the model finds equally quick, the one that copies least is taken."""
    it, seconds = program(layers=10), []
    most = max(planned(it, 1e12).predicted.peak_bytes)
    for share in (0.3, 0.38, 0.46, 0.5, 0.62, 0.74, 0.86, 0.98):
        made = planned(it, share * most, host_state="auto")
        assert made.feasible
        seconds.append(made.predicted.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_what_was_over_the_limit_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    it, tried = program(layers=10), []
    timed = _Residence._timed
    limit = 0.6 * max(planned(it, 1e12).predicted.peak_bytes)

    def noted(self: _Residence, sketch: Any) -> MemoryPlan:
        tried.append(timed(self, sketch))
        return tried[-1]

    def a_little_more(request: PlanRequest, candidate: Candidate) -> tuple[int, ...]:
        return tuple(over + allowance for over in excess(request, candidate))

    monkeypatch.setattr(_Residence, "_timed", noted)
    allowance = 0
    first = planned(it, limit, host_state="auto")
    allowance, before = int(limit) - max(first.predicted.peak_bytes) + 100, len(tried)
    monkeypatch.setattr(sys.modules[_Residence.__module__], "excess", a_little_more)
    planned(it, limit, host_state="auto")
    again = tried[before:]
    assert len(again) > 1 and all(one != other for one, other in pairwise(again))
