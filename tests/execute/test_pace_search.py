"""The pace that is measured to be quickest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from graphs import captured

from apportion.execute.backends import Backends
from apportion.execute.executable import Executable
from apportion.execute.pace_search import COUNT, LEAD, PACES, SETTLE, TURNS, WORTH, PaceSearch
from apportion.execute.transport import worker
from apportion.execute.wire import Pace
from apportion.lower.runnable import runnable
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search import METHODS, Problem
from apportion.split.communication import AUTO, BYTESCHEDULER, NEED, P3, TICTAC, Communication
from apportion.split.space import Space

PLANNED = Pace(1 << 18, 1 << 18)


def alone(seconds: Sequence[float]) -> list[float]:
    return list(seconds)


def searched(took: Callable[[Pace, int], float]) -> tuple[Pace, list[Pace]]:
    """What is decided where a step by a pace takes so long, and the paces of all steps."""
    search, paces = PaceSearch(PLANNED, alone), []
    while not search.is_over:
        paces.append(search.pace)
        search.note(took(search.pace, len(paces)))
    return search.decide(), paces


def test_the_quickest_stays() -> None:
    for best in (PLANNED, *PACES):
        assert searched(lambda pace, step, best=best: 1.0 - 0.1 * (pace == best))[0] == best


def test_the_plan_stays_unless_another_is_worth_it() -> None:
    for gain, chosen in ((0.5 * WORTH, PLANNED), (1.5 * WORTH, PACES[1])):
        assert searched(lambda pace, step, g=gain: 1.0 - g * (pace == PACES[1]))[0] == chosen


def test_a_step_that_was_disturbed_does_not_decide() -> None:
    def took(pace: Pace, step: int) -> float:
        return 9.0 if step % 11 == 0 else 1.0 - 0.1 * (pace == PACES[0])

    assert searched(took)[0] == PACES[0]


def test_every_pace_is_tried_as_often_after_steps_that_settle() -> None:
    paces = searched(lambda pace, step: 1.0)[1]
    tried = (PLANNED, *PACES)
    assert len(paces) == SETTLE + TURNS * len(tried) * (LEAD + COUNT)
    assert paces[:SETTLE] == [PLANNED] * SETTLE
    counts = {paces[SETTLE:].count(pace) for pace in tried}
    assert counts == {TURNS * (LEAD + COUNT)}


def test_the_slowest_rank_says_what_a_pace_takes() -> None:
    """One rank finds the last pace quickest, another one the first."""
    search = PaceSearch(PLANNED, lambda own: [max(a, b) for a, b in zip(own, other, strict=True)])
    other = [1.0, 0.9, 1.0, 1.0, 1.3]
    while not search.is_over:
        search.note(1.0 - 0.2 * (search.pace == PACES[-1]) - 0.1 * (search.pace == PACES[0]))
    assert search.decide() == PACES[0]


def test_the_plan_may_have_one_of_those_that_are_tried() -> None:
    assert PaceSearch(PACES[0], alone).paces == PACES


def test_nothing_is_tried_when_it_is_over() -> None:
    search = PaceSearch(PLANNED, alone)
    while not search.is_over:
        search.note(1.0)
    with pytest.raises(AssertionError, match="over"):
        search.note(1.0)


@pytest.mark.parametrize(
    ("policy", "searches"), [(AUTO, True), (BYTESCHEDULER, True), (P3, False), (TICTAC, False)]
)
def test_policies_that_are_tuned_by_measurement_are(policy: str, searches: bool) -> None:
    program = captured("mlp:tiny")[0]
    space, machine = Space(program.graph), cluster("local:2")
    strategy = METHODS["data"](Problem(space, machine, default_cost(machine))).strategy
    how = Communication(policy, overlaps=True, order=NEED, slice_bytes=1 << 10)
    strategy = replace(strategy, communication=how)
    mine = worker(Executable(space, strategy, runnable(space, strategy, 2)), 0)
    for wire, found in ((None, False), (object(), searches)):
        mine.backends = Backends(wire=wire)  # type: ignore[arg-type]
        mine.measure_pace()
        assert (mine.search is not None) == found
