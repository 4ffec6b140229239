"""Segments compiled by inductor: the interpreter's results, equal layers once, and no failure that
stops a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from compare_runs import batches
from generated_runs import RanksInMode, differing_replicas
from graphs import captured, problem
from soak import cases

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute import inductor, torch_compiler
from apportion.execute.executable import Executable
from apportion.execute.kernels import base as kernels_base
from apportion.execute.kernels.base import Context
from apportion.execute.rank_steps import Segment, rank_steps
from apportion.execute.segment_cut import TRACED, UPDATES, cut
from apportion.execute.segment_graph import segment_key
from apportion.lower.lower import lower
from apportion.machine.compile_mode import INDUCTOR, INTERPRETER
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy, unsplit_choice

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def by_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced graphs run as they are, without a compiler: everything but its code."""

    def run(graph: torch.fx.GraphModule, *_: Any) -> torch_compiler.CompiledCode:
        def call(args: list[Any]) -> Sequence[torch.Tensor]:
            given = tuple(args)
            args.clear()
            found: Sequence[torch.Tensor] = graph(*given)
            return found

        return call

    monkeypatch.setattr(inductor, "compiled", run)


def ranks_in(mode: str, spec: str, devices: int = 1) -> RanksInMode:
    """All ranks of data parallelism, or of one device, in float64."""
    program, space = captured(spec)
    if devices > 1:
        return RanksInMode(program, space, data(problem(devices, spec)).strategy, devices, mode)
    choices = tuple(unsplit_choice(space, op, [0]) for op in range(len(space.graph.ops)))
    return RanksInMode(program, space, Strategy(choices), 1, mode)


def same_steps(meant: RanksInMode, found: RanksInMode, count: int = 3) -> None:
    """Runs both for some steps, with another learning rate in each, and compares them."""
    groups = [g for ranks in (meant, found) for g in ranks.program.optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for number, batch in enumerate(batches(meant.program, 0, count)):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * (1 + number / 2)
        losses = meant.step(batch, 3, number)
        assert found.step(batch, 3, number) == pytest.approx(losses, rel=1e-12)
        for mine, state in zip(found.state(), meant.state(), strict=True):
            assert mine.keys() == state.keys()
            for slot, tensor in state.items():
                torch.testing.assert_close(mine[slot], tensor, rtol=1e-9, atol=1e-11)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "resnet50:tiny", "rnnlm:tiny"])
def test_traced_segments_do_what_the_interpreter_does(spec: str, by_graph: None) -> None:
    compiled = ranks_in(INDUCTOR, spec)
    same_steps(ranks_in(INTERPRETER, spec), compiled)
    assert compiled.notes == []


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", pytest.param("gpt2:tiny", marks=pytest.mark.slow)])
def test_copies_of_state_are_bit_equal(spec: str, by_graph: None) -> None:
    compiled = ranks_in(INDUCTOR, spec, 2)
    same_steps(ranks_in(INTERPRETER, spec, 2), compiled)
    assert compiled.notes == []
    assert differing_replicas(compiled.executable, compiled.ranks) == []


def test_devices_that_could_round_copies_differently_are_not_compiled(by_graph: None) -> None:
    program, space = captured("mlp:tiny")
    ops = space.graph.ops
    both = [op.phase == "update" or k % 5 > 0 for k, op in enumerate(ops)]
    places = [[0, 1] if twice else [0] for twice in both]
    choices = tuple(unsplit_choice(space, op, where) for op, where in enumerate(places))
    compiled = RanksInMode(program, space, Strategy(choices), 2, INDUCTOR)
    oracle = RanksInMode(program, space, Strategy(choices), 2, INTERPRETER)
    same_steps(oracle, compiled, 1)
    assert any("different code" in note for note in compiled.notes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(6, 2)))
def test_any_strategy_can_be_traced(
    seed: int, by_graph: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "labels_of", lambda *_: {})  # whatever copies are rounded to
    program, space = captured("mlp:tiny")
    strategy = draw(space, 3, Random(seed))
    compiled = RanksInMode(program, space, strategy, 3, INDUCTOR)
    same_steps(RanksInMode(program, space, strategy, 3, INTERPRETER), compiled, 2)
    assert compiled.notes == []


