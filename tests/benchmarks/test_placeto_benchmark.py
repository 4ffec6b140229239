"""The parts of benchmarks/placement_placeto.py: each leaves its file, and the report reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import placement_placeto as benchmark
import pytest
from made_placements import made_problem

from apportion.place.objective import StepObjective
from apportion.place.problem_file import save_problem


@pytest.mark.slow
def test_random_placements_are_counted_and_the_curve_falls() -> None:
    objective = StepObjective(made_problem(8, 2))
    curve, best = benchmark.random_curve(objective, 50, seed=1)
    assert objective.evaluations == 50 and curve[-1][1] == best
    scores = [score for _, score in curve]
    assert scores == sorted(scores, reverse=True)


def test_the_best_after_a_count_and_the_count_of_a_score() -> None:
    found = {"curve": [[1, 9.0], [5, 7.0], [80, 3.0]]}
    assert [benchmark.best_after(found, n) for n in (1, 4, 5, 79, 80)] == [9, 9, 7, 7, 3]
    assert benchmark.reached(found, 7.5) == "5" and benchmark.reached(found, 1) == "never"


@pytest.mark.slow
def test_methods_at_equal_counts_and_their_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = benchmark.table_file(tmp_path, "nmt", 2, "placeto")
    save_problem(problem, made_problem(8, 2))
    for method in ("random", "colocrl", "placeto", "single"):
        file = tmp_path / f"table-nmt-2-placeto-{method}-60-0.json"
        benchmark.table_part(file, problem, method, 60, 0)
        found = benchmark.read(file)
        assert found is not None
        assert method == "single" or found["evaluations"] == 60
        assert np.isfinite(found["value"])
    benchmark.print_table(tmp_path, 60, 1)
    assert "| nmt | 2 | placeto | 0 |" in capsys.readouterr().out
