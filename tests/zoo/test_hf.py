"""Models of the transformers package: a captured step means what plain PyTorch does."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers_capture import run
from soak import kept

from apportion import zoo
from apportion.capture.capture import (
    capture,
)
from apportion.capture.program import (
    Program,
)
from apportion.capture.reference import (
    capture_as,
    eager_steps,
)
from apportion.run.training import vary

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FAMILIES = ("gpt2", "llama", "mixtral", "t5", "bert", "vit", "resnet", "convnext")


@cache
def captured(family: str) -> Program:
    it = zoo.load(f"{EXAMPLES / f'hf_{family}.py'}:make")
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


@pytest.mark.slow
@pytest.mark.parametrize("family", kept(FAMILIES, "gpt2", "llama", "mixtral", "vit"))
def test_the_graph_equals_eager_steps(family: str) -> None:
    program = capture_as(captured(family), torch.float64)
    data = [vary(program.batch, 3, step) for step in range(2)]
    losses, state = run(program, data, seed=3)
    expected, ends = eager_steps(program, data, seed=3)
    assert losses == pytest.approx(expected, rel=1e-9)
    rate = max(float(group["lr"]) for group in program.optimizer.param_groups)
    for value, tensor in ends.items():
        scale = float(tensor.abs().max()) if tensor.numel() else 0.0
        torch.testing.assert_close(
            state[value].to(tensor.dtype),
            tensor,
            rtol=0,
            atol=1e-9 * scale + 1e-6 * rate * len(data),
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_in_float64_has_the_same_operators(family: str) -> None:
    single, double = captured(family).graph, capture_as(captured(family), torch.float64).graph
    assert [op.kind for op in double.ops] == [op.kind for op in single.ops]
    narrow = {v.name for v in double.values if v.dtype == "float32" and v.shape}
    assert all(name.startswith("random_uniform") for name in narrow)


@pytest.mark.slow
def test_tied_weights_are_one_parameter() -> None:
    names = {v.name for v in captured("gpt2").graph.values if v.role == "parameter"}
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names


@pytest.mark.slow
def test_a_cache_of_keys_leaves_no_operators() -> None:
    lines = [op.line for op in captured("llama").graph.ops]
    assert any("modeling_llama" in line for line in lines)
    assert not any("cache_utils" in line for line in lines)


@pytest.mark.slow
def test_attention_is_one_operator_where_nothing_is_dropped() -> None:
    kinds = [op.kind for op in captured("llama").graph.ops]
    assert kinds.count("apportion.sdpa") == kinds.count("apportion.sdpa_backward") == 2
