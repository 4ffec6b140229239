"""Plans that offload: they fit where others do not, are saved, and train the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

import apportion as ap
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.machine.cluster import cluster
from apportion.machine.topology import Cluster
from apportion.memory.choose_memory import (
    MemoryDecision,
    choose_memory,
    offloadable,
    spread,
    views_of,
)
from apportion.memory.choose_recompute import RecomputeOutcome
from apportion.memory.recompute import recompute
from apportion.memory.recompute_costs import RecomputeCosts, recompute_costs
from apportion.memory.time_offloads import DEPTH, HostWay, time_offloads
from apportion.plan.make_plan import compare_methods, make_plan
from apportion.plan.plan import Plan
from apportion.run.planned_program import planned_program
from apportion.simulate.host_bytes import host_peaks

LAYERS, ROWS, WIDTH = 6, 256, 8


class Deep(nn.Module):
    """Activations of many times the bytes of parameters; dropout and batch norm among them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        found: Tensor = self.norm(x)
        return found


def program(layers: int = LAYERS) -> Program:
    torch.manual_seed(0)
    model = Deep(layers)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) ** 3).mean()
        return found

    return capture(
        step, model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(ROWS, WIDTH)
    )


@pytest.fixture(scope="module")
def step() -> Program:
    return program()


@pytest.fixture(scope="module")
def kept(step: Program) -> Plan:
    return planned(step, "none")


def planned(
    step: Program,
    offload: str,
    limit: float | None = None,
    recompute: str = "none",
    place: Cluster | None = None,
) -> Plan:
    place = place or cluster("2xh100")
    return make_plan(step, place, "data", 1.0, limit, recompute=recompute, offload=offload)


@pytest.mark.slow
def test_a_limit_is_met_by_offloading(step: Program, kept: Plan, tmp_path: Path) -> None:
    limit = 0.8 * max(kept.predicted.peak_bytes)
    made = planned(step, "auto", limit)
    assert made.feasible and max(made.predicted.peak_bytes) <= limit
    assert made.offloaded and kept.offloaded == ()
    held = host_peaks(made.tasks)
    assert min(held) >= max(kept.predicted.peak_bytes) - limit
    (note,) = [note for note in made.notes if "host's memory" in note]
    assert f"{len(made.offloaded)} activations wait" in note and "a step takes +" in note
    made.save(tmp_path / "p.json")
    read = Plan.load(tmp_path / "p.json")
    assert (read.offloaded, read.recomputed, read.graph) == (
        made.offloaded,
        made.recomputed,
        made.graph,
    )
    assert read.feasible and read.simulate().predicted == made.predicted
    assert ap.check(step, read).equal


@pytest.mark.slow
def test_both_together_are_no_slower_than_either(step: Program, kept: Plan) -> None:
    for share in (0.8, 0.6):
        limit = share * max(kept.predicted.peak_bytes)
        alone = planned(step, "none", limit, "auto"), planned(step, "auto", limit)
        both = planned(step, "auto", limit, "auto")
        assert both.feasible
        for one in alone:
            if one.feasible:
                assert both.predicted.step_seconds <= one.predicted.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_everything_offloaded_trains_the_same_model(step: Program, recompute: str) -> None:
    made = planned(step, "full", recompute=recompute)
    assert made.offloaded and bool(made.recomputed) >= (recompute == "full")
    assert ap.check(step, made).equal
    local = planned(step, "full", recompute=recompute, place=cluster("local:2"))
    assert ap.check(step, local).equal


def test_a_plan_that_fits_offloads_nothing(step: Program, tmp_path: Path) -> None:
    made = planned(step, "auto")
    assert made.feasible and made.offloaded == () and made.graph is step.graph
    made.save(tmp_path / "p.json")
    assert '"offloaded"' not in (tmp_path / "p.json").read_text()


@pytest.mark.slow
def test_a_host_without_room_is_told_in_a_sentence(step: Program) -> None:
    place = cluster("2xh100")
    poor = replace(place, hosts=tuple(replace(host, memory_bytes=10_000) for host in place.hosts))
    made = planned(step, "full", place=poor)
    assert not made.feasible
    (note,) = [note for note in made.notes if note.startswith("host ")]
    assert "10 kB of memory" in note and note.endswith("offload less, or recompute")
    limit = 0.8 * max(planned(step, "none").predicted.peak_bytes)
    other = planned(step, "auto", limit, "auto", poor)
    assert other.feasible and sum(host_peaks(other.tasks)) <= 10_000


