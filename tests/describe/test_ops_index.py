"""Operators that read or write at places given by data, cut along what they index."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from compare_runs import compare
from graphs import CONTEXT, One, captured, one
from torch import nn

from apportion.capture.lift_call import lift_call
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy
from apportion.verify.run_split import check_op, run_op, run_split

aten = torch.ops.aten


def R(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def Z(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


def lifted(target: Any, *args: Any, **keywords: Any) -> One:
    """The one Op that a call becomes, its result the call's."""
    found = lift_call(target, args, keywords)
    (op,) = found.graph.ops
    tensors: list[torch.Tensor] = []
    for arg in (*args, *keywords.values()):
        for t in arg if isinstance(arg, list) else [arg]:
            if isinstance(t, torch.Tensor) and not any(t is known for known in tensors):
                tensors.append(t)
    it = One(Space(found.graph), tuple(tensors))
    (made,) = run_op(op, op.args, tensors, CONTEXT)
    assert torch.equal(made, target(*args, **keywords))
    return it


def assert_cut(it: One, axes: str) -> None:
    """Exactly these axes can be cut, and the pieces of every cut make the whole."""
    assert it.cuttable() == set(axes.split())
    findings = check_op(it.space, 0, it.tensors, CONTEXT)
    assert not [str(f) for f in findings if not f.right]
    assert len(findings) >= len(axes.split())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


# Embeddings


@pytest.mark.parametrize("shape", [(4, 3), (7,)])
def test_a_table_is_cut_by_rows(shape: tuple[int, ...]) -> None:
    it = lifted(aten.embedding.default, R(11, 6), Z(0, 11, *shape))
    assert_cut(it, "v d " + " ".join(f"i{k}" for k in range(len(shape))))


def test_rows_elsewhere_are_zeros() -> None:
    weight, indices = R(11, 6), torch.tensor([[0, 2, 6], [10, 7, 3]])
    it = lifted(aten.embedding.default, weight, indices)
    split = it.space.split(0, it.parts(v=3))
    assert (split.reducers, split.terms) == (("sum",), (3,))
    assert [p.inputs[0] for p in split.parts] == [
        ((0, 3), (0, 6)), ((3, 7), (0, 6)), ((7, 11), (0, 6)),
    ]  # fmt: skip
    assert [p.args[-2:] for p in split.parts] == [(0, 11), (3, 11), (7, 11)]
    op = it.space.graph.ops[0]
    (middle,) = run_op(op, split.parts[1].args, (weight[3:7], indices), CONTEXT)
    expected = torch.zeros(2, 3, 6, dtype=torch.float64)
    expected[0, 2], expected[1, 2] = weight[6], weight[3]
    assert torch.equal(middle, expected)


@pytest.mark.parametrize("padding", [-1, 0, 4, 10])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_the_gradient_of_a_table_is_cut_by_rows(padding: int, by_frequency: bool) -> None:
    indices = Z(0, 11, 4, 3)
    indices[0] = torch.tensor([0, 4, 10])
    backward = aten.embedding_dense_backward.default
    it = lifted(backward, R(4, 3, 6), indices, 11, padding, by_frequency)
    assert_cut(it, "v d" if by_frequency else "v d n0 n1")
    split = it.space.split(0, it.parts(v=4))
    assert split.reducers == (None,)
    assert [p.outputs[0][0] for p in split.parts] == [(0, 2), (2, 5), (5, 8), (8, 11)]
    assert [(p.args[2], p.args[-2]) for p in split.parts] == [(2, 0), (3, 2), (3, 5), (3, 8)]


def test_rows_are_normalised_where_they_are() -> None:
    it = lifted(aten.embedding_renorm.default, R(11, 6), Z(0, 11, 5), 1.0, 2.0)
    assert_cut(it, "v")


def test_an_index_outside_of_the_whole_table_is_an_error_in_a_part_too() -> None:
    it = one("apportion.embedding", R(11, 6), torch.tensor([3, 1]), 0, 11)
    split = it.space.split(0, it.parts(v=2))
    op = it.space.graph.ops[0]
    for wrong in (11, -1):
        with pytest.raises(RuntimeError, match="an index is out of range"):
            run_op(op, split.parts[0].args, (R(6, 6), torch.tensor([wrong, 1])), CONTEXT)


def test_a_cut_of_a_part_begins_where_both_do() -> None:
    """Two cuts of one axis, one inside the other: offsets add."""
    weight, indices = R(4, 6), torch.tensor([7, 8, 0, 10])
    it = one("apportion.embedding", weight, indices, 7, 20)
    assert [p.args[-2:] for p in it.space.split(0, it.parts(v=2)).parts] == [(7, 20), (9, 20)]
    assert_cut(it, "v d i0")


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_are_cut_by_width(mode: int) -> None:
    starts = torch.tensor([0, 2, 5])
    it = one("aten._embedding_bag.default", R(11, 6), Z(0, 11, 9), starts, False, mode)
    assert_cut(it, "d")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_a_step_with_tables_cut_by_rows_trains_the_same(devices: int) -> None:
    program, space = captured("gpt2:tiny")
    cut = 0
    choices = []
    for index, op in enumerate(space.graph.ops):
        axes = space.axes(index)
        rows = [op.kind.startswith("apportion.embedding") and a.name == "v" for a in axes]
        parts = tuple(
            devices if row and a.extent >= devices else 1 for row, a in zip(rows, axes, strict=True)
        )
        cut += max(parts, default=1) > 1
        count = max(parts, default=1)
        choices.append(Choice(parts, tuple(range(count))))
    assert cut >= 4  # tokens and positions, there and back
    found = compare(program, space, Strategy(tuple(choices)), devices)
    assert found.equal, found


