"""TensorFlowMem's three passes and Capuchin's swaps: each lowers the peak, and the step trains the
same."""

from __future__ import annotations

import itertools

import pytest
from graphs import captured
from test_host_state import trains_the_same
from test_orders import started

from apportion import zoo
from apportion.capture.capture import capture
from apportion.describe.ops.host import FROM_HOST_KIND, HOST_KINDS, TO_HOST_KIND
from apportion.describe.ops.update import HOST_UPDATE_KIND
from apportion.graph import Graph, verify
from apportion.machine.cluster import cluster
from apportion.machine.host_links import host_link
from apportion.memory.capuchin import capuchin, swap_gaps
from apportion.memory.choose_memory import views_of
from apportion.memory.level_order import level_order
from apportion.memory.low_order import low_order
from apportion.memory.order_model import OrderModel
from apportion.memory.planned_graph import MemoryPlan, planned_graph
from apportion.memory.recompute import recompute
from apportion.memory.step_model import StepModel, step_model
from apportion.memory.tensorflowmem import partition, tensorflowmem
from apportion.memory.time_offloads import HostWay, time_offloads
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import PlanRequest
from apportion.plan.planned_memory import with_memory
from apportion.run.one_process import undivided

SMALL_GPT2 = "gpt2:layers={layers},width=256,heads=4,vocab=512,batch=4,seq=256"
WAY = HostWay(host_link(cluster("1xtitanx"), 0))


def step_of(start: Candidate) -> StepModel:
    where = cluster("1xtitanx")
    return step_model(start.space, start.tasks, start.timeline, 0, where, start.cost)


def larger(spec: str) -> tuple[PlanRequest, Candidate, OrderModel, StepModel]:
    """A step whose copies are not all shorter than a launch."""
    it = zoo.load(spec, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    request, start, orders = started(graph)
    return request, start, orders, step_of(start)


def test_chunks_are_an_order_and_make_what_they_may() -> None:
    _, _, orders = started(captured("mlp:tiny")[0].graph)
    order = orders.order_of(())
    assert partition(orders, order, 1 << 40).chunks == (tuple(level_order(orders)),)
    for budget in (1, 1 << 10, 1 << 12):
        parts = partition(orders, order, budget)
        assert orders.is_order([unit for chunk in parts.chunks for unit in chunk])
        for chunk in parts.chunks:
            made = sum(orders.nbytes[m] for unit in chunk for m in orders.makes[unit])
            assert made <= budget or len(chunk) == 1 or not made


@pytest.mark.slow
def test_each_pass_lowers_the_peak() -> None:
    request, start, orders, model = larger(
        "gpt2:layers=3,width=256,heads=4,vocab=512,batch=4,seq=256"
    )
    graph = request.space.source
    parts = partition(orders, low_order(graph, orders), start.timeline.peak_bytes[0] // 64)
    peaks = []
    for offloads, places in ((False, False), (True, False), (True, True)):
        plan = tensorflowmem(model, orders, WAY, 0, parts, offloads, places)
        assert bool(plan.offloaded) == offloads and bool(plan.host_state) == places
        found = with_memory(request, start, plan)
        peaks.append(found.timeline.peak_bytes[0])
        kinds = {op.kind for op in found.space.source.ops}
        assert (HOST_UPDATE_KIND in kinds) == places
        assert ({TO_HOST_KIND, FROM_HOST_KIND} <= kinds) == offloads
    assert peaks[0] <= orders.peak(level_order(orders))
    assert peaks[0] > 1.1 * peaks[1] and peaks[1] > 1.1 * peaks[2]
    loose = tensorflowmem(model, orders, WAY, start.timeline.peak_bytes[0], parts, True, False)
    assert not loose.offloaded


@pytest.mark.slow
def test_a_parameter_comes_one_chunk_before_it_is_read() -> None:
    """An ungated copy could begin when the step does, and all would lie there at once."""
    request, _, orders, model = larger("mlp:width=64,layers=12,batch=64")
    graph = request.space.source
    parts = partition(orders, low_order(graph, orders), 1 << 15)
    plan = tensorflowmem(model, orders, WAY, 0, parts, False, True)
    made = planned_graph(graph, plan).graph
    copies = [k for k, op in enumerate(made.ops) if op.kind == FROM_HOST_KIND]
    assert len(plan.host_state) >= 12 and len(copies) > len(plan.host_state)
    distances = [made.consumers[made.ops[op].outputs[0]][0] - op for op in copies]
    assert max(distances) < len(made.ops) / 4


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny", "wresnet:tiny"])
@pytest.mark.parametrize("share", [4, 64])
def test_it_trains_the_same(spec: str, share: int) -> None:
    program, _ = captured(spec)
    _, start, orders = started(program.graph)
    budget = start.timeline.peak_bytes[0] // share
    parts = partition(orders, low_order(program.graph, orders), budget)
    plan = tensorflowmem(step_of(start), orders, WAY, 0, parts)
    made = planned_graph(program.graph, plan)
    verify(made.graph)
    assert any(op.kind in HOST_KINDS for op in made.graph.ops)
    assert trains_the_same(program, made, undivided(made.graph), 1)


def offloading(graph: Graph, model: StepModel, wanted: int, recomputes: bool) -> MemoryPlan:
    found = capuchin(model, WAY, wanted, recomputes)
    again = recompute(graph, found.ops | views_of(graph, model.costs, found.values))
    repeats = tuple(sorted({again.origins[op] for op in again.repeats}))
    return MemoryPlan((), repeats, (), time_offloads(again, model.costs, WAY, found.values))


@pytest.mark.slow
def test_capuchin_hides_what_it_can_first() -> None:
    _, start, _, model = larger("mlp:width=512,layers=12,batch=4096")
    gaps = {gap.value: gap for gap in swap_gaps(model.graph, model.costs, WAY)}
    little = min(gap.nbytes for gap in gaps.values())
    first = capuchin(model, WAY, little).values
    assert len(first) == 1
    assert gaps[next(iter(first))].free == max(gap.free for gap in gaps.values())
    everything = capuchin(model, WAY, start.timeline.peak_bytes[0], False)
    assert everything.values == gaps.keys() and not everything.ops


@pytest.mark.slow
def test_capuchin_frees_more_the_more_is_wanted_and_trains_the_same() -> None:
    request, start, _, model = larger(SMALL_GPT2.format(layers=2))
    graph, peak = request.space.source, start.timeline.peak_bytes[0]
    for recomputes in (True, False):
        plans = [offloading(graph, model, int(share * peak), recomputes) for share in (0.1, 0.3, 1)]
        peaks = [with_memory(request, start, plan).timeline.peak_bytes[0] for plan in plans]
        assert all(a >= b for a, b in itertools.pairwise([peak, *peaks])) and peaks[-1] < 0.9 * peak
    program, _ = captured("gpt2:tiny")
    _, start, _ = started(program.graph)
    made = planned_graph(program.graph, offloading(program.graph, step_of(start), 1 << 40, True))
    assert trains_the_same(program, made, undivided(made.graph), 1)
