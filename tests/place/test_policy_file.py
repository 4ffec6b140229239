"""Policies are written and read back whole; what is malformed is refused in one sentence."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from apportion.place.policy.policy_file import HEADER, read_policy, write_policy


def tensors():
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1.5, -2.0])}


FACTS = {"features": 1, "trained_on": ["gnmt"], "figures": {"seen": 0.9}}


def written(tmp_path, **changes):
    path = tmp_path / "p.safetensors"
    write_policy(path, "policy", {**tensors(), **changes}, FACTS)
    return path


def refusal(path, **options):
    with pytest.raises(ValueError) as caught:
        read_policy(path, **options)
    said = str(caught.value)
    assert str(path) in said and "\n" not in said
    return said


def test_a_policy_reads_back_as_written(tmp_path):
    path = written(tmp_path)
    policy = read_policy(path, "policy", {"w": (2, -1), "b": (2,)})
    assert policy.kind == "policy" and policy.facts == FACTS
    for name, tensor in tensors().items():
        assert policy.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(policy.tensors[name], tensor)


def test_equal_policies_are_equal_files(tmp_path):
    first = written(tmp_path).read_bytes()
    assert written(tmp_path).read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


def test_wrong_kind_and_shapes(tmp_path):
    path = written(tmp_path)
    assert "of kind 'policy', not 'gdp'" in refusal(path, kind="gdp")
    assert "shape (2, 3), not (3, 2)" in refusal(path, shapes={"w": (3, 2), "b": (2,)})
    assert "shape (2, 3), not (6,)" in refusal(path, shapes={"w": (6,), "b": (2,)})
    assert "no tensor 'c'" in refusal(path, shapes={"w": (2, 3), "b": (2,), "c": (1,)})
    assert "a tensor 'b' that no such" in refusal(path, shapes={"w": (2, 3)})


def test_a_truncated_file(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    for size in (0, 4, 8, 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        refusal(path)


@pytest.mark.parametrize(
    "data",
    [b"not a policy at all, but long enough", struct.pack("<Q", 2) + b"[]", b"\x80\x04K\x01." * 9],
)
def test_other_files(tmp_path, data):
    path = tmp_path / "p.safetensors"
    path.write_bytes(data)
    assert "no safetensors" in refusal(path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "is no policy"),
        ({"other": "x"}, "is no policy"),
        ({HEADER: "{"}, "no JSON"),
        ({HEADER: "[" * 100_000}, "no JSON"),
        ({HEADER: "[1]"}, "what kind"),
        ({HEADER: json.dumps({"version": 1, "kind": 3, "facts": {}})}, "what kind"),
        ({HEADER: json.dumps({"version": 9, "kind": "policy", "facts": {}})}, "version 9"),
        ({HEADER: json.dumps({"version": 1, "kind": "policy"})}, "no facts"),
    ],
)
def test_malformed_headers(tmp_path, metadata, said):
    path = tmp_path / "p.safetensors"
    path.write_bytes(save(tensors(), metadata=metadata))
    assert said in refusal(path)


def test_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "p.safetensors"
    header = json.dumps({"version": 1, "kind": "policy", "facts": {}})
    path.write_bytes(save({"w": np.array([1.0, np.nan])}, metadata={HEADER: header}))
    assert "'w' has numbers that are not finite" in refusal(path)
    with pytest.raises(ValueError, match="not finite"):
        written(tmp_path, w=np.array([np.inf]))


def test_missing_files_and_facts_that_are_no_json(tmp_path):
    assert "there is no policy file" in refusal(tmp_path / "none")
    refusal(tmp_path)
    with pytest.raises(ValueError, match="no JSON"):
        write_policy(tmp_path / "q", "policy", tensors(), {"x": {1, 2}})
    with pytest.raises(ValueError, match="no JSON"):
        write_policy(tmp_path / "q", "policy", tensors(), {"x": float("nan")})
    assert not (tmp_path / "q").exists()
