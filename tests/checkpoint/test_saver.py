"""Saving beside training: whole or not at all, the last ones kept, failures told to everybody."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.checkpoint import folder as folders
from apportion.checkpoint import write_part
from apportion.checkpoint.folder import checkpoints_in, last_checkpoint
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.runner import Runner
from apportion.run.vary_batch import vary


@pytest.fixture(scope="module")
def program() -> Program:
    it = zoo.load("mlp:tiny", 3)
    return capture(it.step, it.model, it.optimizer, it.batch)


@pytest.fixture
def runner(program: Program) -> Runner:
    return made(program)


def made(program: Program) -> Runner:
    plan = make_plan(program, cluster("local:1"), "single")
    return Runner(program, worker(Executable(plan.space, plan.strategy, plan.tasks), 0))


def train(runner: Runner, steps: int) -> list[float]:
    return [
        float(runner.step(vary(runner.program.batch, 0, runner.steps_done))) for _ in range(steps)
    ]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_last_ones_stay(runner: Runner, tmp_path: Path) -> None:
    for _ in range(4):
        train(runner, 1)
        runner.save(tmp_path, keep=2)
    assert runner.saved() == tmp_path / "step-4"
    assert names(tmp_path) == ["step-3", "step-4"]
    assert [each.record.number for each in checkpoints_in(tmp_path)] == [2, 3]


def test_training_goes_on_while_files_are_written(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written is the state of the moment at which it was asked for."""
    go, real = threading.Event(), write_part.write_tensors

    def late(*args: Any, **named: Any) -> Any:
        assert go.wait(30)
        return real(*args, **named)

    monkeypatch.setattr(write_part, "write_tensors", late)
    train(runner, 1)
    runner.save(tmp_path)
    expected = train(runner, 2)
    assert last_checkpoint(tmp_path) is None  # nobody takes it for one
    assert [name for name in names(tmp_path) if not name.startswith(".saving-1-")] == []
    go.set()
    assert runner.saved() == tmp_path / "step-1"
    other = made(runner.program)
    other.load(tmp_path)
    assert train(other, 2) == expected


def test_a_save_that_was_cut_off_is_none(runner: Runner, tmp_path: Path) -> None:
    """Whatever prefix of it is on the disk; and the next save removes it."""
    train(runner, 1)
    runner.save(tmp_path, wait=True)
    whole = tmp_path / "step-1"
    for count in range(len(list(whole.iterdir()))):
        cut = tmp_path / f".saving-2-{count:012x}"
        cut.mkdir()
        for file in sorted(whole.iterdir(), reverse=True)[:count]:
            shutil.copy(file, cut)
    found = last_checkpoint(tmp_path)
    assert found is not None and found.path == whole
    assert len(names(tmp_path)) > 1
    train(runner, 1)
    runner.save(tmp_path, wait=True)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_full_disk_is_told_and_leaves_nothing(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(runner, 1)
    runner.save(tmp_path, wait=True)
    state = str(runner.state_dict())

    def full(*args: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device", "shard")

    with monkeypatch.context() as patch:
        patch.setattr(write_part, "write_tensors", full)
        runner.save(tmp_path)
        with pytest.raises(RuntimeError, match=r"not saved: rank 0: cannot write shard: No space le"
                           r"ft on device; the last one is .*step-1"):  # fmt: skip
            runner.saved()
    assert names(tmp_path) == ["step-1"]
    assert str(runner.state_dict()) == state
    train(runner, 1)
    runner.save(tmp_path, wait=True)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_too_little_room_is_seen_before(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    train(runner, 1)
    with pytest.raises(ValueError, match=r"no room for a checkpoint in .*takes 2.64 kB, 1 kB are"):
        runner.save(tmp_path / "run")
    assert names(tmp_path / "run") == []


def test_a_folder_of_another_run_is_refused(program: Program, tmp_path: Path) -> None:
    """So that a new run is never continued from an old one's last checkpoint."""
    one, other = made(program), made(program)
    train(one, 1)
    one.save(tmp_path, wait=True)
    train(other, 1)
    with pytest.raises(ValueError, match=r"has checkpoints of another training run .*step-1"):
        other.save(tmp_path)
    other.load(tmp_path)
    train(other, 1)
    other.save(tmp_path, wait=True)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_the_last_saved_counts_not_the_largest_step(program: Program, tmp_path: Path) -> None:
    """Who goes back to an older checkpoint and on from there has the new ones."""
    runner = made(program)
    for _ in range(3):
        train(runner, 1)
        runner.save(tmp_path, wait=True)
    runner.load(tmp_path / "step-1")
    train(runner, 1)
    runner.save(tmp_path, wait=True)
    assert names(tmp_path) == ["step-2", "step-2.2", "step-3"]
    found = last_checkpoint(tmp_path)
    assert found is not None and found.path.name == "step-2.2"


def test_a_folder_that_cannot_be_made(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot read the folder .*file: Not a directory"):
        runner.save(tmp_path / "file")
    with pytest.raises(ValueError, match="keep=0 would keep no checkpoint"):
        runner.save(tmp_path, keep=0)


def test_resume_begins_where_there_is_nothing(program: Program, tmp_path: Path) -> None:
    runner = made(program)
    assert runner.resume(tmp_path / "none") is None
    train(runner, 2)
    runner.save(tmp_path, wait=True)
    expected = train(runner, 1)
    other = made(program)
    resumed = other.resume(tmp_path)
    assert resumed is not None and resumed.step == 2 == other.steps_done
    assert train(other, 1) == expected


def test_copies_for_saving_are_as_large_as_said(runner: Runner) -> None:
    nbytes = runner.stage()
    state = runner.worker.rank.state()
    assert nbytes >= sum(t.numel() * t.element_size() for _, t in state.values())
    assert nbytes < 1.1 * sum(t.numel() * t.element_size() for _, t in state.values())


def test_no_thread_is_left(runner: Runner, tmp_path: Path) -> None:
    train(runner, 1)
    runner.save(tmp_path, wait=True)
    assert not [each for each in threading.enumerate() if each.name == "checkpoint"]
    assert os.listdir(tmp_path) == ["step-1"]


class Loader:
    """Batches that know how far they were taken."""

    def __init__(self, program: Program, stateful: bool) -> None:
        self.program, self.taken = program, 0
        if stateful:
            self.state_dict = lambda: {"taken": self.taken}
            self.load_state_dict = lambda state: setattr(self, "taken", state["taken"])

    def __iter__(self) -> Any:
        start, self.taken = self.taken if hasattr(self, "state_dict") else 0, 0
        for number in range(start, 5):
            self.taken = number + 1
            yield vary(self.program.batch, 0, number)
        self.taken = 0


@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_goes_on_where_it_was(program: Program, tmp_path: Path, stateful: bool) -> None:
    """In the midst of the second pass; by skipping, or by its own state."""
    whole, others = Loader(program, stateful), {}
    runner = made(program)
    expected = [float(loss) for _ in range(3) for loss in runner.train(whole)]
    runner, loader = made(program), Loader(program, stateful)
    losses = [float(loss) for loss in runner.train(loader)]
    for loss in runner.train(loader):
        losses.append(float(loss))
        if len(losses) == 8:
            others = {"loader": loader} if stateful else {}
            runner.save(tmp_path, wait=True, **others)
            break
    runner, loader = made(program), Loader(program, stateful)
    runner.load(tmp_path, **({"loader": loader} if stateful else {}))
    losses += [float(loss) for _ in range(2) for loss in runner.train(loader)]
    assert losses == expected
