"""Splits derived from descriptions: the paper's examples, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import CONTEXT, Maker, One, one

from apportion.describe import descriptions
from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import BadDescription, IllegalCut
from apportion.describe.language import Max, Output, Sum, axis, f, opaque
from apportion.graph import Arg
from apportion.split.part import Split
from apportion.split.space import Space
from apportion.verify.run_split import check_op


@pytest.fixture(autouse=True)
def no_lasting_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test describes is forgotten after it."""
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))


@torch.library.custom_op("apportion_test::shift", mutates_args=())
def shift(a: torch.Tensor, by: int) -> torch.Tensor:
    return a[by:].clone()


@torch.library.custom_op("apportion_test::conv1d", mutates_args=())
def conv1d(data: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    return F.conv1d(data, filters.transpose(0, 1))


@torch.library.custom_op("apportion_test::repeat", mutates_args=())
def repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.unsqueeze(1).repeat(1, times)


def described(function: Callable[..., Any], *shapes: tuple[int, ...], args: Any = ()) -> One:
    """A Graph of one test-only Op on inputs of the given shapes; the last shape is its output's."""
    describe("test.op")(function)
    make = Maker()
    inputs = [make.value(*shape) for shape in shapes[:-1]]
    make.op("test.op.default", *inputs, *args, out=shapes[-1])
    return One(make.space(), ())


def split(it: One, **parts: int) -> Split:
    return it.space.split(0, it.parts(**parts))


def refusal(it: One, **parts: int) -> str:
    with pytest.raises(IllegalCut) as error:
        split(it, **parts)
    return str(error.value)


def checked(it: One) -> Iterator[Any]:
    """The findings of the piecewise check, each of which must be right."""
    for finding in check_op(it.space, 0, it.tensors, CONTEXT):
        assert finding.right, str(finding)
        yield finding


# The paper's examples


@pytest.mark.parametrize(
    ("cut", "a", "b", "c", "reducer"),
    [
        ("i", [((0, 2), (0, 6)), ((2, 4), (0, 6))], [((0, 6), (0, 8))] * 2,
         [((0, 2), (0, 8)), ((2, 4), (0, 8))], None),
        ("j", [((0, 4), (0, 6))] * 2, [((0, 6), (0, 4)), ((0, 6), (4, 8))],
         [((0, 4), (0, 4)), ((0, 4), (4, 8))], None),
        ("k", [((0, 4), (0, 3)), ((0, 4), (3, 6))], [((0, 3), (0, 8)), ((3, 6), (0, 8))],
         [((0, 4), (0, 8))] * 2, "sum"),
    ],
)  # fmt: skip
def test_matmul_halved(cut: str, a: Any, b: Any, c: Any, reducer: str | None) -> None:
    make = Maker()
    make.op("aten.mm.default", make.value(4, 6), make.value(6, 8), out=(4, 8))
    found = split(One(make.space(), ()), **{cut: 2})
    assert [p.inputs[0] for p in found.parts] == a
    assert [p.inputs[1] for p in found.parts] == b
    assert [p.outputs[0] for p in found.parts] == c
    assert found.reducers == (reducer,)
    assert found.terms == (2 if reducer else 1,)
    assert [p.terms for p in found.parts] == ([(0,), (1,)] if reducer else [(0,), (0,)])
    assert [p.flops for p in found.parts] == [2 * 4 * 6 * 8 / 2] * 2


def shift_local(args: tuple[Arg, ...], local: PartLocation) -> tuple[Arg, ...]:
    return (args[0], 0)  # the part's region begins where the part reads


def test_shift_two_reads_what_it_shifts() -> None:
    describe("apportion_test.shift", local=shift_local)(lambda a, by: lambda i: a[i + by])
    it = one("apportion_test.shift.default", torch.randn(12, dtype=torch.float64), 2)
    parts = split(it, i=2).parts
    assert [p.outputs[0] for p in parts] == [((0, 5),), ((5, 10),)]
    assert [p.inputs[0] for p in parts] == [((2, 7),), ((7, 12),)]
    assert len(list(checked(it))) == 2


def test_shift_without_a_local_rule_is_refused_since_the_kernel_would_shift_again() -> None:
    describe("apportion_test.shift")(lambda a, by: lambda i: a[i + by])
    it = one("apportion_test.shift.default", torch.randn(12, dtype=torch.float64), 2)
    assert "does not compute the part" in refusal(it, i=2)


def conv() -> One:
    describe("apportion_test.conv1d")(
        lambda data, filters: (
            lambda b, co, x: Sum(lambda ci, dx: data[b, ci, x + dx] * filters[ci, co, dx])
        )
    )
    data, filters = torch.randn(4, 6, 11), torch.randn(6, 2, 4)
    return one("apportion_test.conv1d.default", data.double(), filters.double())


@pytest.mark.parametrize(
    ("cut", "data", "filters", "reducer"),
    [
        ("b", [(0, 0, 2), (0, 2, 4)], [(0, 0, 6)] * 2, None),
        ("co", [(0, 0, 4)] * 2, [(1, 0, 1), (1, 1, 2)], None),
        ("x", [(2, 0, 7), (2, 4, 11)], [(0, 0, 6)] * 2, None),  # halves of 8 with a halo of 3
        ("ci", [(1, 0, 3), (1, 3, 6)], [(0, 0, 3), (0, 3, 6)], "sum"),
        ("dx", [(2, 0, 9), (2, 2, 11)], [(2, 0, 2), (2, 2, 4)], "sum"),
    ],
)
def test_conv1d_halved(cut: str, data: Any, filters: Any, reducer: str | None) -> None:
    it = conv()
    found = split(it, **{cut: 2})
    assert found.reducers == (reducer,)
    shapes = [t.shape for t in it.tensors]
    for part, *expected in zip(found.parts, data, filters, strict=True):
        for region, shape, (dim, low, high) in zip(part.inputs, shapes, expected, strict=True):
            whole = [(0, n) for n in shape]
            whole[dim] = (low, high)
            assert region == tuple(whole)


def test_every_derived_split_of_conv1d_is_right() -> None:
    cuts = {tuple(n > 1 for n in finding.parts) for finding in checked(conv())}
    assert len(cuts) == 5 + 10  # each axis, and each pair of axes


def test_a_flip_reads_from_the_other_end() -> None:
    it = one("aten.flip.default", torch.randn(7, 2, dtype=torch.float64), [0])
    assert [p.inputs[0][0] for p in split(it, i0=3).parts] == [(5, 7), (3, 5), (0, 3)]
    assert len(list(checked(it))) == 4


# What the parts leave


def test_softmax_gets_no_reduction_split() -> None:
    it = described(
        lambda x: lambda i, j: f("exp", x[i, j]) / Sum(lambda k: f("exp", x[i, k])),
        (4, 6), (4, 6),
    )  # fmt: skip
    assert it.cuttable() == {"i"}
    assert "reduced inside, not at the root" in refusal(it, k=2)


def test_the_kernel_of_softmax_is_cut_along_the_other_dimensions_only() -> None:
    it = one("aten._softmax.default", torch.randn(4, 6), 1, False)
    assert it.cuttable() == {"i0"}
    assert "indexes an opaque result" in refusal(it, i1=2)


def test_a_mean_is_scaled_by_the_share_of_each_part() -> None:
    it = one("aten.mean.dim", torch.randn(4, 5), [1])
    found = split(it, k0=2)
    assert [p.scales for p in found.parts] == [(pytest.approx(2 / 5),), (pytest.approx(3 / 5),)]
    assert found.reducers == ("sum",)
    assert [p.scales for p in split(it, i0=2).parts] == [(1.0,), (1.0,)]


def test_a_bias_is_counted_once() -> None:
    it = one("aten.addmm.default", torch.randn(5), torch.randn(4, 6), torch.randn(6, 5), beta=2)
    assert [p.zeros for p in split(it, k=3).parts] == [(), (0,), (0,)]
    assert [p.zeros for p in split(it, i=2, j=2).parts] == [()] * 4
    both = split(it, i=2, k=2)
    assert [(p.terms, p.zeros) for p in both.parts] == [((0,), ()), ((1,), (0,))] * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: lambda i: Sum(lambda k: x[i, k]) + 1, "cannot be counted once"),
        (lambda x: lambda i: f("exp", Sum(lambda k: x[i, k])), "reduced inside"),
        (lambda x: lambda i: 1 / Sum(lambda k: x[i, k]), "reduced inside"),
        (
            lambda x: lambda i: Sum(lambda k: x[i, k]) + Max(lambda k: x[i, k]),
            "do not combine",
        ),
    ],
)
def test_only_a_reduction_at_the_root_leaves_partial_values(function: Any, message: str) -> None:
    it = described(function, (4, 6), (4,))
    assert message in refusal(it, k=2)
    assert it.cuttable() == {"i"}


