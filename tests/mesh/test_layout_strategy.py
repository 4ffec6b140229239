"""Layouts become plans that train as one device does, hold what they should, and move what FSDP
moves."""

from __future__ import annotations

from functools import cache

import pytest

import apportion as ap
from apportion import zoo
from apportion.capture.program import Program
from apportion.graph import OPTIMIZER_STATE, PARAMETER
from apportion.mesh.layout_of_plan import layout_of_plan
from apportion.mesh.mesh_layout import MeshLayout, ParameterPlacement
from apportion.mesh.plan_layout import plan_layout
from apportion.plan.given_strategy import plan_strategy
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.one_process import train_in_one_process
from apportion.run.planned_program import planned_program
from apportion.search.baselines.fsdp import fsdp

GPT2, LLAMA = "gpt2:tiny,dropout=0,batch=8,heads=4,vocab=40", "llama:tiny"
TRAINED = [(GPT2, (1, 2, 2)), (GPT2, (2, 2, 1)), (LLAMA, (1, 2, 2)), (LLAMA, (2, 1, 2))]
MESHES = [((4, 1, 1), True), ((1, 4, 1), True), ((2, 2, 1), False), ((1, 2, 2), True)]


@cache
def captured(spec: str) -> Program:
    it = zoo.load(spec)
    return ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)


def planned(spec: str, layout: MeshLayout) -> Plan:
    return plan_layout(captured(spec), ap.cluster(f"local:{layout.devices}"), layout)


def losses(spec: str, plan: Plan | None) -> list[float]:
    program, strategy, devices = captured(spec), None, 1
    if plan is not None:
        program, strategy = planned_program(program, plan), plan.strategy
        devices = len(plan.cluster.devices)
    batches = [program.batch] * 2
    done = train_in_one_process(program, strategy, devices, batches, 0, wide=True)
    return [float(loss or 0.0) for loss in done.ranks[0].losses]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "mesh"), TRAINED, ids=str)
def test_layouts_train_as_one_device_does(spec: str, mesh: tuple[int, int, int]) -> None:
    plan = planned(spec, MeshLayout(*mesh))
    assert losses(spec, plan) == pytest.approx(losses(spec, None), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "reshard"), MESHES, ids=str)
def test_an_exported_layout_imports_as_the_same_plan(
    mesh: tuple[int, int, int], reshard: bool
) -> None:
    plan = planned(LLAMA, MeshLayout(*mesh, reshard=reshard, checkpoint=("blocks.*",)))
    assert plan.recomputed
    layout = layout_of_plan(captured(LLAMA).graph, plan)
    assert (layout.replicate, layout.shard, layout.tensor) == mesh
    assert layout.reshard == reshard or layout.shard == 1
    assert layout.checkpoint == ("blocks.0", "blocks.1")
    again = planned(LLAMA, layout)
    assert again.predicted == plan.predicted
    assert again.strategy == plan.strategy


@pytest.mark.slow
def test_fsdp_moves_two_gathers_and_a_scatter_of_all_parameters() -> None:
    graph = captured(LLAMA).graph
    plan = planned(LLAMA, MeshLayout(shard=2))
    whole = sum(v.nbytes for k, v in enumerate(graph.values)
                if v.role == PARAMETER and graph.producer[k] is None)  # fmt: skip
    forward_only = graph.values[0].nbytes  # rows of the embedding are only read by the forward
    assert graph.values[0].name == "tokens.weight"
    assert plan.predicted.bytes_moved == pytest.approx(3 * whole - forward_only, abs=16)
    kept = planned(LLAMA, MeshLayout(shard=2, reshard=False))
    assert kept.predicted.bytes_moved == pytest.approx(2 * whole, abs=16)


@pytest.mark.slow
def test_shards_and_tensor_ranks_divide_state() -> None:
    plan = planned(LLAMA, MeshLayout(shard=2, tensor=2))
    graph, tasks = plan.space.graph, plan.tasks
    held = {
        graph.values[before].name: None
        for before, _ in graph.state
        if graph.values[before].role in (PARAMETER, OPTIMIZER_STATE)
    }
    assert held and tasks.devices == 4
    layout = layout_of_plan(captured(LLAMA).graph, plan)
    placements = layout.placements or {}
    assert placements["blocks.0.attn.query.weight"] == ParameterPlacement(0, 0)
    assert placements["blocks.0.attn.proj.weight"].tensor == 1
    assert placements["blocks.0.norm1.weight"].tensor is None


@pytest.mark.slow
def test_placements_of_ones_own_are_taken() -> None:
    own = MeshLayout(tensor=2, placements={
        "blocks.*.mlp.gate.weight": ParameterPlacement(tensor=0),
        "blocks.*.mlp.up.weight": ParameterPlacement(tensor=0),
        "blocks.*.mlp.proj.weight": ParameterPlacement(tensor=1),
    })  # fmt: skip
    plan = planned(LLAMA, own)
    found = layout_of_plan(captured(LLAMA).graph, plan).placements or {}
    assert found["blocks.1.mlp.gate.weight"].tensor == 0
    assert found["blocks.1.mlp.proj.weight"].tensor == 1
    assert found["blocks.1.attn.query.weight"].tensor is None
    usual = planned(LLAMA, MeshLayout(tensor=2))
    assert plan.strategy != usual.strategy


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tofu", "op-placement"])
def test_what_a_mesh_cannot_say_is_refused_by_name(method: str) -> None:
    program = captured(LLAMA)
    plan = make_plan(program, ap.cluster("local:4"), method, budget=5.0)
    with pytest.raises(ValueError, match=r"operator '[\w.#]+'"):
        layout_of_plan(program.graph, plan)


@pytest.mark.slow
def test_a_part_of_a_module_cannot_be_checkpointed() -> None:
    graph = captured(LLAMA).graph
    silu = next(k for k, op in enumerate(graph.ops) if op.kind == "aten.silu.default")
    plan = plan_strategy(graph, ap.cluster("local:2"), "fsdp", fsdp, recomputed=[silu])
    assert plan.recomputed == (silu,)
    with pytest.raises(ValueError, match=rf"operator '{graph.ops[silu].name}' of module"):
        layout_of_plan(graph, plan)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (MeshLayout(shard=2, placements={"heads.weight": ParameterPlacement(0)}), "heads.weight"),
        (MeshLayout(shard=2, placements={"head.weight": ParameterPlacement(2)}), "2 dimensions"),
        (MeshLayout(shard=2, checkpoint=("layers.*",)), "layers"),
        (MeshLayout(tensor=16), "too few for 16"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: MeshLayout, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_layout(captured(LLAMA), ap.cluster(f"local:{layout.devices}"), layout)
