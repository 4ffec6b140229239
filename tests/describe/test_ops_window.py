"""Pools, resampling, padding and columns: which axes can be cut, and halos, places and counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from graphs import CONTEXT, One, one
from rings import sampled

from apportion.capture.lift_call import lift_call
from apportion.describe.errors import IllegalCut
from apportion.split.part import Pad
from apportion.split.space import Space
from apportion.verify.run_split import check_op, run_op

aten = torch.ops.aten
PLANES = {2: (7, 9), 3: (5, 6, 7)}


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def results(it: One) -> tuple[torch.Tensor, ...]:
    op = it.space.graph.ops[0]
    return run_op(op, op.args, it.tensors, CONTEXT)


def assert_right(it: One) -> int:
    findings = check_op(it.space, 0, it.tensors, CONTEXT)
    wrong = [str(f) for f in findings if not f.right]
    assert not wrong, wrong
    return len(findings)


def names(prefix: str, count: int) -> set[str]:
    return {f"{prefix}{d}" for d in range(count)}


def lifted(target: Any, *args: Any) -> One:
    """The operator as capture writes it: one Op."""
    made = lift_call(target, args, {})
    assert len(made.graph.ops) == 1
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    used = [made.inputs.index(v) for v in made.graph.ops[0].inputs]
    return One(Space(made.graph), tuple(inputs[k] for k in used))


# Maximum


def pooled(rank: int, *settings: Any, lead: tuple[int, ...] = (2, 3)) -> tuple[One, One]:
    """A maximum pool and its gradient."""
    kernel, stride, padding, dilation, ceil = settings
    each = [[n] * rank for n in (kernel, stride, padding, dilation)]
    x = rand(*lead, *PLANES[rank])
    forward, backward = (
        (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward)
        if rank == 2
        else (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward)
    )
    most, found = forward.default(x, *each, ceil)
    there = lifted(forward.default, x, *each, ceil)
    assert all(map(torch.equal, results(there), (most, found)))
    grad = rand(*most.shape)
    back = lifted(backward.default, grad, x, *each, ceil, found)
    torch.testing.assert_close(results(back)[0], backward.default(grad, x, *each, ceil, found))
    return there, back


MAXIMA = [
    (rank, *settings)
    for number, (rank, *settings) in enumerate(
        itertools.product((2, 3), (2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True))
    )
    if number % {2: 3, 3: 9}[rank] == 0
]


@pytest.mark.parametrize("case", sampled(MAXIMA, 3), ids=str)
def test_every_split_of_a_maximum_pool_is_right(case: Any) -> None:
    rank = case[0]
    for lead in ((2, 3), (3,)):
        there, back = pooled(*case, lead=lead)
        assert there.space.graph.ops[0].kind == "apportion.max_pool"
        assert {*names("i", len(lead))} <= there.cuttable()
        assert {*names("y", len(lead) + rank)} == back.cuttable()
        assert assert_right(there) > 0 and assert_right(back) > 0


def test_all_of_a_maximum_pools_space_can_be_cut() -> None:
    there, back = pooled(2, 3, 2, 1, 1, False)
    assert there.cuttable() == names("i", 4)
    assert back.cuttable() == names("y", 4)


def test_a_maximum_is_found_in_the_whole_plane() -> None:
    there, back = pooled(2, 3, 2, 1, 1, False)
    parts = there.space.split(0, there.parts(i2=2)).parts
    # Windows begin at 2*i - 1: two of the first part's, two of the second's.
    assert [p.inputs[0][2] for p in parts] == [(0, 4), (3, 7)]
    assert [p.pads for p in parts] == [
        (Pad(0, 2, 1, 0, -math.inf),),
        (Pad(0, 2, 0, 1, -math.inf),),
    ]
    assert [p.args[3] for p in parts] == [(0, 1)] * 2  # no padding where it is given
    assert [p.args[6] for p in parts] == [(-1, 0), (3, 0)]  # where the part's rows begin
    parts = back.space.split(0, back.parts(y2=2)).parts
    assert [p.outputs[0][2] for p in parts] == [(0, 3), (3, 7)]
    assert [p.inputs[0][2] for p in parts] == [(0, 2), (1, 4)]
    assert [p.args[7] for p in parts] == [(0, 0), (3, 0)]


def test_windows_of_minus_infinity_are_found_inside() -> None:
    x = rand(2, 3, 7, 9)
    x[:, :, :5] = -math.inf
    it = lifted(aten.max_pool2d_with_indices.default, x, [3, 3], [2, 2], [1, 1])
    assert it.cuttable() == names("i", 4)
    assert assert_right(it) > 8


def test_whole_numbers_have_no_least_to_pad_with() -> None:
    x = torch.randperm(2 * 3 * 63).view(2, 3, 7, 9)
    it = lifted(aten.max_pool2d_with_indices.default, x, [2, 2])
    assert it.space.graph.ops[0].kind == "aten.max_pool2d_with_indices.default"
    assert it.cuttable() == {"i0", "i1"}
    assert_right(it)


# Average

AVERAGES = [
    (rank, kernel, stride, padding, ceil, counted, divisor)
    for number, (rank, kernel, stride, padding, ceil, counted, divisor) in enumerate(
        itertools.product(
            (2, 3), (2, 3), (1, 2, 3), (0, 1), (False, True), (False, True), (None, 5)
        )
    )
    if number % {2: 2, 3: 7}[rank] == 0
]


def averaged(rank: int, *settings: Any, lead: tuple[int, ...] = (2, 3)) -> tuple[One, One]:
    kernel, stride, padding, *rest = settings
    each = [[n] * rank for n in (kernel, stride, padding)]
    x = rand(*lead, *PLANES[rank])
    forward, backward = (
        (aten.avg_pool2d, aten.avg_pool2d_backward)
        if rank == 2
        else (aten.avg_pool3d, aten.avg_pool3d_backward)
    )
    made = forward.default(x, *each, *rest)
    there = lifted(forward.default, x, *each, *rest)
    torch.testing.assert_close(results(there)[0], made)
    grad = rand(*made.shape)
    back = lifted(backward.default, grad, x, *each, *rest)
    torch.testing.assert_close(results(back)[0], backward.default(grad, x, *each, *rest))
    return there, back


@pytest.mark.parametrize("case", sampled(AVERAGES, 4), ids=str)
def test_every_split_of_an_average_pool_is_right(case: Any) -> None:
    for lead in ((2, 3), (3,)):
        there, back = averaged(*case, lead=lead)
        assert names("i", len(lead)) <= there.cuttable()
        assert back.cuttable() == names("y", len(lead) + case[0])
        assert assert_right(there) > 0 and assert_right(back) > 0


@pytest.mark.parametrize(("ceil", "counted"), [(False, True), (False, False), (True, True)])
def test_all_of_an_average_pools_space_can_be_cut(ceil: bool, counted: bool) -> None:
    there, back = averaged(2, 3, 2, 1, ceil, counted, None)
    assert there.cuttable() == names("i", 4)
    assert back.cuttable() == names("y", 4)
    assert back.space.graph.ops[0].kind == "apportion.avg_pool_backward"


def test_windows_are_counted_in_the_whole_plane() -> None:
    there, back = averaged(2, 3, 2, 1, False, False, None)
    parts = there.space.split(0, there.parts(i2=2)).parts
    assert [p.inputs[0][2] for p in parts] == [(0, 4), (3, 7)]
    assert [p.args[5] for p in parts] == [(-1, 0), (3, 0)]
    parts = back.space.split(0, back.parts(y2=2)).parts
    assert [p.args[5] for p in parts] == [(0, 0), (3, 0)]


# Places in a plane


@pytest.mark.parametrize("lead", [(2, 3), (3,)])
@pytest.mark.parametrize("rank", [2, 3])
def test_gradients_are_added_at_their_places(rank: int, lead: tuple[int, ...]) -> None:
    x = rand(*lead, *PLANES[rank])
    pool, back = (
        (aten.adaptive_max_pool2d, aten.adaptive_max_pool2d_backward)
        if rank == 2
        else (aten.adaptive_max_pool3d, aten.adaptive_max_pool3d_backward)
    )
    most, found = pool.default(x, [3, 4, 5][:rank])
    grad = rand(*most.shape)
    it = lifted(back.default, grad, x, found)
    torch.testing.assert_close(results(it)[0], back.default(grad, x, found))
    assert it.cuttable() == names("y", len(lead) + rank) | names("k", rank)
    split = it.space.split(0, it.parts(k0=2))
    assert split.reducers == ("sum",) and split.terms == (2,)
    assert_right(it)


def test_unpooling_keeps_the_last_of_one_place() -> None:
    found = torch.tensor([[[0, 0], [3, 3]]]).repeat(2, 3, 1, 1)
    it = one("aten.max_unpool2d.default", rand(2, 3, 2, 2), found, [4, 5])
    assert it.cuttable() == {"i0", "i1"}
    assert_right(it)


@pytest.mark.parametrize(("lead", "axes"), [((2, 3), "i0 i1"), ((3,), "i0")])
def test_fractional_pools_draw_for_each_plane(lead: tuple[int, ...], axes: str) -> None:
    samples = torch.rand(*((1,) * (2 - len(lead)) + lead), 2, dtype=torch.float64)
    it = one("aten.fractional_max_pool2d.default", rand(*lead, 7, 9), [2, 3], [3, 4], samples)
    assert it.cuttable() == set(axes.split())
    assert_right(it)


# Planes of another size


@pytest.mark.parametrize(
    ("plane", "size", "axes"),
    [
        ((8, 6), (4, 6), "i0 i1 y0 y1"),  # two by one
        ((4, 5), (8, 1), "i0 i1 y0"),
        ((6, 9), (4, 6), "i0 i1 b0 b1"),  # blocks of 3 become 2
        ((7, 5), (3, 4), "i0 i1"),
        ((6, 5), (2, 5), "i0 i1 y0 y1"),
    ],
)
def test_adaptive_averages_repeat_in_blocks(plane: Any, size: Any, axes: str) -> None:
    x = rand(2, 3, *plane)
    it = one("aten._adaptive_avg_pool2d.default", x, size)
    assert it.cuttable() == set(axes.split())
    assert_right(it)
    back = one("aten._adaptive_avg_pool2d_backward.default", rand(2, 3, *size), x)
    assert back.cuttable() == set(axes.split())
    assert_right(back)


@pytest.mark.parametrize(
    ("plane", "size", "scales", "axes"),
    [
        ((4, 6), (8, 18), (None, None), "i0 i1 y0 y1"),
        ((4, 6), (8, 18), (2.0, 3.0), "i0 i1 y0 y1"),
        ((8, 6), (4, 9), (None, None), "i0 i1 y0 b1"),
        ((4, 6), (8, 15), (2.0, 2.6), "i0 i1 y0"),  # 2.6 is not 15/6: it rounds otherwise
        ((5, 7), (7, 5), (None, None), "i0 i1"),
    ],
)
@pytest.mark.parametrize("kind", ["upsample_nearest2d", "_upsample_nearest_exact2d"])
def test_nearest_neighbours_repeat_in_blocks(
    kind: str, plane: Any, size: Any, scales: Any, axes: str
) -> None:
    it = one(f"aten.{kind}.default", rand(2, 3, *plane), size, *scales)
    assert it.cuttable() == set(axes.split())
    assert_right(it)
    shape = (2, 3, *plane)
    back = one(f"aten.{kind}_backward.default", rand(2, 3, *size), size, shape, *scales)
    assert back.cuttable() == set(axes.split())
    assert_right(back)


def test_parts_that_do_not_end_with_blocks_are_refused() -> None:
    it = one("aten.upsample_nearest1d.default", rand(2, 3, 5), [15], None)
    parts = it.space.split(0, it.parts(y0=5)).parts
    assert [p.inputs[0][2] for p in parts] == [(k, k + 1) for k in range(5)]
    with pytest.raises(IllegalCut):
        it.space.split(0, it.parts(y0=2))


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("upsample_bilinear2d", (True,)), ("upsample_bicubic2d", (False,)),
     ("_upsample_bilinear2d_aa", (False,))],
)  # fmt: skip
def test_interpolation_is_cut_where_it_keeps_the_size(kind: str, extra: Any) -> None:
    it = one(f"aten.{kind}.default", rand(2, 3, 5, 6), [5, 9], *extra)
    assert it.cuttable() == {"i0", "i1", "y0"}
    assert_right(it)
    args = ([5, 9], [2, 3, 5, 6], *extra)
    back = one(f"aten.{kind}_backward.default", rand(2, 3, 5, 9), *args)
    assert back.cuttable() == {"i0", "i1", "y0"}
    assert_right(back)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
def test_padding_is_cut_beside_the_dims_that_are_padded(kind: str) -> None:
    x = rand(2, 3, 5, 6)
    for widths, axes in (([1, 2, 0, 0], "i0 i1 i2"), ([0, 0, 2, 1], "i0 i1 i3")):
        it = one(f"aten.{kind}_pad2d.default", x, widths)
        assert it.cuttable() == set(axes.split())
        assert_right(it)
        back = one(f"aten.{kind}_pad2d_backward.default", rand(*results(it)[0].shape), x, widths)
        assert back.cuttable() == set(axes.split())
        assert_right(back)


# Grids and columns


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_grid_can_be_cut_everywhere(mode: int) -> None:
    x, grid = rand(3, 2, 4, 6), rand(3, 7, 5, 2)
    it = one("aten.grid_sampler_2d.default", x, grid, mode, 1, False)
    assert it.cuttable() == {"n", "c", "i0", "i1"}
    assert_right(it)
    kind = "aten.grid_sampler_2d_backward.default"
    back = one(kind, rand(3, 2, 7, 5), x, grid, mode, 1, False, [True, True])
    assert back.cuttable() == {"n", "c", "i0", "i1"}
    assert back.space.split(0, back.parts(c=2)).reducers == (None, "sum")
    assert back.space.split(0, back.parts(i0=2)).reducers == ("sum", None)
    assert_right(back)


def test_grids_are_cut_along_the_batch() -> None:
    it = one("aten.affine_grid_generator.default", rand(5, 2, 3), [5, 3, 4, 6], False)
    assert it.cuttable() == {"n"}
    assert_right(it)


@pytest.mark.parametrize("lead", [(3,), ()])
def test_columns_can_be_cut_everywhere(lead: tuple[int, ...]) -> None:
    settings = [3, 2], [2, 1], [1, 0], [2, 3]
    it = one("aten.im2col.default", rand(*lead, 4, 9, 8), *settings)
    assert it.cuttable() == {"c", *names("k", 2), *names("i", 2), *names("n", len(lead))}
    parts = it.space.split(0, it.parts(i0=2)).parts
    assert [p.inputs[0][-2] for p in parts] == [(0, 6), (3, 9)]  # 2*i + 2*k - 1
    assert_right(it)
    columns = rand(*results(it)[0].shape)
    back = one("aten.col2im.default", columns, [9, 8], *settings)
    assert back.cuttable() == {"c", *names("n", len(lead))}
    assert_right(back)


def test_convolution_of_time_batch_channel() -> None:
    it = one("aten.conv_tbc.default", rand(9, 3, 4), rand(3, 4, 5), rand(5), 1)
    assert it.cuttable() == {"t", "n", "o", "c", "k"}
    assert_right(it)