def test_a_bias_under_a_maximum_is_not_split_off() -> None:
    it = described(lambda x, b: lambda i: Max(lambda k: x[i, k]) + b[i], (4, 6), (4,), (4,))
    assert "do not combine" in refusal(it, k=2)


def test_a_factor_of_the_root_stays_with_every_part() -> None:
    it = described(lambda x: lambda i: 3 * Max(lambda k: x[i, k]) / 2, (4, 6), (4,))
    found = split(it, k=2)
    assert found.reducers == ("max",)
    assert [p.scales for p in found.parts] == [(1.0,), (1.0,)]


def test_an_axis_of_one_output_leaves_copies_or_partial_values_of_the_others() -> None:
    grad, x = torch.randn(4, 3, 6), torch.randn(4, 3, 6)
    weight = torch.randn(6)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [6], weight, None, 1e-5)
    it = one(
        "aten.native_layer_norm_backward.default",
        grad, x, [6], mean, rstd, weight, torch.randn(6), [True] * 3,
    )  # fmt: skip
    assert it.cuttable() == {"i0", "i1"}
    found = split(it, i0=2)
    assert found.reducers == (None, "sum", "sum")
    assert found.terms == (1, 2, 2)
    assert [p.outputs[0][0] for p in found.parts] == [(0, 2), (2, 4)]
    assert [p.outputs[1] for p in found.parts] == [((0, 6),)] * 2


