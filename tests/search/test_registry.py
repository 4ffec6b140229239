"""A method is one file and one row: everything else follows from the registry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from graphs import captured
from method_rows import only

import apportion as ap
from apportion.search import METHODS, help_text, tried_by_auto
from apportion.search.registry import Method

FILE = '''
"""last-device: everything unsplit on the last device."""

from apportion.search.problem import Problem, SearchResult
from apportion.split import Strategy, unsplit_choice

asked = []


def last_device(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The step as it was written, on the last device."""
    asked.append((budget, seed))
    space, last = problem.space, problem.devices - 1
    choices = tuple(unsplit_choice(space, op, (last,)) for op in range(len(space.graph.ops)))
    return SearchResult(Strategy(choices, digits=space.digits, opening=space.opening))
'''
HELP = "everything on the last device"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The file of a new method, imported, and its row beside that of data parallelism."""
    (tmp_path / "last_device.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = import_module("last_device")
    with only("data"):
        METHODS["last-device"] = Method(made.last_device, HELP, auto=5, baseline=True)
        yield made
    del sys.modules["last_device"]


def test_plan_finds_a_new_method(module: ModuleType) -> None:
    program, _ = captured("mlp:tiny")
    plan = ap.plan(program, ap.cluster("2xh100"), method="last-device", seed=3)
    assert plan.method == "last-device" and module.asked[0][1] == 3
    assert {choice.devices for choice in plan.strategy.choices} == {(1,)}


def test_compare_has_a_row_for_it(module: ModuleType) -> None:
    program, _ = captured("mlp:tiny")
    table = ap.compare(program, ap.cluster("2xh100"), methods=list(METHODS))
    assert {plan.method for plan in table} == {"data", "last-device"}


def test_auto_tries_it_at_its_place(module: ModuleType) -> None:
    assert tried_by_auto() == ["last-device", "data"]
    program, _ = captured("mlp:tiny")
    plan = ap.plan(program, ap.cluster("2xh100"), method="auto", budget=1.0)
    alone = ap.plan(program, ap.cluster("2xh100"), method="last-device")
    assert len(module.asked) == 2
    assert plan.predicted.step_seconds <= alone.predicted.step_seconds


@pytest.mark.slow
def test_help_names_it(module: ModuleType, tmp_path: Path) -> None:
    assert f"last-device: {HELP}." in help_text()
    script = (
        "import last_device\n"
        "from apportion.search.registry import METHODS, Method\n"
        f"METHODS['last-device'] = Method(last_device.last_device, {HELP!r}, auto=5)\n"
        "from apportion.cli import main\n"
        "raise SystemExit(main.status(['plan', '--help']))\n"
    )
    (tmp_path / "main.py").write_text(script)
    run = subprocess.run([sys.executable, tmp_path / "main.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "last-device" in run.stdout and "last device" in run.stdout


def test_every_row_names_a_function_that_is_there() -> None:
    for name, method in METHODS.items():
        assert isinstance(method.search, str), name
        home, _, function = method.search.partition(":")
        assert callable(getattr(import_module(f"apportion.search.{home}"), function)), name
    places = [method.auto for method in METHODS.values() if method.auto is not None]
    assert len(set(places)) == len(places)
