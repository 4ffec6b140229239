"""What a step holds with fusion: results that stay in a kernel take no room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from chain_plan import chain_plan

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import FORWARD
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import with_storage
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.plan.candidates import DefaultCosts
from apportion.plan.fused_storage import MARGIN, _padded, fused_storage
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.simulate.fusion import unwritten_slots
from apportion.simulate.segments import SEGMENT_PAGES

ROWS, WIDTH = 4096, 256


@pytest.fixture(scope="module")
def plan() -> Plan:
    return chain_plan(ROWS, WIDTH)


def test_what_stays_in_a_kernel_takes_no_room(plan: Plan) -> None:
    inside = unwritten_slots(plan.tasks)
    made = [plan.tasks.works[plan.tasks.work[t]] for t in plan.tasks.slot_first[inside]]
    assert any(work.startswith("aten.mul.Tensor(") for work in made)
    assert not any(work.startswith(("aten.mm", "apportion.update")) for work in made)
    cost = default_cost(plan.cluster, "inductor")
    bare = runnable(plan.space, plan.strategy, 1)
    found = with_storage(bare, fused_storage(bare, plan.storage, plan.cluster, cost))
    assert (found.slot_nbytes[inside] == 0).all()
    assert (found.slot_nbytes[~inside] == plan.tasks.slot_nbytes[~inside]).all()


def test_a_margin_is_added(plan: Plan) -> None:
    where = plan.cluster
    fused = make_plan(plan.graph, where, "single", costs=DefaultCosts(where, mode="inductor"))
    asked = plan.tasks.slot_nbytes[plan.tasks.slot_first < 0].sum()
    assert fused.predicted.peak_bytes[0] > (1 + MARGIN) * asked + sum(SEGMENT_PAGES)
    assert fused.cost.mode == "inductor" and plan.cost.mode == "generated"


def test_odd_products_in_half_precision_are_padded(plan: Plan) -> None:
    tasks = plan.tasks
    assert not _padded(tasks).any()
    product = next(k for k, w in enumerate(tasks.works) if w.startswith("aten.mm"))
    works = list(tasks.works)
    works[product] = "aten.mm.default(bfloat16[4096,257] bfloat16[257,256]) #0"
    padded = _padded(replace(tasks, works=tuple(works)))
    assert (padded > 0).tolist() == (tasks.work == product).tolist()
    twice = 2 * ROWS * WIDTH * 4  # what it reads and what it makes
    assert padded.max() == twice + max(SEGMENT_PAGES)
    assert np.issubdtype(padded.dtype, np.integer)


def test_the_interpreter_updates_beside_the_old_state(plan: Plan) -> None:
    where = plan.cluster
    plain = make_plan(plan.graph, where, "single", costs=DefaultCosts(where, mode="none"))
    assert plain.predicted.peak_bytes[0] >= plan.predicted.peak_bytes[0]
    assert plain.storage.slots != plan.storage.slots


def _written_softmax(spec: str, pieces_of: Callable[[Plan], list[list[int]]]) -> list[int]:
    """Bytes of the logarithmic softmaxes of a step, in memory with fusion."""
    it = zoo.load(spec, 0, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    made = make_plan(program.graph, cluster("1xh200"), "single")
    bare = runnable(made.space, made.strategy, 1)
    cost = default_cost(made.cluster, "inductor")
    storage = fused_storage(bare, made.storage, made.cluster, cost, pieces_of(made))
    found = with_storage(bare, storage)
    values = made.space.graph.values
    names = [values[v].name for v in found.slot_value.tolist()]
    softmax = [
        k
        for k, name in enumerate(names)
        if name.startswith("log_softmax") and "backward" not in name
    ]
    assert softmax and (made.tasks.slot_nbytes[softmax] > 0).all()
    sizes: list[int] = found.slot_nbytes[softmax].tolist()
    return sizes


@pytest.mark.slow
def test_a_softmax_of_logits_in_another_precision_is_not_written() -> None:
    assert _written_softmax("gpt2:tiny,precision=bf16-mixed", lambda made: []) == [0]


@pytest.mark.slow
def test_a_softmax_is_written_for_a_backward_that_is_compiled_by_itself() -> None:
    def at_the_loss(made: Plan) -> list[list[int]]:
        backward = [made.graph.ops[op].phase != FORWARD for op in made.tasks.op.tolist()]
        first = backward.index(True)
        return [list(range(first)), list(range(first, len(made.tasks)))]

    (written,) = _written_softmax("gpt2:tiny,precision=bf16-mixed", at_the_loss)
    assert written > 0
