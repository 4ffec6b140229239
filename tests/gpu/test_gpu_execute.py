"""A plan for one device runs on a GPU and leaves what plain PyTorch leaves on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.reference import capture_as, eager_steps
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    Context,
    kernel,
)
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.calibrate_cuda import runner_on
from apportion.run.check_run import PER_STEP, RELATIVE
from apportion.run.training import vary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = 2


@pytest.mark.parametrize("method", ["single", "random"])
@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "llama", "resnet50", "inception-v3", "rnn", "nmt", "transformer-moe"]
)
def test_a_step_on_a_gpu_is_that_of_pytorch(name: str, method: str) -> None:
    it = zoo.load(f"{name}:tiny", 0)
    program = capture_as(capture(it.step, it.model, it.optimizer, it.batch), torch.float64)
    made = make_plan(program.graph, cluster("1xh200"), method, seed=1)
    batches = [vary(program.batch, 0, k) for k in range(STEPS)]
    losses, state = eager_steps(program, batches, 0)
    executable = Executable(made.space, made.strategy, made.tasks)
    runner = runner_on(program, executable)
    ours = [float(runner.step(batch)) for batch in batches]
    assert ours == pytest.approx(losses, rel=RELATIVE)
    rate = max(float(group["lr"]) for group in program.optimizer.param_groups)
    compared = 0
    for value, tensor in runner.worker.rank.state().values():
        assert tensor.is_cuda
        true = state.get(value)
        if true is None or true.shape != tensor.shape or not true.numel():
            continue  # a region of it
        compared += 1
        slack = RELATIVE * float(true.abs().max()) + PER_STEP * rate * STEPS
        assert float((tensor.cpu() - true).abs().max()) <= slack
    assert compared


def attention(kind: torch.dtype, place: str, **shape: Any) -> list[torch.Tensor]:
    """Results and gradients of attention on a device, from the same random numbers."""
    generator = torch.Generator().manual_seed(5)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(place, kind)

    heads, queries, keys, own = shape["heads"], shape["queries"], shape["keys"], shape["own"]
    q, grad = draw(2, heads, queries, 16), draw(2, heads, queries, 16)
    k, v = draw(2, own, keys, 16), draw(2, own, keys, 16)
    mask = draw(2, 1, queries, keys) if shape["mask"] else None
    context = Context(0, 0, float, device=place)
    rest = (shape["causal"], mask, None, *shape["start"])
    out, lse = kernel("apportion.sdpa")(context, (q, k, v, 0.0, *rest))
    back = kernel("apportion.sdpa_backward")(context, (grad, q, k, v, out, lse, 0.0, *rest))
    return [x.cpu().double() for x in (out, lse, *back)]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("own", [4, 2])
@pytest.mark.parametrize(
    ("causal", "mask", "start"),
    [(False, False, ()), (True, False, ()), (False, True, ()), (True, False, (8, 0))],
)
def test_attention_is_that_of_a_cpu(
    kind: torch.dtype, own: int, causal: bool, mask: bool, start: tuple[int, ...]
) -> None:
    shape = {"heads": 4, "own": own, "queries": 40, "keys": 40 + 8 * bool(start)}
    shape |= {"causal": causal, "mask": mask, "start": start}
    true = attention(torch.float64, "cpu", **shape)
    ours = attention(kind, "cuda", **shape)
    close = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}[kind]
    for a, b in zip(ours, true, strict=True):
        assert float((a - b).abs().max()) <= close * float(b.abs().max())