# What is refused


def test_opaque_axes_are_not_cut() -> None:
    it = described(lambda x: lambda b, i, j: opaque(x[b, :, :])[i, j], (4, 5, 5), (4, 5, 5))
    assert it.cuttable() == {"b"}
    assert [p.inputs[0] for p in split(it, b=2).parts] == [
        ((0, 2), (0, 5), (0, 5)),
        ((2, 4), (0, 5), (0, 5)),
    ]


def test_rows_of_an_embedding_are_not_cut() -> None:
    it = one("aten.embedding.default", torch.randn(11, 6), torch.randint(11, (4, 3)))
    assert it.cuttable() == {"i0", "i1", "i2"}
    assert all(p.inputs[0][0] == (0, 11) for p in split(it, i0=2, i2=2).parts)
    back = one(
        "aten.embedding_dense_backward.default",
        torch.randn(4, 3, 6), torch.randint(11, (4, 3)), 11, -1, False,
    )  # fmt: skip
    assert back.cuttable() == {"n0", "n1", "d"}
    assert "does not compute the part" in refusal(back, v=2)


def test_accesses_that_need_different_regions_refuse_the_cut() -> None:
    it = described(lambda x: lambda i: x[i] + x[x.shape[0] - 1 - i], (8,), (8,))
    assert "need different regions" in refusal(it, i=2)
    both = described_again(lambda x: lambda i, j: x[i] * x[j], (8,), (8, 8))
    assert both.cuttable() == set()


def described_again(function: Callable[..., Any], *shapes: tuple[int, ...]) -> One:
    del descriptions.DESCRIPTIONS["test.op"]
    return described(function, *shapes)


def test_a_value_that_depends_on_its_position_is_not_cut() -> None:
    it = described(lambda x: lambda i, j: f("mask", i, x[i, j]), (4, 6), (4, 6))
    assert it.cuttable() == {"j"}
    assert "does not compute the part" in refusal(it, i=2)


def test_an_argument_that_depends_on_the_part_is_not_cut() -> None:
    def with_extent(x: Any) -> Any:
        return lambda i: f("scaled", x[i], x.shape[0])

    assert described(with_extent, (8,), (8,)).cuttable() == set()


def test_a_region_outside_its_tensor_is_a_mistake() -> None:
    with pytest.raises(BadDescription, match=r"it reads \[-1, 7\) along dim 0 of input 0"):
        described(lambda x: lambda i: x[i - 1], (8,), (8,))


def test_an_output_axis_that_no_access_mentions_is_refused_without_a_local_rule() -> None:
    describe("apportion_test.repeat")(lambda x, times: lambda i, j: x[i])
    it = one("apportion_test.repeat.default", torch.randn(4, dtype=torch.float64), 6)
    assert it.cuttable() == {"i"}
    assert "nothing is read along axis j" in refusal(it, j=2)
    assert len(list(checked(it))) == 2


