"""Views, pieces of tensors and tensors put together: which axes can be cut, and what parts read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Maker, one

from apportion.describe.descriptions import find_description, reason_unsplit
from apportion.describe.errors import IllegalCut
from apportion.execute.kernels.base import (
    kernel,
)
from apportion.verify.evaluated_call import EvaluatedCall
from apportion.verify.sample import sample_of
from apportion.verify.verdict import RAISED, RIGHT, WRONG

aten = torch.ops.aten
R = torch.randn


def cut_axes(target: Callable[..., Any], *args: Any) -> tuple[set[str], list[str]]:
    """The axes along which a call can be cut, all splits checked, and the kinds of its Ops."""
    case = EvaluatedCall(sample_of(target, *args))
    assert case.lifting_error() == ""
    cuts = list(case.cuts())
    wrong = [str(cut) for cut in cuts if cut.status in (WRONG, RAISED)]
    assert not wrong
    assert not {WRONG, RAISED} & case.pairs().keys()
    kinds = [op.kind for op in case.lifted.graph.ops]
    return {cut.axis for cut in cuts if cut.status == RIGHT}, kinds


CALLS = [
    (aten.view.dtype, (R(4, 6), torch.int32), "i0 i1"),
    (aten.view.dtype, (torch.arange(24).view(4, 6), torch.int32), "i0 i1"),
    (aten.view.dtype, (torch.arange(24, dtype=torch.int16).view(3, 8), torch.int64), "i0 i1"),
    (aten.view_copy.default, (R(4, 6), [24]), "g0_0 g0_1"),
    (aten.view_copy.default, (R(2, 3), [3, 2]), ""),
    (aten.view.default, (R(4, 9), [6, 6]), "g0_0"),
    (aten.view.default, (R(5, 4, 3, 3), [5, 6, 2, 3]), "g0_0 g1_0 g2_0"),
    (aten.expand_copy.default, (R(5, 1), [3, 5, 4]), "i0 i1 i2"),
    (aten.squeeze.default, (R(1, 4, 1, 2),), "i0 i1"),
    (aten.squeeze.dim, (R(4, 2), 1), "i0 i1"),
    (aten.squeeze_copy.dims, (R(1, 4, 2), [0, 2]), "i0 i1"),
    (aten.flip.default, (R(4, 5, 7), [0, -1]), "i0 i1 i2"),
    (aten.rot90.default, (R(4, 5, 7), 1, [0, 2]), "i0 i1 i2"),
    (aten.rot90.default, (R(4, 5, 7), 2, [2, 1]), "i0 i1 i2"),
    (aten.rot90.default, (R(4, 5, 7), 3, [0, 1]), "i0 i1 i2"),
    (aten.roll.default, (R(4, 5, 7), [2, -1], [1, 2]), "i0"),
    (aten.roll.default, (R(4, 5), [5], [1]), "i0 i1"),
    (aten.roll.default, (R(4, 5), [3]), ""),
    (aten.repeat.default, (R(4, 1, 5), [3, 2, 4, 1]), "p0 p1 p2 i1 i3"),
    (aten.channel_shuffle.default, (R(3, 12, 5), 4), "i0 i1 g c"),
    (aten.pixel_shuffle.default, (R(3, 18, 4, 5), 3), "i0 c h w"),
    (aten.pixel_unshuffle.default, (R(3, 5, 8, 12), 4), "i0 c h w"),
    (aten.view_as_real.default, (R(4, 5, dtype=torch.complex64),), "i0 i1"),
    (aten.view_as_complex.default, (R(4, 5, 2),), "i0 i1"),
    (aten.resize.default, (R(4, 5), [4, 5]), "i0 i1"),
    (aten.resize.default, (R(4, 5), [3, 4]), ""),
    (aten.narrow_copy.default, (R(9, 5), 0, 2, 6), "i0 i1"),
    (aten.unsafe_split.Tensor, (R(4, 6), 2, 1), "i0 i1"),
    (aten.split_with_sizes_copy.default, (R(4, 7), [2, 5], 1), "i0"),
    (aten.unbind_copy.int, (R(4, 3, 5), 1), "i0 i1"),
    (aten.diagonal.default, (R(9, 4, 6), -3, 0, -1), "i0 i1"),
    (aten.diagonal.default, (R(9, 4, 6), 2, 0, -1), "i0 i1"),
    (aten.trace.default, (R(5, 8),), "k"),
    (aten.unfold.default, (R(4, 11, 3), 1, 4, 2), "i0 i1 i2 i3"),
    (aten.unfold_backward.default, (R(4, 4, 3, 4), [4, 11, 3], 1, 4, 2), "i0 i2"),
    (aten._chunk_cat.default, ([R(4, 5, 3), R(4, 7, 2)], 1, 3), "i0"),
    (aten.block_diag.default, ([R(4, 5)],), "i j"),
    (aten.block_diag.default, ([R(4, 5), R(3, 3)],), ""),
    (aten.cat.default, ([R(4, 5), R(0), R(4, 2)], 1), "i0"),
    (aten.cat.default, ([R(4, 0), R(4, 0)], 1), "i0"),
    (aten.cat.default, ([R(0), R(0)],), ""),
    (aten.split.Tensor, (R(4, 0), 2, 1), "i0"),
    (aten.constant_pad_nd.default, (R(4, 9, 5), [1, 2, 0, 3], 0.5), "i0 i1 i2"),
    (aten.constant_pad_nd.default, (R(4, 9), [-2, 1], -1), "i0 i1"),
    # A piece in its place: the parts along its dimension are told where they are.
    (aten.slice_backward.default, (R(4, 8), [4, 9], 1, 1, 9, 1), "i0 i1"),
    (aten.slice_backward.default, (R(3, 4), [9, 4], 0, 2, 5, 1), "i0 i1"),
    (aten.slice_backward.default, (R(4, 3), [4, 9], -1, -8, 9, 3), "i0 i1"),
    (aten.select_backward.default, (R(4, 5), [4, 6, 5], -2, -3), "i0 i1 i2"),
    (aten.slice_scatter.default, (R(4, 9), R(4, 3), 1, 1, 8, 3), "i0 i1"),
    (aten.slice_scatter.default, (R(4, 9), R(4, 2), -1, None, 2), "i0 i1"),
    (aten.select_scatter.default, (R(4, 9, 5), R(4, 5), 1, -2), "i0 i1 i2"),
    (aten.diagonal_scatter.default, (R(4, 9, 5), R(9, 3), 2, 0, 2), "i0 i1 i2"),
    (aten.diagonal_backward.default, (R(4, 6), [9, 4, 6], -3, 0, -1), "i0 i1 i2"),
    (aten.diag_embed.default, (R(4, 5), -1, 0, 2), "i0 i1 i2"),
]


@pytest.mark.parametrize(
    "number", range(len(CALLS)), ids=[f"{n}-{call[0]}" for n, call in enumerate(CALLS)]
)
def test_exactly_these_axes_can_be_cut(number: int) -> None:
    target, args, axes = CALLS[number]
    assert cut_axes(target, *args)[0] == set(axes.split())


@pytest.mark.parametrize(
    ("name", "overload"),
    [
        *((name, "default") for name in ("diagonal", "expand", "permute", "t", "unfold", "view")),
        *((name, "default") for name in ("unsqueeze", "split_with_sizes", "view_as_real")),
        *(("view", "dtype"), ("select", "int"), ("slice", "Tensor"), ("split", "Tensor")),
        *(("transpose", "int"), ("unbind", "int"), ("view_as_complex", "default")),
        ("as_strided", "default"),
    ],
)
def test_a_copy_takes_the_arguments_of_its_view(name: str, overload: str) -> None:
    """The one becomes the other by its name alone."""

    def arguments(packet: str) -> list[tuple[str, str]]:
        schema = getattr(getattr(aten, packet), overload)._schema
        return [(a.name, str(a.type)) for a in schema.arguments]

    assert arguments(name) == arguments(f"{name}_copy")


def test_the_backward_of_a_long_slice_is_padding_and_of_a_short_one_a_place() -> None:
    assert cut_axes(aten.slice_backward.default, R(15, 2), [16, 2], 0, 1, 16, 1)[1] == [
        "aten.constant_pad_nd.default"
    ]
    assert cut_axes(aten.slice_backward.default, R(1, 2), [16, 2], 0, 1, 2, 1)[1] == [
        "apportion.slice_place"
    ]


def test_a_flipped_part_reads_from_the_other_end() -> None:
    it = one("aten.flip.default", R(10, 3), [0])
    split = it.space.split(0, it.parts(i0=3))
    assert [part.outputs[0][0] for part in split.parts] == [(0, 3), (3, 6), (6, 10)]
    assert [part.inputs[0][0] for part in split.parts] == [(7, 10), (4, 7), (0, 4)]


def test_windows_of_a_part_overlap_with_its_neighbours() -> None:
    it = one("aten.unfold.default", R(11), 0, 4, 2)
    by_window = it.space.split(0, it.parts(i0=2))
    assert [part.inputs[0][0] for part in by_window.parts] == [(0, 6), (4, 10)]
    by_place = it.space.split(0, it.parts(i1=2))
    assert [part.inputs[0][0] for part in by_place.parts] == [(0, 8), (2, 10)]
    assert [part.args[2] for part in by_place.parts] == [2, 2]


def test_a_part_of_a_diagonal_reads_its_square_only() -> None:
    it = one("aten.diagonal.default", R(9, 6), -2)
    split = it.space.split(0, it.parts(i0=2))
    assert [part.inputs[0] for part in split.parts] == [((2, 5), (0, 3)), ((5, 8), (3, 6))]


def test_a_trace_adds_its_parts() -> None:
    it = one("aten.trace.default", R(5, 8))
    split = it.space.split(0, it.parts(k=2))
    assert split.reducers == ("sum",)
    assert [part.inputs[0] for part in split.parts] == [((0, 2), (0, 2)), ((2, 5), (2, 5))]


@pytest.mark.parametrize("start", [-7, -3, 0, 2, 8, 9])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_lies_outside_of_a_part_is_left_out(start: int, step: int) -> None:
    source, size = R(4), 9
    expected = torch.zeros(size)
    for k in range(4):
        if 0 <= start + k * step < size:
            expected[start + k * step] = source[k]
    context: Any = None
    (made,) = kernel("apportion.slice_place")(context, (source, (size,), 0, start, step))
    assert torch.equal(made, expected)
    x = R(size)
    (made,) = kernel("apportion.slice_scatter")(context, (x, source, 0, start, step))
    assert torch.equal(made, torch.where(expected != 0, expected, x))


@pytest.mark.parametrize(("row", "column"), [(0, 0), (-2, 1), (3, -1), (-4, 0), (6, 2), (-9, 0)])
def test_a_diagonal_outside_of_a_part_is_left_out(row: int, column: int) -> None:
    source, expected = R(4), torch.zeros(6, 5)
    for k in range(4):
        if 0 <= row + k < 6 and 0 <= column + k < 5:
            expected[row + k, column + k] = source[k]
    context: Any = None
    (made,) = kernel("apportion.diagonal_place")(context, (source, (6, 5), 0, 1, row, column))
    assert torch.equal(made, expected)


def test_heads_survive_a_shuffle_of_channels() -> None:
    """The groups of a shuffle are atoms, so that a view into them is cut along each."""
    make = Maker()
    x = make.value(3, 12, 5)
    y = make.op("aten.channel_shuffle.default", x, 4, out=(3, 12, 5))
    make.op("aten.view.default", y, (3, 3, 4, 5), out=(3, 3, 4, 5))
    space = make.space()
    groups = {axis.name: axis.group for axis in space.axes(0)}
    after = [axis.group for axis in space.axes(1)]
    assert {groups["g"], groups["c"]} <= set(after)
    assert all(space.cuttable(1))


def test_groups_that_are_not_contiguous_are_refused() -> None:
    make = Maker()
    x = make.value(3, 2, 2, 5)
    y = make.op("aten.view.default", x, (3, 20), out=(3, 20))
    make.op("aten.channel_shuffle.default", y, 4, out=(3, 20))
    space = make.space()
    names = [axis.name for axis in space.axes(1)]
    assert {"g.0", "g.1"} < set(names)
    space.split(1, [2 if name == "g.0" else 1 for name in names])
    with pytest.raises(IllegalCut, match="not contiguous"):
        space.split(1, [2 if name == "g.1" else 1 for name in names])


@pytest.mark.parametrize(
    "kind",
    ["aten.as_strided.default", "aten.as_strided_scatter.default", "aten.repeat_interleave.Tensor"],
)
def test_some_run_unsplit_for_a_reason(kind: str) -> None:
    assert find_description(kind) is None
    assert reason_unsplit(kind)
