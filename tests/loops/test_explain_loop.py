"""What a loop says of itself: why it is divided so, and how long a pass takes on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_loops import function_of

import apportion as ap
import apportion.loops as loops
from apportion.cli.main import status
from apportion.loops.check_accesses import check_accesses
from apportion.loops.dependence import LoopDependences
from apportion.loops.elements import Elements
from apportion.loops.plan_loop import analyse_body
from apportion.loops.session import threads

MF = """
def body(key, rating, W, H, rate):
    u, i = key
    error = rating - W[:, u] @ H[:, i]
    W[:, u] += rate * error * H[:, i]
    H[:, i] += rate * error * W[:, u]
"""


def factorisation(users: int = 60, items: int = 20, **how: Any) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    data = draw.integers(0, users, 500), draw.integers(0, items, 500), draw.normal(size=500)
    over = loops.array.from_coordinates(*data, shape=(users, items))
    step = loops.parallel(over=over, **how)(function_of(MF))
    return step, loops.array.normal((4, users)), loops.array.normal((4, items))


def test_the_larger_array_stays() -> None:
    step, W, H = factorisation()
    found = step.explain(W, H, 0.1, processes=4)
    assert found.kind == "2D" and str(found.scheme) == "2D, space k0, time k1"
    assert found.choices[0].nbytes == 4 * H.nbytes and found.choices[1].nbytes == 4 * W.nbytes
    text = str(found)
    assert "W is resident: cut along dim 1 like k0" in text
    assert "H rotates: cut along dim 1 like k1, in 8 parts" in text
    assert "1D on k0: H has (+, 0) (lines 4 and 6)" in text
    step, W, H = factorisation(20, 60)
    assert str(step.explain(W, H, 0.1).scheme) == "2D, space k1, time k0"


def test_without_arguments_the_names_around_are_taken() -> None:
    step, *_ = factorisation()
    found = step.explain()
    assert found.kind == "2D" and not found.choices  # nothing is named W here
    step.function.__globals__.update(W=loops.array.zeros((4, 60)), H=loops.array.zeros((4, 20)))
    assert step.explain().choices


def test_ordered_loops_are_wavefronts() -> None:
    step, W, H = factorisation(ordered=True)
    found = step.explain(W, H, 0.1, processes=3)
    assert found.kind == "ordered 2D wavefront"
    assert "tiles run along a wavefront, in the program's order" in str(found)


def test_buffered_loops_say_so() -> None:
    over = loops.array.from_coordinates(np.arange(9), np.arange(9))
    step = loops.parallel(over=over)(function_of("def body(i, x, w):\n    w[int(x)] += 1.0\n"))
    w = loops.array.zeros((9,))
    none = step.explain(w)
    assert none.kind == "none" and "No scheme keeps that; pass loops.buffer" in str(none)
    found = step.explain(loops.buffer(w))
    assert found.kind == "1D, buffered" and "fetched tile by tile" in str(found)


# Predictions


@pytest.mark.slow
def test_a_pass_is_predicted() -> None:
    step, W, H = factorisation()
    one, two = (step.predict(ap.cluster(f"local:{n}"), W, H, 0.1) for n in (1, 2))
    assert one.timeline.bytes_moved == 0 and two.timeline.bytes_moved == 2 * H.nbytes
    assert one.idle == pytest.approx(0, abs=0.05) and two.elements == 500
    assert "timed on this machine over 500 elements" in str(one)
    far = step.predict(ap.cluster("8xh100"), W, H, 0.1)
    assert "is taken to have a core like that" in far.provenance and far.idle > 0.3


def test_a_slower_link_makes_processes_wait() -> None:
    from apportion.loops.array_uses import uses_by_name
    from apportion.loops.elements import DealRequest, facts_of
    from apportion.loops.predict_loop import predict_loop
    from apportion.loops.tile_schedule import tile_schedule

    step, W, H = factorisation()
    bound = step.planner.bind((W, H, 0.1))
    scheme = step.planner.choices(bound, 2)[0].scheme
    schedule = tile_schedule(scheme, 2, 2)
    request = DealRequest(scheme, (60, 20), 2, 4, False)
    over = step.planner.over
    facts = facts_of(Elements(over.keys, (), np.arange(500)), request)
    uses = tuple(uses_by_name(step.planner.used_arrays(bound), scheme, schedule, facts).values())
    cluster = ap.cluster("local:2")
    found = [predict_loop(cluster, scheme, schedule, uses, facts, s, "") for s in (1e-3, 1e-9)]
    counts = np.array(facts.counts)
    # Four steps; at each the slower rank decides, unless messages do.
    longest = sum(
        max(counts[rank, time] for rank, time in enumerate(row)) for row in schedule.table
    )
    assert longest * 1e-3 * 0.9 < found[0].seconds <= counts.sum() * 1e-3
    assert found[1].idle > 0.9 > found[0].idle


FILE = """
import numpy as np
import apportion.loops as loops
over = loops.array.from_coordinates(np.arange(50) % 10, np.arange(50) % 7, np.ones(50))
A, B = loops.array.zeros((10,)), loops.array.zeros((7,))
@loops.parallel(over=over)
def step(key, x, A, B):
    i, j = key
    A[i] += x
    B[j] += x