# Reading


def test_gather_is_cut_along_every_axis() -> None:
    assert_cut(lifted(aten.gather.default, R(5, 7), 1, Z(0, 7, 5, 3)), "i0 i1 v")
    assert_cut(lifted(aten.gather.default, R(5, 7), -2, Z(0, 5, 9, 7)), "i0 i1 v")


def test_gather_reads_the_first_rows_of_what_is_longer_than_the_index() -> None:
    it = lifted(aten.gather.default, R(9, 7, 6), 1, Z(0, 7, 4, 8, 3))
    assert_cut(it, "i0 i1 i2 v")
    split = it.space.split(0, it.parts(i0=2))
    assert [p.inputs[0][0] for p in split.parts] == [(0, 2), (2, 4)]
    assert all(p.inputs[0][2] == (0, 3) for p in split.parts)


def test_index_select_is_cut_along_what_it_picks_from() -> None:
    it = lifted(aten.index_select.default, R(5, 7, 4), -2, Z(0, 7, 6))
    assert_cut(it, "i0 i1 i2 v")
    whole = it.space.split(0, it.parts(v=3))
    assert whole.reducers == ("sum",)


@pytest.mark.parametrize(
    ("indices", "axes"),
    [
        ([Z(-5, 5, 3, 2)], "v0 i1 i2 i3 b0 b1"),
        ([None, Z(-7, 7, 3, 1), Z(-4, 4, 2)], "i0 v1 v2 i3 b0 b1"),
        ([Z(-5, 5, 3), None, None, Z(0, 6, 3)], "v0 i1 i2 v3 b0"),
        ([None, Z(0, 7, 3), None, Z(-6, 6, 1)], "i0 v1 i2 v3 b0"),
        ([torch.tensor(-2), None, Z(0, 4, 3)], "v0 i1 v2 i3 b0"),
    ],
)
def test_several_indices_at_once(indices: list[Any], axes: str) -> None:
    it = lifted(aten.index.Tensor, R(5, 7, 4, 6), indices)
    assert_cut(it, axes)
    picked = {int(a[1:]): 2 for a in axes.split() if a[0] == "v"}
    parts = it.parts(**{f"v{k}": n for k, n in picked.items()})
    op = it.space.graph.ops[0]
    (made,) = run_split(it.space, 0, it.space.split(0, parts), it.tensors, CONTEXT)
    (whole,) = run_op(op, op.args, it.tensors, CONTEXT)
    assert torch.equal(made, whole)


def test_take_is_cut_along_every_dimension_of_what_it_reads() -> None:
    assert_cut(lifted(aten.take.default, R(5, 7, 3), Z(-105, 105, 6, 4)), "i0 i1 v0 v1 v2")


def test_a_mask_is_not_an_index() -> None:
    mask = torch.rand(5, 7) < 0.5
    assert_cut(lifted(aten.index.Tensor, R(5, 7, 4), [mask]), "i2")
    assert_cut(lifted(aten.index.Tensor, R(5, 7, 4), [None, mask[0]]), "i0 i2")
    assert_cut(lifted(aten.index.Tensor, R(5, 7), [mask[:, 0].byte()]), "i1")


@pytest.mark.parametrize("right", [False, True])
def test_a_search_counts_in_every_part(right: bool) -> None:
    line, lines = Z(0, 20, 9).sort()[0], Z(0, 20, 5, 9).sort()[0]
    assert_cut(lifted(aten.searchsorted.Tensor, line, Z(0, 20, 4, 6), right=right), "i0 i1 k")
    assert_cut(lifted(aten.searchsorted.Tensor, lines, Z(0, 20, 5, 6), right=right), "i0 i1 k")
    assert_cut(lifted(aten.bucketize.Tensor, Z(0, 20, 4, 6), line, right=right), "i0 i1 k")


# Writing


def once(size: int, count: int, *shape: int) -> torch.Tensor:
    """Indices [count, ...] that are all different along the first dimension."""
    return torch.rand(size, *shape).argsort(0)[:count]


