"""Recorded calls: everything is dropped once, settings and random words are left open."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from graphs import captured

from apportion.execute.call_trace import (
    CallTrace,
    TracedSetting,
    TracedTensor,
    TracedWord,
    quick_function,
)
from apportion.execute.executable import Executable
from apportion.execute.generate import SegmentGenerator
from apportion.execute.rank_steps import rank_steps
from apportion.lower.runnable import runnable
from apportion.search.baselines.random_strategy import draw


def traces(spec: str, fuse: bool = True) -> list[CallTrace]:
    _, space = captured(spec)
    strategy = draw(space, 2, Random(3))
    executable = Executable(space, strategy, runnable(space, strategy, 2))
    generator = SegmentGenerator(executable, 0, "cpu", fuse=fuse)
    generator.segments(rank_steps(executable, 0))
    assert not generator.notes
    return [trace for trace in generator.book.traces.values() if isinstance(trace, CallTrace)]


def leaves(arg: Any) -> list[Any]:
    return [leaf for part in arg for leaf in leaves(part)] if isinstance(arg, tuple) else [arg]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "lenet:tiny"])
def test_every_result_is_dropped_once_unless_it_goes_out(spec: str) -> None:
    for trace in traces(spec, fuse=False):
        made = {
            leaf.index
            for call in trace.calls
            for leaf in leaves(call.result)
            if isinstance(leaf, TracedTensor) and leaf.index >= trace.inputs
        }
        dropped = Counter([d for call in trace.calls for d in call.drops] + list(trace.drops))
        assert set(dropped.values()) <= {1}
        assert dropped.keys() | set(trace.outputs) >= made
        assert not dropped.keys() & set(trace.outputs)


def test_settings_are_left_open() -> None:
    found = [
        leaf for t in traces("mlp:tiny", fuse=False) for c in t.calls for leaf in leaves(c.args)
    ]
    keys = {leaf.expression[2] for leaf in found if isinstance(leaf, TracedSetting)}
    assert {"momentum"} <= keys
    assert not any(type(leaf) is float and 0.731 < leaf < 0.7311 for leaf in found)


@pytest.mark.slow
def test_random_words_are_left_open() -> None:
    words = [
        leaf.number
        for trace in traces("gpt2:tiny")
        for call in trace.calls
        for leaf in leaves(call.args)
        if isinstance(leaf, TracedWord)
    ]
    assert set(words) == {0, 1}


def test_a_quick_function_calls_the_same_overload() -> None:
    a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 2, device="meta")
    known: dict[Any, Any] = {}
    assert quick_function(torch.ops.aten.mm.default, (a, b), {}, known) is torch.mm
    layer_norm = torch.ops.aten.native_layer_norm_backward.default
    x, one = torch.empty(4, 3, device="meta"), torch.empty(4, 1, device="meta")
    args = (x, x, [3], one, one, None, None, [True, False, False])
    assert quick_function(layer_norm, args, {}, known) is layer_norm
