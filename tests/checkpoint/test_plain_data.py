"""Plain data comes back as it was, and what is not plain is refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.checkpoint.plain_data import from_plain, to_plain

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.text(max_size=5) | st.integers()
DATA = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.slow
@given(DATA)
def test_it_comes_back_through_json(data: Any) -> None:
    assert same(data, from_plain(json.loads(json.dumps(to_plain(data, "x"), allow_nan=False))))


def test_tensors_arrays_sets_and_counters_come_back() -> None:
    data = {
        "t": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "a": np.array([1.5, 2.5]),
        "s": {1, 2},
        "c": Counter({30: 2}),
        "$": 1,
    }
    back = from_plain(json.loads(json.dumps(to_plain(data, "x"))))
    assert torch.equal(back["t"], data["t"]) and back["t"].dtype == torch.bfloat16  # type: ignore[arg-type]
    assert back["empty"].shape == (0, 3)
    assert np.array_equal(back["a"], data["a"])  # type: ignore[arg-type]
    assert back["s"] == {1, 2} and back["c"] == Counter({30: 2}) and back["$"] == 1
    assert isinstance(back["c"], Counter)


def test_the_state_of_torchs_schedulers_comes_back() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    one = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    other = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 7, 7])
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [one, other], [4])
    state = both.state_dict()
    back = from_plain(json.loads(json.dumps(to_plain(state, "s"))))
    assert back == state
    assert isinstance(back["_schedulers"][1]["milestones"], Counter)


@pytest.mark.parametrize("value", [object(), print, torch.device("cpu"), {"a": [1, object()]}])
def test_what_is_not_plain_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^scheduler\S* is a .* which a checkpoint does not keep"):
        to_plain(value, "scheduler")


@pytest.mark.parametrize(
    "data",
    [
        {"$": "nonsense", "of": 1},
        {"$": ["tensor"], "of": 1},
        {"$": "tensor", "of": "AAAA", "dtype": "load", "shape": [1]},
        {"$": "tensor", "of": "AAAA", "dtype": "float32", "shape": [1000000]},
        {"$": "tensor", "of": "AAAA", "dtype": "float32", "shape": [-1]},
        {"$": "tensor", "of": "????", "dtype": "float32", "shape": [1]},
        {"$": "number", "of": "1e999"},
        {"$": "tuple", "of": 3},
        {"$": "dict", "of": [[1]]},
        {"$": "set", "of": [[1]]},
    ],
)
def test_what_it_did_not_write_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="plain data"):
        from_plain(data)