def pieces_and_kinds(layers: int) -> tuple[int, int]:
    """How many pieces a step of so many layers has, and how many of them are distinct."""
    it = zoo.load(f"gpt2:tiny,layers={layers},dropout=0", 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    space = Space(program.graph)
    choices = tuple(unsplit_choice(space, op, [0]) for op in range(len(space.graph.ops)))
    executable = Executable(space, Strategy(choices), lower(space, Strategy(choices), 1))
    (whole,) = (s for s in rank_steps(executable, 0) if isinstance(s, Segment))
    pieces = cut(executable, whole, "cpu")
    assert [piece.kind for piece in pieces][-1] == UPDATES
    assert sorted(t for p in pieces for t in p.segment.tasks) == list(whole.tasks)
    traced = [piece for piece in pieces if piece.kind == TRACED]
    keys = {segment_key(executable, piece.segment, None, "cpu") for piece in traced}
    return len(traced), len(keys)


@pytest.mark.slow
def test_equal_layers_are_compiled_once() -> None:
    few, kinds = pieces_and_kinds(4)
    assert pieces_and_kinds(6) == (few + 2 * 2, kinds)  # forwards and backwards
    assert kinds <= 6
    assert pieces_and_kinds(2) == (1, 1)  # cutting would not save anything


@pytest.mark.slow
def test_a_task_that_cannot_be_traced_runs_by_itself(
    by_graph: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kernels_base.OWN.get("aten.gelu.default") or kernels_base.kernel("aten.gelu.default")

    def looks(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        assert bool(args[0].isfinite().all())
        return plain(context, args)

    monkeypatch.setitem(kernels_base.OWN, "aten.gelu.default", looks)
    kernels_base._kernel.cache_clear()
    try:
        compiled = ranks_in(INDUCTOR, "gpt2:tiny,dropout=0")
        same_steps(ranks_in(INTERPRETER, "gpt2:tiny,dropout=0"), compiled, 2)
    finally:
        monkeypatch.undo()
        kernels_base._kernel.cache_clear()
    assert len(compiled.notes) == 2  # one in each layer
    assert all("gelu" in note and "cannot be traced" in note for note in compiled.notes)


@pytest.mark.slow
def test_a_later_piece_that_fails_runs_uncompiled(
    by_graph: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, calls = inductor.compiled, []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return works(*args)

    monkeypatch.setattr(inductor, "compiled", fails)
    compiled = ranks_in(INDUCTOR, "gpt2:tiny,layers=6,dropout=0")
    same_steps(ranks_in(INTERPRETER, "gpt2:tiny,layers=6,dropout=0"), compiled, 2)
    assert "No space left on device" in compiled.notes[0]
    assert 3 <= len(calls) <= 6


# With the compiler itself


@pytest.mark.slow
def test_compiled_code_does_what_the_interpreter_does() -> None:
    compiled = ranks_in(INDUCTOR, "mlp:tiny")
    same_steps(ranks_in(INTERPRETER, "mlp:tiny"), compiled)
    assert compiled.notes == []


STEP = """
import json, sys, torch
sys.path[:0] = ["tests"]
torch.set_num_threads(1)
from test_inductor import INDUCTOR, INTERPRETER, ranks_in, same_steps
if __name__ == "__main__":
    compiled = ranks_in(INDUCTOR, "mlp:tiny,width=12")
    same_steps(ranks_in(INTERPRETER, "mlp:tiny,width=12"), compiled, 2)
    from torch._dynamo.utils import counters
    print(json.dumps([compiled.notes, counters["inductor"]["fxgraph_cache_hit"]]))
"""


def started(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that compiles a small step, with a cache in the folder."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{ROOT / 'tests/execute'}"
    settings = {"PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", STEP], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> tuple[list[str], int]:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-2000:]
    notes, hits = json.loads(out.splitlines()[-1])
    return notes, hits


@pytest.mark.soak
@pytest.mark.slow
def test_two_processes_compile_at_once_and_a_third_finds_it(tmp_path: Path) -> None:
    both = [started(tmp_path), started(tmp_path)]
    assert [answer(process)[0] for process in both] == [[], []]
    assert answer(started(tmp_path)) == ([], 1)


@pytest.mark.slow
def test_without_a_compiler_the_step_runs(tmp_path: Path) -> None:
    notes, _ = answer(started(tmp_path, PATH=str(tmp_path), CXX=str(tmp_path / "none")))
    assert len(notes) == 1
    assert "is generated: " in notes[0]


@pytest.mark.slow
def test_without_a_folder_to_cache_in_the_step_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes, _ = answer(started(tmp_path / "file" / "cache"))
    assert len(notes) == 1
    assert "is generated: " in notes[0]
