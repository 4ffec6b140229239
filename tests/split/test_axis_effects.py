"""What a cut of one axis does to the tensors of an Op."""

from __future__ import annotations

import pytest
from graphs import Maker, captured

from apportion.split.axis_effects import (
    FIRST_ONLY,
    PARTIAL,
    SEVERAL,
    WHOLE,
    AxisEffect,
    AxisEffects,
)
from apportion.split.grid_choices import one_cut
from apportion.split.space import Space


def effect_of(space: Space, op: int, name: str) -> AxisEffect:
    names = [axis.name for axis in space.axes(op)]
    found = AxisEffects(space).of(op, names.index(name))
    assert found is not None
    return found


def test_a_product_is_cut_on_rows_and_inside() -> None:
    make = Maker()
    bias, a, b = make.value(6), make.value(8, 4), make.value(4, 6)
    make.op("aten.addmm.default", bias, a, b, 1, 1, out=(8, 6))
    space = make.space()
    rows, inside = (effect_of(space, 0, space.axes(0)[k].name) for k in (0, 2))
    assert rows.inputs == (WHOLE, 0, WHOLE) and rows.outputs == (0,)
    assert rows.atoms_cut(space.graph.ops[0]) == [(a.index, 0), (3, 0)]
    assert rows.divides_work and not rows.is_partial
    assert inside.inputs == (FIRST_ONLY, 1, 0) and inside.outputs == (PARTIAL,)
    assert inside.is_partial and inside.written == ()


def test_windows_overlap_by_their_halo() -> None:
    make = Maker()
    data, filters = make.value(2, 4, 12), make.value(6, 4, 5)
    make.op(
        "aten.convolution.default", data, filters, None, (1,), (0,), (1,), False, (0,), 1,
        out=(2, 6, 8),
    )  # fmt: skip
    space = make.space()
    able = dict(AxisEffects(space).legal(0))
    along = [effect for effect in able.values() if effect.outputs == (2,)]
    assert len(along) == 1 and along[0].inputs[0] == 2
    assert along[0].halos[0] == pytest.approx(2 * 8 / 12 - 1)  # each half reads 4 + 4 of 12
    assert (0, 2) in along[0].windows and (0, 2) not in along[0].aligned


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "lenet", "rnnlm:tiny"])
def test_effects_are_what_the_split_in_two_says(spec: str) -> None:
    """Ops that share an effect with others of their form have it themselves."""
    _, space = captured(spec)
    effects = AxisEffects(space)
    for op in range(len(space.graph.ops)):
        count = len(space.axes(op))
        whole = space.split(op, (1,) * count).parts[0]
        for position, effect in effects.legal(op):
            halves = space.split(op, one_cut(count, position))
            assert effect.is_partial == (max(halves.terms, default=1) > 1)
            sides = [(effect.inputs, "inputs"), (effect.outputs, "outputs")]
            for codes, side in sides:
                for place, code in enumerate(codes):
                    boxes = [getattr(part, side)[place] for part in (*halves.parts, whole)]
                    cut = [k for k, three in enumerate(zip(*boxes, strict=True))
                           if len(set(three)) > 1]  # fmt: skip
                    if code >= 0:
                        assert cut == [code]
                    elif code == SEVERAL:
                        assert len(cut) > 1
                    elif code == WHOLE:
                        assert cut == []
