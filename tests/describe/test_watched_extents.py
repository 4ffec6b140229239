"""A description that does not look at sizes is evaluated once for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from apportion.describe.descriptions import Description, find_description
from apportion.describe.formula import evaluate_formula
from apportion.describe.language import Output, Sum, axes, f
from apportion.describe.watched_extents import ExtentWatch, WatchedExtent, shape_pattern, single
from apportion.graph import Ref

LOOKS: list[Any] = [
    lambda n: n == 3,
    lambda n: n != 3,
    lambda n: n < 3,
    lambda n: n >= 3,
    lambda n: n + 1,
    lambda n: 2 * n,
    lambda n: 7 // n,
    lambda n: n % 2,
    lambda n: divmod(n, 2),
    lambda n: -n,
    lambda n: range(n),
    lambda n: [0] * n,
    lambda n: math.prod((n, n)),
    lambda n: min(n, 9),
    lambda n: max(2, n),
    lambda n: f"{n}",
    lambda n: str(n),
    lambda n: int(n),
    lambda n: float(n),
    lambda n: {n},
    lambda n: bool(n),
    lambda n: (n,) == (3,),
    lambda n: sum((n,)),
    lambda n: sorted([n, 2]),
    lambda n: n in (1, 2),
    lambda n: math.sqrt(n),
]


@pytest.mark.parametrize("number", range(len(LOOKS)))
def test_every_look_is_noticed_and_gives_what_a_number_would(number: int) -> None:
    watch = ExtentWatch()
    assert repr(LOOKS[number](WatchedExtent(3, watch))) == repr(LOOKS[number](3))
    assert watch.seen


def test_asking_for_a_single_element_is_free() -> None:
    watch = ExtentWatch()
    assert single(WatchedExtent(1, watch)) and not single(WatchedExtent(4, watch))
    assert not watch.seen
    assert shape_pattern((0, 1, 2, 9)) == (0, 1, 2, 2)


def count(formula: Any, *shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """How often a description of one input is evaluated for calls of these shapes."""
    calls = []

    def watched(x: Any) -> Any:
        calls.append(x)
        return formula(x)

    description = Description("test.op", watched)
    for shape, out in shapes:
        evaluate_formula(description, (Ref(0),), [shape], [out])
    return len(calls)


def test_calls_of_other_sizes_share_an_evaluation() -> None:
    def total(x: Any) -> Any:
        return lambda i: Sum(lambda k: x[i, k])

    assert count(total, ((3, 4), (3,)), ((5, 6), (5,)), ((7, 2), (7,))) == 1
    assert count(total, ((3, 4), (3,)), ((3, 1), (3,)), ((0, 4), (0,))) == 3  # other forms


def test_calls_do_not_share_what_depends_on_sizes() -> None:
    def mean(x: Any) -> Any:
        return lambda i: Sum(lambda k: x[i, k]) / x.shape[1]

    def picky(x: Any) -> Any:
        i = axes("i", 2)
        return Output.of(i, f("long" if x.shape[0] > 4 else "short", x[i]))

    shapes = ((3, 4), (3,)), ((5, 6), (5,))
    assert count(mean, *shapes) == 3  # once watched, then for each
    assert count(picky, ((3, 4), (3, 4)), ((5, 6), (5, 6))) == 3
    description = Description("test.op", mean)
    for n in (4, 6):
        found = evaluate_formula(description, (Ref(0),), [(3, n)], [(3,)])
        assert found.outputs[0] is not None and f"value={n}" in repr(found.outputs[0].body)


def test_common_descriptions_are_of_any_size() -> None:
    """What a transformer is made of is evaluated once for all sizes."""
    for kind, args, small, large in (
        ("aten.mm", (Ref(0), Ref(1)), [(3, 4), (4, 5)], [(30, 40), (40, 50)]),
        ("aten.bmm", (Ref(0), Ref(1)), [(2, 3, 4), (2, 4, 5)], [(9, 30, 40), (9, 40, 50)]),
        ("aten.add", (Ref(0), Ref(1), 1), [(3, 4), (4,)], [(30, 40), (40,)]),
    ):
        description = find_description(kind)
        assert description is not None
        out = [(*small[0][:-1], small[1][-1])], [(*large[0][:-1], large[1][-1])]
        first = evaluate_formula(description, args, small, out[0])
        second = evaluate_formula(description, args, large, out[1])
        assert first.outputs is second.outputs
        assert first.extents != second.extents
