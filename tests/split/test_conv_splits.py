"""Convolutions and pooling: halos, padding, groups, and gradients that are Ops of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from graphs import CONTEXT, One, one
from rings import sampled

from apportion.capture.capture import capture
from apportion.describe.errors import IllegalCut
from apportion.split.part import Pad
from apportion.split.space import Space
from apportion.verify import run_split as check
from apportion.verify.run_split import check_op, run_op

SIZES = {1: (11,), 2: (7, 8), 3: (5, 4, 6)}


class Case:
    """A convolution with random tensors, and the calls of its gradients."""

    def __init__(
        self,
        size: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int = 1,
        inward: int = 2,
        outward: int = 3,
        bias: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.x = made(3, groups * inward, *size)
        self.weight = made(groups * outward, inward, *kernel)
        self.bias = made(groups * outward) if bias else None
        self.settings = tuple(stride), tuple(padding), tuple(dilation)
        self.groups = groups
        self.grad = made(*run_op_of(self.forward).shape)

    @property
    def forward(self) -> One:
        none = (0,) * (self.x.dim() - 2)
        return one(
            "aten.convolution.default", self.x, self.weight, self.bias, *self.settings, False, none,
            self.groups,
        )  # fmt: skip

    @property
    def for_input(self) -> One:
        size = tuple(self.x.shape)
        kind = "apportion.conv_backward_input"
        return one(kind, self.grad, self.weight, size, *self.settings, self.groups)

    @property
    def for_weight(self) -> One:
        size = tuple(self.weight.shape)
        kind = "apportion.conv_backward_weight"
        return one(kind, self.grad, self.x, size, *self.settings, self.groups)


def run_op_of(it: One) -> torch.Tensor:
    op = it.space.graph.ops[0]
    return run_op(op, op.args, it.tensors, CONTEXT)[0]


def assert_right(it: One) -> int:
    findings = check_op(it.space, 0, it.tensors, CONTEXT)
    wrong = [str(f) for f in findings if not f.right]
    assert not wrong, wrong
    return len(findings)


def fits(size: Sequence[int], kernel: Any, padding: Any, dilation: Any) -> bool:
    each = zip(size, kernel, padding, dilation, strict=True)
    return all(n + 2 * p - d * (k - 1) >= 1 for n, k, p, d in each)


CASES = [
    (rank, (kernel,) * rank, (stride,) * rank, (padding,) * rank, (dilation,) * rank, groups)
    for number, (rank, kernel, stride, padding, dilation, groups) in enumerate(
        itertools.product((1, 2, 3), (1, 3, 5), (1, 2), (0, 1, 2), (1, 2), (1, 2, 3))
    )
    if fits(SIZES[rank], (kernel,) * rank, (padding,) * rank, (dilation,) * rank)
    and number % {1: 5, 2: 17, 3: 67}[rank] == 0
]


@pytest.mark.parametrize("case", sampled(CASES, 4), ids=str)
def test_every_derived_split_is_right(case: Any) -> None:
    rank, *settings, groups = case
    it = Case(SIZES[rank], *settings, groups=groups)
    for call in (it.forward, it.for_input, it.for_weight):
        assert assert_right(call) > 0


def names(prefix: str, count: int = 2) -> set[str]:
    return {f"{prefix}{d}" for d in range(count)}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_which_axes_can_be_cut(groups: int, stride: int) -> None:
    it = Case((7, 8), (3, 3), (stride, stride), (1, 1), (1, 1), groups)
    channels = {"n", "c", "o", *(["g"] if groups > 1 else [])}
    assert it.forward.cuttable() == channels | names("i") | names("k")
    assert it.for_weight.cuttable() == channels | names("i") | names("k")
    assert it.for_input.cuttable() == channels | names("y") | names("k")


def test_a_dimension_without_stride_is_cut_beside_one_with_stride() -> None:
    it = Case((7, 8), (3, 3), (1, 2), (1, 1), (1, 1)).for_input
    assert it.cuttable() == {"n", "c", "o", *names("y"), *names("k")}
    assert_right(it)


def test_a_kernel_of_one_tap_reads_at_its_own_place() -> None:
    it = Case((7, 8), (1, 1), (1, 1), (0, 0), (1, 1))
    for call in (it.forward, it.for_input, it.for_weight):
        split = call.space.split(0, call.parts(**{"y0" if call is it.for_input else "n": 2}))
        assert all(part.pads == () for part in split.parts)
    # One class: what cuts the input along its height cuts the output.
    forward = it.forward.space
    height = forward.atoms.value_classes[0][2]
    assert {axis.name for axis in forward.axes(0) if axis.group == height} == {"i0"}


# Padding


def test_parts_get_a_halo_and_the_padding_that_is_theirs() -> None:
    it = Case((9,), (3,), (1,), (1,), (1,)).forward
    parts = it.space.split(0, it.parts(i0=3)).parts
    assert [p.inputs[0][2] for p in parts] == [(0, 4), (2, 7), (5, 9)]
    assert [p.pads for p in parts] == [(Pad(0, 2, 1, 0, 0),), (), (Pad(0, 2, 0, 1, 0),)]
    assert [p.args[4] for p in parts] == [(0,)] * 3


def test_an_uncut_axis_keeps_the_padding_of_its_kernel() -> None:
    it = Case((9,), (3,), (2,), (1,), (1,)).forward
    for part in it.space.split(0, it.parts(n=3, o=2)).parts:
        assert part.pads == () and part.args[4] == (1,) and part.inputs[0][2] == (0, 9)


def test_the_input_gradient_reads_backwards() -> None:
    it = Case((8,), (3,), (1,), (1,), (2,)).for_input
    parts = it.space.split(0, it.parts(y0=2)).parts
    # grad[y + 1 - 2k] for y in 0..3 and k in 0..2: -3 .. 4
    assert [p.inputs[0][2] for p in parts] == [(0, 5), (1, 6)]
    assert [p.pads for p in parts] == [(Pad(0, 2, 3, 0, 0),), (Pad(0, 2, 0, 3, 0),)]
    assert [p.args[4] for p in parts] == [(4,)] * 2


def test_the_input_gradient_of_a_stride_reads_what_can_touch_it() -> None:
    it = Case((9,), (3,), (2,), (1,), (1,)).for_input
    parts = it.space.split(0, it.parts(y0=2)).parts
    # grad[(y + 1 - k)/2]: y in 0..3 meets 0 .. 2, y in 4..8 meets 2 .. 4
    assert [p.outputs[0][2] for p in parts] == [(0, 4), (4, 9)]
    assert [p.inputs[0][2] for p in parts] == [(0, 3), (2, 5)]
    # 2*i + k - p = y from the part's first: 2*0 + 1 - 1 = 0 and 2*0 + 1 - 1 = 0
    assert [p.args[4] for p in parts] == [(1,), (1,)]
    parts = it.space.split(0, it.parts(y0=3)).parts
    assert [p.outputs[0][2] for p in parts] == [(0, 3), (3, 6), (6, 9)]
    assert [p.args[4] for p in parts] == [(1,), (2,), (1,)]


def test_one_tap_of_a_stride_may_ask_for_less_than_no_padding() -> None:
    it = Case((9,), (1,), (2,), (0,), (1,)).for_input
    parts = it.space.split(0, it.parts(y0=3)).parts
    assert [p.inputs[0][2] for p in parts] == [(0, 2), (2, 3), (3, 5)]
    assert [p.args[4] for p in parts] == [(0,), (-1,), (0,)]
    with pytest.raises(IllegalCut, match="nothing but padding"):
        it.space.split(0, it.parts(y0=9))
    assert_right(it)


def test_taps_can_be_cut_too() -> None:
    """Tofu's conv1d: cutting the window leaves partial sums."""
    it = Case((9,), (4,), (1,), (0,), (1,), bias=False).forward
    split = it.space.split(0, it.parts(k0=2))
    assert split.reducers == ("sum",) and split.terms == (2,)
    assert [p.inputs[0][2] for p in split.parts] == [(0, 7), (2, 9)]
    assert [p.inputs[1][2] for p in split.parts] == [(0, 2), (2, 4)]


