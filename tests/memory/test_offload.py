"""Offloaded Values: any set of them leaves every result as it is, divided or not, and copies take
the time of a link beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare_runs import REFERENCE, compare
from graphs import captured, problem
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.describe.ops.host import FROM_HOST_KIND, HOST_KINDS, ON_HOST_KIND, TO_HOST_KIND
from apportion.graph import BACKWARD, FORWARD, Graph, from_json, to_json, verify
from apportion.lower.lower import lower
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph
from apportion.lower.task_graph import verify as verify_tasks
from apportion.lower.task_kinds import COMPUTE, FROM_HOST, TO_HOST
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.machine.host_links import host_link
from apportion.memory.carry_strategy import carry_strategy
from apportion.memory.offload import Offload, offload
from apportion.memory.recompute import recompute
from apportion.memory.rewritten_graph import RewrittenGraph
from apportion.run.one_process import undivided
from apportion.search import METHODS
from apportion.search.baselines.random_strategy import draw
from apportion.simulate.host_bytes import host_excess, host_peaks
from apportion.simulate.simulate import simulate
from apportion.split.open_composites import composites
from apportion.split.space import Space
from apportion.split.strategy import Strategy, verify_strategy


class Net(nn.Module):
    """Dropout and batch norm among what is kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.dropout(torch.tanh(self.norm(self.first(x))), 0.5))
        return found


def small() -> Program:
    torch.manual_seed(0)
    model = Net().double()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) ** 2).mean()
        return found

    batch = torch.randn(12, 6, dtype=torch.float64)
    return capture(step, model, torch.optim.AdamW(model.parameters(), lr=0.01), batch)


def made_by_forward(graph: Graph) -> list[int]:
    return [
        value
        for value, made in enumerate(graph.producer)
        if made is not None and graph.ops[made[0]].phase == FORWARD
    ]


def drawn(graph: Graph, values: Iterable[int], share: float, rng: Random) -> list[Offload]:
    """Some Values, which go and come back anywhere."""
    count = len(graph.ops)
    chosen = [value for value in values if rng.random() < share]
    return [Offload(v, rng.randrange(count + 1), rng.randrange(count + 1)) for v in chosen]


def trains_the_same(
    program: Program, made: RewrittenGraph, strategy: Strategy, devices: int, seed: int = 0
) -> bool:
    again = replace(program, graph=made.graph)
    REFERENCE.borrow(again, program, seed)
    space = Space(made.graph, strategy.digits, strategy.opening)
    verify_strategy(space, strategy, devices)
    found = compare(
        again, space, strategy, devices, seed=seed, corrupt=lambda task, message: message
    )
    return bool(found.equal)


# The Graph


def test_nothing_offloaded_is_the_same_graph() -> None:
    graph = small().graph
    assert offload(graph, ()).graph is graph


