"""Placements for people: the table of devices, what is said below it, and the line of progress."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from placement_graphs import FIDDLE_GRAPH

from apportion.place.imports.fiddle import read_fiddle
from apportion.place.imports.imported import imported_problem
from apportion.place.objective import PlacerProgress
from apportion.place.run_placer import PlacedProblem, place
from apportion.show.placement_progress import PlacementLine, placement_progress
from apportion.show.placement_tables import assignment, placed_tables, placement_facts, shown_time


@pytest.fixture
def placed() -> PlacedProblem:
    problem = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"), accelerators=40)
    return place(problem, "step", "single")


def lines(placed: PlacedProblem) -> list[str]:
    return [item for item in placed_tables("small", placed) if isinstance(item, str)]


def test_many_devices_are_cut_short_and_all_are_in_the_facts(placed: PlacedProblem) -> None:
    assert "and 9 more devices" in lines(placed)
    assert len(placement_facts("small", placed)["loads"]) == 41
    assert lines(placed)[0] == "small: step by single"


def test_the_value_stands_beside_one_device_and_the_bound(placed: PlacedProblem) -> None:
    assert "step: 6.75 ms" in lines(placed)
    assert "one device: 6.75, 1.00 times as long" in lines(placed)
    assert "bound: 6, the placement is 12.5% above it" in lines(placed)  # 7, 3 and 9 in a row
    worse = replace(placed, evaluation=replace(placed.evaluation, value=42.0))
    assert "bound: 6, the placement is 7 times that" in lines(worse)


def test_what_is_over_its_limit_is_told_by_how_much(placed: PlacedProblem) -> None:
    held = np.zeros(41, np.int64)
    held[[1, 40]] = 150, 10**9  # the last is the CPU, which has no limit
    over = replace(placed, evaluation=replace(placed.evaluation, memory=held, feasible=False))
    at = lines(over).index("nothing fits; this is the nearest:")
    assert lines(over)[at + 1] == "  acc1 is 50 B (50.0%) over its limit"
    assert not any("cpu0" in line for line in lines(over))


def test_nodes_of_one_name_are_told_apart(placed: PlacedProblem) -> None:
    twins = replace(placed, problem=replace(placed.problem, node_names=("a", "a", "b")))
    assert list(assignment(twins)) == ["a", "a (2)", "b"]


def test_times_are_shown_in_their_unit() -> None:
    assert [shown_time(1.5, "ms"), shown_time(1.5, "s"), shown_time(1.5, "1e10")] == [
        *("1.5 ms", "1.5 s", "1.5"),
    ]


def test_the_line_of_progress_keeps_the_best() -> None:
    line = PlacementLine("ms")
    for progress in (PlacerProgress(5.0, 1.0, 10), PlacerProgress(7.0, None, 2_000)):
        line.tell(progress)
    assert line.line().endswith("best 5 ms | bound 1 | 2,000 evaluations")
    with placement_progress(wanted=False, unit="ms") as told:
        assert told is None