def test_an_output_axis_that_no_access_mentions_is_cut_by_a_local_rule() -> None:
    def times(args: tuple[Arg, ...], local: PartLocation) -> tuple[Arg, ...]:
        return (args[0], local.outputs[0][1])

    describe("apportion_test.repeat", local=times)(lambda x, times: lambda i, j: x[i])
    it = one("apportion_test.repeat.default", torch.randn(4, dtype=torch.float64), 6)
    assert it.cuttable() == {"i", "j"}
    assert len(list(checked(it))) == 6


@pytest.mark.parametrize("parts", [0, -1, 5])
def test_an_axis_has_no_more_parts_than_elements_and_no_less_than_one(parts: int) -> None:
    it = described(lambda x: lambda i: x[i], (4,), (4,))
    assert f"cannot be cut into {parts} parts" in refusal(it, i=parts)


def test_a_cut_names_every_axis() -> None:
    it = described(lambda x: lambda i, j: x[i, j], (4, 6), (4, 6))
    with pytest.raises(IllegalCut, match="has 2 axes, the cut names 1"):
        it.space.split(0, (2,))


# Operators that cannot be cut at all


def test_an_operator_without_description_runs_unsplit_and_says_so() -> None:
    make = Maker()
    x = make.value(4, 6)
    make.op("test.unknown.default", make.op("aten.relu.default", x, out=(4, 6)), out=(4,))
    space = make.space()
    assert space.undescribed == {"test.unknown.default": "no description"}
    assert space.axes(1) == ()
    (part,) = space.split(1, ()).parts
    assert part.inputs == (((0, 4), (0, 6)),)
    assert part.outputs == (((0, 4),),)
    with pytest.raises(IllegalCut, match="has 0 axes"):
        space.split(1, (2,))


def test_a_call_that_its_description_does_not_cover_says_why() -> None:
    make = Maker()
    grad, ids = make.value(4, 6), make.value(4, dtype="int64")
    make.op("aten.embedding_dense_backward.default", grad, ids, 11, -1, True, out=(11, 6))
    (reason,) = make.space().undescribed.values()
    assert "how often a row occurs" in reason


def test_axes_of_extent_one_are_not_axes_to_cut() -> None:
    make = Maker()
    make.op("aten.relu.default", make.value(1, 6), out=(1, 6))
    assert [a.name for a in make.space().axes(0)] == ["i1"]


@pytest.mark.parametrize(
    ("kind", "shape", "args", "out"),
    [
        ("aten.relu.default", (0, 3), (), (0, 3)),
        ("aten.slice.Tensor", (6,), (0, 5, 5, 1), (0,)),
        ("aten.sum.dim_IntList", (0, 3), ((0,), False, None), (3,)),
        ("aten.view.default", (0, 3), ((3, 0),), (3, 0)),
    ],
)
def test_an_operator_on_nothing_runs_unsplit(kind: str, shape: Any, args: Any, out: Any) -> None:
    make = Maker()
    make.op(kind, make.value(*shape), *args, out=out)
    space = make.space()
    (part,) = space.split(0, [1] * len(space.axes(0))).parts
    assert part.outputs[0] == tuple((0, n) for n in out if n != 1)
    assert part.inputs[0] == tuple((0, n) for n in shape if n != 1)


def test_a_description_that_does_not_fit_a_call_is_a_mistake() -> None:
    with pytest.raises(BadDescription, match=r"described at .*test_space.py:\d+, but it reads"):
        described(lambda x: lambda i: f("cyclic", x[i]), (5,), (10,))


def test_equal_calls_are_analysed_once() -> None:
    calls: list[Any] = []

    def counted(x: Any) -> Any:
        calls.append(x)
        return lambda i: x[i]

    describe("test.op")(counted)
    make = Maker()
    x = make.value(4)
    for _ in range(5):
        x = make.op("test.op.default", x, out=(4,))
    space = Space(make.graph())
    for op in range(5):
        space.split(op, (2,))
    assert len(calls) <= 1 + 1 + 2  # the Graph, the Split, and its two parts


def test_an_output_dimension_can_be_a_product_of_axes() -> None:
    p, i = axis("p"), axis("i")
    it = described(lambda x: Output.of(((i, p),), f("copy", x[i], p), p=3), (4,), (12,))
    assert {a.name: a.extent for a in it.space.axes(0)} == {"i": 4, "p": 3}
    assert it.cuttable() == {"i"}
    assert [x.outputs[0] for x in split(it, i=2).parts] == [((0, 2), (0, 3)), ((2, 4), (0, 3))]
