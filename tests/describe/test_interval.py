"""Index arithmetic against the enumeration of index sets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.describe.interval import (
    Affine,
    Box,
    Factors,
    Range,
    bounds,
    flatten,
    full,
    intersect,
    lengths,
    part_range,
    refine,
    relative,
    runs,
    subtract,
    unflatten,
    volume,
)

X, Y = Affine((("x", 1),)), Affine((("y", 1),))
RANGES = {"x": (0, 5), "y": (0, 3)}


def cells(box: Box) -> set[tuple[int, ...]]:
    """The points of a box."""
    return set(itertools.product(*(range(low, high) for low, high in box)))


def flat(box: Box, factors: Factors) -> set[int]:
    """The places in the flat dimension of the points of a box of its atoms."""
    places = set()
    for cell in cells(box):
        place = 0
        for index, factor in zip(cell, factors, strict=True):
            place = place * factor + index
        places.add(place)
    return places


ranges = st.tuples(st.integers(-6, 6), st.integers(1, 4)).map(lambda r: (r[0], r[0] + r[1]))
coefficients = st.integers(-3, 3)
names = st.sampled_from("abc")
forms = st.builds(
    lambda terms, constant: sum(
        (Affine(((n, 1),)) * c for n, c in terms.items()), Affine((), constant)
    ),
    st.dictionaries(names, coefficients, max_size=3),
    st.integers(-9, 9),
)


def value(form: Affine, point: dict[str, int]) -> int:
    return form.constant + sum(c * point[n] for n, c in form.terms)


@given(forms, forms, coefficients, st.fixed_dictionaries({n: st.integers(-9, 9) for n in "abc"}))
def test_arithmetic_on_forms_is_arithmetic_on_their_values(
    a: Affine, b: Affine, k: int, point: dict[str, int]
) -> None:
    assert value(a + b, point) == value(a, point) + value(b, point)
    assert value(a - b, point) == value(a, point) - value(b, point)
    assert value(k * a, point) == value(a * k, point) == k * value(a, point)
    assert value(k - a, point) == k - value(a, point)
    assert value(a - k, point) == value(a, point) - k
    assert value(-a, point) == -value(a, point)


@given(forms, forms)
def test_equal_forms_compare_equal_however_they_were_made(a: Affine, b: Affine) -> None:
    assert a + b == b + a
    assert (a + b) - b == a
    assert a - a == Affine((), 0)
    assert a * 0 == Affine((), 0)


@given(forms, st.fixed_dictionaries(dict.fromkeys("abc", ranges)))
def test_bounds_are_those_of_all_values(form: Affine, box: dict[str, Range]) -> None:
    points = itertools.product(*(range(*box[n]) for n in "abc"))
    values = {value(form, dict(zip("abc", p, strict=True))) for p in points}
    assert bounds(form, box) == (min(values), max(values) + 1)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (X + 2, (2, 7)),
        (X - Y, (-2, 5)),  # componentwise subtraction would give [0, 3)
        (X * -2, (-8, 1)),  # a negative scale swaps the ends
        (3 - X, (-1, 4)),
        (2 * X + Y, (0, 11)),  # lower and upper need constants of their own
        (X - X, (0, 1)),
    ],
)
def test_the_corrections_to_the_paper_s_arithmetic(form: Affine, expected: Range) -> None:
    assert bounds(form, RANGES) == expected


@pytest.mark.parametrize(
    ("form", "name"),
    [(X, "x"), (X + Y - X, "y"), (X + 1, None), (2 * X, None), (-X, None), (X + Y, None)],
)
def test_a_form_is_an_axis_only_if_it_is_nothing_else(form: Affine, name: str | None) -> None:
    assert form.axis == name


def test_forms_have_no_products_and_no_fractions() -> None:
    with pytest.raises(TypeError):
        X * Y  # type: ignore[operator]
    with pytest.raises(TypeError):
        X * 0.5  # type: ignore[operator]
    with pytest.raises(TypeError):
        X + 0.5  # type: ignore[operator]


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_tile_an_axis_in_order_and_differ_by_at_most_one(extent: int, parts: int) -> None:
    found = [part_range(extent, parts, k) for k in range(parts)]
    assert [n for r in found for n in range(*r)] == list(range(extent))
    sizes = {high - low for low, high in found}
    assert max(sizes) - min(sizes) <= 1


boxes = st.lists(ranges, min_size=3, max_size=3).map(tuple)


@given(boxes, boxes)
def test_an_intersection_has_the_common_points(a: Box, b: Box) -> None:
    common = intersect(a, b)
    assert (set() if common is None else cells(common)) == cells(a) & cells(b)


@given(boxes, boxes)
def test_a_difference_is_disjoint_boxes_of_the_other_points(a: Box, b: Box) -> None:
    common = intersect(a, b)
    if common is not None:
        rest = subtract(a, common)
        assert set().union(*map(cells, rest)) == cells(a) - cells(b)
        assert sum(map(volume, rest)) == len(cells(a) - cells(b))


@given(boxes, boxes)
def test_relative_boxes_count_from_the_corner(a: Box, b: Box) -> None:
    corner = [low for low, _ in b]
    moved = {tuple(i - c for i, c in zip(cell, corner, strict=True)) for cell in cells(a)}
    assert cells(relative(a, b)) == moved
    assert lengths(relative(a, b)) == lengths(a)
    assert volume(a) == len(cells(a))


factorings = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def box_of(draw: st.DrawFn, factors: Factors) -> Box:
    low = [draw(st.integers(0, f - 1)) for f in factors]
    return tuple((a, draw(st.integers(a + 1, f))) for a, f in zip(low, factors, strict=True))


@st.composite
def factored_boxes(draw: st.DrawFn) -> tuple[Factors, Box]:
    factors = draw(factorings)
    return factors, box_of(draw, factors)


@st.composite
def factored_spans(draw: st.DrawFn) -> tuple[Factors, Range]:
    factors = draw(factorings)
    low = draw(st.integers(0, math.prod(factors) - 1))
    return factors, (low, draw(st.integers(low + 1, math.prod(factors))))


@given(factored_boxes())
def test_flatten_finds_the_range_or_that_there_is_none(case: tuple[Factors, Box]) -> None:
    factors, box = case
    places = flat(box, factors)
    contiguous = max(places) - min(places) + 1 == len(places)
    assert flatten(box, factors) == ((min(places), max(places) + 1) if contiguous else None)


@given(factored_spans())
def test_unflatten_finds_the_box_or_that_there_is_none(case: tuple[Factors, Range]) -> None:
    factors, span = case
    wanted = set(range(*span))
    every = itertools.product(
        *([(a, b) for a in range(f) for b in range(a + 1, f + 1)] for f in factors)
    )
    matching = [box for box in every if flat(box, factors) == wanted]
    assert unflatten(span, factors) == (matching[0] if matching else None)


def factorings_of(extent: int) -> list[Factors]:
    """All ordered factorings without ones."""
    if extent == 1:
        return [()]
    return [
        (first, *rest)
        for first in range(2, extent + 1)
        if extent % first == 0
        for rest in factorings_of(extent // first)
    ]


def refines(fine: Factors, coarse: Factors) -> bool:
    suffixes = {math.prod(fine[k:]) for k in range(len(fine) + 1)}
    return all(math.prod(coarse[k:]) in suffixes for k in range(len(coarse) + 1))


@pytest.mark.parametrize("extent", [1, 2, 12, 24, 36])
def test_refine_is_the_coarsest_factoring_that_refines_both(extent: int) -> None:
    every = factorings_of(extent)
    for a, b in itertools.product(every, repeat=2):
        common = [c for c in every if refines(c, a) and refines(c, b)]
        expected = min(common, key=len) if common else None
        assert refine(a, b) == expected, (a, b)


def test_twelve_as_three_fours_and_as_four_threes_have_no_common_refinement() -> None:
    assert refine((3, 4), (4, 3)) is None
    assert refine((12,), (3, 4)) == refine((3, 4), (12,)) == (3, 4)
    assert refine((2, 6), (4, 3)) == (2, 2, 3)


def test_the_whole_of_no_atoms_is_one_point() -> None:
    assert full(()) == ()
    assert volume(()) == 1
    assert flatten((), ()) == (0, 1)
    assert unflatten((0, 1), ()) == ()
    assert unflatten((0, 2), ()) is None


def test_joined_atoms_hold_the_same_elements_in_the_same_order() -> None:
    factors = (2, 3, 2)
    spans = [[(a, b) for a in range(f) for b in range(a + 1, f + 1)] for f in factors]
    for box in itertools.product(*spans):
        found = runs(box, factors)
        joined, sizes = tuple(r for _, r in found), tuple(f for f, _ in found)
        assert flat(joined, sizes) == flat(box, factors)
        assert math.prod(sizes) == 12
        whole = [r == (0, f) for f, r in found]
        assert not any(a and b for a, b in itertools.pairwise(whole))


def test_different_places_are_told_apart_by_their_runs() -> None:
    assert runs(((0, 1), (0, 2), (0, 9)), (2, 2, 9)) == runs(((0, 1), (0, 3), (0, 6)), (2, 3, 6))
    assert runs(((0, 1), (0, 2), (0, 9)), (2, 2, 9)) != runs(((1, 2), (0, 3), (0, 6)), (2, 3, 6))
    assert runs(((0, 2), (0, 2)), (2, 4)) != runs(((0, 4), (0, 1)), (4, 2))
