"""Atoms: cuts survive views, conflicting views refuse cuts, classes tie axes through a graph."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from graphs import Maker, Tensor
from plain_atoms import divide, find_atoms
from torch import nn

from apportion import zoo
from apportion.capture.capture import capture
from apportion.describe.descriptions import DESCRIPTIONS, Description
from apportion.describe.errors import IllegalCut
from apportion.describe.language import f
from apportion.graph import Graph
from apportion.search.baselines.data import sample_classes
from apportion.split.space import Space

BATCH, SEQ, HEADS, WIDTH = 4, 5, 3, 2


def attention_views() -> tuple[Space, list[Tensor], Tensor]:
    """(B, T, 3D) -> (B*T, 3D) -> three of (B*T, D) -> each (B, T, heads, D / heads)."""
    make = Maker()
    size = HEADS * WIDTH
    x = make.value(BATCH, SEQ, 3 * size)
    flat = make.op("aten.view.default", x, (BATCH * SEQ, 3 * size), out=(BATCH * SEQ, 3 * size))
    pieces = make.several("aten.split.Tensor", flat, size, 1, outs=[(BATCH * SEQ, size)] * 3)
    shape = (BATCH, SEQ, HEADS, WIDTH)
    heads = [make.op("aten.view.default", p, shape, out=shape) for p in pieces]
    return make.space(), heads, x


def test_a_chain_of_views_keeps_the_atoms_of_the_heads() -> None:
    space, heads, x = attention_views()
    assert space.atoms.dims[x.index] == ((BATCH,), (SEQ,), (3, HEADS, WIDTH))
    for head in heads:
        assert space.atoms.dims[head.index] == ((BATCH,), (SEQ,), (HEADS,), (WIDTH,))


def test_the_atoms_of_a_head_are_one_class_through_all_views() -> None:
    space, heads, x = attention_views()
    batch, seq, _, head, width = space.atoms.value_classes[x.index]
    for tensor in heads:
        assert space.atoms.value_classes[tensor.index] == (batch, seq, head, width)
    assert len({batch, seq, head, width}) == 4


def test_every_view_of_the_chain_can_be_cut_by_heads() -> None:
    space, _, x = attention_views()
    head = space.atoms.value_classes[x.index][3]
    for op in range(len(space.graph.ops)):
        axes = space.axes(op)
        (place,) = [k for k, axis in enumerate(axes) if axis.group == head]
        assert axes[place].extent == HEADS
        parts = [HEADS if k == place else 1 for k in range(len(axes))]
        made = space.split(op, parts).parts[1].outputs[0]
        factors = space.factors(space.graph.ops[op].outputs[0])
        cut = [k for k, (r, f) in enumerate(zip(made, factors, strict=True)) if r != (0, f)]
        assert [made[k] for k in cut] == [(1, 2)]


def test_views_with_no_common_refinement_refuse_cuts_but_work_uncut() -> None:
    make = Maker()
    x = make.value(12)
    a = make.op("aten.view.default", x, (3, 4), out=(3, 4))
    b = make.op("aten.view.default", x, (4, 3), out=(4, 3))
    make.op("aten.relu.default", b, out=(4, 3))
    space = make.space()
    assert space.atoms.dims[x.index] == ((3, 4),)
    assert all(space.cuttable(0))
    assert not any(space.cuttable(1))
    assert all(space.cuttable(2))
    with pytest.raises(IllegalCut, match="another way"):
        space.split(1, (2, 1))
    (part,) = space.split(1, (1, 1)).parts
    assert part.inputs == (((0, 3), (0, 4)),)
    assert part.outputs == (((0, 4), (0, 3)),)
    assert a.index != b.index


def test_an_axis_of_several_atoms_is_cut_atom_by_atom() -> None:
    make = Maker()
    x = make.value(12)
    make.op("aten.view.default", x, (3, 4), out=(3, 4))
    make.op("aten.relu.default", x, out=(12,))
    space = make.space()
    assert [(a.name, a.extent) for a in space.axes(1)] == [("i0.0", 3), ("i0.1", 4)]
    assert space.cuttable(1) == (True, True)
    regions = [p.inputs[0] for p in space.split(1, (1, 2)).parts]
    assert regions == [((0, 3), (0, 2)), ((0, 3), (2, 4))]


def test_an_axis_cut_into_ranges_that_are_not_contiguous_is_refused_where_order_matters() -> None:
    make = Maker()
    x = make.value(13)
    y = make.op("aten.slice.Tensor", x, 0, 1, 13, 1, out=(12,))
    make.op("aten.view.default", y, (3, 4), out=(3, 4))
    space = make.space()
    assert space.cuttable(0) == (True, False)
    with pytest.raises(IllegalCut, match="not contiguous"):
        space.split(0, (1, 2))


def test_state_has_the_same_atoms_at_both_ends_of_the_step() -> None:
    make = Maker()
    x, before = make.value(3, 4), make.value(12, role="buffer")
    after = make.op("aten.view.default", x, (12,), out=(12,))
    make.survives(before, after)
    space = make.space()
    assert space.atoms.dims[before.index] == space.atoms.dims[after.index] == ((3, 4),)
    classes = space.atoms.value_classes
    assert classes[before.index] == classes[after.index]


def test_dimensions_of_extent_one_have_no_atoms() -> None:
    make = Maker()
    x = make.value(1, 6)
    make.op("aten.view.default", x, (2, 1, 3), out=(2, 1, 3))
    space = make.space()
    assert space.atoms.dims == (((), (2, 3)), ((2,), (), (3,)))


@pytest.mark.slow
def test_atoms_multiply_to_the_extents_of_a_captured_step() -> None:
    space = mlp_space()
    for value, dims in zip(space.graph.values, space.atoms.dims, strict=True):
        assert tuple(math.prod(f) for f in dims) == value.shape


def mlp_space() -> Space:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    return Space(capture(step, model, optimizer, torch.randn(5, 6)).graph)


def test_the_batch_is_one_class_through_forward_and_backward() -> None:
    space = mlp_space()
    (batch,) = sample_classes(space)
    for value, classes in zip(space.graph.values, space.atoms.value_classes, strict=True):
        shape = value.shape or ()
        for extent, group in zip((n for n in shape if n != 1), classes, strict=True):
            assert (group == batch) == (extent == 5), value
    matmuls = [o for o, op in enumerate(space.graph.ops) if op.kind == "aten.mm.default"]
    assert matmuls
    for op in matmuls:  # gradients of weights reduce over the batch, those of inputs keep it
        assert [axis.extent for axis in space.axes(op) if axis.group == batch] == [5]


def test_a_parameter_its_gradient_and_its_state_share_classes() -> None:
    space = mlp_space()
    updates = [op for op in space.graph.ops if op.kind == "apportion.update"]
    assert len(updates) == 4
    for op in updates:
        wide = [v for v in (*op.inputs, *op.outputs) if space.graph.values[v].shape]
        assert len({space.atoms.value_classes[v] for v in wide}) == 1


# Against the plain ones


def views(random: Random) -> Graph:
    """Views of views, some of which have no common refinement, and sums that tie what is alike."""
    make = Maker()
    shapes = [(24,), (2, 12), (3, 8), (4, 6), (6, 4), (12, 2), (2, 3, 4), (4, 1, 6), (2, 2, 6)]
    tensors = [(make.value(*shape), shape) for shape in random.sample(shapes, 3)]
    first = tensors[0]
    for _ in range(random.randint(3, 12)):
        x, shape = random.choice(tensors)
        same = [other for other, theirs in tensors if theirs == shape]
        if random.random() < 0.4:
            made = make.op("aten.add.Tensor", x, random.choice(same), 1, out=shape)
        else:
            shape = random.choice(shapes)
            made = make.op("aten.view.default", x, shape, out=shape)
        tensors.append((made, shape))
    last = [tensor for tensor, shape in tensors[3:] if shape == first[1]]
    if last:
        make.survives(first[0], last[-1])
    return make.graph()


def captured(spec: str) -> Graph:
    it = zoo.load(spec, 0, meta=True)
    return capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm).graph


def halved(space: Space, random: Random) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Some of the even classes, each divided in two."""
    extents: dict[int, int] = {}
    for op in range(len(space.graph.ops)):
        extents.update((axis.group, axis.extent) for axis in space.axes(op))
    even = [c for c, extent in sorted(extents.items()) if extent > 2 and extent % 2 == 0]
    some = random.sample(even, len(even) // 2)
    return tuple((c, (2, extents[c] // 2)) for c in some)


@pytest.mark.parametrize("seed", range(60))
def test_views_at_random_have_the_atoms_of_the_plain_search(seed: int) -> None:
    random = Random(seed)
    graph = views(random)
    space = Space(graph)
    plain = find_atoms(graph, space.formulas)
    assert space.atoms == plain
    digits = halved(space, random)
    assert space.with_digits(digits).atoms == divide(plain, digits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt2", "rnn", "transformer-xl", "wavenet", pytest.param("wresnet", marks=pytest.mark.slow)],
)
def test_captured_steps_have_the_atoms_of_the_plain_search(name: str) -> None:
    graph = captured(f"{name}:tiny")
    space = Space(graph)
    plain = find_atoms(graph, space.formulas)
    assert space.atoms == plain
    digits = halved(space, Random(name))
    assert digits
    assert space.with_digits(digits).atoms == divide(plain, digits)


@pytest.mark.slow
def test_a_space_divided_later_is_the_one_divided_at_once() -> None:
    graph = captured("gpt2:tiny")
    space = Space(graph)
    before = space.atoms, space.calls, space.call_ids
    digits = halved(space, Random(1))
    once, later = Space(graph, digits), space.with_digits(digits)
    assert once.digits == later.digits == digits
    assert (once.atoms, once.calls, once.call_ids) == (later.atoms, later.calls, later.call_ids)
    for op in range(len(graph.ops)):
        assert once.axes(op) == later.axes(op)
        assert once.cuttable(op) == later.cuttable(op)
    assert later.with_digits(()).atoms == space.atoms
    assert (space.atoms, space.calls, space.call_ids) == before
    with pytest.raises(ValueError, match="cannot be divided"):
        space.with_digits(((0, (2, 10**6)),))


def test_call_ids_are_equal_exactly_for_equal_calls() -> None:
    space = Space(captured("gpt2:tiny"))
    assert set(space.call_ids) == set(range(space.number_of_calls))
    assert space.number_of_calls == len(set(space.calls)) < len(space.calls)
    number: dict[object, int] = {}
    for call, own in zip(space.calls, space.call_ids, strict=True):
        assert number.setdefault(call, own) == own
    for op in range(len(space.graph.ops)):
        assert space.groups(op) == tuple(axis.group for axis in space.axes(op))


def test_calls_are_alike_that_differ_in_what_their_description_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled(x: Any, dim: int) -> Any:
        return lambda i, j: f("scaled", x[i, j], dim)

    monkeypatch.setitem(DESCRIPTIONS, "test.scaled", Description("test.scaled", scaled))
    make = Maker()
    x = make.value(4, 6)
    for args in ((1, 5), (1, 7), (0, 5)):
        make.op("test.scaled.default", x, *args, out=(4, 6))
    space = make.space()
    assert len(set(space.call_ids)) == 3
    assert [number == space.alike[0] for number in space.alike] == [True, True, False]
    once, twice = (space.split(op, (2, 1)).parts for op in (0, 1))
    assert [part.args[2] for part in (*once, *twice)] == [5, 5, 7, 7]
    assert [part.inputs for part in once] == [part.inputs for part in twice]


def test_arguments_that_are_equal_and_not_the_same_make_different_calls() -> None:
    make = Maker()
    x = make.value(4, dtype="int64")
    for exponent in (2, 2.0):
        make.op("aten.pow.Tensor_Scalar", x, exponent, out=(4,))
    space = make.space()
    assert space.number_of_calls == 2
    for op, kind in enumerate((int, float)):
        assert {type(part.args[1]) for part in space.split(op, (2,)).parts} == {kind}