def test_a_part_in_nothing_but_padding_is_refused() -> None:
    it = Case((3,), (1,), (1,), (2,), (1,)).forward
    with pytest.raises(IllegalCut, match="nothing but padding"):
        it.space.split(0, it.parts(i0=7))
    assert_right(it)


def test_the_bias_counts_once() -> None:
    it = Case((7, 8), (3, 3), (1, 1), (1, 1), (1, 1), groups=2).forward
    parts = it.space.split(0, it.parts(c=2, g=2)).parts
    assert sorted((p.terms, p.zeros) for p in parts) == [((0,), ())] * 2 + [((1,), (2,))] * 2


def test_groups_come_from_the_local_shapes() -> None:
    it = Case((5,), (3,), (1,), (0,), (1,), groups=3).forward
    for parts, groups in (({"g": 3}, [1] * 3), ({"g": 2}, [1, 2]), ({"o": 2}, [3] * 2)):
        split = it.space.split(0, it.parts(**parts))
        assert [p.args[8] for p in split.parts] == groups


# Transposed


def transposed(
    rank: int, kernel: int, stride: int, padding: int, dilation: int, more: int, groups: int,
    bias: bool = True,
) -> tuple[One, torch.Tensor]:  # fmt: skip
    """A transposed convolution and torch's result."""
    generator = torch.Generator().manual_seed(5)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    plane = {1: (7,), 2: (4, 5), 3: (3, 4, 5)}[rank]
    x = made(3, groups * 2, *plane)
    weight = made(groups * 2, 3, *[kernel] * rank)
    shift = made(groups * 3) if bias else None
    settings = [stride] * rank, [padding] * rank, [dilation] * rank
    out = torch.ops.aten.convolution.default(
        x, weight, shift, *settings, True, [more] * rank, groups
    )
    kind = "apportion.conv_transpose"
    it = one(kind, x, weight, shift, tuple(out.shape), *map(tuple, settings), groups)
    return it, out