@loops.parallel(over=over)
def tangled(key, x, A):
    A[int(x)] += 1.0
def build():
    return step, A, B
number = 3
"""


@pytest.mark.slow
def test_the_command_shows_a_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apportion.loops.measure_loop.PASSES", 1)
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert status(["loops", "show", f"{file}:step", "--cluster", "local:2"]) == 0
    shown = capsys.readouterr().out
    assert "A is resident" in shown and "Predicted on local:2 (2 processes)" in shown
    assert status(["loops", "show", f"{file}:build", "--json"]) == 0
    assert '"kind": "2D"' in capsys.readouterr().out
    assert status(["loops", "show", f"{file}:tangled"]) == 1
    assert "No scheme keeps" in capsys.readouterr().err
    assert status(["loops", "show", f"{file}:number"]) == 2
    assert status(["loops", "show", f"{file}:step", "--cluster", "nowhere"]) == 2


# Bodies are watched


def check(loop_text: str, edit: Any) -> None:
    """Watch a body whose analysis was tampered with."""
    over = loops.array.indices(6, 5)
    step = loops.parallel(over=over)(function_of(loop_text))
    analysis = analyse_body(step.planner.body, {"A": 2}, 2, False)
    references, vectors = edit(list(analysis.references.found), analysis.dependences)
    elements = Elements(over.keys, (), np.arange(30))
    array = {"A": np.ones((8, 8))}
    check_accesses(
        step.planner.body, step.function, elements, array, {}, references, vectors, False
    )


STENCIL = "def body(key, x, A):\n    i, j = key\n    A[i, j] = A[i + 1, j] + 1\n"


def test_a_right_analysis_is_not_contradicted() -> None:
    check(STENCIL, lambda references, vectors: (references, vectors))


def test_a_missing_reference_is_noticed() -> None:
    with pytest.raises(
        RuntimeError, match=r"reads A\[1, 0\], which the analysis .* does not expect"
    ):
        check(STENCIL, lambda references, vectors: (references[:1], vectors))


def test_a_missing_dependence_is_noticed() -> None:
    with pytest.raises(
        RuntimeError, match=r"touch one element of A, and no dependence is \(1, 0\)"
    ):
        check(STENCIL, lambda references, vectors: (references, LoopDependences(())))


def test_a_change_through_another_name_is_seen() -> None:
    text = "def body(key, x, A):\n    i, j = key\n    row = A[i]\n    row[j] = 2\n"
    with pytest.raises(RuntimeError, match=r"writes A\[0, 0\]"):
        check(text, lambda found, vectors: ([replace(r, writes=False) for r in found], vectors))


def test_a_loop_is_watched_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apportion.loops.plan_loop.dependences", lambda *given: LoopDependences(()))
    step, W, H = factorisation()
    before = W.numpy()
    with threads(2):
        with pytest.raises(RuntimeError, match="This is a defect of apportion"):
            step(W, H, 0.1)
        assert np.array_equal(W.numpy(), before)
