"""What would fit when nothing does: every figure is that of the plan which the options make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import apportion as ap
from apportion import zoo
from apportion.cli import main as cli
from apportion.cli.requests import capture_without_data
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan, with_model
from apportion.run.ways_out import WayOut, _batch_to_try, ways_out

MODEL = "gpt2:layers=1,width=32,heads=2,vocab=101,seq=32,batch=64"


def plan_by(options: str, limit: int, model: str = MODEL, cluster: str = "2xh100") -> Plan:
    """The plan that a user gets who types these options."""
    given = dict(zip(options.split()[::2], options.split()[1::2], strict=True))
    model = zoo.with_sizes(model, batch=int(given["--batch"]) if "--batch" in given else None)
    model = zoo.with_accumulation(model, int(given.get("--accumulate", 1)))
    model = zoo.with_precision(model, given.get("--precision"))
    program = capture_without_data(model, 0)
    place = ap.cluster(given.get("--cluster", cluster))
    names = ("recompute", "offload", "host-state")
    how = {name.replace("-", "_"): given.get(f"--{name}", "none") for name in names}
    return make_plan(program, place, "fsdp", 0.0, memory_limit=limit, **how)


@pytest.fixture(scope="module")
def too_large() -> tuple[Plan, tuple[WayOut, ...]]:
    program, place = capture_without_data(MODEL, 0), ap.cluster("2xh100")
    most = max(make_plan(program, place, "fsdp", 0.0).predicted.peak_bytes)
    made = with_model(make_plan(program, place, "fsdp", 0.0, memory_limit=int(0.6 * most)), MODEL)
    assert not made.feasible and made.memory_limit is not None
    return made, ways_out(made, program)


@pytest.mark.slow
def test_every_way_gives_what_it_says(too_large: tuple[Plan, tuple[WayOut, ...]]) -> None:
    made, ways = too_large
    kinds = {way.options.split()[0] for way in ways}
    assert kinds == {
        "--precision",
        "--recompute",
        "--batch",
        "--accumulate",
        "--cluster",
        "--offload",
    }
    assert any(way.fits for way in ways)
    assert made.memory_limit is not None
    for way in ways:
        found = plan_by(way.options, made.memory_limit[0])
        assert found.predicted.step_seconds == pytest.approx(way.step_seconds, rel=1e-12)
        assert max(found.predicted.peak_bytes) == way.peak_bytes
        assert found.feasible == way.fits == (way.peak_bytes <= way.limit)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(
    too_large: tuple[Plan, tuple[WayOut, ...]],
) -> None:
    made, ways = too_large
    (way,) = [one for one in ways if one.options.startswith("--batch")]
    largest = int(way.options.split()[1])
    assert way.fits and way.about == f"{largest + 2} does not fit" and made.memory_limit
    assert not plan_by(f"--batch {largest + 2}", made.memory_limit[0]).feasible


def test_a_plan_that_fits_needs_no_way_out() -> None:
    program = capture_without_data("mlp:tiny", 0)
    made = make_plan(program, ap.cluster("2xh100"), "data", 0.0)
    assert ap.ways_out(made, program) == ()


@pytest.mark.slow
def test_a_graph_without_a_model_has_ways_out_too() -> None:
    graph, place = capture_without_data("mlp:tiny", 0).graph, ap.cluster("2xh100")
    made = make_plan(graph, place, "data", 0.0, memory_limit=1000)
    ways = ways_out(made, graph)
    assert {way.options.split()[0] for way in ways} == {"--recompute", "--cluster", "--offload"}
    assert not any(way.fits for way in ways)


def test_without_time_nothing_is_tried() -> None:
    program = capture_without_data("mlp:tiny", 0)
    made = make_plan(program, ap.cluster("2xh100"), "data", 0.0, memory_limit=1000)
    assert ways_out(made, program, budget=-1.0) == ()


def test_batches_are_found_along_a_line() -> None:
    needs = lambda batch: 100 + 7 * batch  # noqa: E731
    points, low, high, tried = {64: needs(64)}, 0, 64, 0
    while high - low > 2:
        guess = _batch_to_try(points, 300, low, high, 2)
        points[guess] = needs(guess)
        low, high = (guess, high) if needs(guess) <= 300 else (low, guess)
        tried += 1
    assert (low, high) == (28, 30) and tried <= 3


@pytest.mark.slow
def test_the_command_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "mlp:tiny", "--cluster", "2xh100", "--method", "data", "--budget", "0"]
    asked += ["--memory-limit", "1KB", "--recompute", "none"]
    assert cli.status(asked) == 1
    said = capsys.readouterr()
    assert "what would fit" in said.out and "--precision bf16-mixed" in said.out
    assert "looking for what would fit: --recompute full" in said.err
    assert cli.status([*asked, "--json"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways_out"]
    assert {"options", "method", "step_seconds", "peak_bytes", "limit", "fits"} <= ways[0].keys()