TRANSPOSED = [
    case
    for number, case in enumerate(
        itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2), (0, 1, 2), (1, 2))
    )
    if case[5] < max(case[2], case[4])
    and case[3] <= case[4] * (case[1] - 1)
    and number % {1: 11, 2: 37, 3: 131}[case[0]] == 0
]


@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
def test_every_split_of_a_transposed_convolution_is_right(case: Any) -> None:
    it, out = transposed(*case)
    torch.testing.assert_close(run_op_of(it), out)
    assert assert_right(it) > 0


@pytest.mark.parametrize("stride", [1, 2])
def test_which_axes_of_a_transposed_convolution_can_be_cut(stride: int) -> None:
    it, _ = transposed(2, 3, stride, 1, 1, 0, 2)
    assert it.cuttable() == {"n", "g", "c", "o", *names("y"), *names("k")}
    parts = it.space.split(0, it.parts(c=2)).parts
    assert [p.zeros for p in parts] == [(), (2,)]  # the bias counts once


def test_a_part_of_a_transposed_convolution_reads_what_can_touch_it() -> None:
    it, out = transposed(1, 3, 2, 1, 1, 1, 1, bias=False)
    assert out.shape[2] == 14
    parts = it.space.split(0, it.parts(y0=2)).parts
    # x[(y + 1 - k)/2]: y in 0..6 meets 0 .. 3, y in 7..13 meets 3 .. 7, of which 7 is not there
    assert [p.inputs[0][2] for p in parts] == [(0, 4), (3, 7)]
    assert [p.pads for p in parts] == [(), (Pad(0, 2, 0, 1, 0),)]
    assert [p.args[3][2] for p in parts] == [7, 7]
    assert [p.args[5] for p in parts] == [(1,), (2,)]


# Several axes at once


@pytest.mark.parametrize("seed", range(8))
def test_random_cuts_of_several_axes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    rank = rng.choice((1, 2, 2, 3))

    def drawn(*choices: int) -> list[int]:
        return [rng.choice(choices) for _ in range(rank)]

    size, kernel, padding, dilation = drawn(6, 7, 9), drawn(1, 2, 3), drawn(0, 1, 3), drawn(1, 2)
    it = Case(size, kernel, drawn(1, 1, 2, 3), padding, dilation, rng.choice((1, 2, 3)))
    checked = 0
    for call in (it.forward, it.for_input, it.for_weight):
        extents = [axis.extent for axis in call.space.axes(0)]
        cuts = [
            tuple(rng.randint(1, min(n, 4)) if rng.random() < 0.5 else 1 for n in extents)
            for _ in range(6)
        ]
        monkeypatch.setattr(check, "cuts", lambda space, index, cuts=cuts: cuts)
        checked += assert_right(call)
    assert checked > 3


# Gradients


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 1, 1), (2, 0, 2), (3, 2, 3)])
def test_the_gradients_are_autograds(stride: int, padding: int, groups: int, bias: bool) -> None:
    it = Case((7, 8), (3, 2), (stride,) * 2, (padding,) * 2, (1, 2), groups, bias=bias)
    x, weight = it.x.requires_grad_(), it.weight.requires_grad_()
    out = torch.nn.functional.conv2d(x, weight, it.bias, *it.settings, groups)
    wanted = torch.autograd.grad(out, [x, weight], it.grad)
    for call, expected in zip((it.for_input, it.for_weight), wanted, strict=True):
        torch.testing.assert_close(run_op_of(call), expected)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(2, 4, 3, bias=False)
        self.second = torch.nn.Conv2d(4, 4, 3, groups=2)
        self.third = torch.nn.ConvTranspose2d(4, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(self.first(x)))
        return out


@pytest.mark.slow
def test_capture_asks_only_for_the_gradients_that_are_needed() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.randn(3, 2, 8, 8)
    program = capture(lambda m, b: m(b).square().mean(), model, optimizer, batch)
    kinds = [op.kind for op in program.graph.ops]
    assert kinds.count("apportion.conv_backward_input") == 1  # nobody needs that of the batch
    assert kinds.count("apportion.conv_backward_weight") == 3
    assert kinds.count("aten.sum.dim_IntList") == 2  # the biases of the second and third
    assert kinds.count("apportion.conv_transpose") == 1
    assert kinds.count("aten.convolution.default") == 3  # one is the gradient of the transposed
    assert Space(program.graph).undescribed == {}
    backward = next(op for op in program.graph.ops if op.kind == "apportion.conv_backward_input")
    assert backward.module == "second" and backward.forward is not None