def test_later_readers_read_what_was_to_the_host_and_back() -> None:
    graph = small().graph
    values = made_by_forward(graph)
    made = offload(graph, [Offload(v, 0, len(graph.ops)) for v in values]).graph
    verify(made)
    assert made.fingerprint != graph.fingerprint
    assert from_json(to_json(made)).fingerprint == made.fingerprint
    assert made.values[: len(graph.values)] == graph.values
    assert (made.state, made.loss) == (graph.state, graph.loss)
    kinds = [op.kind for op in made.ops]
    assert kinds.count(TO_HOST_KIND) == kinds.count(ON_HOST_KIND) == kinds.count(FROM_HOST_KIND) > 3
    for op in made.ops:
        if op.phase != FORWARD and op.kind not in HOST_KINDS:
            assert set(values).isdisjoint(op.inputs), op.name
    assert [op for op in made.ops if op.kind not in HOST_KINDS and op.phase == FORWARD] == [
        op for op in graph.ops if op.phase == FORWARD
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_value_goes_after_its_readers_and_is_back_before_the_first(seed: int) -> None:
    graph, rng = small().graph, Random(seed)
    made = offload(graph, drawn(graph, made_by_forward(graph), 0.8, rng))
    verify(made.graph)
    place = {op.outputs[0]: k for k, op in enumerate(made.graph.ops) if op.kind in HOST_KINDS}
    for k, op in enumerate(made.graph.ops):
        if op.kind == TO_HOST_KIND:
            producer = made.graph.producer[op.inputs[0]]
            assert producer is not None
            between = made.graph.ops[producer[0] + 1 : k]
            assert all(other.kind in HOST_KINDS for other in between)
        elif op.kind == ON_HOST_KIND:
            value, host = op.inputs
            early = [r for r in made.graph.consumers[value] if r != k]
            assert max(early) < k and place[host] < k
            assert all(made.graph.ops[r].phase == FORWARD for r in early)
        elif op.kind == FROM_HOST_KIND:
            assert k < min(made.graph.consumers[op.outputs[0]])


def test_what_cannot_be_offloaded_is_refused() -> None:
    graph = small().graph
    with pytest.raises(ValueError, match="there is no value"):
        offload(graph, [Offload(len(graph.values), 0, 0)])
    parameter = next(v for v, made in enumerate(graph.producer) if made is None)
    late = next(op.outputs[0] for op in graph.ops if op.phase == BACKWARD)
    for value in (parameter, late):
        with pytest.raises(ValueError, match="is not made by the forward"):
            offload(graph, [Offload(value, 0, 0)])
    twice = Offload(made_by_forward(graph)[0], 0, 0)
    with pytest.raises(ValueError, match="offloaded twice"):
        offload(graph, [twice, twice])


# Results


@pytest.mark.parametrize("seed", range(4))
def test_dropout_and_batch_norm_on_one_device(seed: int) -> None:
    program, rng = small(), Random(seed)
    made = offload(program.graph, drawn(program.graph, made_by_forward(program.graph), 0.7, rng))
    assert trains_the_same(program, made, undivided(made.graph), 1)


@pytest.mark.parametrize(("devices", "seed"), [(1, 0), (2, 1), (2, 2), (3, 3)])
def test_random_strategies_with_recomputation(devices: int, seed: int) -> None:
    program, rng = small(), Random(seed)
    carried_to_recomputed_and_offloaded(program, Space(program.graph), devices, rng, seed)


def carried_to_recomputed_and_offloaded(
    program: Program, space: Space, devices: int, rng: Random, seed: int, method: Any = None
) -> None:
    graph = program.graph
    ops = [k for k, op in enumerate(graph.ops) if op.phase == FORWARD and rng.random() < 0.4]
    again = recompute(graph, ops)
    made = offload(again.graph, drawn(again.graph, made_by_forward(graph), 0.6, rng))
    strategy = draw(space, devices, rng) if method is None else method
    strategy = carry_strategy(strategy, space, again)
    strategy = carry_strategy(strategy, Space(again.graph), made)
    assert trains_the_same(program, made, strategy, devices, seed)


@pytest.mark.slow
def test_opened_composites_carry_over() -> None:
    program, space = captured("gpt2:tiny")
    rng, graph = Random(5), program.graph
    strategy = draw(Space(graph, (), composites(graph)), 2, rng)
    made = offload(graph, drawn(graph, made_by_forward(graph), 0.3, rng))
    carried = carry_strategy(strategy, space, made)
    assert len(carried.opening) == len(strategy.opening) > 0
    assert trains_the_same(program, made, carried, 2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny", "wresnet:tiny"])
@pytest.mark.parametrize("method", ["data", "tofu", None])
def test_models_with_recomputation(spec: str, method: str | None) -> None:
    program, space = captured(spec)
    strategy = None if method is None else METHODS[method](problem(2, spec), budget=1.0).strategy
    carried_to_recomputed_and_offloaded(program, space, 2, Random(1), 0, strategy)


@pytest.mark.parametrize("method", ["data", "tofu"])
def test_copies_lie_where_the_value_lies_and_move_nothing(method: str) -> None:
    _, space = captured("mlp:tiny")
    strategy = METHODS[method](problem(2, "mlp:tiny"), budget=1.0).strategy
    graph, split = space.source, Space(space.source, strategy.digits, strategy.opening)
    terms = {
        value: split.split(op, strategy.choices[op].parts).terms[0]
        for value in made_by_forward(graph)
        for op in [made_op(graph, value)]
    }
    whole = [value for value, count in terms.items() if count == 1]  # a sum is added up first
    made = offload(graph, [Offload(v, 0, len(graph.ops)) for v in whole])
    carried = carry_strategy(strategy, space, made)
    after = lower(Space(made.graph, carried.digits, carried.opening), carried, 2)
    copies = after.op[np.isin(after.kind, (TO_HOST, FROM_HOST))]
    moving = after.op[after.is_message]
    assert len(copies) and np.intersect1d(copies, moving).size == 0


def made_op(graph: Graph, value: int) -> int:
    made = graph.producer[value]
    assert made is not None
    return made[0]


# Time and memory


def chain(layers: int = 6, rows: int = 4096, width: int = 1024) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh())
                            for _ in range(layers)])  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().mean()
        return found

    return capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1),
                   torch.empty(rows, width))  # fmt: skip