def test_what_overwrites_is_cut_along_the_destination_only() -> None:
    x = R(7, 5)
    assert_cut(lifted(aten.scatter.src, x, 0, once(7, 6, 5), R(6, 5)), "v i1")
    assert_cut(lifted(aten.scatter.value, x, 0, Z(0, 7, 9, 5), 0.5), "v i1")
    assert_cut(lifted(aten.index_copy.default, x, 0, once(7, 6), R(6, 5)), "v i1")
    assert_cut(lifted(aten.index_fill.int_Scalar, x, 1, Z(0, 5, 3), 2.0), "i0 v")
    assert_cut(lifted(aten.index_put.default, x, [once(7, 6) - 7], R(6, 5)), "v0 i1")
    assert_cut(lifted(aten.put.default, x, once(35, 9) - 20, R(9)), "v0 v1")


def test_what_accumulates_is_cut_along_what_is_written_too() -> None:
    x, index = R(7, 5), Z(0, 7, 9)
    there = Z(0, 7, 9, 5)
    assert_cut(lifted(aten.scatter_add.default, x, 0, there, R(9, 5)), "v i1 p")
    assert_cut(lifted(aten.scatter_reduce.two, x, 0, there, R(9, 5), "amax"), "v i1 p")
    assert_cut(lifted(aten.scatter_reduce.two, x, 0, there, R(9, 5), "prod"), "v i1")
    assert_cut(lifted(aten.index_add.default, x, -2, index, R(9, 5), alpha=3), "v i1 p")
    assert_cut(lifted(aten.index_put.default, x, [index - 7], R(9, 5), True), "v0 i1 b0")
    assert_cut(lifted(aten.index_put.default, x, [index], R(5), True), "v0 i1 b0")
    assert_cut(lifted(aten.put.default, x, Z(-35, 35, 9), R(9), True), "v0 v1 p0")


def test_without_its_own_elements_a_scatter_is_not_cut_along_what_is_written() -> None:
    for how in ("sum", "amax", "mean"):
        it = lifted(aten.scatter_reduce.two, R(7, 5), 0, Z(0, 7, 9, 5), R(9, 5), how,
                    include_self=False)  # fmt: skip
        assert_cut(it, "v i1")


def test_the_destination_is_counted_once() -> None:
    it = lifted(aten.index_add.default, R(7, 5), 0, Z(0, 7, 9), R(9, 5))
    split = it.space.split(0, it.parts(p=3))
    assert split.reducers == ("sum",)
    assert [p.zeros for p in split.parts] == [(), (0,), (0,)]


def test_a_destination_longer_than_its_index_is_cut_where_all_of_it_is_written() -> None:
    x = R(9, 7, 6)
    assert_cut(lifted(aten.scatter_add.default, x, 1, Z(0, 7, 4, 8, 6), R(5, 8, 9)), "v i2 p")
    assert_cut(lifted(aten.scatter.src, x, 0, once(9, 4, 5, 6), R(4, 7, 6)), "v i2")


def test_a_value_where_a_mask_is_true_is_pointwise() -> None:
    x, mask = R(5, 7, 4), torch.rand(5, 7) < 0.5
    assert_cut(lifted(aten.index_put.default, x, [mask], torch.tensor(0.5).double()), "i0 i1 i2")
    assert_cut(lifted(aten.index_put.default, x, [None, mask[0]], R(1, 4), True), "i0 i1 i2")
    values = R(int(mask.sum()), 4)
    assert_cut(lifted(aten.index_put.default, x, [mask], values), "i2")


def test_random_boxes_of_rows_and_columns() -> None:
    """Cuts of several axes at once, uneven ones among them."""
    random = Random(3)
    for _ in range(12):
        it = lifted(aten.index_put.default, R(11, 7, 5), [Z(-11, 11, 9), None, Z(-5, 5, 9)],
                    R(9, 7), True)  # fmt: skip
        parts = it.parts(v0=random.randint(1, 4), v2=random.randint(1, 3),
                         i1=random.randint(1, 3), b0=random.randint(1, 4))  # fmt: skip
        op = it.space.graph.ops[0]
        (made,) = run_split(it.space, 0, it.space.split(0, parts), it.tensors, CONTEXT)
        (whole,) = run_op(op, op.args, it.tensors, CONTEXT)
        assert torch.allclose(made, whole, rtol=1e-12)


def test_a_module_with_padding_trains_to_the_same_gradient() -> None:
    """Torch's own embedding, forward and backward, against parts of 5 and 6 rows."""
    table = nn.Embedding(11, 6, padding_idx=7, dtype=torch.float64)
    indices = torch.tensor([7, 1, 5, 6, 7, 10, 5])
    out = table(indices)
    grad = R(7, 6)
    out.backward(grad)
    weight = table.weight.detach()
    forward = lifted(aten.embedding.default, weight, indices, 7)
    (made,) = run_split(
        forward.space, 0, forward.space.split(0, forward.parts(v=2)), forward.tensors, CONTEXT
    )
    assert torch.equal(made, out.detach())
    back = lifted(aten.embedding_dense_backward.default, grad, indices, 11, 7, False)
    (made,) = run_split(back.space, 0, back.space.split(0, back.parts(v=2)), back.tensors, CONTEXT)
    assert table.weight.grad is not None
    assert torch.allclose(made, table.weight.grad, rtol=1e-14)
    assert not made[7].any()
