"""Micro-batches as a setting: the same training as with the whole batch, in parts."""

from __future__ import annotations

import pytest
import torch

import apportion as ap
from apportion import zoo


def gradients(spec: str) -> dict[str, torch.Tensor]:
    """Parameters after one step."""
    it = zoo.load(spec, 3)
    for group in it.optimizer.param_groups:
        group["lr"] = 1e-3
    if "accumulate" in spec:
        it.step(it.model, it.optimizer, it.batch)
    else:
        it.step(it.model, it.batch).backward()
        it.optimizer.step()
    return {name: value.detach().clone() for name, value in it.model.named_parameters()}


@pytest.mark.slow
def test_gradients_of_the_parts_add_up_to_those_of_the_batch() -> None:
    whole, parts = gradients("mlp:tiny,batch=8"), gradients("mlp:tiny,batch=8,accumulate=4")
    for name, value in whole.items():
        assert torch.allclose(value, parts[name], atol=1e-6), name


@pytest.mark.slow
def test_a_step_in_parts_is_captured_and_divided() -> None:
    it = zoo.load("gpt2:tiny,batch=4,accumulate=2")
    assert it.notes == ("gradients are accumulated over 2 micro-batches",)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    plan = ap.plan(program, "local:2", method="data", calibrate=False)
    assert ap.check(program, plan).equal


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mlp:tiny,batch=8,accumulate=3", "cannot be taken in 3 equal micro-batches"),
        ("mlp:tiny,accumulate=0", "must be a positive whole number"),
        ("mlp:tiny,accumulate=x", "must be a positive whole number"),
        ("mlp:tiny,accumulate=2,accumulate=2", "set twice"),
        ("gpt2:tiny,precision=fp16-mixed,accumulate=2", "does not go with fp16-mixed"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        zoo.load(spec, meta=True)


def test_the_option_is_a_setting() -> None:
    assert zoo.with_accumulation("gpt2", 4) == "gpt2:accumulate=4"
    assert zoo.with_accumulation("gpt2:tiny,accumulate=2", 4) == "gpt2:tiny,accumulate=4"
    assert zoo.with_accumulation("gpt2:accumulate=2", 1) == "gpt2"
    with pytest.raises(ValueError, match="has a step of its own"):
        zoo.with_accumulation("train.py:make", 2)