def lowered(made: Graph, devices: int = 1) -> TaskGraph:
    tasks = runnable(Space(made), undivided(made), devices)
    verify_tasks(tasks)
    return tasks


def kept_by_chain(graph: Graph) -> list[int]:
    """What tanh makes, which the backward of it and of the next product read."""
    return [op.outputs[0] for op in graph.ops if op.kind.startswith("aten.tanh.")]


@pytest.mark.slow
def test_copies_run_beside_what_the_device_computes_and_memory_is_the_hosts() -> None:
    graph, here = chain().graph, cluster("1xh100")
    cost, values = default_cost(here), kept_by_chain(graph)[:3]
    size = graph.values[values[0]].nbytes
    end = len(graph.ops)
    late = [Offload(v, end, end) for v in values]  # nobody waits for a copy to the host
    kept, away = (lowered(g) for g in (graph, offload(graph, late).graph))
    line, before = simulate(away, here, cost), simulate(kept, here, cost)
    out = np.flatnonzero(away.kind == TO_HOST)
    took = (line.end_ns - line.start_ns)[out] / 1e9
    link = host_link(here, 0)
    assert took == pytest.approx(link.latency + size / link.bandwidth, rel=1e-6)
    computes = np.flatnonzero(away.kind == COMPUTE)
    for copy in out:
        inside = (line.start_ns[computes] < line.end_ns[copy]) & (
            line.end_ns[computes] > line.start_ns[copy]
        )
        assert inside.sum() > 1, "nothing is computed while it copies"
    assert (line.start_ns[out][1:] >= line.end_ns[out][:-1]).all(), "a lane does one at a time"
    assert host_peaks(away) == (3 * size,) and host_peaks(kept) == (0,)
    assert not host_excess(away, here)
    soon = [Offload(v, 0, end) for v in values]  # waits at once, and the memory is free at once
    tight = simulate(lowered(offload(graph, soon).graph), here, cost)
    assert tight.peak_bytes[0] <= before.peak_bytes[0] - 2 * size
    assert tight.step_seconds > before.step_seconds


def test_what_comes_back_begins_no_sooner_than_the_order_says() -> None:
    graph, here = chain().graph, cluster("1xh100")
    value, end = kept_by_chain(graph)[0], len(graph.ops)
    for back in range(end // 2, end, 5):
        tasks = lowered(offload(graph, [Offload(value, 0, back)]).graph)
        line = simulate(tasks, here, default_cost(here))
        (copy,) = np.flatnonzero(tasks.kind == FROM_HOST)
        before = np.flatnonzero((tasks.kind == COMPUTE) & (np.arange(len(tasks)) < copy))
        assert line.start_ns[copy] >= line.end_ns[before].max()


def test_copies_that_burn_the_device_are_paid_in_full() -> None:
    graph, here = chain(3, 64, 64).graph, cluster("local:1")
    end, cost = len(graph.ops), default_cost(here)
    made = offload(graph, [Offload(v, end, end) for v in kept_by_chain(graph)]).graph
    tasks = lowered(made)
    line = simulate(tasks, here, cost)
    order = np.argsort(line.start_ns, kind="stable")
    assert (line.start_ns[order][1:] >= line.end_ns[order][:-1]).all()
    assert line.busy[0] == pytest.approx(1.0)


def test_devices_share_the_link_of_their_host() -> None:
    alone, shared = cluster("p2.8xlarge:1"), cluster("p2.8xlarge")
    assert host_link(alone, 0).bandwidth == pytest.approx(10e9)
    assert host_link(shared, 3).bandwidth == pytest.approx(10e9 / 8)
    assert host_link(cluster("8xh100"), 0).bandwidth == pytest.approx(63e9)  # its own is slower
    unknown = host_link(cluster("1xk80"), 0)
    assert unknown.bandwidth > 0 and "assumed" in unknown.provenance
