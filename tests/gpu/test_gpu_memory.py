"""On a GPU: steps that use the host train as plain PyTorch does, in float64, in every mode; copies
run beside what the device computes; and memory is what was predicted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.graph import FORWARD
from apportion.lower.runnable import runnable
from apportion.memory.host_state import DEVICE, HOST, HostState, parameters_on_host
from apportion.memory.offload import Offload
from apportion.memory.planned_graph import MemoryPlan, before_host, planned_graph
from apportion.memory.reorder import updates_early
from apportion.run.one_process import train_in_one_process, undivided
from apportion.run.planned_program import planned_bindings
from apportion.run.runner import Runner
from apportion.run.vary_batch import vary
from apportion.split.space import Space

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = 5


def double(spec: str) -> Program:
    it = zoo.load(spec, 0)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    return capture_as(program, torch.float64)


def drawn_plan(program: Program, rng: Random) -> MemoryPlan:
    """Anything on the host, copies anywhere."""
    graph = program.graph
    forward = [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]
    ops = tuple(op for op in forward if rng.random() < 0.3)
    order = updates_early(graph) if rng.random() < 0.7 else ()
    made = before_host(graph, MemoryPlan(order, ops)).graph
    count = len(made.ops)
    states = tuple(
        HostState(
            value, rng.choice((HOST, DEVICE)),
            tuple((op, rng.randrange(op + 1)) for op in made.consumers[value]),
            *(rng.randrange(count) for _ in range(3)),
        )
        for value in parameters_on_host(made) if rng.random() < 0.5
    )  # fmt: skip
    made = planned_graph(graph, MemoryPlan(order, ops, states)).graph
    count = len(made.ops)
    there = [
        value
        for op in made.ops
        if op.phase == FORWARD and op.kind.startswith("aten.") and rng.random() < 0.1
        for value in op.outputs
    ]
    away = tuple(Offload(v, *(rng.randrange(count) for _ in range(3))) for v in there)
    return MemoryPlan(order, ops, states, away)


@pytest.mark.parametrize("mode", ["none", "generated", "graph"])
@pytest.mark.parametrize("spec", ["gpt2:tiny", "wresnet:tiny"])
def test_random_plans_train_as_plain_pytorch(spec: str, mode: str) -> None:
    program = double(spec)
    for seed in range(3):
        plan = drawn_plan(program, Random(seed))
        made = planned_graph(program.graph, plan)
        bound = planned_bindings(program.bindings, made)
        planned = replace(program, graph=made.graph, bindings=bound)
        space, strategy = Space(made.graph), undivided(made.graph)
        tasks = runnable(space, strategy, 1)
        batches = [vary(program.batch, 0, k) for k in range(STEPS)]
        with torch.device("cpu"):
            plain = train_in_one_process(program, None, 1, batches, 0)
        mine = worker(Executable(space, strategy, tasks), 0, "cuda:0", mode)
        torch.set_default_dtype(torch.float64)
        try:
            runner = Runner(planned, mine)
            for batch in batches:
                runner.local_step(batch)
            found = mine.rank.state()
        finally:
            torch.set_default_dtype(torch.float32)
        if mode == "graph":
            recorder = mine.compiled().recorder
            assert recorder is not None and recorder.actions, mine.notes
        ends = {int(plain.tasks.slot_value[s]): torch.as_tensor(a) for s, a in plain.ranks[0].state}
        compared = 0
        for value, tensor in found.values():
            if value in ends:
                compared += 1
                far = (tensor.cpu() - ends[value]).abs().max() if tensor.numel() else 0.0
                scale = max(float(ends[value].abs().max()), 1e-3) if tensor.numel() else 1.0
                name = made.graph.values[value].name
                assert float(far) <= 1e-8 * scale, (seed, name, float(far))
        assert compared > 10
