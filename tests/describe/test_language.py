"""The description language: what lambdas turn into, and how descriptions are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from apportion.describe import descriptions, language
from apportion.describe.descriptions import Description, describe, find_description
from apportion.describe.formula import evaluate_formula
from apportion.describe.interval import Affine
from apportion.describe.language import (
    ALL,
    WHOLE,
    Access,
    All,
    Apply,
    Const,
    Gather,
    Operand,
    Output,
    Position,
    Reduce,
    Sum,
    axes,
    axis,
    f,
    opaque,
)
from apportion.graph import Ref

X = Operand(0, (4, 6))
P, Q = axis("i"), axis("j")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Description]:
    """A copy of the table that the test may change."""
    copy = dict(descriptions.DESCRIPTIONS)
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", copy)
    return copy


def formula(function: Callable[..., Any], args: Any, inputs: Any, outputs: Any) -> Any:
    return evaluate_formula(Description("test.op", function), args, inputs, outputs)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ((P, Q), ((P,), (Q,))),
        ((P + 2, 3), ((P + 2,), (Affine((), 3),))),
        ((P - Q, -2 * Q), ((P - Q,), (Affine((("j", -2),)),))),
        ((slice(None), Q), ((WHOLE,), (Q,))),
        ((P, (ALL(3), Q)), ((P,), (All(3), Q))),
    ],
)
def test_an_element_has_one_tuple_of_indices_per_dimension(index: Any, expected: Any) -> None:
    assert X[index] == Access(0, expected)


def test_a_data_dependent_index_is_a_gather() -> None:
    ids = Operand(1, (5,))
    assert X[ids[P], Q] == Access(0, ((Gather(Access(1, ((P,),))),), (Q,)))


def test_broadcasting_is_right_aligned_and_reads_extent_one_at_zero() -> None:
    zero = Affine((), 0)
    i = axes("i", 3)
    assert Operand(0, (6,)).at(i) == Access(0, ((i[2],),))
    assert Operand(0, (4, 1)).at(i) == Access(0, ((i[1],), (zero,)))
    assert Operand(0, ()).at(i) == Access(0, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: X[P], "has 2 dims, indexed with 1"),
        (lambda: X[P, 1:2], "the whole dimension"),
        (lambda: X[P, 0.5], "not an affine form"),
        (lambda: Output.of((P + 1,), X[P, Q]), "not a plain axis"),
    ],
)
def test_what_the_language_cannot_say_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_arithmetic_makes_expressions_and_axes_become_positions() -> None:
    element = X[P, Q]
    assert element * 2 == Apply("*", (element, Const(2)))
    assert 2 / element == Apply("/", (Const(2), element))
    assert element - 1 == Apply("+", (element, Apply("*", (Const(-1), Const(1)))))
    assert f("mask", P, element) == Apply("mask", (Position(P), element))


def test_a_reduction_adds_the_axes_of_its_lambda() -> None:
    assert Sum(lambda k: X[P, k]) == Reduce("sum", ("k",), X[P, axis("k")])
    assert language.Max(lambda *k: X[k], rank=2) == Reduce("max", ("k0", "k1"), X[axes("k", 2)])
    assert language.Min(lambda k: X[P, k]).reducer == "min"
    assert language.Prod(lambda k: X[P, k]).reducer == "prod"


def test_the_axes_that_index_an_opaque_result_are_kept() -> None:
    assert opaque(X[P, :])[Q].axes == ("j",)
    assert opaque(X[P, :], None)[P, Q].axes == ("i", "j")
    assert opaque(X[P, :]).axes == ()


def test_extents_come_from_outputs_and_from_dimensions_indexed_alone() -> None:
    found = formula(
        lambda a, b: lambda i, j: Sum(lambda k: a[i, k] * b[k, j]),
        (Ref(0), Ref(1)),
        [(2, 3), (3, 5)],
        [(2, 5)],
    )
    assert found.extents == {"i": 2, "j": 5, "k": 3}
    assert [a.tensor for a in found.accesses] == [0, 1]


def test_the_missing_factor_of_a_product_follows_from_the_rest() -> None:
    found = formula(lambda a: Output.of(((P, Q),), f("pick", P, a[Q])), (Ref(0),), [(4,)], [(12,)])
    assert found.extents == {"i": 3, "j": 4}


def test_an_axis_whose_extent_nobody_tells_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"test\.op.*how long axis k is"):
        formula(lambda a: lambda i: Sum(lambda k: a[i + k]), (Ref(0),), [(9,)], [(5,)])
    with pytest.raises(ValueError, match=r"extents of axes \['i', 'j'\] are not known"):
        formula(lambda a: Output.of(((P, Q),), f("x")), (Ref(0),), [(4,)], [(12,)])


def test_a_description_may_take_only_its_first_arguments_and_named_extras() -> None:
    seen: list[Any] = []

    def described(a: Any, *, out: Any) -> Any:
        seen.append((a.shape, out))
        return lambda i: a[i]

    formula(described, (Ref(0), 7, "unused"), [(4,)], [(4,)])
    assert seen == [((4,), ((4,),))]


def test_absent_outputs_at_the_end_need_no_shape() -> None:
    found = formula(lambda a: (lambda i: a[i], None), (Ref(0),), [(4,)], [(4,)])
    assert len(found.outputs) == 1


def test_describing_an_operator_twice_is_an_error(table: dict[str, Description]) -> None:
    describe("test::once")(lambda a: lambda i: a[i])
    assert "test.once" in table
    with pytest.raises(
        ValueError, match=r"test\.once is described at .*test_language.py:\d+ already"
    ):
        describe("test.once")(lambda a: lambda i: a[i])
    with pytest.raises(ValueError, match=r"aten\.mm is described at .*matmul.py:\d+ already"):
        describe("aten::mm")(lambda a: None)


def test_an_overload_is_found_by_its_own_name_first(table: dict[str, Description]) -> None:
    describe("test.op")(lambda a: lambda i: a[i])
    describe("test.op.special")(lambda a: lambda i: f("special", a[i]))
    for kind, name in {"test.op.default": "test.op", "test.op.special": "test.op.special"}.items():
        found = find_description(kind)
        assert found is not None and found.kind == name
    assert find_description("test.other.default") is None


def test_torch_s_own_objects_can_be_described(table: dict[str, Description]) -> None:
    describe(torch.ops.aten.hspmm, torch.ops.aten.sspaddmm.default)(lambda x: lambda *i: x[i])
    assert {"aten.hspmm", "aten.sspaddmm.default"} <= table.keys()
