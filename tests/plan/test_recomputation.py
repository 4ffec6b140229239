"""Plans that recompute: they fit where others do not, are saved, and train the same model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import captured
from torch import Tensor, nn

import apportion as ap
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.machine.cluster import cluster
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import SearchLog, candidates
from apportion.plan.make_plan import compare_methods, make_plan, plan_request
from apportion.plan.plan import Plan
from apportion.plan.recomputation import best_decided
from apportion.run.planned_program import planned_program

LAYERS, ROWS, WIDTH = 8, 256, 8


class Deep(nn.Module):
    """Activations of many times the bytes of parameters; dropout and batch norm among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        found: Tensor = self.norm(x)
        return found


def program(layers: int = LAYERS) -> Program:
    torch.manual_seed(0)
    model = Deep()
    model.layers = model.layers[:layers]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) ** 3).mean()
        return found

    return capture(
        step, model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(ROWS, WIDTH)
    )


@pytest.fixture(scope="module")
def step() -> Program:
    return program()


def planned(step: Program, mode: str, limit: float | None = None, method: str = "data") -> Plan:
    return make_plan(step, cluster("2xh100"), method, 1.0, limit, recompute=mode)


@pytest.mark.slow
def test_a_limit_is_met_by_recomputing(step: Program, tmp_path: Path) -> None:
    kept = planned(step, "none")
    assert kept.recomputed == () and kept.graph is step.graph
    limit = 0.8 * max(kept.predicted.peak_bytes)
    assert not planned(step, "none", limit).feasible
    made = planned(step, "auto", limit)
    assert made.feasible and max(made.predicted.peak_bytes) <= limit
    assert made.recomputed
    assert made.predicted.step_seconds > kept.predicted.step_seconds
    assert any("computed again in the backward" in note for note in made.notes)
    made.save(tmp_path / "p.json")
    read = Plan.load(tmp_path / "p.json")
    assert (read.recomputed, read.graph) == (made.recomputed, made.graph)
    assert read.simulate().predicted == made.predicted
    assert ap.check(step, read).equal


def test_a_plan_that_fits_recomputes_nothing(step: Program) -> None:
    made = planned(step, "auto")
    assert made.feasible and made.recomputed == () and made.graph is step.graph


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "fsdp"])
def test_everything_recomputed_trains_the_same_model(step: Program, method: str) -> None:
    made = planned(step, "full", method=method)
    assert made.recomputed
    assert ap.check(step, made).equal


@pytest.mark.slow
def test_an_unfittable_limit_says_what_is_over(step: Program) -> None:
    made = planned(step, "auto", 1000.0)
    assert not made.feasible
    assert any("does not fit" in note for note in made.notes)


def test_a_plan_without_recomputation_is_written_as_before(step: Program, tmp_path: Path) -> None:
    planned(step, "none").save(tmp_path / "p.json")
    assert '"recomputed"' not in (tmp_path / "p.json").read_text()


@pytest.mark.slow
def test_all_methods_in_one_table(step: Program) -> None:
    kept = planned(step, "none")
    limit = 0.8 * max(kept.predicted.peak_bytes)
    rows = compare_methods(step, cluster("2xh100"), ["data", "fsdp"], 1.0, limit, recompute="auto")
    assert [row.feasible for row in rows] == [True, True]


def test_a_wrong_word_is_refused(step: Program) -> None:
    with pytest.raises(ValueError, match="choose none, auto, modules, full"):
        planned(step, "some")


@pytest.mark.slow
def test_the_plan_of_another_step_is_refused(step: Program) -> None:
    made = planned(step, "full")
    assert planned_program(step, made).graph.fingerprint == made.graph.fingerprint
    with pytest.raises(ValueError, match="another step"):
        planned_program(program(LAYERS - 1), made)
    with pytest.raises(ValueError, match="another step"):
        planned_program(
            step, replace(made, memory=replace(made.memory, recomputed=made.recomputed[1:]))
        )
    backward = next(k for k, op in enumerate(step.graph.ops) if op.phase == "backward")
    with pytest.raises(ValueError, match="another step"):
        planned_program(step, replace(made, memory=replace(made.memory, recomputed=(backward,))))


@pytest.mark.slow
def test_other_starts_are_tried_only_while_there_is_time() -> None:
    """Each takes as long as the first; but where that does not fit, they are tried all the same.
    Where something fits, one is tried only if it promises to be quicker."""
    graph, place = captured("gpt2:tiny")[0], ap.cluster("2xh100")
    whole = max(make_plan(graph, place, "data", 0.0).predicted.peak_bytes)
    for limit, ends, decided in ((whole, -math.inf, 1), (whole, math.inf, 2), (1, -math.inf, 2)):
        request = plan_request(graph, place, limit, 0, None, None, None)
        starts = [next(candidates(request, name, 0.0, SearchLog())) for name in ("fsdp", "data")]
        asked: list[str] = []

        def decide(start: Candidate, asked: list[str] = asked) -> Candidate:
            asked.append(start.method)
            return start

        best_decided(request, Selection(starts[0], starts=(starts[1],)), True, decide, ends)
        assert asked == ["fsdp", "data"][:decided]


@pytest.mark.slow
def test_the_table_of_methods_shows_what_was_decided_about_memory() -> None:
    """A plan that recomputes stands in its own table, which no row that fits is quicker than."""
    graph, place = captured("gpt2:tiny")[0], ap.cluster("2xh100")
    free = make_plan(graph, place, "fsdp", 0.0)
    limit = 0.65 * max(free.predicted.peak_bytes)
    made = make_plan(graph, place, "auto", 0.0, limit, recompute="auto")
    assert made.feasible and made.recomputed
    assert made.tried[0].method == f"{made.method} + recompute"
    assert made.tried[0].step_seconds == made.predicted.step_seconds
    assert all(made.predicted.step_seconds <= row.step_seconds for row in made.tried if row.fits)
