"""Orders of a step: what they hold, and that the programme finds the lowest of all."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from recompute_graphs import drawn_graph

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute import fused_update
from apportion.graph import Graph
from apportion.machine.cluster import cluster
from apportion.memory.beam_order import beam_order
from apportion.memory.least_peak_order import least_peak_order
from apportion.memory.level_order import level_order
from apportion.memory.olla_order import olla_order
from apportion.memory.order_model import HELD_BYTES, OrderModel, order_model
from apportion.memory.planned_graph import MemoryPlan
from apportion.memory.reorder import updates_early
from apportion.memory.step_model import step_model
from apportion.plan.auto import choose
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import DefaultCosts, PlanRequest
from apportion.plan.planned_memory import with_memory
from apportion.split.space import Space


def started(graph: Graph) -> tuple[PlanRequest, Candidate, OrderModel]:
    where = cluster("1xtitanx")
    request = PlanRequest(Space(graph), where, DefaultCosts(where), None)
    start = choose(request, "single", 1.0).best
    step = step_model(start.space, start.tasks, start.timeline, 0, where, start.cost)
    made = order_model(step, start.tasks, start.timeline, 0, start.space.origins)
    return request, start, made


def random_order(model: OrderModel, rng: Random) -> list[int]:
    left = [len(row) for row in model.needs]
    ready = [unit for unit, count in enumerate(left) if not count]
    found = []
    while ready:
        found.append(ready.pop(rng.randrange(len(ready))))
        for unit in model.followers[found[-1]]:
            left[unit] -= 1
            if not left[unit]:
                ready.append(unit)
    return found


def test_held_gradients_are_those_of_ranks() -> None:
    assert HELD_BYTES == fused_update.HELD_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", pytest.param("gpt2:tiny", marks=pytest.mark.slow)])
def test_the_model_is_what_simulation_gives(spec: str) -> None:
    it = zoo.load(spec, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    request, start, model = started(graph)
    orders = [random_order(model, Random(seed)) for seed in range(3)]
    orders += [level_order(model), least_peak_order(model), model.order_of(updates_early(graph))]
    assert model.peak(model.order_of(())) == start.timeline.peak_bytes[0]
    for order in orders:
        assert model.is_order(order)
        found = with_memory(request, start, MemoryPlan(model.ops(order)))
        assert found.timeline.peak_bytes[0] == model.peak(order)


@pytest.mark.slow
def test_calls_of_several_operators_stay_together() -> None:
    it = zoo.load("wresnet:tiny", meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    request, start, model = started(graph)
    found = with_memory(request, start, MemoryPlan(model.ops(level_order(model))))
    assert max(map(len, model.units)) > 1
    calls = [sum(one.tasks.call >= 0) for one in (start, found)]
    assert calls[0] == calls[1]
    assert found.timeline.step_seconds == pytest.approx(start.timeline.step_seconds, rel=0.02)


def made_up(rng: Random) -> OrderModel:
    """Units that read and make memories at random."""
    count = rng.randrange(3, 9)
    needs = [
        tuple(sorted(rng.sample(range(unit), rng.randrange(min(unit, 3) + 1))))
        for unit in range(count)
    ]
    reads = [
        sorted({one for one in range(unit) if one in needs[unit] or rng.random() < 0.1})
        for unit in range(count)
    ]
    needs = [tuple(row) for row in reads]
    return OrderModel(
        units=tuple((unit,) for unit in range(count)),
        needs=tuple(needs),
        touches=tuple((*row, unit) for unit, row in enumerate(reads)),
        makes=tuple((unit,) for unit in range(count)),
        nbytes=tuple(rng.choice((1, 2, 5, 9, 20)) << 10 for _ in range(count)),
        begins=frozenset(),
        stays=frozenset(unit for unit in range(count) if rng.random() < 0.1),
        workspace=tuple(rng.choice((0, 0, 3, 8)) << 10 for _ in range(count)),
        updates=(0,) * count,
        base=rng.choice((0, 7)) << 10,
    )


def all_orders(model: OrderModel) -> Iterator[tuple[int, ...]]:
    def rest(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(model.units):
            yield done
        for unit in range(len(model.units)):
            if unit not in done and set(model.needs[unit]) <= set(done):
                yield from rest((*done, unit))

    return rest(())


@pytest.mark.parametrize("seed", range(20))
def test_the_programme_is_the_best_of_all_orders(seed: int) -> None:
    model = made_up(Random(seed))
    every = {model.peak(order) for order in all_orders(model)}
    found = olla_order(model, 20.0)
    assert found.order is not None and found.optimal
    assert model.is_order(found.order)
    assert model.peak(found.order) == min(every)
    assert found.bound <= min(every)
    assert model.peak(beam_order(model)) == min(every)  # no more sets than the beam is wide
    for order in (level_order(model), least_peak_order(model), beam_order(model, 1)):
        assert model.is_order(order) and min(every) <= model.peak(order) <= max(every)


def test_least_peak_first_by_hand() -> None:
    """Two chains of a large and a small memory, which end in nothing: each chain as a whole."""
    large, small = 100, 1
    model = OrderModel(
        units=((0,), (1,), (2,), (3,)),
        needs=((), (), (0,), (1,)),
        touches=((0,), (1,), (0, 2), (1, 3)),
        makes=((0,), (1,), (2,), (3,)),
        nbytes=(large, large, small, small),
        begins=frozenset(),
        stays=frozenset((2, 3)),
        workspace=(0,) * 4,
        updates=(0,) * 4,
        base=0,
    )
    assert level_order(model) == [0, 1, 2, 3]
    assert least_peak_order(model) == [0, 2, 1, 3]
    assert (model.peak([0, 1, 2, 3]), model.peak([0, 2, 1, 3])) == (201, 102)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (0, 3))
def test_orders_of_a_step_and_the_programme(seed: int) -> None:
    _, _, model = started(drawn_graph(seed))
    peaks = [model.peak(order) for order in (level_order(model), least_peak_order(model))]
    found = olla_order(model, 20.0, min(peaks))
    assert found.bound <= min(peaks)
    if found.order is not None and found.optimal:
        assert model.peak(found.order) <= min(peaks)
