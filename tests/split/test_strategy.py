"""Choices, Layouts and Strategies: their order, what is refused, and the methods that make them."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from graphs import Maker, captured, problem

from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.search.baselines.single import single
from apportion.split.space import Space
from apportion.split.strategy import (
    Choice,
    Layout,
    Strategy,
    from_json,
    grid_boxes,
    to_json,
    unsplit_choice,
    verify_strategy,
)


def relu_space() -> Space:
    """One Op on a 4 by 6 tensor."""
    make = Maker()
    make.op("aten._softmax.default", make.value(4, 6), 1, False, out=(4, 6))
    return make.space()


GOOD = Choice((2, 1), (0, 1))


def test_a_grid_runs_through_the_last_atom_fastest() -> None:
    assert grid_boxes((4, 6), (2, 3)) == [
        ((0, 2), (0, 2)), ((0, 2), (2, 4)), ((0, 2), (4, 6)),
        ((2, 4), (0, 2)), ((2, 4), (2, 4)), ((2, 4), (4, 6)),
    ]  # fmt: skip
    assert grid_boxes((), ()) == [()]


def test_devices_are_listed_replica_by_replica() -> None:
    choice = Choice((2, 1), (0, 1, 2, 3))
    assert (choice.count, choice.replicas) == (2, 2)
    assert str(choice) == "2x1 on 0,1,2,3"
    assert Layout((2,), (0, 1, 2, 3)).pieces((5,)) == [
        (((0, 2),), 0), (((2, 5),), 1), (((0, 2),), 2), (((2, 5),), 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choices", "layouts", "message"),
    [
        ((), {}, "0 choices for 1 operators"),
        ((GOOD, GOOD), {}, "2 choices for 1 operators"),
        ((Choice((2,), (0, 1)),), {}, r"'op0' cannot be cut so: .* has 2 axes, the cut names 1"),
        ((Choice((1, 2), (0, 1)),), {}, "'op0' cannot be cut so: .*opaque"),
        ((Choice((5, 1), (0,) * 5),), {}, "an axis of 4 cannot be cut into 5 parts"),
        ((Choice((0, 1), ()),), {}, "'op0' has 0 parts"),
        ((Choice((0, 1), (0,)),), {}, "'op0' has 0 parts"),
        ((Choice((-1, 1), (0,)),), {}, "'op0' has -1 parts"),
        ((Choice((2, 1), (0, 1, 2)),), {}, "2 parts and 3 devices, not a multiple"),
        ((Choice((2, 1), ()),), {}, "2 parts and 0 devices"),
        ((Choice((2, 1), (0, 3)),), {}, "is on device 3, of which there are 3"),
        ((Choice((2, 1), (0, -1)),), {}, "is on device -1"),
        ((Choice((2, 1), (0, 1, 2, 1)),), {}, "two replicas of part 1 on one device"),
        ((GOOD,), {2: Layout((1, 1), (0,))}, "lays out value 2, of which there are 2"),
        ((GOOD,), {-1: Layout((1, 1), (0,))}, "lays out value -1"),
        ((GOOD,), {0: Layout((1,), (0,))}, "'v0' has 2 atoms, its layout cuts 1"),
        ((GOOD,), {0: Layout((5, 1), (0,) * 5)}, "an atom of 4 cannot be cut into 5"),
        ((GOOD,), {0: Layout((0, 1), (0,))}, "an atom of 4 cannot be cut into 0"),
        ((GOOD,), {1: Layout((2, 1), (0,))}, "value 'v1' has 2 parts and 1 devices"),
        ((GOOD,), {1: Layout((1, 1), (0, 0))}, "value 'v1' has two replicas of part 0"),
    ],
)
def test_what_is_not_legal_is_refused_by_name(choices: Any, layouts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_strategy(relu_space(), Strategy(choices, layouts), 3)


@pytest.mark.parametrize(
    ("choice", "layouts"),
    [
        (GOOD, {}),
        (Choice((1, 1), (2,)), {}),
        (Choice((1, 1), (2, 0, 1)), {}),
        (Choice((4, 1), (0, 0, 2, 2)), {}),  # several parts on one device
        (Choice((2, 1), (0, 1, 1, 2)), {0: Layout((3, 2), (0, 1, 2, 0, 1, 2))}),
    ],
)
def test_what_is_legal_passes(choice: Choice, layouts: Any) -> None:
    verify_strategy(relu_space(), Strategy((choice,), layouts), 3)


def test_a_strategy_is_the_same_after_json() -> None:
    layouts = {3: Layout((1, 2), (0, 1)), 0: Layout((), (1,))}
    strategy = Strategy((GOOD, Choice((), (1,))), layouts, ((4, (2, 3)),))
    assert from_json(json.loads(json.dumps(to_json(strategy)))) == strategy


@pytest.mark.parametrize(
    "change",
    [{"choices": [[1, 2]]}, {"choices": [[["x"], [0]]]}, {"choices": None}, {"layouts": [[1]]},
     {"layouts": 3}, {"digits": [[0, 1]]}, {"digits": None}],
)  # fmt: skip
def test_a_malformed_strategy_is_refused(change: Any) -> None:
    good = to_json(Strategy((GOOD,)))
    from_json(good)
    with pytest.raises(ValueError, match=r": .* is not a|entries, not"):
        from_json(good | change)
    with pytest.raises(ValueError, match="of the strategy is missing"):
        from_json({key: item for key, item in good.items() if key not in change})


# The methods


@pytest.mark.slow
def test_single_puts_everything_on_the_first_device() -> None:
    found = single(problem(3)).strategy
    assert {(set(c.parts) <= {1}, c.devices) for c in found.choices} == {(True, (0,))}
    assert found.layouts == {}


@pytest.mark.parametrize(("devices", "parts"), [(2, 2), (3, 3), (9, 7)])
def test_data_cuts_the_batch_and_nothing_else(devices: int, parts: int) -> None:
    it = problem(devices)
    found = data(it).strategy
    verify_strategy(it.space, found, devices)
    for op, choice in enumerate(found.choices):
        cut = [a.extent for a, n in zip(it.space.axes(op), choice.parts, strict=True) if n > 1]
        assert cut in ([], [7])  # the batch of mlp:tiny
        assert choice.devices == (tuple(range(parts)) if cut else tuple(range(devices)))
    kinds = Counter(
        it.space.graph.ops[op].kind for op, c in enumerate(found.choices) if c.count > 1
    )
    assert kinds["aten.addmm.default"] == 3
    assert kinds["aten.mm.default"] == 3 + 2  # weights; inputs of all but the first
    assert "apportion.update" not in kinds


@pytest.mark.slow
def test_random_strategies_are_legal_and_repeatable() -> None:
    space = captured("gpt2:tiny")[1]
    for seed in range(5):
        verify_strategy(space, draw(space, 3, Random(seed)), 3)
    assert draw(space, 3, Random(1)) == draw(space, 3, Random(1))
    assert draw(space, 3, Random(1)) != draw(space, 3, Random(2))


def test_random_strategies_have_everything_that_a_strategy_can_say() -> None:
    space = captured("mlp:tiny")[1]
    seen = Counter[str]()
    for seed in range(30):
        strategy = draw(space, 3, Random(seed))
        seen["layout of state"] += any(v in dict(space.graph.state) for v in strategy.layouts)
        seen["layout of input"] += any(
            space.graph.values[v].role == "input" for v in strategy.layouts
        )
        for op, choice in enumerate(strategy.choices):
            split = space.split(op, choice.parts)
            cut = [n for n in choice.parts if n > 1]
            seen["uncut"] += not cut
            seen["several axes"] += len(cut) > 1
            seen["partial"] += any(split.reducers)
            seen["replicas"] += choice.replicas > 1
            first = choice.devices[: choice.count]
            seen["several parts on a device"] += len(set(first)) < len(first)
            seen["subset"] += len(set(choice.devices)) < 3
            extents = [a.extent for a in space.axes(op)]
            seen["uneven"] += any(e % n for e, n in zip(extents, choice.parts, strict=True))
    assert all(seen.values()), seen


def test_whole_names_every_axis_once() -> None:
    space = relu_space()
    assert unsplit_choice(space, 0, (1, 2)) == Choice((1, 1), (1, 2))
