"""Pointwise operators of several outputs, halves of a dimension, lists, and parts that know their
place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import CONTEXT, One, one

from apportion.capture.lift_call import lift_call
from apportion.describe import ops
from apportion.describe.descriptions import find_description
from apportion.split.space import Space
from apportion.verify.run_split import run_op, run_split


def double(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def check(found: One, *, exactly: str, rounding: float = 0.0, **parts: int) -> None:
    """Exactly these axes can be cut, and the pieces of a cut are the whole, but for rounding."""
    assert found.cuttable() == set(exactly.split())
    op = found.space.graph.ops[0]
    whole = run_op(op, op.args, found.tensors, CONTEXT)
    split = found.space.split(0, found.parts(**parts))
    assert len(split.parts) > 1
    for made, expected in zip(
        run_split(found.space, 0, split, found.tensors, CONTEXT), whole, strict=True
    ):
        torch.testing.assert_close(made, expected, rtol=rounding, atol=0.0)


def test_every_operator_that_torch_calls_pointwise_is_described() -> None:
    assert ops.__all__
    missing = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, form = rest.partition(".")
        overload = getattr(getattr(torch.ops.aten, packet, None), form or "default", None)
        if namespace != "aten" or not isinstance(overload, torch._ops.OpOverload):
            continue
        if torch.Tag.pointwise not in overload.tags or overload._schema.is_mutable:
            continue
        if any(str(result.type) != "Tensor" for result in overload._schema.returns):
            continue
        if find_description(str(overload)) is None:
            missing.append(str(overload))
    # The last is random, the others are calls of operators that are described.
    composite = ["__xor__.Scalar", "__xor__.Tensor", "clip.Tensor", "clip.default"]
    assert sorted(missing) == [f"aten.{name}" for name in (*composite, "rrelu.default")]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_both_halves_of_a_dimension_are_cut_alike(dim: int) -> None:
    x = double(6, 8, 10)
    found = one("aten.glu.default", x, dim)
    check(found, exactly="i0 i1 i2", rounding=1e-14, i0=3, i1=2, i2=5)
    grad = torch.nn.functional.glu(x, dim)
    found = one("aten.glu_backward.default", grad, x, dim)
    cut = {f"i{d}": 3 if d == dim % 3 else 2 for d in range(3)}
    check(found, exactly="i0 i1 i2", rounding=1e-14, **cut)


def test_all_outputs_are_cut_at_once() -> None:
    x, weight = double(4, 6, 5), double(6, 1)
    check(one("aten.frexp.Tensor", x), exactly="i0 i1 i2", i0=2, i2=3)
    found = one("aten.log_sigmoid_forward.default", x)
    check(found, exactly="i0 i1 i2", rounding=1e-14, i0=2, i2=3)
    found = one("aten._prelu_kernel_backward.default", x, x + 1, weight)
    check(found, exactly="i0 i1 i2", i0=2, i1=4)


@pytest.mark.parametrize("invert", [False, True])
def test_candidates_can_be_cut(invert: bool) -> None:
    given, among = torch.arange(30).reshape(5, 6), torch.arange(0, 40, 3)[:12].reshape(3, 4)
    found = one("aten.isin.Tensor_Tensor", given, among, invert=invert)
    check(found, exactly="i0 i1 k0 k1", i1=2, k0=3, k1=2)


@pytest.mark.parametrize("name", ["tril", "triu"])
@pytest.mark.parametrize("diagonal", [-3, 0, 2])
def test_a_triangle_moves_with_its_part(name: str, diagonal: int) -> None:
    found = one(f"aten.{name}.default", double(3, 7, 8), diagonal)
    check(found, exactly="i0 i1 i2", i1=3, i2=4)


def test_a_unit_matrix_moves_with_its_part() -> None:
    check(one("aten.eye.default", 7, torch.float64), exactly="i j", i=3, j=2)
    check(one("aten.eye.m", 4, 9, torch.float64), exactly="i j", i=2, j=5)
    check(one("aten.eye.m", 9, 4, torch.int64), exactly="i j", i=5, j=2)


@pytest.mark.parametrize(
    "call",
    [
        ("arange.default", 11, torch.int64),
        ("arange.start", 3, 14, torch.int64),
        ("arange.start_step", 0.1, 7.0, 0.3, torch.float32),
        ("linspace.default", -0.3, 2.9, 23, torch.float32),
        ("logspace.default", -0.3, 2.9, 23, 10.0, torch.float32),
        ("linspace.Tensor_Tensor", torch.tensor(0.3), torch.tensor(7.1), 23, torch.float32),
    ],
)
def test_a_part_of_a_sequence_has_the_bits_of_the_whole(call: tuple[Any, ...]) -> None:
    kind, *args = call
    check(one(f"aten.{kind}", *args), exactly="i0", i0=3)


def test_indices_of_a_triangle_are_cut_both_ways() -> None:
    check(one("aten.tril_indices.default", 5, 7, 1, torch.int64), exactly="i0 i1", i0=2, i1=4)


@pytest.mark.parametrize(
    "call",
    [
        ("empty.memory_format", [5, 7], torch.float64),
        ("empty_strided.default", [5, 7], [1, 5], torch.float64),
        ("empty_permuted.default", [5, 7], [1, 0], torch.float64),
        ("new_empty_strided.default", double(3), [5, 7], [1, 5], torch.float64),
        ("_efficientzerotensor.default", [5, 7], torch.float64),
    ],
)
def test_tensors_without_values_are_zeros(call: tuple[Any, ...]) -> None:
    kind, *args = call
    found = one(f"aten.{kind}", *args)
    check(found, exactly="i0 i1", i0=2, i1=3)
    op = found.space.graph.ops[0]
    assert not run_op(op, op.args, found.tensors, CONTEXT)[0].any()


# Lists of tensors


def lifted_values(function: Any, *tensors: torch.Tensor) -> tuple[Space, list[torch.Tensor]]:
    found = lift_call(function, tensors, {})
    values = dict(zip(found.inputs, tensors, strict=True))
    for op in found.graph.ops:
        results = run_op(op, op.args, [values[v] for v in op.inputs], CONTEXT)
        values |= dict(zip(op.outputs, results, strict=True))
    return Space(found.graph), [values[v] for v in found.outputs if v is not None]


def test_lists_become_one_operator_per_tensor() -> None:
    a, b = double(4, 6), double(5)

    def step(a: Any, b: Any) -> Any:
        total = torch._foreach_add([a, b], [b[:1], b], alpha=0.5)
        power = torch._foreach_pow(total, 2)
        scaled = torch._foreach_addcdiv(power, [a, b], [a * a + 1, b * b + 1], [2.0, 3.0])
        return [
            *scaled,
            *torch._foreach_norm(scaled),
            *torch._foreach_lerp([a, b], [b[:1], b], 0.3),
        ]

    space, values = lifted_values(step, a, b)
    assert not any("_foreach" in op.kind for op in space.graph.ops)
    for ours, torchs in zip(values, step(a, b), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-13, atol=0)
    sums = [k for k, op in enumerate(space.graph.ops) if op.kind == "aten.sum.default"]
    assert len(sums) == 2 and all(all(space.cuttable(k)) for k in sums)


def test_a_fused_optimizer_becomes_one_call_per_parameter() -> None:
    shapes = ((4, 6), (5,))
    names = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-6}
    tensors = [double(*shape).abs() for _ in range(4) for shape in shapes]

    def step(*t: Any) -> Any:
        steps = [torch.full((), 3.0), torch.full((), 3.0)]
        adam = torch.ops.aten._fused_adamw.default
        lists = [[t[k], t[k + 1]] for k in range(0, 8, 2)]
        made = adam(*lists, [], steps, **names, amsgrad=False, maximize=False)
        return [x for several in made for x in several]

    space, values = lifted_values(step, *tensors)
    calls = [k for k, op in enumerate(space.graph.ops) if "_fused" in op.kind]
    assert [len(space.axes(k)) for k in calls] == [2, 1]
    assert all(all(space.cuttable(k)) for k in calls)
    for ours, torchs in zip(values, step(*tensors), strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("overflown", [0, 1, None])
def test_each_gradient_of_a_scaled_loss_is_checked(overflown: int | None) -> None:
    gradients = [double(4, 6), double(5)]
    if overflown is not None:
        gradients[overflown].reshape(-1)[-1] = torch.inf

    def unscale(a: Any, b: Any, found: Any, scale: Any) -> Any:
        check = torch.ops.aten._amp_foreach_non_finite_check_and_unscale.default
        scaled, after = check([a, b], found, scale)
        return [*scaled, after]

    given = (*gradients, torch.zeros(1), torch.full((1,), 0.5))
    space, values = lifted_values(unscale, *given)
    assert len(space.graph.ops) == 2 and all(all(space.cuttable(k)) for k in (0, 1))
    for ours, torchs in zip(values, unscale(*given), strict=True):
        assert torch.equal(ours, torchs)
    assert bool(values[-1].item()) == (overflown is not None)
