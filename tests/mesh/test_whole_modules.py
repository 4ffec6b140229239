"""Recomputation by whole modules: it keeps what modules hand on, takes as few as suffice, and is
what checkpointed modules of a layout say."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest

import apportion as ap
from apportion import zoo
from apportion.capture.program import Program
from apportion.memory.choose_modules import choose_modules
from apportion.memory.choose_recompute import RecomputeOutcome
from apportion.memory.step_model import StepModel
from apportion.memory.whole_modules import inside_modules, modules_of
from apportion.mesh.layout_of_plan import layout_of_plan
from apportion.mesh.mesh_layout import MeshLayout
from apportion.mesh.plan_layout import plan_layout
from apportion.mesh.program_text import check_program
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan

LLAMA = "llama:tiny,layers=6,batch=16"
GPT2 = "gpt2:tiny,layers=3,batch=16,dropout=0"
HF = (
    "hf:llama,hidden_size=16,intermediate_size=32,num_hidden_layers=3,num_attention_heads=4,"
    "num_key_value_heads=2,vocab_size=32"
)
BLOCKS = [f"blocks.{number}" for number in range(6)]


@cache
def captured(spec: str) -> Program:
    it = zoo.load(spec, meta=True)
    return ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)


@cache
def checkpointed(count: int) -> Plan:
    layout = MeshLayout(shard=2, checkpoint=tuple(BLOCKS[:count]))
    return plan_layout(captured(LLAMA), ap.cluster("2xh100"), layout)


def peak(plan: Plan) -> int:
    return max(plan.predicted.peak_bytes)


@pytest.mark.slow
def test_what_a_module_hands_on_is_kept() -> None:
    """Else every module would wait for all before it, and checkpoints would save nothing."""
    graph = captured(LLAMA).graph
    inside = set(inside_modules(graph, BLOCKS))
    forward = [op for k, op in enumerate(graph.ops) if op.phase == "forward" and k not in inside]
    left = [op for op in forward if op.module.startswith("blocks.")]
    assert [op.module for op in left] == BLOCKS
    assert {op.kind for op in left} == {"aten.add.Tensor"}
    assert "blocks" in modules_of(graph) and set(inside_modules(graph, ["blocks"])) > inside
    held = [peak(checkpointed(count)) for count in range(7)]
    assert held == sorted(held, reverse=True) and held[6] < 0.6 * held[0]


@pytest.mark.slow
@pytest.mark.parametrize("fitting", [1, 3])
def test_as_few_modules_as_suffice(fitting: int) -> None:
    limit = peak(checkpointed(fitting))
    step, place = captured(LLAMA), ap.cluster("2xh100")
    made = make_plan(step, place, "fsdp", 1.0, limit, recompute="modules")
    assert made.feasible and made.recomputed == checkpointed(fitting).recomputed
    assert layout_of_plan(step.graph, made).checkpoint == tuple(BLOCKS[:fitting])


@pytest.mark.slow
def test_a_limit_that_all_modules_do_not_meet() -> None:
    limit = peak(checkpointed(6)) - 1
    step, place = captured(LLAMA), ap.cluster("2xh100")
    made = make_plan(step, place, "fsdp", 1.0, limit, recompute="modules")
    assert not made.feasible and peak(made) == peak(checkpointed(6))


@pytest.mark.slow
@pytest.mark.parametrize(("needed", "wrong"), [(1, 9), (2, 0), (3, -3), (4, 2), (5, 9), (6, -3)])
def test_a_model_that_is_wrong_costs_simulations_only(needed: int, wrong: int) -> None:
    """By the model each module saves one of ten bytes; really as many more or less are needed."""
    graph = captured(LLAMA).graph

    def modules(ops: frozenset[int]) -> int:
        return len({graph.ops[op].module.split(".")[1] for op in ops})

    def run(ops: frozenset[int]) -> RecomputeOutcome:
        return RecomputeOutcome(needed - modules(ops), float(modules(ops)))

    def of(ops: frozenset[int]) -> SimpleNamespace:
        return SimpleNamespace(peak=10 + wrong - modules(ops) if ops else 10)

    model = cast(StepModel, SimpleNamespace(graph=graph, of=of))
    found = choose_modules(model, RecomputeOutcome(needed, 0.0), run)
    assert modules(found.ops) == needed and found.outcome == RecomputeOutcome(0, float(needed))
    assert found.simulated <= 5
    late = choose_modules(model, RecomputeOutcome(needed, 0.0), run, lambda: True)
    assert (modules(late.ops), late.simulated) == (6, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "first"), [(GPT2, "blocks.0"), (HF, "model.layers.0")])
def test_plans_by_modules_are_exported(spec: str, first: str) -> None:
    step, place = captured(spec), ap.cluster("local:2")
    limit = peak(make_plan(step, place, "fsdp", 1.0)) - 1
    made = make_plan(step, place, "fsdp", 1.0, limit, recompute="modules")
    layout = layout_of_plan(step.graph, made)
    assert made.feasible and layout.checkpoint == (first,)
    check_program(step, made, layout)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "full"])
def test_what_follows_no_modules_is_named_with_what_to_do(mode: str) -> None:
    step, place = captured(LLAMA), ap.cluster("2xh100")
    made = make_plan(step, place, "fsdp", 1.0, 0.7 * peak(checkpointed(0)), recompute=mode)
    says = r"operator '[\w.#]+' of module '[\w.]+' is .* plan it again with --recompute modules"
    with pytest.raises(ValueError, match=says):
        layout_of_plan(step.graph, made)


def test_modules_are_decided_alone() -> None:
    step, place = captured("mlp:tiny"), ap.cluster("2xh100")
    with pytest.raises(ValueError, match="leave --offload, --host-state and pins out"):
        make_plan(step, place, "data", 0.0, recompute="modules", offload="auto")