def test_a_wrong_word_is_refused(step: Program) -> None:
    with pytest.raises(ValueError, match="cannot offload 'some'; choose none, auto, full"):
        planned(step, "some")


@pytest.mark.slow
def test_methods_in_one_table(step: Program, kept: Plan) -> None:
    limit = 0.8 * max(kept.predicted.peak_bytes)
    rows = compare_methods(step, cluster("2xh100"), ["data"], 1.0, limit, offload="auto")
    assert [row.feasible for row in rows] == [True] and rows[0].offloaded


@pytest.mark.slow
def test_the_plan_of_another_step_is_refused(step: Program, kept: Plan) -> None:
    made = planned(step, "full")
    assert planned_program(step, made).graph.fingerprint == made.graph.fingerprint
    with pytest.raises(ValueError, match=f"it has {len(step.graph.ops)} operators"):
        planned_program(program(LAYERS - 1), made)
    with pytest.raises(ValueError, match="another step"):
        planned_program(
            step, replace(made, memory=replace(made.memory, offloaded=made.offloaded[1:]))
        )


# Where Values go and come back


def costs_of(kept: Plan) -> RecomputeCosts:
    return recompute_costs(kept.space, kept.tasks, kept.timeline, 0)


@pytest.mark.parametrize("seed", range(4))
def test_few_values_are_on_their_way_at_a_time(kept: Plan, seed: int) -> None:
    rng, costs, graph = Random(seed), costs_of(kept), kept.graph
    values = [v for v in offloadable(graph, costs, frozenset()) if rng.random() < 0.8]
    link = replace(kept.cluster.links[0], bandwidth=10 ** rng.uniform(3, 12), latency=0.0)
    made = recompute(graph, views_of(graph, costs, frozenset(values)))
    found = time_offloads(made, costs, HostWay(link), values)
    assert [each.value for each in found] == sorted(values)
    producer = made.graph.producer
    makers = {v: made_by[0] for v in values if (made_by := producer[v]) is not None}
    order = sorted(found, key=lambda each: makers[each.value])
    early = {
        v: max([makers[v], *(k for k, op in enumerate(made.graph.ops) if op.phase == "forward"
                             and v in {costs.shares[made.values[x]] for x in op.inputs})])
        for v in values
    }  # fmt: skip
    for place, each in enumerate(order):
        assert early[each.value] < each.gone
        if place + DEPTH < len(order):
            later = makers[order[place + DEPTH].value]
            assert each.gone <= max(later, early[each.value] + 1)
    for each in found:
        reads = [k for k, op in enumerate(made.graph.ops) if op.phase != "forward"
                 and each.value in {costs.shares[made.values[x]] for x in op.inputs}]  # fmt: skip
        assert each.back <= min(reads)


def test_where_copies_burn_the_device_they_are_made_at_once(kept: Plan) -> None:
    costs, graph = costs_of(kept), kept.graph
    values = offloadable(graph, costs, frozenset())
    made = recompute(graph, views_of(graph, costs, values))
    link = kept.cluster.links[0]
    for each in time_offloads(made, costs, HostWay(link, beside=False), values):
        reads = [k for k, op in enumerate(made.graph.ops) if op.phase != "forward"
                 and each.value in {costs.shares[made.values[x]] for x in op.inputs}]  # fmt: skip
        assert each.back == min(reads)


def test_places_are_spread() -> None:
    assert [spread(k) for k in range(5)] == [0.0, 0.5, 0.25, 0.75, 0.125]


def test_what_is_chosen_is_the_best_of_what_was_simulated(kept: Plan) -> None:
    costs, graph = costs_of(kept), kept.graph
    way, seen = HostWay(kept.cluster.links[0]), dict[MemoryDecision, RecomputeOutcome]()

    def run(decision: MemoryDecision) -> RecomputeOutcome:
        saved = sum(costs.nbytes[v] for v in decision.values) + 100 * len(decision.ops)
        found = RecomputeOutcome(40_000 - saved, 1.0 + 0.1 * len(decision.values))
        seen[decision] = found
        return found

    chosen = choose_memory(graph, costs, way, RecomputeOutcome(40_000, 1.0), run, tries=10)
    assert chosen.simulated == len(seen) <= 10
    assert chosen.outcome == min(seen.values(), key=lambda outcome: outcome.rank)
    alone = choose_memory(graph, costs, way, RecomputeOutcome(1, 1.0), run, False, 10)
    assert alone.decision.ops == frozenset() and alone.decision.values
