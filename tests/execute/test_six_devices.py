"""Six devices divide neither 64 samples, nor 1,024 features, nor seven heads: nothing that is work
may run replicated for that."""

from __future__ import annotations

import pytest
from compare_runs import compare
from graphs import captured

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import Graph
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.split.space import Space
from apportion.split.strategy import Strategy, space_of, unsplit_choice

DEVICES = 6
MLP = "mlp:layers=2,batch=64,width=1024"
HEADS = "gpt2:tiny,heads=7,width=56"
LARGE = "gpt2:layers=2,heads=7,width=1792,batch=64,seq=256,vocab=8192"
MUCH = 0.01  # of all floating-point operations


def work(space: Space, op: int) -> float:
    """Floating-point operations of an Op."""
    return space.split(op, (1,) * len(space.axes(op))).parts[0].flops


def replicated(space: Space, strategy: Strategy) -> dict[str, float]:
    """Ops that several devices do whole, each with its share of all operations."""
    total = sum(work(space, op) for op in range(len(strategy.choices)))
    return {
        space.graph.ops[op].name: work(space, op) / total
        for op, choice in enumerate(strategy.choices)
        if choice.count == 1 and choice.replicas > 1
    }


def extra_work(space: Space, strategy: Strategy) -> float:
    """What all devices do beyond what one alone would, as a share of that."""
    done = sum(
        choice.replicas * sum(part.flops for part in space.split(op, choice.parts).parts)
        for op, choice in enumerate(strategy.choices)
    )
    return done / sum(work(space, op) for op in range(len(strategy.choices))) - 1


def planned(graph: Graph, machine: str, method: str) -> Plan:
    return make_plan(graph, cluster(machine), method, budget=6.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tofu", "auto"])
@pytest.mark.parametrize("spec", [MLP, HEADS])
def test_no_work_is_replicated_and_the_model_is_the_same(spec: str, method: str) -> None:
    program, _ = captured(spec)
    made = planned(program.graph, f"local:{DEVICES}", method)
    strategy, space = made.strategy, space_of(program.graph, made.strategy)
    assert max(replicated(space, strategy).values(), default=0.0) < MUCH
    assert extra_work(space, strategy) < MUCH
    used = {device for choice in strategy.choices for device in choice.devices}
    if method == "tofu" or spec == MLP:  # a tiny step is faster on one device
        assert used == set(range(DEVICES))
    found = compare(program, space, strategy, DEVICES)
    assert found.equal, found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tofu", "auto"])
def test_a_step_that_is_worth_it_uses_all_six(method: str) -> None:
    it = zoo.load(LARGE, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph
    made = planned(graph, f"p2.8xlarge:{DEVICES}", method)
    space = space_of(graph, made.strategy)
    assert max(replicated(space, made.strategy).values(), default=0.0) < MUCH
    shares = [0.0] * DEVICES
    for op, choice in enumerate(made.strategy.choices):
        parts = space.split(op, choice.parts).parts
        for device, part in zip(choice.devices, parts * choice.replicas, strict=True):
            shares[device] += part.flops
    assert max(shares) < 1.25 * sum(shares) / DEVICES


@pytest.mark.slow
def test_what_is_replicated_is_found() -> None:
    """The measure itself: everything everywhere is all of the work, six times."""
    space = captured(HEADS)[1]
    everywhere = [unsplit_choice(space, op, range(DEVICES)) for op in range(len(space.graph.ops))]
    assert sum(replicated(space, Strategy(tuple(everywhere))).values()) == pytest.approx(1)
    assert extra_work(space, Strategy(tuple(everywhere))) == pytest.approx(DEVICES - 1)
